"""Hidden states of the chosen layers, shard by shard, into the feature cache.

One worker holds the target and turns shards into commits. Batches are made inside a shard, by length, as a
pure function of the shard's samples and `batch_tokens`; so who does the shard, and after how many restarts,
changes no bit of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from cache_schema.identity import CacheIdentity
from cache_schema.layout import feature_format, last_hidden_dtype
from cache_schema.quantized import FeatureFormat
from cache_schema.response_format import Response
from cache_schema.responses import ResponsesTable
from cache_schema.writer import ShardWriter
from stages.config import CacheConfig, ExtractConfig, TargetConfig
from stages.device import use_threads, worker_device
from stages.errors import SampleRefused
from stages.features import capture_features
from stages.quantize import to_stored
from stages.target import Target, load_target

SHORTENED, TOO_SHORT = "shortened", "no_supervised_token"


@dataclass(frozen=True, slots=True)
class ExtractJob:
    """Everything a worker needs; picklable."""

    target: TargetConfig
    cache: CacheConfig
    extract: ExtractConfig
    identity: CacheIdentity
    responses_dir: Path
    cache_dir: str | Path
    """Folder or URL."""


@dataclass(frozen=True, slots=True)
class ShardUnit:
    """One shard to make: its name and its samples, by the cache's plan."""

    name: str
    sample_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoredSample:
    """A sample's states as the cache stores them."""

    features: NDArray[Any]
    scale: NDArray[Any] | None
    last_hidden: NDArray[Any] | None
    n_tokens: int


class ExtractWorker:
    """Holds the target and makes shards.

    Args:
        job: what to make.
        target: a loaded target (tests); None loads the job's.
    """

    def __init__(self, job: ExtractJob, target: Target | None = None) -> None:
        use_threads(job.extract.threads)
        self.job = job
        self.target = target or load_target(job.target, device=worker_device(), tokenizer=False)
        self.table = ResponsesTable.open(job.responses_dir)

    def run(self, unit: ShardUnit, attempt: int) -> dict[str, Any]:
        """Make and commit one shard; returns counts for the driver.

        Raises:
            ShardRefused: a layer is all zero or two are equal.
            CacheError: what was captured does not fit the cache.
        """
        started = time.perf_counter()
        responses = list(self.table.select(unit.sample_ids))
        shape = self.target.shape
        with ShardWriter(self.job.cache_dir, unit.name, self.job.identity, shape.hidden_size, len(responses), attempt,
                         planned=unit.sample_ids, compression=str(self.job.cache.compression)) as writer:
            by_id = dict(self._capture(writer, responses))
            for response in responses:
                if response.sample_id in by_id:
                    found = by_id.pop(response.sample_id)
                    ids, mask = response.input_ids[: found.n_tokens], response.loss_mask[: found.n_tokens]
                    writer.append(response.sample_id, found.features, ids, mask, found.last_hidden, found.scale)
            marker = writer.commit()
        dropped = [row for row in marker.ledger if row["reason"] == "non_finite"]
        return {"shard": unit.name, "samples": marker.samples, "tokens": marker.tokens, "bytes": marker.bytes,
                "quarantined": len(dropped), "seconds": round(time.perf_counter() - started, 3)}

    def _capture(
        self, writer: ShardWriter, responses: Sequence[Response]
    ) -> Iterator[tuple[str, StoredSample]]:
        """Features per sample id; samples that cannot be used are dropped in the ledger here."""
        limit = self.job.cache.max_length
        usable: list[Response] = []
        for response in responses:
            n_tokens = len(response.loss_mask)
            if not response.loss_mask[:limit].any():
                detail = f"no supervised token within the first {limit} of {n_tokens}"
                writer.drop(response.sample_id, TOO_SHORT, detail)
                continue
            if n_tokens > limit:
                writer.note(response.sample_id, SHORTENED, f"from {n_tokens} to {limit} tokens (cache.max_length)")
            usable.append(response)
        for batch in batches_by_length(usable, self.job.extract.batch_tokens, limit):
            sequences = [r.input_ids[:limit].tolist() for r in batch]
            features, last = capture_features(self.target, self.job.identity.layer_ids, sequences,
                                              last_hidden=self.job.identity.last_hidden)
            for row, response in enumerate(batch):
                try:
                    yield response.sample_id, self._stored(features[row], last[row] if last is not None else None)
                except SampleRefused as refused:
                    writer.drop(response.sample_id, refused.reason, refused.detail)

    def _stored(self, features: torch.Tensor, last: torch.Tensor | None) -> StoredSample:
        form = feature_format(self.job.identity)
        codes, scale = to_stored(features, form)
        final = None
        if last is not None:
            final, _ = to_stored(last, FeatureFormat(dtype=last_hidden_dtype(form.dtype)))
        return StoredSample(codes, scale, final, len(features))


def batches_by_length(responses: Sequence[Response], batch_tokens: int, limit: int) -> Iterator[list[Response]]:
    """Samples of similar length together, at most `batch_tokens` padded tokens a batch (one sample at least).

    None is dropped, the last, smaller batch included. Order: by length, then by place in the shard.
    """
    batch: list[Response] = []
    for response in sorted(responses, key=lambda r: min(len(r.loss_mask), limit)):
        width = min(len(response.loss_mask), limit)
        if batch and width * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(response)
    if batch:
        yield batch
