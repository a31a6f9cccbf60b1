"""The run folder: where each stage keeps its things, which stages are done, and who is at work in it."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_schema.durable import make_dirs, write_atomic
from pipeline.errors import PipelineError


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside a run folder."""

    path: Path

    @property
    def responses(self) -> Path:
        return self.path / "responses"

    @property
    def cache(self) -> Path:
        return self.path / "cache"

    @property
    def heldout_cache(self) -> Path:
        """Of the held-out samples alone, in rolling mode."""
        return self.path / "cache-heldout"

    @property
    def train(self) -> Path:
        return self.path / "train"

    @property
    def evaluate(self) -> Path:
        return self.path / "evaluate"

    @property
    def export(self) -> Path:
        return self.path / "export"

    @property
    def serve_check(self) -> Path:
        return self.path / "serve-check"

    def done(self, stage: str) -> dict[str, Any] | None:
        """The status of a finished stage, or None.

        Raises:
            PipelineError: the status file is damaged.
        """
        file = self.path / "status" / f"{stage}.json"
        try:
            status = json.loads(file.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            status = None
        whole = isinstance(status, dict) and isinstance(status.get("summary"), dict)
        if not whole or not isinstance(status.get("fingerprint"), str):
            raise PipelineError(
                f"{file} is damaged: expected a JSON object with fingerprint and summary; remove it and run the stage "
                "again, finished work is found"
            )
        return dict(status)

    def finish(self, stage: str, fingerprint: str, seconds: float, summary: dict[str, Any]) -> None:
        """Record that a stage is done."""
        make_dirs(self.path / "status")
        body = {
            "stage": stage,
            "fingerprint": fingerprint,
            "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds": round(seconds, 3),
            "summary": summary,
        }
        write_atomic(
            self.path / "status" / f"{stage}.json", (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()
        )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run folder: a second driver is refused. A killed one leaves no lock behind.

        Raises:
            PipelineError: names the process that holds it.
        """
        make_dirs(self.path)
        file = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.read(file, 200).decode(errors="replace").strip() or "another process"
                raise PipelineError(
                    f"{self.path} is in use by {holder}; wait for it, or give this run another folder"
                ) from error
            os.ftruncate(file, 0)
            os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
            yield
        finally:
            os.close(file)
