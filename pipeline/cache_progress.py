"""Progress in bytes: MB and MB/s of work that several threads or processes report."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeline.progress import Progress

_SMALL = 10_000_000
"""Below this many bytes kB are counted, so that a small cache does not read 0/0 MB."""


@contextmanager
def byte_progress(total: int, label: str) -> Iterator[Callable[[int], None]]:
    """Gives a function that counts bytes; it may be called from any thread.

    Args:
        total: bytes that will come.
        label: what is running.
    """
    size, unit = (1000, "kB") if total < _SMALL else (1_000_000, "MB")
    lock, done = threading.Lock(), 0
    with Progress(round(total / size), unit, label) as progress:

        def add(n_bytes: int) -> None:
            nonlocal done
            with lock:
                done += n_bytes
                progress.update(min(round(done / size), progress.total) - progress.done)

        yield add
