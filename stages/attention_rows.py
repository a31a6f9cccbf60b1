"""Attention for drafting: one block in each of several sequences, whose kept contexts are equally long buffers.

A sequence that is shorter than its buffer sees only its own positions, as the spans say; what lies behind them must be
finite. One small mask [S, Q/S, T + Q/S] in place of the dense form's, which has all pairs of sequences.

Shapes: S sequences, T context rows of each, Q slots of all, H query heads, G key/value heads, E head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from stages.layout import KeysValues, Layout, Spans


class RowsAttention:
    """Scaled dot-product attention, sequence by sequence in one call; every slot asks.

    Raises:
        ValueError: the samples have different numbers of context rows or of blocks.
    """

    def __init__(self, layout: Layout, spans: Spans) -> None:
        if len(set(layout.n_context)) > 1 or len(set(layout.n_blocks)) > 1:
            raise ValueError(f"contexts of {layout.n_context} rows and {layout.n_blocks} blocks; each must be equal")
        self.n, self.n_context = len(layout.n_context), layout.n_context[0]
        n_slots = len(spans.slot_start) // self.n
        self.mask = torch.cat([
            _inside(spans.context_start, spans.context_stop, self.n, self.n_context),
            _inside(spans.slot_start, spans.slot_stop, self.n, n_slots),
        ], dim=-1)[:, None]  # fmt: skip

    def __call__(self, queries_RHE: torch.Tensor, context: KeysValues, slots: KeysValues) -> torch.Tensor:
        shared = queries_RHE.shape[1] // slots[0].shape[1]
        keys, values = (
            torch.cat([c.unflatten(0, (self.n, self.n_context)).to(s.dtype), s.unflatten(0, (self.n, -1))], dim=1)
            .transpose(1, 2).repeat_interleave(shared, dim=1)
            for c, s in zip(context, slots, strict=True)
        )  # fmt: skip
        queries = queries_RHE.unflatten(0, (self.n, -1)).transpose(1, 2)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self.mask)
        return out.transpose(1, 2).flatten(0, 1)


def _inside(start_Q: torch.Tensor, stop_Q: torch.Tensor, n: int, width: int) -> torch.Tensor:
    """Which rows of its own sequence each slot sees, boolean [S, Q/S, width]."""
    first_S11 = torch.arange(n, device=start_Q.device)[:, None, None] * width
    rows = first_S11 + torch.arange(width, device=start_Q.device)
    return (rows >= start_Q.view(n, -1, 1)) & (rows < stop_Q.view(n, -1, 1))
