"""How samples go through the target to have their states captured: packed, padded, or one at a time.

Shapes: S samples, R rows of a batch (tokens, padding included), T tokens of a sample, L feature layers, D hidden.

Each way makes batches of the samples of a shard and captures the states of one batch. All give the states that each
sample would have alone, up to rounding; `stages.probe` proves that for the target at hand before one is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from stages.features import FeatureTap
from stages.packed_attention import NAME, NotPackable, packed_pass, register
from stages.packing import Ids, Rows, Segment, pack, packed_batches, padded_batches
from stages.target import Target


@dataclass(frozen=True, slots=True)
class Captured:
    """States of one forward pass, on the target's device.

    Attributes:
        ids_R: what the target was given, on the host.
        layers_RD: one tensor [R, D] per feature layer, ascending.
        final_RD: states after the final norm, or None.
        rows: of each sample.
    """

    ids_R: NDArray[np.int64]
    layers_RD: tuple[torch.Tensor, ...]
    final_RD: torch.Tensor | None
    rows: tuple[Rows, ...]

    def ids(self, sample: int) -> NDArray[np.int64]:
        """One sample's token ids, [T]."""
        rows = self.rows[sample]
        return self.ids_R[rows if isinstance(rows, slice) else rows.numpy()]

    def features(self, sample: int) -> torch.Tensor:
        """One sample's features, [T, L, D]."""
        return torch.stack([take_rows(layer, self.rows[sample]) for layer in self.layers_RD], dim=1)


def take_rows(states_RD: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Rows of one sample, [T, D]."""
    return states_RD[rows] if isinstance(rows, slice) else states_RD.index_select(0, rows.to(states_RD.device))


class Way(Protocol):
    """A way to put samples through the target."""

    name: str

    def batches(self, sequences: Sequence[Ids], batch_tokens: int) -> Iterator[list[int]]:
        """Indices of the sequences that go together, each index once."""
        ...

    def capture(self, sequences: Sequence[Ids]) -> Captured:
        """The states of one batch."""
        ...


class PaddedWay:
    """Sequences padded on the right to the longest of their batch.

    The model is causal, so no real token sees the padding and no attention mask is needed: what is real follows from
    lengths, never from ids (pad may equal eos).
    """

    name = "padded"

    def __init__(self, target: Target, layer_ids: tuple[int, ...], last_hidden: bool) -> None:
        self.target, self.layer_ids, self.last_hidden = target, layer_ids, last_hidden

    def batches(self, sequences: Sequence[Ids], batch_tokens: int) -> Iterator[list[int]]:
        return padded_batches([len(s) for s in sequences], batch_tokens)

    @torch.inference_mode()
    def capture(self, sequences: Sequence[Ids]) -> Captured:
        width = max(map(len, sequences))
        ids_ST = np.zeros((len(sequences), width), np.int64)
        for row, ids in enumerate(sequences):
            ids_ST[row, : len(ids)] = ids
        layers, final = forward(self.target, self.layer_ids, torch.from_numpy(ids_ST), last_hidden=self.last_hidden)
        rows = tuple(slice(i * width, i * width + len(ids)) for i, ids in enumerate(sequences))
        return Captured(ids_ST.reshape(-1), layers, final, rows)


class SingleWay(PaddedWay):
    """One sequence at a time."""

    name = "single"

    def batches(self, sequences: Sequence[Ids], batch_tokens: int) -> Iterator[list[int]]:
        return ([i] for i in range(len(sequences)))


class PackedWay:
    """Sequences end to end in one row, for targets whose attention goes through transformers' interface.

    Raises:
        NotPackable: this target's does not, or does more than causal attention.
    """

    name = "packed"

    def __init__(self, target: Target, layer_ids: tuple[int, ...], last_hidden: bool) -> None:
        self.target, self.layer_ids, self.last_hidden = target, layer_ids, last_hidden
        require_attention_only(target)
        register()
        self.windows: list[int] = []
        self._learn()

    def batches(self, sequences: Sequence[Ids], batch_tokens: int) -> Iterator[list[int]]:
        return (list(found) for found in packed_batches(sequences, batch_tokens))

    @torch.inference_mode()
    def capture(self, sequences: Sequence[Ids]) -> Captured:
        packing = pack(sequences)
        with attention_of(self.target, NAME), packed_pass(packing.segments, self.windows):
            layers, final = forward(self.target, self.layer_ids, packing.ids_R[None], packing.positions_R[None],
                                    last_hidden=self.last_hidden)
        return Captured(packing.ids_R.numpy(), layers, final, tuple(segment.rows for segment in packing.segments))

    @torch.inference_mode()
    def _learn(self) -> None:
        """Find out which masks the target makes, from a pass over two tokens."""
        ids = torch.zeros(1, 2, dtype=torch.long)
        segment = Segment(0, 2, slice(0, 2), 2)
        with attention_of(self.target, NAME), packed_pass([segment], self.windows, learning=True):
            forward(self.target, self.layer_ids[-1:], ids, last_hidden=False)
        if not self.windows:
            raise NotPackable("the target makes no attention mask through transformers")


def forward(
    target: Target, layer_ids: tuple[int, ...], ids_ST: torch.Tensor, positions_ST: torch.Tensor | None = None, *,
    last_hidden: bool,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """One pass, ended behind the last chosen layer (unless the final norm is wanted): no head, no cache.

    Returns:
        The states after each chosen layer, [R, D] with R = S·T, and after the final norm or None.
    """
    tap = FeatureTap(target, layer_ids)
    arguments: dict[str, Any] = {"input_ids": ids_ST.to(target.device), "use_cache": False}
    if positions_ST is not None:
        arguments["position_ids"] = positions_ST.to(target.device)
    final = None
    with tap.attached(stop_after_last=not last_hidden):
        final = target.decoder(**arguments).last_hidden_state
    layers = tuple(states.flatten(0, 1) for states in tap.take_layers())
    return layers, final.flatten(0, 1) if final is not None else None


@contextmanager
def attention_of(target: Target, name: str) -> Iterator[None]:
    """Another attention implementation within the block.

    Raises:
        NotPackable: the model does not take it.
    """
    model: Any = target.decoder
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        if model.config._attn_implementation != name:
            raise NotPackable(f"{type(model).__name__} does not use transformers' attention interface")
        yield
    finally:
        model.set_attn_implementation(before)


def require_attention_only(target: Target) -> None:
    """Refuse to pack a target whose layers carry a state from token to token, or that takes no positions.

    Raises:
        NotPackable: names what was found.
    """
    if not hasattr(target.decoder, "set_attn_implementation"):
        raise NotPackable(f"{type(target.decoder).__name__} is no model of transformers'")
    if "position_ids" not in inspect.signature(target.decoder.forward).parameters:
        raise NotPackable(f"{type(target.decoder).__name__} takes no position ids")
    kinds = set(getattr(target.text_config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise NotPackable(f"it has layers of type {', '.join(sorted(kinds))}")
    for path, module in target.layers.named_modules():
        if isinstance(module, torch.nn.Conv1d | torch.nn.RNNBase):
            raise NotPackable(f"layer {path} is a {type(module).__name__}, which looks at neighbouring tokens")
