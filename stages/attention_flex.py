"""Attention for a GPU: compiled flex attention under a block mask that is made by arithmetic on intervals.

What a slot sees is an interval of context rows and one of slots (`stages.layout.Spans`). Whether it sees some of a tile
of keys, or all of it, is a comparison of ends, so that the block mask takes rows × tiles comparisons on the device;
`create_block_mask` makes rows × keys of them. Slots are in block order and anchors ascend, so that the rows
of a tile see nearly the same, and few tiles need the mask function at all.

All samples of a micro-batch are one call. Rows and keys are padded to whole tiles and sizes are left symbolic, so that
the kernels are compiled once for all micro-batches (and once more for one without gradients).

Shapes: C context rows, Q slots, R slots that ask, K keys (context, then slots, each padded), H query heads, G key/value
heads, E head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from stages.errors import TrainingError
from stages.layout import KeysValues, Spans

TILE = 128


class FlexAttention:
    """See the module."""

    def __init__(self, spans: Spans, n_context: int, n_slots: int) -> None:
        self.n_context, self.n_slots = n_context, n_slots
        self.block_mask = block_mask(spans, n_context, n_slots)

    def __call__(self, queries_RHE: torch.Tensor, context: KeysValues, slots: KeysValues) -> torch.Tensor:
        n_rows = len(queries_RHE)
        queries = _heads_first(_whole_tiles(queries_RHE))
        keys, values = (
            _heads_first(torch.cat([_whole_tiles(c.to(s.dtype)), _whole_tiles(s)]))
            for c, s in zip(context, slots, strict=True)
        )
        out_1HRE = _kernel(queries.device.type)(queries, keys, values, block_mask=self.block_mask, enable_gqa=True)
        out_RHE: torch.Tensor = out_1HRE[0].transpose(0, 1)[:n_rows]
        return out_RHE


def require_gpu(device: torch.device) -> None:
    """Refuse to train with this form where it has no compiled kernel.

    Raises:
        TrainingError: the device is no GPU.
    """
    if device.type != "cuda":
        raise TrainingError(
            f"train.attention is flex, which needs a GPU to train, but this rank computes on {device.type}. Leave "
            "train.attention out, or set it to grouped: the numbers are the same"
        )


def padded(n: int) -> int:
    """The next whole number of tiles."""
    return -(-n // TILE) * TILE


def block_mask(spans: Spans, n_context: int, n_slots: int) -> BlockMask:
    """The block mask of flex attention, from the ends of intervals alone.

    Args:
        spans: of the slots that ask, R of them.
        n_context, n_slots: C and Q. Keys are C rows, padded to whole tiles, then Q slots, padded too.
    """
    extra = padded(len(spans.slot_start)) - len(spans.slot_start)
    behind = padded(n_context)
    # A row of padding sees the first slot, for a softmax over something; nothing comes back from it.
    ends = (
        F.pad(spans.context_start, (0, extra)), F.pad(spans.context_stop, (0, extra)),
        F.pad(spans.slot_start + behind, (0, extra), value=behind),
        F.pad(spans.slot_stop + behind, (0, extra), value=behind + 1),
    )  # fmt: skip
    n_keys = behind + padded(n_slots)
    some, whole = _tiles_seen(ends, n_keys)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole), *_listed(whole), BLOCK_SIZE=TILE, mask_mod=_mask_function(*ends),
        seq_lengths=(len(ends[0]), n_keys),
    )  # fmt: skip


def _mask_function(
    context_start: torch.Tensor, context_stop: torch.Tensor, slot_start: torch.Tensor, slot_stop: torch.Tensor
) -> Callable[..., torch.Tensor]:
    def sees(_sample: Any, _head: Any, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        in_context = (key >= context_start[row]) & (key < context_stop[row])
        return in_context | ((key >= slot_start[row]) & (key < slot_stop[row]))

    return sees


def _tiles_seen(ends: tuple[torch.Tensor, ...], n_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each tile of rows: which tiles of keys some row sees something of, and which every row sees all of."""
    low = torch.arange(0, n_keys, TILE, device=ends[0].device)
    high = low + TILE
    some_RK, whole_RK = torch.zeros((), dtype=torch.bool), torch.zeros((), dtype=torch.bool)
    some_RK, whole_RK = some_RK.to(low.device), whole_RK.to(low.device)
    for start_R, stop_R in (ends[:2], ends[2:]):
        start, stop = start_R[:, None], stop_R[:, None]
        some_RK = some_RK | ((start < high) & (stop > low) & (start < stop))
        whole_RK = whole_RK | ((start <= low) & (stop >= high))
    return some_RK.unflatten(0, (-1, TILE)).any(1), whole_RK.unflatten(0, (-1, TILE)).all(1)


def _listed(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number and indices of the chosen tiles of keys (the others behind them), int32 [1, 1, tiles(, tiles)]."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


def _whole_tiles(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, 0, 0, 0, 0, padded(len(x)) - len(x)))


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1)[None].contiguous()


@functools.cache
def _kernel(device_type: str) -> Any:
    """Compiled on a GPU. Elsewhere it is the reference that materialises all scores, which only tests use."""
    return torch.compile(flex_attention, dynamic=True) if device_type == "cuda" else flex_attention
