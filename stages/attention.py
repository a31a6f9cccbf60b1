"""Attention of block slots over injected context and their own block: one interface, several forms, same numbers.

| form | where | how |
|---|---|---|
| `dense` | anywhere | one boolean mask over all keys: the oracle |
| `grouped` | CPU | neighbouring blocks together, over the visible prefix and their own slots only |
| `flex` | GPU | compiled flex attention under a block mask that is made by arithmetic |
| `rows` | drafting | sequences of one block each, side by side, with contexts in equally long buffers |

Shapes: C context rows, Q slots, R slots that ask, H query heads, G key/value heads, E head width.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from stages.attention_dense import DenseAttention
from stages.attention_flex import FlexAttention
from stages.attention_grouped import GroupedAttention
from stages.attention_rows import RowsAttention
from stages.layout import KeysValues, Layout, visible_spans
from stages.train_config import AttentionForm

PassForm = AttentionForm | Literal["rows"]
"""Of any pass; the first are what a training may choose."""


class BlockAttention(Protocol):
    """Attention with its mask made."""

    def __call__(self, queries_RHE: torch.Tensor, context: KeysValues, slots: KeysValues) -> torch.Tensor:
        """Outputs [R, H, E].

        Args:
            queries_RHE: of the slots that ask, normed and rotated.
            context: of the context rows, [C, G, E] each.
            slots: of all slots, [Q, G, E] each.
        """
        ...


class AttentionPlan:
    """The masks of a micro-batch, each made once and shared by the layers that need it.

    Args:
        layout: where everything stands.
        block_size: B.
        form: `auto` takes the fastest for the device.
        causal: whether sliding-window layers are causal inside the block.
        rows_R: slots that ask in the last layer, ascending; None for all.
    """

    def __init__(
        self, layout: Layout, block_size: int, *, form: PassForm = "auto", causal: bool = True,
        rows_R: torch.Tensor | None = None,
    ) -> None:
        self.layout, self.block_size, self.causal, self.rows_R = layout, block_size, causal, rows_R
        self.form = form_for(layout.device) if form == "auto" else form
        self._made: dict[tuple[int | None, bool], BlockAttention] = {}

    def layer(self, window: int | None, *, last: bool = False) -> BlockAttention:
        """For a layer with this window (None: full attention)."""
        key = (window, last and self.rows_R is not None)
        if key not in self._made:
            self._made[key] = self._make(*key)
        return self._made[key]

    def _make(self, window: int | None, chosen: bool) -> BlockAttention:
        spans = visible_spans(self.layout, self.block_size, window=window, causal=self.causal)
        n_context, n_slots = sum(self.layout.n_context), len(spans.slot_start)
        rows_R = self.rows_R if chosen else None
        if self.form == "rows" and rows_R is None:
            return RowsAttention(self.layout, spans)
        if self.form == "grouped":
            return GroupedAttention(self.layout, self.block_size, spans, rows_R)
        asking = spans if rows_R is None else spans.of(rows_R)
        return (FlexAttention if self.form == "flex" else DenseAttention)(asking, n_context, n_slots)


def form_for(device: torch.device) -> AttentionForm:
    """The fastest form on a device."""
    if device.type == "cpu":
        return "grouped"
    return "flex" if device.type == "cuda" else "dense"
