"""Attention for a CPU: a few neighbouring blocks together, over nothing but what they see.

Anchors are sorted within a sample, so the context that a group of blocks sees is a prefix (with a window: a short
range) of the sample's rows, the same for all its blocks but for a ragged end. Scores of a group are made in one
buffer that stays in a core's cache, with a small additive mask on the ragged end and on the group's own slots, and
are made again in the backward pass instead of being kept. All in float32, whatever comes in.

Queries and keys are normed, so that scores are bounded by the product of their lengths. While that is below `SAFE`,
which it is unless norm weights grow large, exp needs no shift by the largest score of the row: neither exp nor a
row's sum can overflow or vanish.

Shapes: C context rows, Q slots, R slots that ask, H query heads, G key/value heads, K = H/G heads that share one,
E head width, M = rows of a group times K, P keys of a group.

Measured on one core of this machine, 256 blocks of 16 in 1,024 tokens, 4 heads over 2, forward and backward: dense
mask 699 ms, scaled_dot_product_attention of groups of 8 153 ms, this with 4 blocks per group 96 ms (E = 32); 953, 199
and 126 ms (E = 64).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from stages.layout import KeysValues, Layout, Spans

GROUP_ROWS = 128
"""Rows of scores per key/value head in a group, about."""
SAFE = 40.0
"""e⁴⁰ times any number of keys is far below float32's largest number, e⁻⁴⁰ far above its smallest."""


def size(part: slice) -> int:
    """Of a slice with both ends."""
    return int(part.stop) - int(part.start)


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks that are computed together.

    Attributes:
        rows: their slots among those that ask.
        slots: all their slots.
        context: context rows that at least one of them sees.
        masked_from: the first column of the scores that the mask covers; what is left of it is seen by all.
        mask: additive, [rows, 1, columns from `masked_from`].
    """

    rows: slice
    slots: slice
    context: slice
    masked_from: int
    mask: torch.Tensor

    @property
    def n_keys(self) -> int:
        return size(self.context) + size(self.slots)


class GroupedAttention:
    """See the module; `rows_R` are the slots that ask (None: all), ascending."""

    def __init__(self, layout: Layout, block_size: int, spans: Spans, rows_R: torch.Tensor | None) -> None:
        self.layout, self.block_size, self.spans, self.rows_R = layout, block_size, spans, rows_R
        self._groups: dict[int, list[Group]] = {}

    def groups(self, shared: int) -> list[Group]:
        """The groups when so many query heads share a key/value head."""
        if shared not in self._groups:
            n = max(1, GROUP_ROWS // (shared * self.block_size))
            found = _groups(self.layout, self.block_size, self.spans, self.rows_R, n)
            self._groups[shared] = sorted(found, key=lambda group: -group.context.stop)  # see `_Rows`
        return self._groups[shared]

    def __call__(self, queries_RHE: torch.Tensor, context: KeysValues, slots: KeysValues) -> torch.Tensor:
        groups = self.groups(queries_RHE.shape[1] // slots[0].shape[1])
        wide = [x.float() for x in (queries_RHE, *context, *slots)]
        with torch.autocast("cpu", enabled=False):
            out: torch.Tensor = _Groups.apply(*wide, groups)  # type: ignore[no-untyped-call]
        return out.to(queries_RHE.dtype)


def leave_uncompiled() -> None:
    """Keep `torch.compile` out of grouped attention. To be called where something is compiled: marking it imports the
    compiler, which takes longer than all else that an extract worker imports."""
    GroupedAttention.__call__ = torch.compiler.disable(GroupedAttention.__call__)  # type: ignore[method-assign]


def _groups(
    layout: Layout, block_size: int, spans: Spans, rows_R: torch.Tensor | None, n_together: int
) -> Iterator[Group]:
    asking = spans if rows_R is None else spans.of(rows_R)
    ends = [e for first, n in _runs(layout.n_blocks) for e in [*range(first, first + n, n_together)]]
    ends = [*ends, sum(layout.n_blocks)]
    bounds = torch.tensor(ends) * block_size
    places = bounds if rows_R is None else torch.searchsorted(rows_R, bounds)
    pairs = zip(places.tolist(), bounds.tolist(), strict=True)
    previous = next(pairs)
    for place, bound in pairs:
        rows, slots = slice(previous[0], place), slice(previous[1], bound)
        previous = (place, bound)
        if rows.start < rows.stop:
            yield _group(rows, slots, asking)


def _runs(counts: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    first = 0
    for n in counts:
        yield first, n
        first += n


def _group(rows: slice, slots: slice, asking: Spans) -> Group:
    start, stop = asking.context_start[rows, None], asking.context_stop[rows, None]
    context = slice(int(start.min()), int(stop.max()))
    seen_by_all = int(stop.min()) if int(start.max()) == context.start else context.start
    columns, own = torch.arange(seen_by_all, context.stop), torch.arange(slots.start, slots.stop)
    sees_context = (columns >= start) & (columns < stop)
    sees_slots = (own >= asking.slot_start[rows, None]) & (own < asking.slot_stop[rows, None])
    hidden = ~torch.cat([sees_context, sees_slots], dim=1)
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    return Group(rows, slots, context, seen_by_all - context.start, mask[:, None])


class _Groups(torch.autograd.Function):
    """Attention group by group. Heads that share a key/value head stand beside each other as rows; what is kept for
    the backward pass is inputs, outputs and the rows' normalisers only."""

    @staticmethod
    def forward(
        ctx: Any, q_RHE: torch.Tensor, kc_CGE: torch.Tensor, vc_CGE: torch.Tensor, ks_QGE: torch.Tensor,
        vs_QGE: torch.Tensor, groups: list[Group],
    ) -> torch.Tensor:
        n_kv, scale = ks_QGE.shape[1], q_RHE.shape[2] ** -0.5
        shared = q_RHE.shape[1] // n_kv
        q, k, v = _fold(q_RHE, n_kv, scale), _Rows(kc_CGE, ks_QGE, groups), _Rows(vc_CGE, vs_QGE, groups)
        out, sums = torch.empty_like(q), torch.empty_like(q[..., :1])
        shift = None if _longest(q) * max(_longest(kc_CGE), _longest(ks_QGE)) < SAFE else torch.empty_like(sums)
        scratch = _Scratch(groups, q_RHE.shape[1])
        for group in groups:
            rows = slice(group.rows.start * shared, group.rows.stop * shared)
            scores_GMP = _scores(scratch.take(group, n_kv), q[:, rows], k.of(group), group)
            if shift is not None:
                torch.amax(scores_GMP, dim=-1, keepdim=True, out=shift[:, rows])
            weights_GMP = _exp(scores_GMP, shift, rows)
            torch.sum(weights_GMP, dim=-1, keepdim=True, out=sums[:, rows])
            # Into a tensor of its own: batched products into rows of a larger one are done one by one.
            out[:, rows] = torch.bmm(weights_GMP, v.of(group))
        out.div_(sums)
        ctx.save_for_backward(q, kc_CGE, ks_QGE, vc_CGE, vs_QGE, out, sums, shift)
        ctx.groups, ctx.shared, ctx.scale = groups, shared, scale
        return _unfold(out, shared)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RHE: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, kc_CGE, ks_QGE, vc_CGE, vs_QGE, out, sums, shift = ctx.saved_tensors
        groups, shared, n_kv = ctx.groups, ctx.shared, ks_QGE.shape[1]
        k, v = _Rows(kc_CGE, ks_QGE, groups), _Rows(vc_CGE, vs_QGE, groups)
        dk, dv = _Gradients(kc_CGE, ks_QGE), _Gradients(vc_CGE, vs_QGE)
        # The weights below are not divided by their sums; the gradient is, once and for all.
        grad, dq = _fold(grad_RHE, n_kv).div_(sums), torch.empty_like(q)
        inner_GM1 = (grad * out).sum(-1, keepdim=True)
        scratch, more = (_Scratch(groups, n_kv * shared) for _ in range(2))
        for group in groups:
            rows = slice(group.rows.start * shared, group.rows.stop * shared)
            keys_GPE, values_GPE, q_GME, grad_GME = k.of(group), v.of(group), q[:, rows], grad[:, rows]
            weights_GMP = _exp(_scores(scratch.take(group, n_kv), q_GME, keys_GPE, group), shift, rows)
            dv.add(torch.bmm(weights_GMP.transpose(1, 2), grad_GME), group)
            change_GMP = torch.bmm(grad_GME, values_GPE.transpose(1, 2), out=more.take(group, n_kv))
            change_GMP.sub_(inner_GM1[:, rows]).mul_(weights_GMP)
            dq[:, rows] = torch.bmm(change_GMP, keys_GPE)
            dk.add(torch.bmm(change_GMP.transpose(1, 2), q_GME), group)
        heads_last = (x.transpose(0, 1) for x in (dk.context, dv.context, dk.slots, dv.slots))
        return _unfold(dq.mul_(ctx.scale), shared), *heads_last, None


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


class _Rows:
    """Keys or values of context and slots; those of a group stand side by side, so that one product takes them all.

    A group's slots are put behind the context that it sees, over rows that no group before it sees: groups have to
    come last first.
    """

    def __init__(self, context_CGE: torch.Tensor, slots_QGE: torch.Tensor, groups: list[Group]) -> None:
        most = max((size(group.slots) for group in groups), default=0)
        n_rows, n_kv, width = context_CGE.shape
        self.buffer_GRE = context_CGE.new_empty(n_kv, n_rows + most, width)
        self.buffer_GRE[:, :n_rows] = context_CGE.transpose(0, 1)
        self.slots_GQE = slots_QGE.transpose(0, 1)

    def of(self, group: Group) -> torch.Tensor:
        """[G, P, E], good until the next group's."""
        stop = group.context.stop + size(group.slots)
        self.buffer_GRE[:, group.context.stop : stop] = self.slots_GQE[:, group.slots]
        return self.buffer_GRE[:, group.context.start : stop]


class _Gradients:
    """Of keys or values: of context rows [G, C, E], added up over groups, and of slots [G, Q, E]."""

    def __init__(self, context_CGE: torch.Tensor, slots_QGE: torch.Tensor) -> None:
        self.context, self.slots = (x.new_zeros(x.shape[1], x.shape[0], x.shape[2]) for x in (context_CGE, slots_QGE))

    def add(self, part_GPE: torch.Tensor, group: Group) -> None:
        """A group's part; no other group sees its slots."""
        n = size(group.context)
        self.context[:, group.context].add_(part_GPE[:, :n])
        self.slots[:, group.slots] = part_GPE[:, n:]


class _Scratch:
    """One buffer for the scores of every group in turn."""

    def __init__(self, groups: list[Group], n_heads: int) -> None:
        self.n_heads = n_heads
        self.buffer = torch.empty(max((self._size(g) for g in groups), default=0))

    def _size(self, group: Group) -> int:
        return self.n_heads * size(group.rows) * group.n_keys

    def take(self, group: Group, n_kv: int) -> torch.Tensor:
        return self.buffer[: self._size(group)].view(n_kv, -1, group.n_keys)


def _scores(out_GMP: torch.Tensor, q_GME: torch.Tensor, keys_GPE: torch.Tensor, group: Group) -> torch.Tensor:
    torch.bmm(q_GME, keys_GPE.transpose(1, 2), out=out_GMP)
    out_GMP.unflatten(1, (len(group.mask), -1))[..., group.masked_from :].add_(group.mask)
    return out_GMP


def _exp(scores_GMP: torch.Tensor, shift_GM1: torch.Tensor | None, rows: slice) -> torch.Tensor:
    if shift_GM1 is not None:
        scores_GMP.sub_(shift_GM1[:, rows])
    return scores_GMP.exp_()
