"""Where a training says how it goes: `metrics.jsonl`, the trackers, and whoever listens."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from cache_schema.carried import Carried
from cache_schema.durable import write_atomic
from stages.trackers import TENSORBOARD, Tracker, flat_numbers, open_trackers

METRICS = "metrics.jsonl"


class TrainLog:
    """Of the chief rank; of the others nothing is written.

    Args:
        place: the run's training files.
        n_steps: of the whole run.
        chief: whether this rank writes.
        trackers: kinds, as in `train.trackers`.
        settings: what is trained, for the trackers that show it.
        on_row: called with each row.
    """

    def __init__(
        self, place: Carried, n_steps: int, *, chief: bool, trackers: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None, on_row: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.place, self.folder, self.n_steps, self.chief, self.on_row = place, place.path, n_steps, chief, on_row
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

    def go_on_from(self, step: int | None) -> None:
        """Drop the rows of steps that will be done again: all after `step`; with None, all."""
        if not self.chief or not self.place.fetch(METRICS):
            return
        file = self.folder / METRICS
        before = file.read_bytes()
        last = -1 if step is None else step
        kept = b"".join(line for line in before.splitlines(keepends=True) if _step_of(line) <= last)
        if kept != before:
            write_atomic(file, kept)

    def carry(self) -> None:
        """Take what was logged to the store, where the training's folder is one."""
        if self.chief:
            self.place.keep(METRICS)
            self.place.keep_tree(TENSORBOARD)

    def write(self, row: dict[str, Any]) -> None:
        """Add a row; it has a `kind` (`step`, `heldout`) and a `step`."""
        if not self.chief:
            return
        row["seconds"] = round(time.perf_counter() - self._started, 3)
        with (self.folder / METRICS).open("a") as file:
            file.write(json.dumps(row) + "\n")
        numbers = flat_numbers(row)
        for tracker in self._trackers:
            tracker.log(row["step"], numbers)
        if self.on_row:
            self.on_row({**row, "n_steps": self.n_steps})


def _step_of(line: bytes) -> float:
    """The step of a row; infinite when the line is torn."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
