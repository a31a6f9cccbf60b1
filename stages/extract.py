"""Hidden states of the chosen layers, shard by shard, into the feature cache.

One worker holds the target and turns shards into commits. What a shard holds depends on its samples, the way of
batching, `extract.batch_tokens` and `extract.tensor_parallel`; who makes it, and after how many restarts, changes no
bit of it.

The device is kept busy: a thread per shard quantises, copies and writes what one pass captured while the next pass
runs (`stages.shard_stream`), and `run` may be called from several threads, so that one shard is read or committed while
another has the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cache_schema.errors import ResponsesError, ShardRefused
from cache_schema.identity import CacheIdentity
from cache_schema.layout import feature_format, last_hidden_dtype
from cache_schema.ledger import NON_FINITE, SHORTENED, TOO_SHORT
from cache_schema.marker import CommitMarker
from cache_schema.quantized import FeatureFormat
from cache_schema.response_format import Response
from cache_schema.responses import ResponsesTable
from cache_schema.storage import Location
from cache_schema.writer import ShardWriter
from stages.capture import Captured
from stages.config import CacheConfig, ExtractConfig, TargetConfig
from stages.device import use_threads, worker_device
from stages.device_clock import DeviceClock, Lap
from stages.group import Member, join_group
from stages.handover import Handover
from stages.packing import Ids
from stages.probe import choose_way
from stages.shard_stream import ShardStream
from stages.spot_check import SpotCheck, chosen_sample
from stages.target import Target, load_target

Put = Callable[[Sequence[int], Captured, Any], None]


@dataclass(frozen=True, slots=True)
class ExtractJob:
    """Everything a worker needs; picklable."""

    target: TargetConfig
    cache: CacheConfig
    extract: ExtractConfig
    identity: CacheIdentity
    responses_dir: Location
    cache_dir: str | Path
    """Folder or URL."""


@dataclass(frozen=True, slots=True)
class ShardUnit:
    """One shard to make: its name and its samples, by the cache's plan."""

    name: str
    sample_ids: tuple[str, ...]


class ExtractWorker:
    """Holds the target and makes shards.

    Args:
        job: what to make.
        target: a loaded target (tests); None loads the job's.
        member: this process's place in a group that holds the target together. All do every shard; the first writes.

    Raises:
        TargetError: the target cannot be loaded, or its states cannot be captured.
        TargetSettingError: the target's positions do not allow for `cache.max_length`.
    """

    def __init__(self, job: ExtractJob, target: Target | None = None, member: Member | None = None) -> None:
        use_threads(job.extract.threads)
        self.job = job
        self._writes = member is None or member.rank == 0
        if member is not None:
            join_group(member)
        size = 1 if member is None else member.size
        self.target = target or load_target(job.target, device=worker_device(), tokenizer=False, tensor_parallel=size)
        self.table = ResponsesTable.open(job.responses_dir)
        self.choice = choose_way(self.target, job.identity.layer_ids, last_hidden=job.identity.last_hidden,
                                 batching=job.extract.batching, max_length=job.cache.max_length)
        self.batch_tokens = job.extract.tokens_per_batch(self.target.device.type)
        self._reading, self._device = threading.Lock(), threading.Lock()
        self._clock = DeviceClock(self.target.device)

    def run(self, unit: ShardUnit, attempt: int) -> dict[str, Any]:
        """Make and commit one shard; returns counts for the driver. May be called from several threads at once.

        Raises:
            ShardRefused: a layer is all zero, two are equal, or a sample's states are not those that it has alone.
            CacheError: what was captured does not fit the cache.
            ResponsesError: a sample has a token id that the target does not.
        """
        started = time.perf_counter()
        with self._reading:  # the table keeps the part that it read last
            responses = list(self.table.select(unit.sample_ids))
        if not self._writes:
            self._forward(unit.name, self._usable(None, responses), lambda members, captured, ready: None)
            return {"shard": unit.name}
        with ShardWriter(self.job.cache_dir, unit.name, self.job.identity, self.target.shape.hidden_size,
                         len(responses), attempt, planned=unit.sample_ids,
                         compression=str(self.job.cache.compression)) as writer:
            usable = self._usable(writer, responses)
            with ShardStream(writer, usable, self.job.cache.max_length, self._handover()) as stream:
                lap, refusal = self._forward(unit.name, usable, stream.put)
                stream.finish()  # what the writer finds wrong says more than the spot check
            if refusal is not None:
                raise refusal
            marker = writer.commit()
        return self._receipt(marker, lap, time.perf_counter() - started)

    def _usable(self, writer: ShardWriter | None, responses: Sequence[Response]) -> list[Response]:
        """The samples to be captured; ledger rows are made for the others, and for those that are cut."""
        limit = self.job.cache.max_length
        usable: list[Response] = []
        for response in responses:
            n_tokens = len(response.loss_mask)
            if not response.loss_mask[:limit].any():
                detail = f"no supervised token within the first {limit} of {n_tokens}"
                if writer is not None:
                    writer.drop(response.sample_id, TOO_SHORT, detail)
                continue
            if writer is not None and n_tokens > limit:
                writer.note(response.sample_id, SHORTENED, f"from {n_tokens} to {limit} tokens (cache.max_length)")
            self._require_known(response)
            usable.append(response)
        return usable

    def _require_known(self, response: Response) -> None:
        """Ids that the embedding lacks would be an IndexError that is tried again, and on a GPU end the process."""
        ids, vocab_size = response.input_ids[: self.job.cache.max_length], self.target.shape.vocab_size
        wrong = ((ids < 0) | (ids >= vocab_size)).nonzero()[0]
        if len(wrong):
            raise ResponsesError(
                f"{self.job.responses_dir}: sample {response.sample_id} has token id {ids[wrong[0]]} at position "
                f"{wrong[0]}, but target {self.target.name} has ids 0…{vocab_size - 1}; were these responses made with "
                "another target? Take a new run folder, or the target that answered"
            )

    def _forward(self, shard: str, usable: Sequence[Response], put: Put) -> tuple[Lap, ShardRefused | None]:
        """All passes of a shard, one after the other, while no other shard has the device; the spot check's finding."""
        sequences: list[Ids] = [r.input_ids[: self.job.cache.max_length] for r in usable]
        chosen = chosen_sample(shard, len(sequences)) if self.choice.way.name != "single" else None
        check: SpotCheck | None = None
        refusal: ShardRefused | None = None
        with self._device:
            lap = self._clock.lap()
            for members in self.choice.way.batches(sequences, self.batch_tokens):
                with lap.running():
                    captured = self.choice.way.capture([sequences[i] for i in members])
                if chosen in members:
                    assert chosen is not None
                    check = SpotCheck.of(usable[chosen].sample_id, sequences[chosen], captured, members.index(chosen))
                put(members, captured, self._ready())
            if check is not None:
                with lap.running():
                    refusal = check.refusal(self.target, self.job.identity.layer_ids, shard, self.choice.way.name)
        return lap, refusal

    def _ready(self) -> Any:
        """Behind the pass that was queued last; None on a CPU."""
        if self.target.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _handover(self) -> Handover:
        form = feature_format(self.job.identity)
        return Handover(self.target.device, form, FeatureFormat(dtype=last_hidden_dtype(form.dtype)))

    def _receipt(self, marker: CommitMarker, lap: Lap, seconds: float) -> dict[str, Any]:
        busy_s, wait_s = lap.seconds()
        return {
            "shard": marker.shard, "samples": marker.samples, "tokens": marker.tokens, "bytes": marker.bytes,
            "quarantined": sum(row["reason"] == NON_FINITE for row in marker.ledger), "seconds": round(seconds, 3),
            "device_busy_s": round(busy_s, 4), "device_wait_s": round(wait_s, 4),
            "batching": self.choice.way.name, "batching_reason": self.choice.reason,
        }  # fmt: skip


def group_member(job: ExtractJob, member: Member) -> ExtractWorker:
    """One process of a worker that is a group."""
    return ExtractWorker(job, member=member)
