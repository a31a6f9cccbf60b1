"""Rolling mode, the decisions: which shard to make next, which to evict, when to wait. No I/O, no Ray.

Training goes through the shards in an order that is known beforehand, so the classical rule is optimal (Belady,
"A study of replacement algorithms for a virtual-storage computer", 1966): make the missing shard that is needed
first, and make room for it by evicting the shard that is needed again last, if that is after the new one is needed.

Sizes count as soon as a shard is being made, so the limit holds for what is on disk and not only for what is
committed. A shard's size is estimated before it is made: exactly for uncompressed features, too high for others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cache_schema.codec import CRC_BYTES
from cache_schema.identity import CacheIdentity
from cache_schema.layout import CHUNK_ROWS, PER_SAMPLE, array_specs, group_metadata, index_bytes, n_chunks
from cache_schema.plan import ShardPlan
from pipeline.errors import PipelineError
from pipeline.report_text import bytes_text
from stages.order import StepPlan

Ints = npt.NDArray[np.int64]
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Make:
    """Make this shard."""

    shard: int


@dataclass(frozen=True, slots=True)
class Evict:
    """Remove this shard."""

    shard: int


def shard_sizes(plan: ShardPlan, identity: CacheIdentity, hidden_size: int) -> Ints:
    """Bytes of each shard's objects before compression, [shards]."""
    width = max((len(s.encode()) for s in plan.sample_ids), default=1)
    specs = array_specs(identity, hidden_size, width)
    metadata: dict[tuple[str, int, int], int] = {}
    group = len(group_metadata())
    sizes = []
    for shard in plan.shards():
        lengths = plan.lengths(shard)
        n_samples, n_tokens, total = len(lengths), int(lengths.sum()), group
        for name, spec in specs.items():
            rows = n_samples + (name == "offsets") if name in PER_SAMPLE else n_tokens
            chunks = n_chunks(rows)
            # Metadata differ in nothing but the digits of rows and chunks.
            digits = (name, len(str(rows)), len(str(CHUNK_ROWS * chunks)))
            if digits not in metadata:
                metadata[digits] = len(spec.metadata(rows))
            total += chunks * (spec.chunk_bytes + CRC_BYTES) + index_bytes(chunks) + metadata[digits]
        sizes.append(total)
    return np.asarray(sizes, np.int64)


class RollingSchedule:
    """What to do next, given where training is and which shards there are.

    Args:
        plan: the steps.
        sizes: estimated bytes of each shard, [shards].
        max_bytes: on disk, at most.
        reserved: of them for other things (the held-out samples).
    """

    def __init__(self, plan: StepPlan, sizes: Ints | Sequence[int], max_bytes: int, reserved: int = 0) -> None:
        self.plan, self.max_bytes, self.reserved = plan, max_bytes, reserved
        self.sizes: Ints = np.asarray(sizes, np.int64)
        self._stride = plan.n_steps + 1
        self._first_keys = np.arange(len(self.sizes), dtype=np.int64) * self._stride
        self._reads: dict[int, Ints] = {}

    def next_use(self, position: int) -> Ints:
        """The first step at or after `position` that reads each shard, [shards]; `NEVER` for none."""
        number = position // self.plan.steps_per_round
        soon = self._next_in_round(number, position)
        later = self._next_in_round(number + 1, 0)
        return np.where(soon == NEVER, later, soon)

    def next_action(
        self, position: int, there: Mapping[int, int], coming: set[int], stray_bytes: int = 0
    ) -> Make | Evict | None:
        """What to do now.

        Args:
            position: steps done.
            there: committed shards and their bytes.
            coming: shards that are being made.
            stray_bytes: what attempts that died have left and is not removed yet.

        Returns:
            None: nothing, until training has gone on or a shard has come.
        """
        uses = self.next_use(position)
        taken = sum(there.values()) + sum(int(self.sizes[s]) for s in coming) + stray_bytes
        room = self.max_bytes - self.reserved - taken
        missing = uses.copy()
        missing[[*there, *coming]] = NEVER
        wanted = int(np.argmin(missing)) if len(missing) else 0
        nothing_missing = len(missing) == 0 or missing[wanted] == NEVER
        if not nothing_missing and self.sizes[wanted] <= room:
            return Make(wanted)
        needed_before = position if nothing_missing else int(missing[wanted])
        if nothing_missing and room >= 0:
            return None
        last = max(there, key=lambda s: (uses[s], s), default=None)
        return Evict(last) if last is not None and uses[last] > needed_before else None

    def peak_bytes(self) -> int:
        """The most bytes of shards that are in use at one step, from their first read in a round to their last."""
        return max(self._peak_of_round(number) for number in range(self.plan.n_rounds))

    def times_made(self) -> tuple[int, int]:
        """Shards that training reads, and how often all of them are gone through: the most times each is made."""
        return int((self.next_use(0) != NEVER).sum()), self.plan.n_rounds

    def _peak_of_round(self, number: int) -> int:
        keys = self._keys(number)
        shards, steps = keys // self._stride, keys % self._stride - number * self.plan.steps_per_round
        used, first = np.unique(shards, return_index=True)
        last = np.append(first[1:], len(keys)) - 1
        change = np.zeros(self.plan.steps_per_round + 1, np.int64)
        np.add.at(change, steps[first], self.sizes[used])
        np.subtract.at(change, steps[last] + 1, self.sizes[used])
        return int(np.cumsum(change).max())

    def _next_in_round(self, number: int, position: int) -> Ints:
        if number >= self.plan.n_rounds:
            return np.full(len(self.sizes), NEVER)
        keys = self._keys(number)
        at = np.searchsorted(keys, self._first_keys + position)
        found = keys[np.minimum(at, len(keys) - 1)]
        read = (at < len(keys)) & (found // self._stride == np.arange(len(self.sizes)))
        return np.where(read, found % self._stride, NEVER)

    def _keys(self, number: int) -> Ints:
        """`shard · stride + step` of every read of a round, sorted."""
        if number not in self._reads:
            shards, steps = self.plan.visits(number)
            kept = {n: keys for n, keys in self._reads.items() if abs(n - number) == 1}
            self._reads = kept | {number: np.sort(shards * self._stride + steps)}
        return self._reads[number]


def require_room(schedule: RollingSchedule, workers: int) -> None:
    """Check that the limit holds what must be there at once: the shards in use, and one per extract worker.

    Raises:
        PipelineError: it does not; says what would.
    """
    plan, largest = schedule.plan, int(schedule.sizes.max(initial=0))
    extra = schedule.reserved + workers * largest
    needed = schedule.peak_bytes() + extra
    if needed <= schedule.max_bytes:
        return
    window = plan.config.window_shards
    smaller = _largest_window(schedule, workers)
    held = f", the held-out samples ({bytes_text(schedule.reserved)})" if schedule.reserved else ""
    remedy = (
        f"lower train.window_shards to {smaller} or less"
        if smaller
        else "make shards smaller (cache.shard_bytes, in a new cache)"
    )
    raise PipelineError(
        f"cache.max_bytes is {bytes_text(schedule.max_bytes)}, but a window of {window} shards (with the begin of the "
        f"next: {bytes_text(schedule.peak_bytes())}), one shard for each of {workers} extract workers "
        f"({bytes_text(workers * largest)}){held} must fit in it at once: {bytes_text(needed)}, before compression. "
        f"Raise cache.max_bytes to {needed}, or {remedy}"
    )


def _largest_window(schedule: RollingSchedule, workers: int) -> int:
    """The largest `window_shards` that fits, by bisection; 0 if none does."""
    low, high = 0, min(schedule.plan.config.window_shards, len(schedule.sizes))
    while high - low > 1:
        window = (low + high) // 2
        config = dataclasses.replace(schedule.plan.config, window_shards=window)
        plan = StepPlan(schedule.plan.shard_plan, config, schedule.plan.seed)
        other = RollingSchedule(plan, schedule.sizes, schedule.max_bytes, schedule.reserved)
        fits = other.peak_bytes() + schedule.reserved + workers * int(schedule.sizes.max()) <= schedule.max_bytes
        low, high = (window, high) if fits else (low, window)
    return low


def what_is_seen(schedule: RollingSchedule, stages_overlap_bytes: int) -> str:
    """What the user is told at the start: what each epoch sees, and how often shards are made.

    Args:
        schedule: of the run.
        stages_overlap_bytes: of two windows and the workers' shards: with less, extraction pauses for training.
    """
    config, total = schedule.plan.config, int(schedule.sizes.sum())
    shards, rounds = schedule.times_made()
    times = "once" if rounds == 1 else f"up to {rounds} times"
    text = (
        f"rolling: at most {bytes_text(schedule.max_bytes)} on disk of a cache of {bytes_text(total)} in all: each of "
        f"{config.epochs} epochs sees every sample, and each of {shards} shards is made {times}"
    )
    if config.passes_per_window > 1:
        text += f" ({config.passes_per_window} epochs go through a window of {config.window_shards} shards in a row)"
    elif rounds > 1:
        text += f"; train.passes_per_window={config.epochs} would make each once"
    if schedule.max_bytes < stages_overlap_bytes:
        text += (
            f". Below {bytes_text(stages_overlap_bytes)} the next window is not ready when one ends, and training and "
            "extraction wait for each other; smaller windows (train.window_shards) would help"
        )
    return text
