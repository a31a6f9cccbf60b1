"""Training the drafter: one plain function per process, the same with one rank or many (`stages.trainer`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_schema.identity import CacheIdentity
from cache_schema.reader import FeatureCache
from cache_schema.storage import Location
from stages.config import DrafterConfig, TargetConfig, TrainConfig
from stages.dataset import SampleReader
from stages.device import use_threads
from stages.drafter import Drafter, DrafterSpec, spec_for_target
from stages.ends import FrozenEnds, load_ends
from stages.initial import read_initial, spec_from
from stages.order import StepPlan
from stages.preemption import Asked
from stages.rolling import Rolling, WaitingReader, Watch
from stages.target import choose_mask_token, load_config, load_tokenizer, shape_of
from stages.trainer import Trainer, learning_rate
from stages.world import World

__all__ = ["FrozenEnds", "TrainJob", "Trainer", "learning_rate", "load_ends", "make_spec", "train_rank", "trained_spec"]


@dataclass(frozen=True, slots=True)
class TrainJob:
    """Everything a rank needs; picklable."""

    target: TargetConfig
    drafter: DrafterConfig
    train: TrainConfig
    identity: CacheIdentity
    seed: int
    cache_dir: str | Path
    """Folder or URL."""
    folder: Location
    """For `metrics.jsonl`, checkpoints and the rest; a folder or a URL."""
    fingerprint: str
    rolling: Rolling | None = None
    """Set when the cache is made while training."""


def make_spec(target: TargetConfig, drafter: DrafterConfig, layer_ids: tuple[int, ...]) -> DrafterSpec:
    """The spec of a drafter for a target, from the target's config and tokenizer alone."""
    config = load_config(target)
    mask = choose_mask_token(load_tokenizer(target), shape_of(config).vocab_size, target.mask_token_id)
    return spec_for_target(drafter, config, feature_layer_ids=layer_ids, mask_token_id=mask.id)


def trained_spec(job: TrainJob) -> DrafterSpec:
    """The spec of the drafter that a job trains: the target's, with the sliding windows of `train.init_from`.

    Raises:
        TrainingError, CheckpointError: that folder holds another drafter, or cannot be read.
    """
    spec = make_spec(job.target, job.drafter, job.drafter.feature_layers or job.identity.layer_ids)
    return spec if job.train.init_from is None else spec_from(Path(job.train.init_from), spec)


def initial_drafter(spec: DrafterSpec, job: TrainJob) -> Drafter:
    """The drafter as training starts from it: random weights, or those of `train.init_from`.

    Raises:
        TrainingError: that checkpoint is of another shape or meaning; names each thing that differs.
        CheckpointError: it cannot be read.
    """
    drafter = Drafter(spec, seed=job.seed)
    if job.train.init_from is not None:
        drafter.load_state_dict(read_initial(Path(job.train.init_from), spec))
    return drafter


def train_rank(
    job: TrainJob, world: World, on_step: Callable[[dict[str, Any]], None] | None = None, leaving: Asked | None = None
) -> Path:
    """Everything one rank does, from opening the cache to the final checkpoint.

    Raises:
        CacheError: the cache is incomplete, damaged, or of another identity than the job's.
        TrainingError, TrainingStopped, FingerprintMismatch: as `Trainer.run`.
    """
    use_threads(job.train.threads)
    rolling = job.rolling
    cache = FeatureCache.open(job.cache_dir, job.identity, require_complete=rolling is None)
    plan = StepPlan(cache.plan, job.train, job.seed)
    drafter = initial_drafter(trained_spec(job), job).to(world.device)
    ends = load_ends(job.target, world.device, bf16=job.train.bf16)
    trainer = functools.partial(
        Trainer, drafter, ends, plan, config=job.train, folder=job.folder, fingerprint=job.fingerprint, world=world,
        on_step=on_step, leaving=leaving,
    )  # fmt: skip
    if rolling is None:
        return trainer(SampleReader(cache, job.train, job.seed, job.drafter)).run()
    reader, heldout = WaitingReader(cache, job.train, job.seed, rolling, job.drafter), None
    if rolling.heldout_dir is not None:
        aside = FeatureCache.open(rolling.heldout_dir, job.identity, require_complete=True)
        heldout = SampleReader(aside, job.train, job.seed, job.drafter)
    with Watch(rolling, job.folder, chief=world.rank == 0) as watch:
        return trainer(reader, heldout=heldout, watch=watch).run()
