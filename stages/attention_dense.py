"""Attention by one boolean mask: exact on every device, slow, and the oracle for the faster forms.

Shapes: C context rows, Q slots, R slots that ask, H query heads, G key/value heads, E head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from stages.layout import KeysValues, Spans


def visible_mask(spans: Spans, n_context: int, n_slots: int) -> torch.Tensor:
    """Visibility of keys (context rows, then slots) to every slot that asks, boolean [R, C + Q]."""
    device = spans.slot_start.device
    rows_C, rows_Q = torch.arange(n_context, device=device), torch.arange(n_slots, device=device)
    context = (rows_C >= spans.context_start[:, None]) & (rows_C < spans.context_stop[:, None])
    slots = (rows_Q >= spans.slot_start[:, None]) & (rows_Q < spans.slot_stop[:, None])
    return torch.cat([context, slots], dim=1)


class DenseAttention:
    """Scaled dot-product attention of all slots over all keys, under a mask."""

    def __init__(self, spans: Spans, n_context: int, n_slots: int) -> None:
        self.mask = visible_mask(spans, n_context, n_slots)

    def __call__(self, queries_RHE: torch.Tensor, context: KeysValues, slots: KeysValues) -> torch.Tensor:
        shared = queries_RHE.shape[1] // slots[0].shape[1]
        keys, values = (
            torch.cat([c.to(s.dtype), s]).transpose(0, 1).repeat_interleave(shared, dim=0)
            for c, s in zip(context, slots, strict=True)
        )
        out_HRE = F.scaled_dot_product_attention(queries_RHE.transpose(0, 1)[None], keys[None], values[None],
                                                 attn_mask=self.mask)[0]
        return out_HRE.transpose(0, 1)
