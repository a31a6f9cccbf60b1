"""Raw times of single passes: one draft, one verification, one plain step, at a block and batch size.

What the loop around them costs is what these times do not explain; the block-size schedule is made from them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stages.clock import Clock
from stages.drafter import Drafter
from stages.sessions import DraftSession, open_session, target_logits
from stages.target import Target


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of one pass over all rows, the least of several.

    Attributes:
        rows, block_size, n_context: R, B, and tokens in the caches.
        draft_s: the drafter's forward pass and the head over its drafts; 0 for B = 1.
        verify_s: the target's forward pass over B tokens per row, head and argmax included.
    """

    rows: int
    block_size: int
    n_context: int
    draft_s: float
    verify_s: float


@torch.inference_mode()
def time_passes(
    target: Target, drafter: Drafter, *, rows: int, block_size: int, n_context: int, repeats: int = 5
) -> PassTimes:
    """Measure passes over a context of made-up tokens.

    Args:
        target, drafter: on the same device.
        rows: R.
        block_size: B; 1 is a plain step.
        n_context: tokens that both caches hold.
        repeats: the least time counts, since noise only ever adds.
    """
    layer_ids = drafter.spec.feature_layer_ids if block_size > 1 else ()
    session = open_session(target, layer_ids, rows, n_context + block_size)
    drafts = DraftSession(drafter, target, rows, n_context + block_size) if block_size > 1 else None
    ids = torch.arange(n_context, device=target.device).expand(rows, -1) % target.shape.vocab_size
    _, features = session.forward(ids)
    session.advance([n_context] * rows)
    if drafts is not None and features is not None:
        drafts.extend(features, [n_context] * rows, ids)
    block = ids[:, :1].expand(-1, block_size)
    draft, verify = [], []
    for _ in range(repeats + 1):  # the first pays for allocations
        clock = Clock(target.device)
        if drafts is not None:
            drafts.draft(ids[:, 0], block_size).argmax(dim=-1).tolist()
        clock.lap("draft")
        hidden, _ = session.forward(block)
        target_logits(target, hidden).argmax(dim=-1).tolist()
        clock.lap("verify")
        seconds = clock.seconds()
        draft.append(seconds["draft"])
        verify.append(seconds["verify"])
    return PassTimes(rows, block_size, n_context, min(draft[1:]) if drafts is not None else 0.0, min(verify[1:]))
