"""The extract stage, driven: responses in, feature cache out."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from cache_schema.errors import FingerprintMismatch
from cache_schema.identity import CacheIdentity
from cache_schema.storage import Storage, open_storage
from pipeline.errors import PipelineError
from pipeline.pool import drive_pool
from pipeline.run import Run, first_reasons, say_resume

if TYPE_CHECKING:
    from cache_schema.responses import Content, ResponsesTable

LAYER_CONVENTION = "output of decoder layer i, 0-based: output_hidden_states[i + 1] of transformers"


def responses_of(run: Run) -> ResponsesTable:
    """The answers of this run's target.

    Raises:
        ResponsesError: the responses table is missing, incomplete or damaged.
        FingerprintMismatch: another target gave them.
    """
    from cache_schema.responses import ResponsesTable

    recipe = run.recipe
    table = ResponsesTable.open(run.folder.responses)
    if (
        table.identity.target_weights_sha256 != run.hashes.weights
        or table.identity.tokenizer_sha256 != run.hashes.tokenizer
    ):
        raise FingerprintMismatch(
            f"{run.folder.responses} was answered by target {table.identity.target_name!r} (weights "
            f"{table.identity.target_weights_sha256[:12]}…), this recipe's target is {recipe.target.model!r} (weights "
            f"{run.hashes.weights[:12]}…); use another run folder, or the recipe that made these responses"
        )
    return table


def cache_identity(run: Run, content: Content | None = None) -> CacheIdentity:
    """What the feature cache of this run is made of.

    Args:
        run: whose responses are there.
        content: of the responses, where they have been read already.

    Raises:
        ResponsesError, FingerprintMismatch: see `responses_of`.
    """
    recipe, content = run.recipe, content or responses_of(run).content()
    return CacheIdentity(
        target_name=recipe.target.model,
        target_revision=recipe.target.revision,
        target_weights_sha256=run.hashes.weights,
        tokenizer_sha256=run.hashes.tokenizer,
        chat_template_sha256=run.hashes.chat_template,
        layer_ids=run.layer_ids,
        layer_convention=LAYER_CONVENTION,
        target_dtype=recipe.target.dtype,
        feature_dtype=str(recipe.cache.dtype),
        feature_bits=recipe.cache.bits,
        feature_group=recipe.cache.group,
        last_hidden=recipe.cache.last_hidden,
        max_length=recipe.cache.max_length,
        responses_sha256=content.sha256,
    )


def run_extract(run: Run) -> None:
    """Responses in, feature cache out.

    Raises:
        ResponsesError, FingerprintMismatch, ShardRefused, PoisonShard: see the stages.
        PipelineError: too large a share of samples had non-finite states.
    """
    import numpy as np

    from cache_schema.layout import feature_format
    from cache_schema.manifest import create_cache
    from cache_schema.marker import committed_shards
    from cache_schema.plan import plan_shards
    from pipeline.rolling_train import extract_heldout, is_rolling
    from stages.extract import ExtractJob, ShardUnit
    from stages.target import load_config, shape_of

    recipe, storage = run.recipe, open_storage(run.cache)
    content = responses_of(run).content()
    identity = cache_identity(run, content)
    shape = shape_of(load_config(recipe.target))
    bytes_per_token = feature_format(identity).code_bytes(len(identity.layer_ids), shape.hidden_size)
    plan = create_cache(
        storage,
        identity,
        plan_shards(
            content.sample_ids, np.minimum(content.lengths, recipe.cache.max_length), bytes_per_token,
            recipe.cache.shard_bytes,
        ),
    )  # fmt: skip
    del content
    if is_rolling(run, plan, identity):
        extract_heldout(run, plan, identity)
        return
    if run.is_done("extract", identity.fingerprint(), lambda: set(plan.shards()) <= set(committed_shards(storage))):
        return
    with run.stage("extract", identity.fingerprint()) as summary:
        have = set(committed_shards(storage))
        todo = [ShardUnit(s, tuple(plan.samples(s))) for s in plan.shards() if s not in have]
        say_resume(run, "extract", len(have), plan.n_shards, "shards")
        job = ExtractJob(recipe.target, recipe.cache, recipe.extract, identity, run.folder.responses, run.cache)
        guard = QuarantineGuard(len(plan), recipe.extract.max_quarantined_share, storage.where())
        drive_extract(run, todo, job, len(have), guard)
        summary |= _cache_summary(storage, guard)


def drive_extract(run: Run, todo: list[Any], job: Any, have: int, guard: QuarantineGuard) -> None:
    """Make shards on the pool.

    A worker has two shards at once, so that the device need not wait while one is read or committed.

    Args:
        todo: the `ShardUnit`s that are missing.
        job: the `ExtractJob`.
        have: shards that are there already.
        guard: counts samples with non-finite states.

    Raises:
        TargetSettingError: the target's heads cannot be divided by `extract.tensor_parallel`.
    """
    from stages.extract import ExtractWorker, group_member
    from stages.target import load_config
    from stages.target_limits import require_divisible

    size = job.extract.tensor_parallel
    if size > 1:
        require_divisible(load_config(job.target), job.target.model, size)
    told: set[str] = set()

    def take(unit: Any, receipt: dict[str, Any]) -> None:
        if receipt["batching"] not in told:
            told.add(receipt["batching"])
            why = receipt["batching_reason"]
            run.say(f"extract: batches are {receipt['batching']}{f' ({why})' if why else ''}")
        guard.take(unit, receipt)

    build = functools.partial(ExtractWorker if size == 1 else group_member, job)
    drive_pool(
        run, "extract", "shard", todo, build, have, job.extract, take, in_flight=2 if size == 1 else 1, group_size=size
    )


class QuarantineGuard:
    """Stops the run when too large a share of its samples had non-finite states."""

    def __init__(self, n_samples: int, max_share: float, where: str) -> None:
        self.allowed, self.max_share, self.where = max_share * n_samples, max_share, where
        self.quarantined = 0

    def take(self, _unit: Any, receipt: dict[str, Any]) -> None:
        self.quarantined += receipt["quarantined"]
        self.require()

    def require(self) -> None:
        if self.quarantined > self.allowed:
            raise PipelineError(
                f"{self.quarantined} samples had NaN or infinite states, more than extract.max_quarantined_share "
                f"{self.max_share:.1%} allows; their ids are in the ledgers (`dflash cache info {self.where}`). "
                "Look at the target's dtype first: float16 overflows where bfloat16 does not"
            )


def _cache_summary(storage: Storage, guard: QuarantineGuard) -> dict[str, Any]:
    from cache_schema.reader import FeatureCache

    cache = FeatureCache.open(storage, require_complete=True)
    if len(cache) == 0:
        raise PipelineError(
            f"{storage.where()} holds no sample: all {len(cache.plan)} are in the ledger, "
            f"{first_reasons(cache.ledger())}"
        )
    guard.quarantined = sum(row["reason"] == "non_finite" for row in cache.ledger())
    guard.require()
    markers = cache.markers.values()
    return {
        "samples": len(cache),
        "tokens": sum(m.tokens for m in markers),
        "shards": len(markers),
        "bytes": sum(m.bytes for m in markers),
        "ledger_rows": len(cache.ledger()),
    }
