"""Attention over all packed samples in one call, by torch's kernel for sequences of unequal length on a GPU.

Shapes: H query heads, K key heads, R rows of the packed batch, N keys of all samples together, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from stages.packing import Segment


@dataclass(frozen=True, slots=True)
class Reach:
    """Where samples end, on the device.

    Attributes:
        query_ends, key_ends: int32, a 0 in front.
        key_rows: rows of all keys, [N]; empty if they are as they lie.
        longest_query, longest_key: tokens.
    """

    query_ends: torch.Tensor
    key_ends: torch.Tensor
    key_rows: torch.Tensor
    longest_query: int
    longest_key: int


def reach_of(segments: Sequence[Segment], device: torch.device) -> Reach:
    """What the kernel is told of a packed batch."""
    queries, keys = [0, *(s.stop for s in segments)], [0]
    for segment in segments:
        keys.append(keys[-1] + segment.n_tokens)
    rows = torch.zeros(0, dtype=torch.long)
    if keys != queries:
        rows = torch.cat([torch.arange(s.rows.start, s.rows.stop) if isinstance(s.rows, slice) else s.rows
                          for s in segments])
    query_ends, key_ends = (torch.tensor(e, dtype=torch.int32, device=device) for e in (queries, keys))
    longest_query = max(s.stop - s.start for s in segments)
    return Reach(query_ends, key_ends, rows.to(device), longest_query, max(s.n_tokens for s in segments))


@cache
def _kernel() -> Callable[..., Any] | None:
    """torch's function, if this torch has it with all that is needed here."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = set(inspect.signature(varlen_attn).parameters)
    return varlen_attn if {"scale", "window_size", "enable_gqa", "return_aux"} <= known else None


def kernel_takes(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernel is there and takes tensors like these, [1, H, R, D]."""
    size = query.shape[-1]
    ok = query.dtype in (torch.float16, torch.bfloat16) and size == value.shape[-1] <= 256 and size % 8 == 0
    return ok and torch.cuda.get_device_capability(query.device) >= (8, 0) and _kernel() is not None


def attend_all(reach: Reach, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int,
               scale: float, sinks: torch.Tensor | None) -> torch.Tensor:
    """Causal attention of each sample, [1, R, H, D]; where a sample has fewer queries than keys, they are its last.

    A sink adds exp(sink) to the softmax's sum, so the output without it times sigmoid(lse − sink) is the one with it.

    Args:
        reach: of the batch.
        query: [1, H, R, D].
        key, value: [1, K, R, D].
        window: keys that a query sees, itself included; 0 for all.
        scale: factor on the scores.
        sinks: [H] or None.
    """
    from torch.nn.attention.varlen import AuxRequest

    attend = _kernel()
    assert attend is not None
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    if len(reach.key_rows):
        k, v = k.index_select(0, reach.key_rows), v.index_select(0, reach.key_rows)
    found = attend(
        q.contiguous(), k.contiguous(), v.contiguous(), reach.query_ends, reach.key_ends, reach.longest_query,
        reach.longest_key, scale=scale, window_size=(window - 1 if window else -1, 0),
        enable_gqa=q.shape[1] != k.shape[1], return_aux=None if sinks is None else AuxRequest(lse=True),
    )  # fmt: skip
    if sinks is None:
        return found[None]  # type: ignore[no-any-return]
    out, lse = found
    # Documented as [R, H]; the kernel's own order is [H, R].
    lse_RH = lse if tuple(lse.shape) == tuple(q.shape[:2]) else lse.transpose(0, 1)
    kept = torch.sigmoid(lse_RH.float() - sinks.float())
    return (out * kept[..., None].to(out.dtype))[None]  # type: ignore[no-any-return]
