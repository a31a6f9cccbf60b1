"""Training data from the feature cache: a rank's share of each step, read ahead, with the anchors of its epoch.

`StepDataset` is a map from step number to packed micro-batches. `TrainingStream` goes through it in order from
wherever it stands, one step ahead in a thread or several ahead in worker processes (`torch.utils.data.DataLoader`),
and says where it stands in one number that holds for any number of ranks and workers: rank r of W takes every
W-th sample of a step, starting at r.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from cache_schema.errors import DFlashError
from cache_schema.layout import feature_format
from cache_schema.reader import FeatureCache
from cache_schema.shard import CachedSample
from stages.anchors import choose_anchors
from stages.batch import Batch, TrainingSample, make_batch
from stages.config import DrafterConfig, TrainConfig
from stages.errors import TrainingError
from stages.order import Step, StepPlan
from stages.quantize import from_stored

NO_ANCHOR = "no_anchor"
_AHEAD = 2
"""Steps that each worker process keeps ready."""
StartMethod = Literal["fork", "spawn", "forkserver"]


class SampleReader:
    """Reads samples with their anchors; those that cannot be used are left out and counted.

    Attributes:
        skipped: reason by id, of the samples met so far that are not stored (the ledger's reason) or have no
            eligible anchor (`no_anchor`).
    """

    def __init__(
        self, cache: FeatureCache, config: TrainConfig, seed: int, drafter: DrafterConfig | None = None
    ) -> None:
        self.cache, self.config, self.seed = cache, config, seed
        self.drafter = drafter or DrafterConfig()
        self.columns = _columns(cache, self.drafter)
        if config.distill is not None and not cache.identity.last_hidden:
            raise TrainingError(
                f"train.distill needs the target's last hidden states, which {cache.storage.where()} does not hold; "
                "make a cache with cache.last_hidden: true, or leave train.distill out"
            )
        self.skipped: dict[str, str] = {}

    def read(self, sample_id: str, epoch: int, n_anchors: int | None = None) -> TrainingSample | None:
        """The sample with this epoch's anchors (`n_anchors` at most), or None when it cannot be used.

        Raises:
            ShardNotCommitted, ShardCorrupt: as `FeatureCache.read`.
        """
        reason = self._dropped(sample_id)
        if reason is not None:
            self.skipped[sample_id] = reason
            return None
        ids, mask = self.cache.tokens(sample_id)
        anchors = choose_anchors(
            mask, n_anchors or self.config.anchors, block_size=self.drafter.block_size, epoch=epoch,
            choice="random" if n_anchors else self.config.anchor_choice, seed=self.seed, sample_id=sample_id,
        )  # fmt: skip
        if len(anchors) == 0:
            self.skipped[sample_id] = NO_ANCHOR
            return None
        # Rows at or after the last anchor are seen by no block; its block's teacher states lie behind it.
        teaches = self.config.distill is not None
        stop = int(anchors[-1]) + (self.drafter.block_size - 1 if teaches else 0)
        cached = self.cache.read(sample_id, stop=stop)
        form = feature_format(self.cache.identity)
        features_TLD, scale_TLG = from_stored(cached.features, cached.scale, form)
        if self.columns is not None:
            features_TLD = features_TLD[:, self.columns]
            scale_TLG = scale_TLG[:, self.columns] if scale_TLG is not None else None
        last = _last_hidden(cached) if teaches else None
        return TrainingSample(sample_id, features_TLD, ids, mask, anchors, scale_TLG, form, last)

    def _dropped(self, sample_id: str) -> str | None:
        """Why a committed shard does not hold a sample that the plan gives it."""
        marker = self.cache.markers.get(self.cache.plan.shard_of(sample_id))
        rows = marker.ledger if marker is not None else ()
        return next((row["reason"] for row in rows if row["sample_id"] == sample_id and not row["kept"]), None)


def _columns(cache: FeatureCache, drafter: DrafterConfig) -> list[int] | None:
    """Which of the cached layers the drafter uses; None for all of them."""
    cached, wanted = cache.identity.layer_ids, drafter.feature_layers
    if wanted is None or wanted == cached:
        return None
    absent = [layer for layer in wanted if layer not in cached]
    if absent:
        raise TrainingError(
            f"drafter.feature_layers names {absent}, but {cache.storage.where()} holds the layers {list(cached)}; "
            "choose among those, or make a cache with cache.layer_ids"
        )
    return [cached.index(layer) for layer in wanted]


def _last_hidden(cached: CachedSample) -> torch.Tensor | None:
    if cached.last_hidden is None:
        return None
    states = torch.from_numpy(np.ascontiguousarray(cached.last_hidden))
    return states.view(torch.bfloat16) if states.dtype == torch.uint16 else states


def divided(
    samples: Sequence[TrainingSample], block_size: int, config: TrainConfig
) -> Generator[list[TrainingSample], None, None]:
    """Samples in order, in parts of `train.micro_tokens` rows (context tokens and block slots) at most, but at least
    one sample; or of `train.micro_samples`, if no budget is set."""
    part: list[TrainingSample] = []
    rows = 0
    for sample in samples:
        own = int(sample.anchors.max()) + len(sample.anchors) * block_size
        budget = config.micro_tokens
        full = len(part) == config.micro_samples if budget is None else rows + own > budget
        if part and full:
            yield part
            part, rows = [], 0
        part.append(sample)
        rows += own
    if part:
        yield part


@dataclass(frozen=True, slots=True)
class StepData:
    """A rank's share of a step.

    Attributes:
        step: of all ranks.
        batches: micro-batches, in order; none when this rank has no usable sample.
        n_tokens: stored tokens of its samples.
        skipped: reason by id, of those of its samples that are left out.
    """

    step: Step
    batches: tuple[Batch, ...]
    n_tokens: int
    skipped: Mapping[str, str]

    def pin_memory(self) -> StepData:
        """The same in page-locked memory, from which the copy to a GPU does not hold up the CPU."""
        return StepData(self.step, tuple(b.pin_memory() for b in self.batches), self.n_tokens, self.skipped)


@dataclass(frozen=True, slots=True)
class StepDataset(Dataset[StepData]):
    """From step number to a rank's share of that step; can be sent to another process.

    Attributes:
        plan, reader: which samples, and what reads them.
        block_size, mask_token_id: of the drafter.
        rank, world: this rank among all.
    """

    plan: StepPlan
    reader: SampleReader
    block_size: int
    mask_token_id: int
    rank: int = 0
    world: int = 1

    def __len__(self) -> int:
        return self.plan.n_steps

    def __getitem__(self, index: int) -> StepData:
        step = self.plan.step(index)
        own = list(zip(step.sample_ids, step.epochs, strict=True))[self.rank :: self.world]
        found = [self.reader.read(sample_id, epoch) for sample_id, epoch in own]
        samples = [s for s in found if s is not None]
        skipped = {s: self.reader.skipped[s] for (s, _), sample in zip(own, found, strict=True) if sample is None}
        parts = divided(samples, self.block_size, self.plan.config)
        batches = tuple(make_batch(part, self.block_size, self.mask_token_id) for part in parts)
        return StepData(step, batches, sum(len(s.input_ids) for s in samples), skipped)


class TrainingStream:
    """A rank's steps, in order, from where it stands to the end of the run.

    Args:
        dataset: what the steps hold.
        workers: processes that read; 0 reads one step ahead in a thread.
        start_method: of the processes. `fork` must not be used beside CUDA or Ray, whose threads it would halve.
        pin: put what is read into page-locked memory (needs CUDA).

    Attributes:
        position: the step that comes next.
    """

    def __init__(
        self, dataset: StepDataset, *, workers: int = 0, start_method: StartMethod = "spawn", pin: bool = False
    ) -> None:
        self.dataset, self.workers, self.start_method, self.pin = dataset, workers, start_method, pin
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, as JSON-able values; the step that was given out last counts as done."""
        return {"position": self.position, "order": self.dataset.plan.identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stand where another stream of the same order stood, whatever its rank, number of ranks and workers.

        Raises:
            TrainingError: the state is of another order (names each thing that differs), or of no step of this one.
        """
        own, other = self.dataset.plan.identity(), state["order"]
        lines = [
            f"{key}: the state has {other.get(key)!r}, this run {own.get(key)!r}"
            for key in sorted(own.keys() | other.keys())
            if other.get(key) != own.get(key)
        ]
        if lines:
            raise TrainingError("the training data stood in another order of steps:\n  " + "\n  ".join(lines))
        if not 0 <= state["position"] <= self.dataset.plan.n_steps:
            raise TrainingError(
                f"the training data stood at step {state['position']}, this run has {self.dataset.plan.n_steps}"
            )
        self.position = state["position"]

    def __iter__(self) -> Generator[StepData, None, None]:
        todo = range(self.position, self.dataset.plan.n_steps)
        source = self._from_processes(todo) if self.workers else self._from_thread(todo)
        with closing(source):
            for data in source:
                self.position = data.step.index + 1
                yield data

    def _from_thread(self, todo: range) -> Generator[StepData, None, None]:
        pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")

        def fetch(index: int) -> StepData:
            data = self.dataset[index]
            return data.pin_memory() if self.pin else data

        try:
            waiting: Future[StepData] | None = None
            for index in todo:
                current = waiting or pool.submit(fetch, index)
                waiting = pool.submit(fetch, index + 1) if index + 1 < todo.stop else None
                yield current.result()
        finally:
            # Never wait here: an iterator that was given up may be finalized by the garbage collector in any thread,
            # one that the reading thread is waiting for included.
            pool.shutdown(wait=False, cancel_futures=True)

    def _from_processes(self, todo: range) -> Generator[StepData, None, None]:
        loader = DataLoader(
            _Guarded(self.dataset), batch_size=None, sampler=todo, num_workers=self.workers,
            prefetch_factor=_AHEAD, pin_memory=self.pin, multiprocessing_context=self.start_method,
        )  # fmt: skip
        # One pass over the loader is the rest of the run, so its processes live as long as that.
        for found in loader:
            if isinstance(found, _Fault):
                raise found.error
            yield found


@dataclass(frozen=True, slots=True)
class _Fault:
    """What reading a step raised."""

    error: Exception


@dataclass(frozen=True, slots=True)
class _Guarded(Dataset[StepData | _Fault]):
    """Hands errors over as they are: a loader would turn them into a text with a traceback, and lose `errno`."""

    steps: StepDataset

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> StepData | _Fault:
        try:
            return self.steps[index]
        except (DFlashError, OSError) as error:
            return _Fault(error)
