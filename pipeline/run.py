"""One recipe in one folder: what several stages need, which stages are done, and what their folders are made of.

A stage is safe to call again at any time. It works out what its output is made of (a fingerprint over identity
fields and the stages before it), refuses a folder that holds something else, does what is missing, and records
itself as done. A finished stage is a no-op that says so.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cache_schema.errors import FingerprintMismatch
from cache_schema.identity import canonical_json, sha256_json
from cache_schema.storage import Location, Storage, open_storage
from pipeline.errors import PipelineError
from pipeline.folder import STATUS, RunFolder, absolute
from pipeline.recipe import Recipe

Say = Callable[[str], None]
IDENTITY = "identity.json"
"""What a stage's folder is made of."""


@dataclass
class Run:
    """One recipe in one folder, with what several stages need worked out once.

    Attributes:
        recipe: the run's configuration.
        say: where plain lines for the user go.
    """

    recipe: Recipe
    say: Say
    folder: RunFolder = field(init=False)

    def __post_init__(self) -> None:
        self.folder = RunFolder(self.recipe.run)

    @functools.cached_property
    def tokenizer(self) -> Any:
        from stages.target import load_tokenizer

        return load_tokenizer(self.recipe.target)

    @functools.cached_property
    def hashes(self) -> Any:
        from stages.target import hash_target

        return hash_target(self.recipe.target, self.tokenizer)

    @functools.cached_property
    def layer_ids(self) -> tuple[int, ...]:
        from stages.target import load_config, shape_of

        return shape_of(load_config(self.recipe.target)).layer_ids(
            self.recipe.cache.n_layers, self.recipe.cache.layer_ids
        )

    @functools.cached_property
    def cache(self) -> str:
        """Where the feature cache lies: an absolute path or a URL, the same for every worker."""
        return str(absolute(self.recipe.cache.path or self.folder.cache))

    def is_done(self, stage: str, fingerprint: str, whole: Callable[[], bool]) -> bool:
        """Whether the stage has finished with this fingerprint and its output is still all there; says so.

        Args:
            stage: name.
            fingerprint: of what this run would make.
            whole: a cheap look at the output; if something has gone, the stage is not done and makes it again.

        Raises:
            FingerprintMismatch: the folder holds this stage's output under another one.
        """
        status = self.folder.done(stage)
        if status is None:
            return False
        if status["fingerprint"] != fingerprint:
            raise FingerprintMismatch(
                f"{self.folder.path}: stage {stage} was finished with other inputs or settings (fingerprint "
                f"{status['fingerprint'][:12]}…, this run has {fingerprint[:12]}…); use another run folder, or remove "
                f"{self.folder.storage.where(STATUS)}/{stage}.json and what the stage made"
            )
        if not whole():
            self.say(f"{stage}: was done, but part of its output is missing or damaged; making that again")
            return False
        self.folder.settle(stage)
        self.say(f"{stage}: already done ({_brief(status['summary'])}), nothing to do")
        return True

    def pin(self, stage: str, folder: Location, identity: dict[str, Any]) -> str:
        """Write down what a stage's folder is made of, once; returns the fingerprint.

        Raises:
            FingerprintMismatch: it was made of something else; names each setting that differs, both values.
        """
        storage = open_storage(folder)
        plain: dict[str, Any] = json.loads(canonical_json(identity))
        if not storage.create(IDENTITY, canonical_json(plain).encode()):
            found = read_object(storage, IDENTITY)
            if found is None:
                raise PipelineError(
                    f"{storage.where(IDENTITY)} is damaged: expected a JSON object with the settings that made {folder}"
                    f". Remove that folder to run stage {stage} anew, or restore the file"
                )
            lines = list(_differences("", found, plain))
            if lines:
                raise FingerprintMismatch(
                    f"{folder} was made by stage {stage} with other settings:\n  "
                    + "\n  ".join(lines)
                    + "\nUse another run folder, or remove this one"
                )
        return sha256_json(plain)

    @contextmanager
    def stage(self, name: str, fingerprint: str) -> Iterator[dict[str, Any]]:
        """Times a stage; what the body puts into the dict becomes the stage's summary."""
        self.folder.begin(name)
        started, summary = time.monotonic(), dict[str, Any]()
        yield summary
        seconds = time.monotonic() - started
        self.folder.finish(name, fingerprint, seconds, summary)
        self.say(f"{name}: done in {seconds:.0f} s ({_brief(summary)})")


def read_object(storage: Storage, key: str) -> dict[str, Any] | None:
    """A JSON object, or None when it is missing, damaged, or holds something else."""
    try:
        return object_of(storage.read(key))
    except FileNotFoundError:
        return None


def object_of(data: bytes) -> dict[str, Any] | None:
    """The JSON object that these bytes are, or None."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _brief(summary: dict[str, Any]) -> str:
    return ", ".join(
        f"{k.replace('_', ' ')} {v:.4g}" if isinstance(v, float) else f"{k.replace('_', ' ')} {v}"
        for k, v in summary.items()
    )


def _differences(prefix: str, found: Any, expected: Any) -> Iterator[str]:
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted(found.keys() | expected.keys()):
            yield from _differences(f"{prefix}.{key}" if prefix else key, found.get(key), expected.get(key))
    elif found != expected:
        yield f"{prefix}: the folder has {found!r}, this run {expected!r}"


def first_reasons(ledger: Any) -> str:
    return "; ".join(f"{row['sample_id']}: {row['reason']}: {row['detail']}" for row in ledger[:3])


def say_resume(run: Run, stage: str, have: int, total: int, unit: str) -> None:
    if have:
        run.say(f"{stage}: resuming, {have} of {total} {unit} are committed, {total - have} to do")
