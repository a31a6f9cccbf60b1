"""Rolling mode, driven: extract workers make shards beside the training, and the disk never holds more than allowed.

Used when `cache.max_bytes` is set and the whole cache (before compression) would be larger. Then the extract stage
only makes a small cache of the held-out samples, which every look at them needs, and the train stage does the rest.

The driver's pool of extract workers is fed by `RollingFeed`, which asks `RollingSchedule` what to do whenever a
worker is idle. Markers and the trainer's position are on disk, so a killed run goes on: committed shards are kept,
training goes on from its checkpoint, and shards that only the older position needs are made again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache_schema import names
from cache_schema.identity import CacheIdentity
from cache_schema.layout import feature_format
from cache_schema.manifest import create_cache
from cache_schema.marker import committed_shards
from cache_schema.plan import ShardPlan, plan_shards
from cache_schema.reader import FeatureCache
from cache_schema.storage import Location, Storage, join, open_storage, replace_at
from pipeline.errors import PipelineError
from pipeline.extract_step import QuarantineGuard, drive_extract
from pipeline.follow import follow_metrics
from pipeline.pool import cpus_of, worker_resources
from pipeline.report_text import bytes_text
from pipeline.rolling import RollingSchedule, require_room, shard_sizes, what_is_seen
from pipeline.rolling_feed import RollingFeed
from pipeline.run import Run, Say
from pipeline.runner import ensure_ray, run_pool
from stages.extract import ExtractJob, ExtractWorker, ShardUnit
from stages.order import StepPlan
from stages.rolling import POSITION, STOP, Rolling, write_position
from stages.target import load_config, shape_of
from stages.train import TrainJob
from stages.train_ray import train_with_ray


def is_rolling(run: Run, plan: ShardPlan, identity: CacheIdentity) -> bool:
    """Whether the cache is too large to be kept whole: `cache.max_bytes` is set, and it would exceed that."""
    limit = run.recipe.cache.max_bytes
    return limit is not None and int(_sizes(run, plan, identity).sum()) > limit


def _sizes(run: Run, plan: ShardPlan, identity: CacheIdentity) -> Any:
    return shard_sizes(plan, identity, shape_of(load_config(run.recipe.target)).hidden_size)


# --- the held-out samples -----------------------------------------------------------------------------


def extract_heldout(run: Run, plan: ShardPlan, identity: CacheIdentity) -> None:
    """The extract stage of a rolling run: only the cache of the held-out samples.

    Raises:
        ResponsesError, ShardRefused, PoisonShard: see the stages.
        PipelineError: `cache.max_bytes` cannot hold what must be there at once.
    """
    recipe = run.recipe
    if recipe.extract.tensor_parallel > 1:
        raise PipelineError(
            f"extract.tensor_parallel is {recipe.extract.tensor_parallel}, but beside training (cache.max_bytes) every "
            "extract worker holds the whole target; leave one of the two settings out"
        )
    steps = StepPlan(plan, recipe.train, recipe.seed)
    sizes = _sizes(run, plan, identity)
    own = _heldout_plan(run, steps, identity)
    reserved = int(_sizes(run, own, identity).sum()) if len(own) else 0
    require_room(RollingSchedule(steps, sizes, recipe.cache.max_bytes or 0, reserved), recipe.extract.workers)
    storage = _heldout_storage(run, identity, own)
    if run.is_done("extract", identity.fingerprint(), lambda: set(own.shards()) <= set(committed_shards(storage))):
        return
    with run.stage("extract", identity.fingerprint()) as summary:
        run.say(
            f"extract: the cache would have {bytes_text(sizes.sum())} and cache.max_bytes is "
            f"{bytes_text(recipe.cache.max_bytes)}, so its {plan.n_shards} shards are made while training; now only "
            f"the {len(own)} held-out samples"
        )
        have = set(committed_shards(storage))
        todo = [ShardUnit(s, tuple(own.samples(s))) for s in own.shards() if s not in have]
        job = _extract_job(run, identity, str(run.folder.heldout_cache))
        guard = QuarantineGuard(len(own), recipe.extract.max_quarantined_share, storage.where())
        drive_extract(run, todo, job, len(have), guard)
        made = FeatureCache.open(storage, identity).markers.values() if len(own) else ()
        summary |= {
            "shards_while_training": plan.n_shards,
            "heldout_samples": sum(m.samples for m in made),
            "heldout_bytes": sum(m.bytes for m in made),
        }


def _heldout_plan(run: Run, steps: StepPlan, identity: CacheIdentity) -> ShardPlan:
    hidden = shape_of(load_config(run.recipe.target)).hidden_size
    bytes_per_token = feature_format(identity).code_bytes(len(identity.layer_ids), hidden)
    lengths = [steps.shard_plan.n_tokens(s) for s in steps.heldout]
    return plan_shards(steps.heldout, np.asarray(lengths, np.int64), bytes_per_token, run.recipe.cache.shard_bytes)


def _heldout_storage(run: Run, identity: CacheIdentity, own: ShardPlan) -> Storage:
    """The held-out cache, made if it is not there; one of other held-out samples makes way."""
    storage = open_storage(run.folder.heldout_cache)
    if storage.exists(names.PLAN) and ShardPlan.read(storage).samples_sha != own.samples_sha:
        run.say(f"extract: {storage.where()} holds other held-out samples than this recipe has; making it again")
        storage.delete_tree("")
    if len(own):
        create_cache(storage, identity, own)
    return storage


def _extract_job(run: Run, identity: CacheIdentity, cache_dir: str) -> ExtractJob:
    recipe = run.recipe
    return ExtractJob(recipe.target, recipe.cache, recipe.extract, identity, run.folder.responses, cache_dir)


# --- training -----------------------------------------------------------------------------------------


def train_rolling(run: Run, job: TrainJob, cache: FeatureCache, steps: StepPlan, done: int) -> dict[str, Any]:
    """Train while the extract workers make what training needs next; returns figures for the stage's summary.

    Args:
        run, job: of the train stage.
        cache: the cache as it is now.
        steps: the plan of steps.
        done: steps that a checkpoint already holds.

    Raises:
        PipelineError: `cache.max_bytes` cannot hold what must be there at once.
        PoisonShard, ShardRefused, TrainingError, …: extraction's error if that came first, else training's.
    """
    recipe = run.recipe
    heldout = None
    if steps.heldout:
        heldout = FeatureCache.open(run.folder.heldout_cache, job.identity, require_complete=True)
    reserved = sum(m.bytes for m in heldout.markers.values()) if heldout is not None else 0
    sizes = _sizes(run, cache.plan, job.identity)
    schedule = RollingSchedule(steps, sizes, recipe.cache.max_bytes or 0, reserved)
    require_room(schedule, recipe.extract.workers)
    run.say(what_is_seen(schedule, reserved + 2 * schedule.peak_bytes() + recipe.extract.workers * int(sizes.max())))
    write_position(join(job.folder, POSITION), done)
    guard = QuarantineGuard(len(cache.plan), recipe.extract.max_quarantined_share, cache.storage.where())
    feed = RollingFeed(schedule, cache, job.folder, guard, run.say)
    rolling = Rolling(run.folder.heldout_cache if heldout else None, join(job.folder, STOP), recipe.train.shard_wait_s)
    open_storage(job.folder).delete(STOP)
    extraction = _Extraction(run, feed, _extract_job(run, job.identity, run.cache), rolling.stop_file)
    gpus = _gpu_share(recipe.train.workers + recipe.extract.workers)
    n_cpus = cpus_of(recipe.train.workers, recipe.train.threads) + 1
    with (
        ensure_ray(num_cpus=n_cpus + cpus_of(recipe.extract.workers, recipe.extract.threads)),
        follow_metrics(job.folder, steps.n_steps, done),
        extraction,
    ):
        try:
            rolling_job, scratch = dataclasses.replace(job, rolling=rolling), run.folder.train_scratch
            train_with_ray(rolling_job, storage=scratch / "ray", gpus_per_worker=gpus)
        except Exception:
            if extraction.error is not None:
                raise extraction.error from None
            raise
    return feed.counts.summary(schedule.max_bytes)


def _gpu_share(workers: int) -> float:
    """GPUs of each worker when training and extraction share those of this machine; 0 without any."""
    import torch

    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return 1 / math.ceil(workers / n_gpus) if n_gpus else 0


class _Extraction:
    """The pool of extract workers, in a thread beside the training. What ends it for good ends the training."""

    def __init__(self, run: Run, feed: RollingFeed, job: ExtractJob, stop_file: Location) -> None:
        self.run, self.feed, self.job, self.stop_file = run, feed, job, stop_file
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="extraction", daemon=True)

    def _work(self) -> None:
        config = self.run.recipe.extract
        share = _gpu_share(self.run.recipe.train.workers + config.workers)
        resources = worker_resources(config.threads) | ({"num_gpus": share} if share else {})
        try:
            run_pool(
                self.feed, functools.partial(ExtractWorker, self.job), n_workers=config.workers, resources=resources,
                progress=_Lines(self.run.say), label="shard", on_receipt=self.feed.take, stage="extract",
                run_name=self.run.recipe.name,
            )  # fmt: skip
        except Exception as error:  # whatever it is, the training must not wait for shards that never come
            self.error = error
            replace_at(self.stop_file, f"{type(error).__name__}: {error}".encode())

    def __enter__(self) -> _Extraction:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.feed.stop()
        self._thread.join()


@dataclass(frozen=True, slots=True)
class _Lines:
    """Tells only what failed; how far training is shows how far extraction is."""

    say: Say

    def update(self, n: int = 1, failures: int = 0, tokens: int = 0) -> None:
        """Shows nothing."""

    def note(self, text: str) -> None:
        self.say(f"extract: {text}")
