"""Training data from the feature cache: who is held out, in which order, with which anchors.

Everything here is a pure function of (stored sample ids, seed, epoch): any number of ranks, workers or
restarts sees the same steps. A step is a list of sample ids; rank r of W takes every W-th, starting at r.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from cache_schema.reader import CachedSample, FeatureCache
from stages.anchors import sample_anchors, stable_key
from stages.batch import TrainingSample
from stages.config import TrainConfig
from stages.errors import TrainingError


def is_heldout(sample_id: str, seed: int, share: float) -> bool:
    """Whether a sample is kept out of training, by hash of its id."""
    return stable_key("heldout", seed, sample_id) / 2**128 < share


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step: 0-based index over the whole run, its epoch, and the samples of all ranks."""

    index: int
    epoch: int
    sample_ids: tuple[str, ...]


class StepPlan:
    """The steps of a run.

    Args:
        sample_ids: stored samples, any order.
        config: epochs, batch size, held-out share.
        seed: of the run.

    Raises:
        TrainingError: nothing is left to train on.
    """

    def __init__(self, sample_ids: list[str], config: TrainConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        ordered = sorted(sample_ids)
        kept_out = [s for s in ordered if is_heldout(s, seed, config.heldout_share)]
        self.heldout = kept_out[: config.heldout_max]
        self.training = [s for s in ordered if not is_heldout(s, seed, config.heldout_share)]
        if not self.training:
            raise TrainingError(
                f"the cache has {len(ordered)} samples and {len(kept_out)} of them are held out "
                f"(train.heldout_share {config.heldout_share}), so none is left to train on; extract more samples"
            )
        self.steps_per_epoch = -(-len(self.training) // config.batch_samples)
        self.n_steps = self.steps_per_epoch * config.epochs
        self._shuffled: tuple[int, list[str]] = (-1, [])

    def step(self, index: int) -> Step:
        """The step with this index; the last one of an epoch may be smaller, none is dropped."""
        epoch, within = divmod(index, self.steps_per_epoch)
        order = self._order(epoch)
        start = within * self.config.batch_samples
        return Step(index, epoch, tuple(order[start : start + self.config.batch_samples]))

    def _order(self, epoch: int) -> list[str]:
        if self._shuffled[0] != epoch:
            order = sorted(self.training, key=lambda s: stable_key("order", self.seed, epoch, s))
            self._shuffled = (epoch, order)
        return self._shuffled[1]


class SampleReader:
    """Reads samples with their anchors; those without an eligible anchor are left out and counted.

    Attributes:
        skipped: ids without an eligible anchor that were met so far.
    """

    def __init__(self, cache: FeatureCache, config: TrainConfig, seed: int) -> None:
        self.cache, self.config, self.seed = cache, config, seed
        self.skipped: set[str] = set()
        # The prefetching thread and the look at the held-out samples read at the same time, and the cache's list
        # of open shards is not made for that.
        self._lock = threading.Lock()

    def read(self, sample_id: str, epoch: int, n_anchors: int | None = None) -> TrainingSample | None:
        """The sample with this epoch's anchors (`n_anchors` at most), or None when it has no eligible one."""
        with self._lock:
            cached = self.cache.read(sample_id)
        n, mask = n_anchors or self.config.anchors, cached.loss_mask
        anchors = sample_anchors(mask, n, seed=self.seed, epoch=epoch, sample_id=sample_id)
        if len(anchors) == 0:
            self.skipped.add(sample_id)
            return None
        return TrainingSample(sample_id, to_tensor(cached), cached.input_ids, cached.loss_mask, anchors)

    def read_step(self, step: Step, rank: int, world: int) -> list[TrainingSample]:
        """A rank's samples of a step."""
        found = (self.read(s, step.epoch) for s in step.sample_ids[rank::world])
        return [s for s in found if s is not None]


def to_tensor(sample: CachedSample) -> torch.Tensor:
    """Features as a tensor [T, L, D] of the type that they stand for (no copy)."""
    if sample.features_dtype == "bfloat16":
        return torch.from_numpy(np.ascontiguousarray(sample.features).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(sample.features))


def prefetch(
    plan: StepPlan, reader: SampleReader, *, start: int, stop: int, rank: int, world: int
) -> Generator[tuple[Step, list[TrainingSample]], None, None]:
    """Steps `start` … `stop − 1` with a rank's samples; the next step is read while this one is used."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")

    def submit(index: int) -> Future[tuple[Step, list[TrainingSample]]]:
        step = plan.step(index)
        return pool.submit(lambda: (step, reader.read_step(step, rank, world)))

    try:
        waiting = submit(start) if start < stop else None
        for index in range(start, stop):
            current, waiting = waiting, submit(index + 1) if index + 1 < stop else None
            if current is not None:
                yield current.result()
    finally:
        # Never wait here: an iterator that was given up may be finalized by the garbage collector in any thread,
        # zarr's own event loop included, and the reading thread may be waiting for just that loop.
        pool.shutdown(wait=False, cancel_futures=True)
