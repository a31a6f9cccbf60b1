"""Captured states from the device to arrays as the cache stores them, without holding up the device.

Shapes: R rows of a batch, T tokens of a sample, L feature layers, D hidden, G groups of channels.

On a GPU, quantisation and the copy run on a stream of their own behind the pass that made the states, into pinned
buffers that are used in turn; `start` only queues them, `finish` waits. On a CPU `start` does the work. Both are called
in the thread that writes, so the next pass runs meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from cache_schema.quantized import FeatureFormat
from stages.capture import Captured, take_rows
from stages.errors import SampleRefused
from stages.packing import Rows
from stages.quantize import quantize, stored_bits


@dataclass(frozen=True, slots=True)
class StoredStates:
    """A sample's states as the cache stores them."""

    features: NDArray[Any]
    scale: NDArray[Any] | None
    last_hidden: NDArray[Any] | None


@dataclass(frozen=True, slots=True)
class Pending:
    """States of a batch on their way; arrays may be read once `done` has come."""

    rows: tuple[Rows, ...]
    features: torch.Tensor
    scale: torch.Tensor | None
    last_hidden: torch.Tensor | None
    refused: dict[int, SampleRefused]
    done: Any = None


class Handover:
    """One at work for each shard that is being written. At most two batches are on their way at a time.

    Args:
        device: the target's.
        form: of the stored features.
        final_form: of the stored states after the final norm.
    """

    def __init__(self, device: torch.device, form: FeatureFormat, final_form: FeatureFormat) -> None:
        self._form, self._final_form = form, final_form
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers: tuple[dict[str, torch.Tensor], ...] = ({}, {})
        self._turn = 0

    def start(self, captured: Captured, ready: Any) -> Pending:
        """Quantise a batch and bring it to the host.

        Args:
            captured: states on the device.
            ready: CUDA event behind the pass that made them; None on a CPU.
        """
        self._turn = 1 - self._turn
        if self._stream is None:
            return self._stored(captured, lambda name, tensor: tensor)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            for states in (*captured.layers_RD, captured.final_RD):
                if states is not None:
                    states.record_stream(self._stream)  # else the allocator gives their memory to the next pass
            pending = self._stored(captured, self._to_host)
            done = torch.cuda.Event()
            done.record(self._stream)
        return Pending(pending.rows, pending.features, pending.scale, pending.last_hidden, pending.refused, done)

    def finish(self, pending: Pending) -> list[StoredStates | SampleRefused]:
        """Wait for a batch; its samples, valid until `start` was called twice more."""
        if pending.done is not None:
            pending.done.synchronize()
        features = pending.features.numpy()
        scale = None if pending.scale is None else pending.scale.numpy()
        final = None if pending.last_hidden is None else pending.last_hidden.numpy()
        found: list[StoredStates | SampleRefused] = []
        for i, rows in enumerate(pending.rows):
            at = rows if isinstance(rows, slice) else rows.numpy()
            scales, finals = (None if a is None else a[at] for a in (scale, final))
            found.append(pending.refused.get(i, StoredStates(features[at], scales, finals)))
        return found

    def _stored(self, captured: Captured, bring: Callable[[str, torch.Tensor], torch.Tensor]) -> Pending:
        states_RLD = torch.stack(captured.layers_RD, dim=1)
        refused: dict[int, SampleRefused] = {}
        try:
            codes, scale = quantize(states_RLD, self._form)
        except SampleRefused:
            refused = self._find_refused(states_RLD, captured.rows)
            # Whoever has rows that are not finite is refused; the others' rows stay as they are.
            codes, scale = quantize(states_RLD.nan_to_num(0.0, 0.0, 0.0), self._form)
        final = None
        if captured.final_RD is not None:
            final = bring("final", stored_bits(quantize(captured.final_RD, self._final_form)[0], self._final_form))
        features = bring("features", stored_bits(codes, self._form))
        return Pending(captured.rows, features, None if scale is None else bring("scale", scale), final, refused)

    def _find_refused(self, states_RLD: torch.Tensor, rows: tuple[Rows, ...]) -> dict[int, SampleRefused]:
        refused = {}
        for i, at in enumerate(rows):
            try:
                quantize(take_rows(states_RLD, at), self._form)
            except SampleRefused as reason:
                refused[i] = reason
        return refused

    def _to_host(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in pinned memory, complete once the stream has come so far."""
        buffers, n_bytes = self._buffers[self._turn], tensor.numel() * tensor.element_size()
        if name not in buffers or buffers[name].numel() < n_bytes:
            buffers[name] = torch.empty(n_bytes + n_bytes // 4, dtype=torch.uint8, pin_memory=True)
        there = buffers[name][:n_bytes].view(tensor.dtype).view(tensor.shape)
        return there.copy_(tensor, non_blocking=True)
