"""Progress of training, read from `metrics.jsonl` while the ranks write it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.progress import Progress

POLL_S = 1.0


@contextmanager
def follow_metrics(file: Path, n_steps: int, done: int) -> Iterator[None]:
    """Show steps, rate, ETA and each look at the held-out samples while the block runs.

    Args:
        file: that rank 0 appends to; rows written before are not shown again.
        n_steps: of the whole run.
        done: steps that a checkpoint already holds.
    """
    start = file.stat().st_size if file.exists() else 0
    stop = threading.Event()
    with Progress(n_steps, "steps", "train", done=done) as progress:
        thread = threading.Thread(target=_follow, args=(file, start, progress, stop), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def _follow(file: Path, offset: int, progress: Progress, stop: threading.Event) -> None:
    last = False
    while not last:
        last = stop.wait(POLL_S)
        if not file.exists():
            continue
        with file.open("rb") as stream:
            stream.seek(offset)
            text = stream.read()
        complete = text[: text.rfind(b"\n") + 1]
        offset += len(complete)
        for line in complete.splitlines():
            _show(json.loads(line), progress)
        progress.update(0)


def _show(row: dict[str, object], progress: Progress) -> None:
    step = row["step"]
    if row["kind"] == "heldout":
        progress.note(
            f"step {step}: held-out loss {row['loss']:.3f}, simulated τ {row['tau']:.3f} on {row['samples']} samples"
        )
    elif isinstance(step, int) and step > progress.done:
        progress.update(step - progress.done)
