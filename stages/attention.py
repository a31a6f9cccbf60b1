"""Who sees what, and attention over it.

Shapes: S sequences, T context tokens, A anchors, B block size, Q = A·B slots, H query heads, G key/value
heads, P = T + Q keys, E head width.

This is the dense form: one boolean mask [S, 1, Q, T + Q]. It is exact on every device and serves as the
oracle for faster forms.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def block_positions(anchors_SA: torch.Tensor, block_size: int) -> torch.Tensor:
    """Positions a … a+B−1 of every block's slots, [S, Q]. A padding block (negative anchor) stands at 0."""
    slots = torch.arange(block_size, device=anchors_SA.device)
    return (anchors_SA.clamp(min=0)[..., None] + slots).flatten(1)


def visible_mask(
    anchors_SA: torch.Tensor, block_size: int, n_context: int, *, window: int | None = None, causal: bool = True
) -> torch.Tensor:
    """Visibility of keys (context, then all slots) to every slot, boolean [S, 1, Q, T + Q].

    A slot sees context positions below its anchor (never the anchor's own feature: at inference the
    anchor has not been through the target yet) and all slots of its own block, in both directions. With
    a window, also `0 ≤ q − k < window` over positions, or `|q − k| < window` when not causal.

    Args:
        anchors_SA: int64; negative marks a padding block, which sees its own slots only.
        block_size: B.
        n_context: T.
        window: of a sliding-window layer.
        causal: whether such a layer is causal inside the block.

    Source: specification, section 2.
    """
    n_sequences, n_anchors = anchors_SA.shape
    device = anchors_SA.device
    context_T = torch.arange(n_context, device=device)
    anchor_SQ = anchors_SA.repeat_interleave(block_size, dim=1)
    block_Q = torch.arange(n_anchors, device=device).repeat_interleave(block_size)
    sees_context = context_T < anchor_SQ[..., None]
    sees_slots = (block_Q[:, None] == block_Q[None, :]).expand(n_sequences, -1, -1)
    if window is not None:
        query_SQ = block_positions(anchors_SA, block_size)
        sees_context = sees_context & (query_SQ[..., None] - context_T < window)
        distance_SQQ = query_SQ[:, :, None] - query_SQ[:, None, :]
        near = (distance_SQQ >= 0) & (distance_SQQ < window) if causal else distance_SQQ.abs() < window
        sees_slots = sees_slots & near
    return torch.cat([sees_context, sees_slots], dim=2)[:, None]


def attend(
    queries_SHQE: torch.Tensor, keys_SGPE: torch.Tensor, values_SGPE: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Scaled dot-product attention with grouped key/value heads, [S, H, Q, E]."""
    shared = queries_SHQE.shape[1] // keys_SGPE.shape[1]
    keys = keys_SGPE.repeat_interleave(shared, dim=1)
    values = values_SGPE.repeat_interleave(shared, dim=1)
    return F.scaled_dot_product_attention(queries_SHQE, keys, values, attn_mask=mask)
