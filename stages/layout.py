"""Where the context rows and the blocks of a micro-batch stand: samples end to end, nothing padded.

Shapes: S samples, C context rows of all samples, N blocks of all samples, B block size, Q = N·B slots, R chosen slots.

Who sees what is two intervals per slot: one of context rows, one of slots. Every form of attention takes them from
here, so that the rule stands in one place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class KeysValues(NamedTuple):
    """Of context rows or of slots, [rows, key/value heads, head width] each; keys are normed and rotated."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """Packed samples.

    Attributes:
        anchors_N: int64 positions, each within its own sample; ascending within a sample (any order is right, this
            one is fast).
        n_context: context rows of each sample, S numbers; row i of a sample has position i. A block whose anchor
            lies behind them sees all of them.
        n_blocks: blocks of each sample, S numbers.
    """

    anchors_N: torch.Tensor
    n_context: tuple[int, ...]
    n_blocks: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        return self.anchors_N.device

    def without_context(self) -> Layout:
        """The same blocks, with nothing before them."""
        return Layout(self.anchors_N, (0,) * len(self.n_context), self.n_blocks)

    def rows_before(self) -> torch.Tensor:
        """The context row at each block's a−1, int64 [N]; meaningless (row 0) for a block that stands at 0."""
        counts_S = torch.tensor(self.n_blocks, device=self.device)
        rows_S = torch.tensor(self.n_context, device=self.device)
        first_N = (rows_S.cumsum(0) - rows_S).repeat_interleave(counts_S, output_size=len(self.anchors_N))
        return (first_N + self.anchors_N - 1).clamp(min=0)

    def context_positions(self) -> torch.Tensor:
        """Of every context row within its sample, int64 [C]."""
        parts = [torch.arange(n, device=self.device) for n in self.n_context]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def slot_positions(self, block_size: int) -> torch.Tensor:
        """a … a+B−1 of every block's slots, int64 [Q]."""
        slots = torch.arange(block_size, device=self.device)
        return (self.anchors_N[:, None] + slots).flatten()


@dataclass(frozen=True, slots=True)
class Spans:
    """What each slot sees: context rows `context_start … context_stop − 1` and slots `slot_start … slot_stop − 1`, all
    int64 [Q] (or [R]), counted over the whole micro-batch."""

    context_start: torch.Tensor
    context_stop: torch.Tensor
    slot_start: torch.Tensor
    slot_stop: torch.Tensor

    def of(self, rows_R: torch.Tensor) -> Spans:
        """Those of chosen slots."""
        return Spans(self.context_start[rows_R], self.context_stop[rows_R], self.slot_start[rows_R],
                     self.slot_stop[rows_R])


def visible_spans(layout: Layout, block_size: int, *, window: int | None = None, causal: bool = True) -> Spans:
    """What every slot sees.

    A slot sees context positions below its anchor (never the anchor's own feature: at inference the
    anchor has not been through the target yet) and all slots of its own block, in both directions. With
    a window, also `0 ≤ q − k < window` over positions, or `|q − k| < window` when not causal.

    Args:
        layout: the micro-batch.
        block_size: B.
        window: of a sliding-window layer.
        causal: whether such a layer is causal inside the block.

    Source: specification, section 2.
    """
    device, anchors_N = layout.device, layout.anchors_N
    counts_S = torch.tensor(layout.n_blocks, device=device)
    rows_S = torch.tensor(layout.n_context, device=device)
    first_N = (rows_S.cumsum(0) - rows_S).repeat_interleave(counts_S, output_size=len(anchors_N))
    n_context_N = rows_S.repeat_interleave(counts_S, output_size=len(anchors_N))
    k_B = torch.arange(block_size, device=device)
    base_N1 = torch.arange(len(anchors_N), device=device)[:, None] * block_size
    stop_NB = torch.minimum(anchors_N, n_context_N)[:, None].expand(-1, block_size)
    start_NB, low_B, high_B = torch.zeros_like(stop_NB), torch.zeros_like(k_B), torch.full_like(k_B, block_size)
    if window is not None:
        start_NB = torch.minimum((anchors_N[:, None] + k_B - window + 1).clamp(min=0), stop_NB)
        low_B = (k_B - window + 1).clamp(min=0)
        high_B = k_B + 1 if causal else (k_B + window).clamp(max=block_size)
    return Spans((first_N[:, None] + start_NB).flatten(), (first_N[:, None] + stop_NB).flatten(),
                 (base_N1 + low_B).flatten(), (base_N1 + high_B).flatten())
