"""Which samples make up each optimizer step: who is held out, and in which order the others come.

Everything here is a pure function of (the cache's plan, the training settings, the seed), so any number of
ranks, workers or restarts sees the same steps, and where a run is takes one number.

A **round** goes through all training samples `passes_per_window` times: once (the default), so that a round is
an epoch. The shards, shuffled, are divided into windows of `window_shards`, and the samples of a window are
shuffled together, so that a reader has only a window (and the begin of the next) open at a time. With p passes
each window is gone through p times in a row, every time in another order and with an epoch number of its own,
before the next window comes: a cache that cannot be kept whole is then made once per p epochs.

Shuffling sorts by a 64-bit hash (splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", 2014, as in Vigna's `splitmix64.c`) of places in the plan, and not by a library's generator, so no
release of numpy changes it. A million samples take a third of a second per epoch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_schema.plan import ShardPlan
from cache_schema.response_format import prompt_id
from stages.anchors import Ints, stable_key
from stages.config import TrainConfig
from stages.errors import TrainingError

Keys = npt.NDArray[np.uint64]
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_KEPT_ROUNDS = 2
"""Rounds in memory: while the first steps of one are read ahead, the last of the one before are still asked for."""


def heldout_mask(sample_ids: list[str], seed: int, share: float) -> npt.NDArray[np.bool_]:
    """Which samples are kept out of training, by hash of the ids of the prompts that they go back to, [samples].

    By prompt, so that a second answer or a later turn is never trained on while the first is held out.
    """
    start = hashlib.sha256(f"heldout\x1f{seed}\x1f".encode())
    digests = bytearray()
    for sample_id in sample_ids:
        digest = start.copy()
        digest.update(prompt_id(sample_id).encode())
        digests += digest.digest()[8:16]
    # The upper half of the same 128-bit key that `stable_key` gives.
    return np.frombuffer(digests, "<u8") < np.uint64(round(share * 2**64))


def is_heldout(sample_id: str, seed: int, share: float) -> bool:
    """Whether a sample is kept out of training, by hash of the id of its prompt."""
    return bool(heldout_mask([sample_id], seed, share)[0])


def shuffle_keys(count: int, *parts: object) -> Keys:
    """One distinct 64-bit key for each of 0 … count − 1, a function of the parts' text; sorting by them shuffles."""
    start = np.uint64(stable_key(*parts) & (2**64 - 1))
    z = start + np.arange(1, count + 1, dtype=np.uint64) * _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _MIX[0]
    z = (z ^ (z >> np.uint64(27))) * _MIX[1]
    return np.asarray(z ^ (z >> np.uint64(31)), np.uint64)


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step of all ranks: 0-based index over the whole run, its samples, and the epoch of each."""

    index: int
    sample_ids: tuple[str, ...]
    epochs: tuple[int, ...]

    @property
    def epoch(self) -> int:
        """Of its first sample."""
        return self.epochs[0]


@dataclass(frozen=True, slots=True)
class Window:
    """Shards that are read together, and the places of the round where they are.

    Attributes:
        shards: indices, in no order.
        start, stop: samples `start` … `stop − 1` of the round's order (all passes) lie in these shards.
    """

    shards: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Round:
    """The order of a round: places in the plan, and epochs, both [samples × passes]; its windows."""

    samples: Ints
    epochs: Ints
    windows: tuple[Window, ...]


class StepPlan:
    """The steps of a run.

    Args:
        plan: of the cache; its samples need not be stored yet.
        config: epochs, passes, window, batch size, held-out share.
        seed: of the run.

    Attributes:
        heldout: ids that are looked at and never trained on, sorted.
        n_training: samples of an epoch.
        steps_per_round, n_rounds, n_steps: the last step of a round may be smaller; none is dropped.

    Raises:
        TrainingError: nothing is left to train on.
    """

    def __init__(self, plan: ShardPlan, config: TrainConfig, seed: int) -> None:
        self.shard_plan, self.config, self.seed = plan, config, seed
        self._ids = plan.sample_ids
        counts = [len(plan.lengths(shard)) for shard in plan.shards()]
        self._shard_of: Ints = np.repeat(np.arange(len(counts)), counts)
        out = heldout_mask(self._ids, seed, config.heldout_share)
        self._training: Ints = np.flatnonzero(~out).astype(np.int64)
        if len(self._training) == 0:
            raise TrainingError(
                f"the cache has {len(self._ids)} samples and {int(out.sum())} of them are held out "
                f"(train.heldout_share {config.heldout_share}), so none is left to train on; extract more samples"
            )
        self.heldout = sorted(self._ids[i] for i in np.flatnonzero(out))[: config.heldout_max]
        self.n_training = len(self._training)
        self.n_rounds = config.epochs // config.passes_per_window
        self._round_samples = self.n_training * config.passes_per_window
        self.steps_per_round = -(-self._round_samples // config.batch_samples)
        self.n_steps = self.steps_per_round * self.n_rounds
        self._rounds: dict[int, _Round] = {}

    @property
    def training(self) -> list[str]:
        """Ids that are trained on, in the plan's order."""
        return [self._ids[i] for i in self._training]

    def step(self, index: int) -> Step:
        """The step with this index."""
        number, start, stop = self._place(index)
        order = self._round(number)
        ids = tuple(self._ids[i] for i in order.samples[start:stop])
        return Step(index, ids, tuple(order.epochs[start:stop].tolist()))

    def shards_of_step(self, index: int) -> set[int]:
        """Indices of the shards that a step reads."""
        number, start, stop = self._place(index)
        return set(self._shard_of[self._round(number).samples[start:stop]].tolist())

    def visits(self, number: int) -> tuple[Ints, Ints]:
        """Shard and step of every read of a round (0-based), in order, both [samples × passes]."""
        order = self._round(number).samples
        steps = number * self.steps_per_round + np.arange(len(order)) // self.config.batch_samples
        return self._shard_of[order], steps.astype(np.int64)

    def windows(self, number: int) -> tuple[Window, ...]:
        """The windows of a round (0-based), in order."""
        return self._round(number).windows

    def identity(self) -> dict[str, Any]:
        """What the order is made of, as JSON-able values."""
        config = self.config
        return {
            "plan_sha256": self.shard_plan.sha,
            "seed": self.seed,
            "epochs": config.epochs,
            "batch_samples": config.batch_samples,
            "window_shards": config.window_shards,
            "passes_per_window": config.passes_per_window,
            "heldout_share": config.heldout_share,
        }

    def _place(self, index: int) -> tuple[int, int, int]:
        if not 0 <= index < self.n_steps:
            raise IndexError(f"step {index} is none of this run's, which has {self.n_steps}")
        number, within = divmod(index, self.steps_per_round)
        start = within * self.config.batch_samples
        return number, start, min(start + self.config.batch_samples, self._round_samples)

    def _round(self, number: int) -> _Round:
        found = self._rounds.get(number)
        if found is None:
            found = self._make_round(number)
            kept = list(self._rounds.items())[1 - _KEPT_ROUNDS :]
            self._rounds = dict([*kept, (number, found)])  # replaced whole: another thread may be reading the old one
        return found

    def _make_round(self, number: int) -> _Round:
        passes = self.config.passes_per_window
        first_epoch = number * passes
        groups = self._shard_windows(first_epoch)
        window_of_shard = np.full(self.shard_plan.n_shards, -1)
        for i, shards in enumerate(groups):
            window_of_shard[shards] = i
        window_of = window_of_shard[self._shard_of[self._training]]
        orders = [self._pass(window_of, epoch) for epoch in range(first_epoch, first_epoch + passes)]
        bounds = np.concatenate([[0], np.cumsum(np.bincount(window_of, minlength=len(groups)))])
        spans = list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
        samples = np.concatenate([order[a:b] for a, b in spans for order in orders])
        epochs = np.concatenate([np.full(b - a, first_epoch + p) for a, b in spans for p in range(passes)])
        windows = tuple(
            Window(tuple(shards.tolist()), a * passes, b * passes)
            for shards, (a, b) in zip(groups, spans, strict=True)
        )
        return _Round(samples, epochs, windows)

    def _shard_windows(self, epoch: int) -> list[Ints]:
        """Shards that hold training samples, shuffled and divided."""
        used = np.unique(self._shard_of[self._training])
        keys = shuffle_keys(self.shard_plan.n_shards, "shards", self.seed, epoch)[used]
        shuffled = used[np.argsort(keys)]
        size = self.config.window_shards
        return [shuffled[i : i + size] for i in range(0, len(shuffled), size)]

    def _pass(self, window_of: Ints, epoch: int) -> Ints:
        """All training samples, window after window, shuffled within each."""
        keys = shuffle_keys(len(self._ids), "order", self.seed, epoch)[self._training]
        return self._training[np.lexsort((keys, window_of))]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_rounds": {}}
