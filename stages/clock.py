"""Where a loop's time goes, part by part, without stopping an accelerator to ask it."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import torch

timer = time.perf_counter
"""Of a CPU; benchmarks on a busy machine put `time.process_time` here."""


class Clock:
    """Laps, each of a named part; on a GPU they are events of its stream, which are read at the end.

    Args:
        device: whose time is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._parts: list[str] = []
        self._marks: list[Any] = [self._now()]
        self._times: list[float] | None = None

    def _now(self) -> Any:
        if not self._cuda:
            return timer()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, part: str) -> None:
        """End a lap: the time since the last one belongs to this part."""
        self._marks.append(self._now())
        self._parts.append(part)

    @property
    def n_laps(self) -> int:
        return len(self._parts)

    def seconds(self, first: int = 0, last: int | None = None) -> dict[str, float]:
        """Seconds by part of the laps first … last−1."""
        if self._times is None or len(self._times) != len(self._parts):
            self._times = self._read()
        out: dict[str, float] = defaultdict(float)
        for part, seconds in zip(self._parts[first:last], self._times[first:last], strict=True):
            out[part] += seconds
        return dict(out)

    def _read(self) -> list[float]:
        if not self._cuda:
            return [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]
        self._marks[-1].synchronize()
        return [a.elapsed_time(b) / 1000 for a, b in zip(self._marks, self._marks[1:], strict=False)]
