"""Attention for a CPU: a few neighbouring blocks together, over nothing but what they see.

What slots see of their own block is one batched product over all blocks. Anchors are sorted within a sample, so the
context that a group of blocks sees is a prefix (with a window: a short range) of the sample's rows, the same for all
its blocks but for a ragged end. Scores of a group are made in one buffer that stays in a core's cache, and are made
again in the backward pass instead of being kept. All in float32, whatever comes in.

Queries and keys are normed, so that scores are bounded by the product of their lengths. While that is below `SAFE`,
which it is unless norm weights grow large, exp needs no shift by the largest score of the row: neither exp nor a
row's sum can overflow or vanish. Sums over own block and context then simply add up. What is hidden is set to 0 after
exp, not to −inf before: with one column in ten at −inf, exp takes four times as long.

Shapes: C context rows, N blocks of B slots, Q = N·B, R slots that ask, H query heads, G key/value heads, K = H/G heads
that share one, E head width, M = rows of a group (or all, or of a block) times K, P keys of a group (or of a block).

Measured on one core of this machine, shared, 256 blocks of 16 in 1,024 tokens, 4 heads over 2, forward and backward:
dense mask 722 ms, own blocks and −inf within groups of 4 107 ms, this with 8 blocks per group 79 ms (E = 32); 1,109,
176 and 123 ms (E = 64).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from stages.layout import KeysValues, Layout, Spans

GROUP_ROWS = 256
"""Rows of scores per key/value head in a group, about."""
SAFE = 40.0
"""e⁴⁰ times any number of keys is far below float32's largest number, e⁻⁴⁰ far above its smallest."""


def size(part: slice) -> int:
    """Of a slice with both ends."""
    return int(part.stop) - int(part.start)


class Mask(NamedTuple):
    """What rows of scores do not see."""

    first: int
    """The first column that it covers; what is left of it is seen by all rows."""
    seen_MP: torch.Tensor
    """1 or 0, of the columns from `first`."""


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks that are computed together.

    Attributes:
        rows: their slots among those that ask, times K.
        context: context rows that at least one of them sees.
        mask: of the scores.
    """

    rows: slice
    context: slice
    mask: Mask


class GroupedAttention:
    """See the module; `rows_R` are the slots that ask (None: all), ascending."""

    def __init__(self, layout: Layout, block_size: int, spans: Spans, rows_R: torch.Tensor | None) -> None:
        self.layout, self.block_size, self.spans, self.rows_R = layout, block_size, spans, rows_R
        self._parts: dict[int, tuple[list[Group], OwnBlocks]] = {}

    def parts(self, shared: int) -> tuple[list[Group], OwnBlocks]:
        """What is computed when so many query heads share a key/value head."""
        if shared not in self._parts:
            own = OwnBlocks(self.block_size, self.spans, self.rows_R, shared)
            self._parts[shared] = list(self._groups(shared)), own
        return self._parts[shared]

    def _groups(self, shared: int) -> Iterator[Group]:
        asking = self.spans if self.rows_R is None else self.spans.of(self.rows_R)
        n_together = max(1, GROUP_ROWS // (shared * self.block_size))
        blocks = [*_starts(self.layout.n_blocks, n_together), sum(self.layout.n_blocks)]
        bounds = torch.tensor(blocks) * self.block_size
        places = bounds if self.rows_R is None else torch.searchsorted(self.rows_R, bounds)
        for start, stop in pairwise(places.tolist()):
            group = _group(slice(start, stop), asking, shared) if start < stop else None
            if group is not None and size(group.context):
                yield group

    def __call__(self, queries_RHE: torch.Tensor, context: KeysValues, slots: KeysValues) -> torch.Tensor:
        parts = self.parts(queries_RHE.shape[1] // slots[0].shape[1])
        wide = [x.float() for x in (queries_RHE, *context, *slots)]
        with torch.autocast("cpu", enabled=False):
            out: torch.Tensor = _Grouped.apply(*wide, *parts)  # type: ignore[no-untyped-call]
        return out.to(queries_RHE.dtype)


def leave_uncompiled() -> None:
    """Keep `torch.compile` out of grouped attention. To be called where something is compiled: marking it imports the
    compiler, which takes longer than all else that an extract worker imports."""
    GroupedAttention.__call__ = torch.compiler.disable(GroupedAttention.__call__)  # type: ignore[method-assign]


def _starts(counts: tuple[int, ...], step: int) -> Iterator[int]:
    """First blocks of groups of at most `step` blocks of one sample, of samples with so many blocks."""
    first = 0
    for n in counts:
        yield from range(first, first + n, step)
        first += n


def _group(rows: slice, asking: Spans, shared: int) -> Group:
    start, stop = asking.context_start[rows, None], asking.context_stop[rows, None]
    context = slice(int(start.min()), int(stop.max()))
    seen_by_all = int(stop.min()) if int(start.max()) == context.start else context.start
    columns = torch.arange(seen_by_all, context.stop)
    seen = ((columns >= start) & (columns < stop)).float().repeat_interleave(shared, dim=0)
    return Group(slice(rows.start * shared, rows.stop * shared), context, Mask(seen_by_all - context.start, seen))


class OwnBlocks:
    """Rows and slots as a batch of blocks: what slots see of their own block is then one product for all.

    Slots that do not ask have zeros here. The mask is that of the first block; all blocks have the same.
    """

    def __init__(self, block_size: int, spans: Spans, rows_R: torch.Tensor | None, shared: int) -> None:
        self.block_size, self.rows_R, self.shared = block_size, rows_R, shared
        self.n_slots = len(spans.slot_start)
        places = torch.arange(min(block_size, self.n_slots))
        start, stop = spans.slot_start[: len(places), None], spans.slot_stop[: len(places), None]
        seen = (places >= start) & (places < stop)
        self.mask = None if bool(seen.all()) else Mask(0, seen.float().repeat_interleave(shared, dim=0))

    def from_rows(self, x_GMX: torch.Tensor) -> torch.Tensor:
        """[G·N, B·K, X]; X is E or 1."""
        n_kv, _, width = x_GMX.shape
        if self.rows_R is not None:
            every = x_GMX.new_zeros(n_kv, self.n_slots, self.shared * width)
            x_GMX = every.index_copy_(1, self.rows_R, x_GMX.reshape(n_kv, -1, self.shared * width))
        return x_GMX.reshape(-1, self.block_size * self.shared, width)

    def to_rows(self, x_NMX: torch.Tensor) -> torch.Tensor:
        """The way back."""
        width = x_NMX.shape[2]
        x_GQX = x_NMX.reshape(-1, self.n_slots, self.shared * width)
        if self.rows_R is not None:
            x_GQX = x_GQX.index_select(1, self.rows_R)
        return x_GQX.reshape(len(x_GQX), -1, width)

    def from_slots(self, x_QGE: torch.Tensor) -> torch.Tensor:
        """[G·N, B, E]."""
        return x_QGE.transpose(0, 1).reshape(-1, self.block_size, x_QGE.shape[2])

    def to_slots(self, x_NBE: torch.Tensor) -> torch.Tensor:
        """The way back."""
        return x_NBE.view(-1, self.n_slots, x_NBE.shape[2]).transpose(0, 1)


class _Grouped(torch.autograd.Function):
    """Heads that share a key/value head stand beside each other as rows; what is kept for the backward pass is inputs,
    outputs and the rows' normalisers only."""

    @staticmethod
    def forward(
        ctx: Any, q_RHE: torch.Tensor, kc_CGE: torch.Tensor, vc_CGE: torch.Tensor, ks_QGE: torch.Tensor,
        vs_QGE: torch.Tensor, groups: list[Group], own: OwnBlocks,
    ) -> torch.Tensor:
        n_kv, scale = ks_QGE.shape[1], q_RHE.shape[2] ** -0.5
        q, k, v = _fold(q_RHE, n_kv, scale), kc_CGE.transpose(0, 1), vc_CGE.transpose(0, 1)
        out, sums, shift = torch.zeros_like(q), torch.zeros_like(q[..., :1]), None
        own_scores = torch.bmm(own.from_rows(q), own.from_slots(ks_QGE).transpose(1, 2))
        if _longest(q) * max(_longest(kc_CGE), _longest(ks_QGE)) >= SAFE:
            shift = own.to_rows(_hide(own_scores, own.mask).amax(dim=-1, keepdim=True))
        buffer = _Buffer(groups, n_kv)
        for group in groups:
            rows, keys = group.rows, group.context
            scores = torch.bmm(q[:, rows], k[:, keys].transpose(1, 2), out=buffer.of(group))
            if shift is not None:
                highest = _hide(scores, group.mask).amax(dim=-1, keepdim=True)
                shift[:, rows] = torch.maximum(shift[:, rows], highest)
            weights = _exp(scores, None if shift is None else shift[:, rows], group.mask)
            torch.sum(weights, dim=-1, keepdim=True, out=sums[:, rows])
            # Into a tensor of its own: batched products into rows of a larger one are done one by one.
            out[:, rows] = torch.bmm(weights, v[:, keys])
        weights = _exp(own_scores, None if shift is None else own.from_rows(shift), own.mask)
        sums.add_(own.to_rows(weights.sum(dim=-1, keepdim=True)))
        out.add_(own.to_rows(torch.bmm(weights, own.from_slots(vs_QGE)))).div_(sums)
        ctx.save_for_backward(q, kc_CGE, ks_QGE, vc_CGE, vs_QGE, out, sums, shift)
        ctx.groups, ctx.own, ctx.scale = groups, own, scale
        return _unfold(out, own.shared)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RHE: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, kc_CGE, ks_QGE, vc_CGE, vs_QGE, out, sums, shift = ctx.saved_tensors
        own, n_kv = ctx.own, ks_QGE.shape[1]
        k, v = kc_CGE.transpose(0, 1), vc_CGE.transpose(0, 1)
        # The weights below are not divided by their sums; the gradient is, once and for all.
        grad = _fold(grad_RHE, n_kv).div_(sums)
        of_rows = [q, grad, (grad * out).sum(-1, keepdim=True), shift]
        own_rows = [None if x is None else own.from_rows(x) for x in of_rows]
        own_dq, own_dk, own_dv = _gradients(own_rows, own.from_slots(ks_QGE), own.from_slots(vs_QGE), own.mask)
        dq = own.to_rows(own_dq)
        dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (k, v))
        buffers = [_Buffer(ctx.groups, n_kv) for _ in range(2)]
        for group in ctx.groups:
            rows, keys = group.rows, group.context
            part = [None if x is None else x[:, rows] for x in of_rows]
            changes = _gradients(part, k[:, keys], v[:, keys], group.mask, [b.of(group) for b in buffers])
            for sum_, change in zip((dq[:, rows], dk[:, keys], dv[:, keys]), changes, strict=True):
                sum_.add_(change)
        context = dk.transpose(0, 1), dv.transpose(0, 1)
        return _unfold(dq.mul_(ctx.scale), own.shared), *context, own.to_slots(own_dk), own.to_slots(own_dv), None, None


def _gradients(
    of_rows: Sequence[Any], k: torch.Tensor, v: torch.Tensor, mask: Mask | None,
    buffers: Sequence[torch.Tensor | None] = (None, None),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of some queries, keys and values.

    Args:
        of_rows: queries, gradient of the output [·, M, E], their inner product, shift [·, M, 1].
        k, v: [·, P, E].
        mask: of the scores.
        buffers: two for scores [·, M, P].
    """
    q, grad, inner, shift = of_rows
    weights = _exp(torch.bmm(q, k.transpose(1, 2), out=buffers[0]), shift, mask)
    dv = torch.bmm(weights.transpose(1, 2), grad)
    change = torch.bmm(grad, v.transpose(1, 2), out=buffers[1]).sub_(inner).mul_(weights)
    return torch.bmm(change, k), torch.bmm(change.transpose(1, 2), q), dv


def _hide(scores: torch.Tensor, mask: Mask | None) -> torch.Tensor:
    if mask is not None:
        scores[..., mask.first :].masked_fill_(mask.seen_MP == 0, float("-inf"))
    return scores


def _exp(scores: torch.Tensor, shift: torch.Tensor | None, mask: Mask | None) -> torch.Tensor:
    """In place, 0 where hidden."""
    if shift is not None:
        return _hide(scores, mask).sub_(shift).exp_()
    scores.exp_()
    if mask is not None:
        scores[..., mask.first :].mul_(mask.seen_MP)
    return scores


def _longest(x: torch.Tensor) -> float:
    """Length of the longest row."""
    return float(torch.linalg.vector_norm(x, dim=-1).max()) if x.numel() else 0.0


def _fold(x_RHE: torch.Tensor, n_kv: int, scale: float = 1.0) -> torch.Tensor:
    """Rows and the heads that share a key/value head as one axis, times `scale`, [G, M, E]."""
    n_rows, n_heads, width = x_RHE.shape
    out_GRKE = x_RHE.new_empty(n_kv, n_rows, n_heads // n_kv, width)
    torch.mul(x_RHE.reshape(n_rows, n_kv, -1, width).transpose(0, 1), scale, out=out_GRKE)
    return out_GRKE.flatten(1, 2)


def _unfold(x_GME: torch.Tensor, shared: int) -> torch.Tensor:
    """As `_fold` had it, [R, H, E]."""
    n_kv, n_rows, width = x_GME.shape
    x_GRKE = x_GME.view(n_kv, n_rows // shared, shared, width)
    return x_GRKE.transpose(0, 1).reshape(-1, n_kv * shared, width)


class _Buffer:
    """One for the scores of every group in turn."""

    def __init__(self, groups: list[Group], n_kv: int) -> None:
        self.n_kv = n_kv
        self.floats = torch.empty(n_kv * max((size(g.rows) * size(g.context) for g in groups), default=0))

    def of(self, group: Group) -> torch.Tensor:
        """[G, M, P]."""
        shape = self.n_kv, size(group.rows), size(group.context)
        return self.floats[: shape[0] * shape[1] * shape[2]].view(shape)
