"""How long a device computes and how long it waits for anything else.

On a GPU, passes are queued and run later, so their begin and end are marked by events in the stream; on a CPU a pass is
over when it returns. The time between the end of one pass and the begin of the next is waiting, whatever was done in
it: reading, copying, writing, or nothing because no work was there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Mark = Any
"""A moment: seconds (CPU) or a CUDA event."""


class DeviceClock:
    """Clock of one device. Passes are timed one after the other, never two at once.

    Args:
        device: where the passes run.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._last_end: Mark = None

    def lap(self) -> Lap:
        """A new account, for one unit of work."""
        return Lap(self)

    def mark(self) -> Mark:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Mark, second: Mark) -> float:
        """Seconds; both moments have come."""
        if not self._cuda:
            return float(second - first)
        second.synchronize()
        return float(first.elapsed_time(second)) / 1e3

    def turn(self, end: Mark) -> Mark:
        """Remember a pass's end; returns that of the pass before (None for the first)."""
        before, self._last_end = self._last_end, end
        return before


class Lap:
    """Busy and waiting time of one unit of work."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._passes: list[tuple[Mark, Mark, Mark]] = []  # end of the pass before, begin, end

    @contextmanager
    def running(self) -> Iterator[None]:
        """A pass runs within the block."""
        start = self._clock.mark()
        yield
        end = self._clock.mark()
        self._passes.append((self._clock.turn(end), start, end))

    def seconds(self) -> tuple[float, float]:
        """Busy and waiting seconds so far; waits for the last pass."""
        busy = sum(self._clock.between(start, end) for _, start, end in self._passes)
        waited = sum(self._clock.between(before, start) for before, start, _ in self._passes if before is not None)
        return busy, waited
