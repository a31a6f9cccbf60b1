"""The thread that writes a shard: takes batches of captured states as they come and appends samples in their order.

The queue is short, so memory holds a few batches, whatever the shard's size. Samples of padded batches come in another
order; those that are early wait, for no longer than a window of batches (`stages.packing`). An error in the thread is
raised in the thread that captures, at the next batch or at the end; nothing is left running.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from cache_schema.checks import require_same_ids
from cache_schema.response_format import Response
from cache_schema.writer import ShardWriter
from stages.capture import Captured
from stages.errors import SampleRefused
from stages.handover import Handover, Pending, StoredStates

QUEUED_BATCHES = 2


@dataclass(frozen=True, slots=True)
class _Batch:
    members: Sequence[int]
    captured: Captured
    ready: Any


class ShardStream:
    """Writes the samples of one shard. Use as a context manager; `finish` inside it waits for the last sample.

    Args:
        writer: of the shard.
        responses: the samples to be stored, in the shard's order.
        limit: samples are cut to this many tokens.
        handover: brings states to the host.
    """

    def __init__(self, writer: ShardWriter, responses: Sequence[Response], limit: int, handover: Handover) -> None:
        self._writer, self._responses, self._limit, self._handover = writer, responses, limit, handover
        self._queue: queue.Queue[_Batch | None] = queue.Queue(QUEUED_BATCHES)
        self._early: dict[int, StoredStates | SampleRefused] = {}
        self._next = 0
        self._error: BaseException | None = None
        self._given_up = self._at_end = False
        self._thread = threading.Thread(target=self._work, name="shard-writer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._given_up = kind is not None
        self._end()

    def put(self, members: Sequence[int], captured: Captured, ready: Any) -> None:
        """Hand over a batch; waits while the thread is some batches behind.

        Args:
            members: which of the responses these are.
            captured: their states on the device.
            ready: event behind the pass that made them; None on a CPU.

        Raises:
            whatever went wrong in the thread.
        """
        self._raise()
        self._queue.put(_Batch(members, captured, ready))

    def finish(self) -> None:
        """Wait until all that was put is written.

        Raises:
            whatever went wrong in the thread.
        """
        self._end()
        self._raise()

    def _end(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            with torch.inference_mode():
                self._write_all()
        except BaseException as error:  # raised again where somebody can do something about it
            self._error = error
            while not self._at_end:  # so that nobody waits for room
                self._at_end = self._queue.get() is None

    def _write_all(self) -> None:
        pending: tuple[_Batch, Pending] | None = None
        while True:
            batch = self._queue.get()
            self._at_end = batch is None
            # The next batch is copied while this one is written.
            started = None if batch is None else (batch, self._handover.start(batch.captured, batch.ready))
            if pending is not None and not self._given_up:
                self._write(*pending)
            if started is None:
                return
            pending = started

    def _write(self, batch: _Batch, pending: Pending) -> None:
        for place, (member, stored) in enumerate(zip(batch.members, self._handover.finish(pending), strict=True)):
            response = self._responses[member]
            where = f"what the target was given, row {place} of a batch"
            require_same_ids(response.sample_id, batch.captured.ids(place), response.input_ids[: self._limit], where)
            if member == self._next:
                self._append(stored)
            else:
                self._early[member] = _kept(stored)
        while self._next in self._early:
            self._append(self._early.pop(self._next))

    def _append(self, stored: StoredStates | SampleRefused) -> None:
        response = self._responses[self._next]
        self._next += 1
        try:
            if isinstance(stored, SampleRefused):
                self._writer.drop(response.sample_id, stored.reason, stored.detail)
                return
            ids, mask = response.input_ids[: self._limit], response.loss_mask[: self._limit]
            self._writer.append(response.sample_id, stored.features, ids, mask, stored.last_hidden, stored.scale)
        except Exception as error:
            error.add_note(f"while sample {response.sample_id!r} was being written")
            raise


def _kept(stored: StoredStates | SampleRefused) -> StoredStates | SampleRefused:
    """A copy of its own: the batch's buffers are used again."""
    if isinstance(stored, SampleRefused):
        return stored
    scale, final = stored.scale, stored.last_hidden
    return StoredStates(stored.features.copy(), None if scale is None else scale.copy(),
                        None if final is None else final.copy())
