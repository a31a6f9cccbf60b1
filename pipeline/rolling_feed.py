"""Rolling mode, the shards on disk: asks the schedule what to do, evicts, hands out what is to be made, and counts."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from dataclasses import dataclass
from typing import Any

from cache_schema import names
from cache_schema.marker import evict, read_marker
from cache_schema.reader import FeatureCache
from cache_schema.storage import Location, join, read_at, replace_at
from pipeline.errors import PipelineError
from pipeline.extract_step import QuarantineGuard
from pipeline.report_text import bytes_text
from pipeline.rolling import Make, RollingSchedule
from pipeline.run import Say
from stages.extract import ShardUnit
from stages.rolling import POSITION, read_position

STRAY_S = 30.0
"""Age from which a group that no marker names and no worker writes is removed: its writer has died."""
_SWEEP_S = 10.0
_TELL_S = 30.0


@dataclass
class RollingCounts:
    """What became of the shards, over all starts of a run; kept in the training folder."""

    file: Location
    made: int = 0
    made_again: int = 0
    evicted: int = 0
    peak_bytes: int = 0

    @classmethod
    def load(cls, file: Location) -> RollingCounts:
        """Go on counting where an earlier start of the run stopped."""
        try:
            found = json.loads(read_at(file))
            return cls(file, *(int(found[k]) for k in ("made", "made_again", "evicted", "peak_bytes")))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return cls(file)

    def save(self) -> None:
        counts = {name: value for name, value in dataclasses.asdict(self).items() if name != "file"}
        replace_at(self.file, json.dumps(counts).encode())

    def summary(self, max_bytes: int) -> dict[str, Any]:
        """For the train stage."""
        return {
            "shards_made": self.made,
            "shards_made_again": self.made_again,
            "shards_evicted": self.evicted,
            "peak_bytes": self.peak_bytes,
            "max_bytes": max_bytes,
        }


class RollingFeed:
    """Gives the pool the shard that training needs next, and makes room for it.

    Used by one thread, but for `stop`.

    Args:
        schedule: decides.
        cache: as it is at the start.
        folder: of the run's training files.
        guard: stops the run when too many samples are not finite.
        say: where lines for the user go.
    """

    def __init__(
        self, schedule: RollingSchedule, cache: FeatureCache, folder: Location, guard: QuarantineGuard, say: Say
    ) -> None:
        self.schedule, self.storage, self.plan = schedule, cache.storage, cache.plan
        self.guard, self.say, self._position_file = guard, say, join(folder, POSITION)
        self.counts = RollingCounts.load(join(folder, "rolling.json"))
        self.there = {names.shard_index(s): m.bytes for s, m in cache.markers.items()}
        self.coming: set[int] = set()
        self._groups = {names.shard_index(s): m.group for s, m in cache.markers.items()}
        evicted = (key.rpartition("/")[2].removesuffix(".json") for key, _ in self.storage.list(names.EVICTED))
        self._seen = set(self.there) | set(map(names.shard_index, evicted))
        self._stop = threading.Event()
        self._stray_bytes, self._swept = 0, float("-inf")
        self._lacking: tuple[int, float] = (-1, 0.0)
        self._measure()

    def stop(self) -> None:
        """Nothing more is wanted; may be called by any thread."""
        self._stop.set()

    def given_up(self) -> bool:
        return self._stop.is_set()

    def next_unit(self) -> ShardUnit | None:
        """The next shard to make, after others have been evicted to make room for it."""
        if self._stop.is_set():
            raise StopIteration
        if time.monotonic() - self._swept > _SWEEP_S:
            self._sweep()
        position = read_position(self._position_file)
        while True:
            action = self.schedule.next_action(position, self.there, self.coming, self._stray_bytes)
            if action is None:
                self._look_at_the_trainer(position)
                return None
            if isinstance(action, Make):
                self.coming.add(action.shard)
                shard = names.shard_name(action.shard)
                return ShardUnit(shard, tuple(self.plan.samples(shard)))
            self._evict(action.shard)

    def take(self, unit: ShardUnit, receipt: dict[str, Any]) -> None:
        """Count a shard that a worker has committed."""
        index = names.shard_index(unit.name)
        marker = read_marker(self.storage, unit.name)
        self.coming.discard(index)
        self.there[index], self._groups[index] = marker.bytes, marker.group
        self.counts.made += 1
        if index in self._seen:
            self.counts.made_again += 1
        else:
            self._seen.add(index)
            self.guard.take(unit, receipt)
        self._measure()
        self._remove_earlier_attempts(unit.name, marker.group)

    def _remove_earlier_attempts(self, shard: str, group: str) -> None:
        """Their workers are dead: the pool kills one whose attempt failed before it tries again."""
        for other in self.storage.folders(names.SHARDS):
            if names.group_shard(other) == shard and other != group:
                self.storage.delete_tree(names.group_key(other))

    def _evict(self, index: int) -> None:
        evict(self.storage, names.shard_name(index))
        del self.there[index], self._groups[index]
        self.counts.evicted += 1
        self.counts.save()

    def _measure(self) -> None:
        """Bytes below `shards/` now, the halves of shards that are being made included."""
        found = sum(size for _, size in self.storage.list(names.SHARDS)) + self.schedule.reserved
        self.counts.peak_bytes = max(self.counts.peak_bytes, found)
        self.counts.save()

    def _sweep(self) -> None:
        """Remove what attempts that died have left. This driver holds the run, so only its workers write here."""
        self._swept, self._stray_bytes, removed = time.monotonic(), 0, list[int]()
        named = set(self._groups.values())
        for group in self.storage.folders(names.SHARDS):
            shard = names.group_shard(group)
            if group in named or names.shard_index(shard) in self.coming:
                continue
            key = names.group_key(group)
            size = sum(n for _, n in self.storage.list(key))
            if self.storage.age_s(key) < STRAY_S:
                self._stray_bytes += size  # a worker of a killed driver may still be at it for a moment
                continue
            self.storage.delete_tree(key)
            removed.append(size)
        if removed:
            self.say(f"rolling: removed {len(removed)} unfinished shards of attempts that died "
                     f"({bytes_text(sum(removed))})")

    def _look_at_the_trainer(self, position: int) -> None:
        """Say when training waits for a shard, and notice when it would wait for ever."""
        if position >= self.schedule.plan.n_steps:
            return
        lacking = sorted(self.schedule.plan.shards_of_step(position) - self.there.keys())
        if not lacking:
            self._lacking = (-1, 0.0)
            return
        now = time.monotonic()
        if self._lacking[0] != position:
            self._lacking = (position, now)
        if not self.coming and self._stray_bytes == 0:
            raise PipelineError(
                f"training needs {names.shard_name(lacking[0])} for step {position + 1}, but the shards of that step "
                f"alone fill cache.max_bytes ({bytes_text(self.schedule.max_bytes)}): raise it"
            )
        if now - self._lacking[1] > _TELL_S:
            self._lacking = (position, now)
            self.say(f"train: waiting for {names.shard_name(lacking[0])}: not extracted yet")
