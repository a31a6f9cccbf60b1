"""Where a training says how it goes: `metrics.jsonl`, the trackers, and whoever listens."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from stages.trackers import Tracker, flat_numbers, open_trackers


class TrainLog:
    """Of the chief rank; of the others nothing is written.

    Args:
        folder: of the run's training files.
        n_steps: of the whole run.
        chief: whether this rank writes.
        trackers: kinds, as in `train.trackers`.
        settings: what is trained, for the trackers that show it.
        on_row: called with each row.
    """

    def __init__(
        self, folder: Path, n_steps: int, *, chief: bool, trackers: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None, on_row: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.folder, self.n_steps, self.chief, self.on_row = folder, n_steps, chief, on_row
        self._kinds, self._settings = trackers, settings or {}
        self._trackers: list[Tracker] = []
        self._started = time.perf_counter()

    def __enter__(self) -> TrainLog:
        if self.chief:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._trackers = open_trackers(self._kinds, self.folder, self._settings)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []

    def write(self, row: dict[str, Any]) -> None:
        """Add a row; it has a `kind` (`step`, `heldout`) and a `step`."""
        if not self.chief:
            return
        row["seconds"] = round(time.perf_counter() - self._started, 3)
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        numbers = flat_numbers(row)
        for tracker in self._trackers:
            tracker.log(row["step"], numbers)
        if self.on_row:
            self.on_row({**row, "n_steps": self.n_steps})
