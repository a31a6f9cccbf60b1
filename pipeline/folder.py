"""The run folder: where each stage keeps its things, how far each has come, and who is at work in it.

It is a local folder or a place in an object store. What only files will do for (checkpoints, the exported model) is
kept in a scratch folder of this machine then, and carried to the store (`cache_schema.carried`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cache_schema.carried import Carried
from cache_schema.storage import Location, Storage, join, open_storage
from pipeline.errors import PipelineError
from pipeline.holder import now_text
from pipeline.lock import Hold, hold_run

RESPONSES, CACHE, HELDOUT_CACHE = "responses", "cache", "cache-heldout"
TRAIN, EVALUATE, EXPORT, SERVE_CHECK, STATUS = "train", "evaluate", "export", "serve-check", "status"
RECIPE, REJECTS, RESULTS = "recipe.json", "rejects.parquet", "results.json"
"""The resolved recipe; of the responses; of evaluation."""


class RunFolder:
    """Places inside a run folder.

    Args:
        path: the folder, or its URL.
    """

    def __init__(self, path: Location) -> None:
        self.path = path
        self._hold: Hold | None = None

    @functools.cached_property
    def storage(self) -> Storage:
        return open_storage(self.path)

    @functools.cached_property
    def files(self) -> Carried:
        """The run folder's files as files: the folder itself, or scratch."""
        return Carried(self.path)

    @property
    def responses(self) -> Location:
        return join(self.path, RESPONSES)

    @property
    def cache(self) -> Location:
        return join(self.path, CACHE)

    @property
    def heldout_cache(self) -> Location:
        """Of the held-out samples alone, in rolling mode; absolute."""
        return absolute(join(self.path, HELDOUT_CACHE))

    @property
    def train(self) -> Location:
        return join(self.path, TRAIN)

    @property
    def train_scratch(self) -> Path:
        """The training folder's files on this machine."""
        return Carried(self.train).path

    @property
    def evaluate(self) -> Location:
        return join(self.path, EVALUATE)

    @property
    def export(self) -> Path:
        """Where the exported model lies on this machine."""
        return self.files.path / EXPORT

    @property
    def serve_check(self) -> Path:
        """Where the check of a server keeps its files on this machine."""
        return self.files.path / SERVE_CHECK

    def done(self, stage: str) -> dict[str, Any] | None:
        """The status of a finished stage, or None.

        Raises:
            PipelineError: the status file is damaged.
        """
        key = f"{STATUS}/{stage}.json"
        try:
            status = json.loads(self.storage.read(key))
        except FileNotFoundError:
            return None
        except ValueError:
            status = None
        whole = isinstance(status, dict) and isinstance(status.get("summary"), dict)
        if not whole or not isinstance(status.get("fingerprint"), str):
            raise PipelineError(
                f"{self.storage.where(key)} is damaged: expected a JSON object with fingerprint and summary; remove it "
                "and run the stage again, finished work is found"
            )
        return dict(status)

    def begin(self, stage: str, planned: int | None = None) -> None:
        """Record that a stage is at work, for whoever looks on; a killed one leaves the record behind.

        Args:
            stage: name.
            planned: units of the whole stage, where nothing else in the folder tells.
        """
        self._record(f"{stage}.running", {"stage": stage, "started_at": now_text(), "planned": planned})

    def finish(self, stage: str, fingerprint: str, seconds: float, summary: dict[str, Any]) -> None:
        """Record that a stage is done.

        Raises:
            RunInUse: another driver has taken this run over.
        """
        self.require_held()
        body = {
            "stage": stage,
            "fingerprint": fingerprint,
            "finished_at": now_text(),
            "seconds": round(seconds, 3),
            "summary": summary,
        }
        self._record(stage, body)
        self.settle(stage)

    def settle(self, stage: str) -> None:
        """Forget that a stage was at work, or failed: it is done."""
        for kind in ("failed", "running"):
            self.storage.delete(f"{STATUS}/{stage}.{kind}.json")

    def fail(self, stage: str, error: str, kind: str, exit_code: int) -> None:
        """Record that a stage has failed, and how often in a row."""
        key = f"{STATUS}/{stage}.failed.json"
        try:
            attempt = int(json.loads(self.storage.read(key))["attempt"]) + 1
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            attempt = 1
        body = {"stage": stage, "failed_at": now_text(), "error": error, "kind": kind, "exit_code": exit_code,
                "attempt": attempt}  # fmt: skip
        self._record(f"{stage}.failed", body)
        self.storage.delete(f"{STATUS}/{stage}.running.json")

    def _record(self, name: str, body: dict[str, Any]) -> None:
        self.storage.replace(f"{STATUS}/{name}.json", (json.dumps(body, indent=1, sort_keys=True) + "\n").encode())

    def require_held(self) -> None:
        """Check that no other driver has taken over, where this one holds the run.

        Raises:
            RunInUse: one has.
        """
        if self._hold is not None:
            self._hold.require()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run folder: a second driver is refused. A killed one does not hold it for long.

        Raises:
            RunInUse: names who holds it; or, in the block, who has taken it over.
        """
        with hold_run(self.storage) as self._hold:
            try:
                yield
            finally:
                self._hold = None


def absolute(location: Location) -> Location:
    """The same place for every process of this machine."""
    return location if "://" in str(location) else Path(location).resolve()
