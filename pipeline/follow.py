"""Progress of training, read from `metrics.jsonl` while the ranks write it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from cache_schema.storage import Location, Storage, is_remote, open_storage
from pipeline.progress import Progress
from stages.train_log import METRICS

POLL_S, POLL_STORE_S = 1.0, 10.0


@contextmanager
def follow_metrics(folder: Location, n_steps: int, done: int) -> Iterator[None]:
    """Show steps, rate, ETA and each look at the held-out samples while the block runs.

    Args:
        folder: of the training, whose `metrics.jsonl` rank 0 appends to (at a URL it is there as of the newest
            checkpoint). Rows written before are not shown again.
        n_steps: of the whole run.
        done: steps that a checkpoint already holds.
    """
    storage = open_storage(folder)
    rows = _Rows(storage)
    rows.skip()
    stop = threading.Event()
    with Progress(n_steps, "steps", "train", done=done) as progress:
        poll_s = POLL_STORE_S if is_remote(folder) else POLL_S
        thread = threading.Thread(target=_follow, args=(rows, progress, stop, poll_s), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def _follow(rows: _Rows, progress: Progress, stop: threading.Event, poll_s: float) -> None:
    last = False
    while not last:
        last = stop.wait(poll_s)
        for row in rows.new():
            _show(row, progress)
        progress.update(0)


class _Rows:
    """The rows of a `metrics.jsonl` that were not seen yet. A trainer that starts again cuts it back first."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._offset = 0
        self._looked_at = -1

    def skip(self) -> None:
        """Take what is there as seen."""
        with suppress(OSError):
            self._offset = self._storage.open(METRICS).size

    def new(self) -> Iterator[dict[str, Any]]:
        """Whole rows since the last call; a look at the held-out samples only once, though it is done again."""
        try:
            reader = self._storage.open(METRICS)
            self._offset = min(self._offset, reader.size)
            text = bytearray(reader.size - self._offset)
            reader.read_into(self._offset, [text])
        except (OSError, EOFError):  # not there yet, or changed meanwhile: next time
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            with suppress(ValueError):  # the rest of a row, after the file was cut back
                row = json.loads(line)
                if not isinstance(row, dict):
                    continue
                if row["kind"] == "heldout":
                    if row["step"] <= self._looked_at:
                        continue
                    self._looked_at = row["step"]
                yield row


def _show(row: dict[str, Any], progress: Progress) -> None:
    step = row["step"]
    if row["kind"] == "heldout":
        progress.note(
            f"step {step}: held-out loss {row['loss']:.3f}, simulated τ {row['tau']:.3f} on {row['samples']} samples"
        )
    elif isinstance(step, int) and step > progress.done:
        progress.update(step - progress.done)
