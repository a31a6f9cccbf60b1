"""Attention over packed samples, for every model that goes through transformers' attention interface.

Shapes: H query heads, K key heads, R rows of the packed batch, Q own rows of a sample, T all its rows, D head size.

`transformers.AttentionInterface` gets a function that attends sample by sample, and `AttentionMaskInterface` one that
builds no mask: it finds out which mask the model would have built (causal, or a sliding window) and hands the window to
the attention function in the place of the mask. What masks a model builds is learned once, from a pass over a single
sequence (`learn`); whatever is not a causal window raises `NotPackable`, and so does any argument that is not known
here. So a target is packed only if all that its attention does is done here too.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from stages.errors import StageError
from stages.packed_kernel import Reach, attend_all, kernel_takes, reach_of
from stages.packing import Segment

NAME = "packed_samples"
"""Without "flash": transformers takes names with it for kernels to fetch."""
_EAGER_BLOCK = 256
"""Queries at a time where attention weights are materialised."""
_FAR = 1 << 17
"""Longest window that is told from none."""
_HARMLESS = {"position_ids", "use_cache", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
             "max_length_k", "return_dict", "output_router_logits", "output_hidden_states", "layer_idx"}
"""Arguments that say nothing about one sample's attention beyond what is known anyway."""


class NotPackable(StageError):
    """This target's attention is more than causal attention per sample."""


@dataclass
class _Pass:
    """One forward pass: the samples, and the window of each mask in the order in which the model makes them."""

    segments: Sequence[Segment]
    windows: list[int]
    learning: bool = False
    made: int = 0
    keys: dict[int, torch.Tensor] = field(default_factory=dict)  # segment -> its rows, on the device
    reach: Reach | None = None  # for the GPU's kernel


_now = threading.local()


@contextmanager
def packed_pass(segments: Sequence[Segment], windows: list[int], *, learning: bool = False) -> Iterator[None]:
    """Within the block, attention of this thread works on these samples.

    Args:
        segments: of the one row that the pass is given.
        windows: of the masks in the order in which the model makes them, 0 for none; filled when `learning`.
        learning: the pass is over one sequence, without position ids.
    """
    _now.current = current = _Pass(segments, windows, learning)
    try:
        yield
        if current.made != len(windows):
            raise NotPackable(f"the target made {current.made} masks in this pass, {len(windows)} before")
    finally:
        _now.current = None


def register() -> None:
    """Make the implementation known to transformers; harmless when repeated."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _window_tag)


def _current() -> _Pass:
    current: _Pass | None = getattr(_now, "current", None)
    if current is None:
        raise NotPackable("packed attention outside of a packed pass")
    return current


# --- masks ------------------------------------------------------------------------------------------------------


def _window_tag(*, mask_function: Callable[..., Any], use_vmap: bool = False, **_: Any) -> torch.Tensor:
    """Instead of a mask: its window, [1, 1, 1, 1] int64 on the CPU."""
    current = _current()
    if current.learning:
        if use_vmap:
            raise NotPackable("the target changes its attention mask by a function of its own")
        current.windows.append(window_of(mask_function))
    if current.made >= len(current.windows):
        raise NotPackable(f"the target makes more masks in this pass than before ({len(current.windows)})")
    window = current.windows[current.made]
    current.made += 1
    return torch.full((1, 1, 1, 1), window, dtype=torch.long)


def window_of(mask_function: Callable[..., Any]) -> int:
    """The window W of a mask in which a query sees itself and the W − 1 tokens before it; 0 if it sees all before.

    Raises:
        NotPackable: it is another mask.
    """
    zero, windows = torch.tensor(0), set()
    for query in (_FAR, _FAR - 1, _FAR + 4097):
        keys = torch.arange(query + 8)
        seen = torch.as_tensor(mask_function(zero, zero, torch.tensor(query), keys)).broadcast_to(keys.shape)
        n = int(seen.sum())
        if n == 0 or not bool(seen[query + 1 - n : query + 1].all()):
            raise NotPackable("the target's attention mask is neither causal nor a sliding window")
        windows.add(0 if n == query + 1 else n)
    if len(windows) > 1:
        raise NotPackable(f"the target's attention mask has a window that changes with the position: {windows}")
    return windows.pop()


# --- attention --------------------------------------------------------------------------------------------------


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of each sample over its own tokens.

    The window is that of the mask; `sliding_window` is for kernels that are given no mask.

    Args:
        module: the attention layer.
        query: [1, H, R, D].
        key, value: [1, K, R, D].
        attention_mask: the tag that `_window_tag` made.
        scaling: factor on the scores; None is D ** -0.5.
        softcap: scores are bounded to ± this by tanh.
        s_aux: a sink per head, [H]: a score that takes weight and gives nothing.

    Returns:
        [1, R, H, D], and no weights.

    Raises:
        NotPackable: something is asked for that is not done here.
    """
    current = _current()
    window = _checked(current, module, query, key, attention_mask, is_causal, dropout, others)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.is_cuda and softcap is None and kernel_takes(query, value):
        if current.reach is None:
            current.reach = reach_of(current.segments, query.device)
        return attend_all(current.reach, query, key, value, window, scale, s_aux), None
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    for i, segment in enumerate(current.segments):
        rows = slice(segment.start, segment.stop)
        mine, theirs, values = query[:, :, rows], *_keys(current, i, key, value)
        if softcap is None and s_aux is None:
            attended = _attend(mine, theirs, values, window, scale)
        else:
            attended = _attend_openly(mine, theirs, values, window, scale, softcap, s_aux)
        out[:, rows] = attended.transpose(1, 2)
    return out, None


def _checked(current: _Pass, module: nn.Module, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None,
             is_causal: bool | None, dropout: float, others: dict[str, Any]) -> int:
    n_rows = current.segments[-1].stop
    if query.shape[0] != 1 or query.shape[2] != n_rows or key.shape[2] != n_rows:
        found = f"queries {list(query.shape)} and keys {list(key.shape)}"
        raise NotPackable(f"{found}, expected one row of {n_rows} tokens")
    if mask is None or mask.dtype != torch.long or mask.numel() != 1:
        raise NotPackable("an attention layer is given another mask than the one that transformers makes")
    if is_causal is False or getattr(module, "is_causal", True) is False or dropout:
        raise NotPackable(f"is_causal {is_causal}, dropout {dropout}: not plain causal attention")
    unknown = sorted(k for k, v in others.items() if v is not None and v is not False and k not in _HARMLESS)
    if unknown:
        raise NotPackable(f"attention is given {', '.join(unknown)}, which is not known here")
    return int(mask.item())


def _keys(current: _Pass, i: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Rows that a sample sees, of keys and values [1, K, R, D]."""
    rows = current.segments[i].rows
    if isinstance(rows, slice):
        return [t[:, :, rows] for t in tensors]
    if i not in current.keys:
        current.keys[i] = rows.to(tensors[0].device)
    return [t.index_select(2, current.keys[i]) for t in tensors]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, scale: float) -> torch.Tensor:
    """[1, H, Q, D]; the queries are the last Q of the T positions."""
    n, total = q.shape[2], k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    if n == total and not 0 < window < total:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    parts = []
    for rows, keys, visible in _blocks(n, total, window, max(window, _EAGER_BLOCK) if window else n, q.device):
        part = F.scaled_dot_product_attention(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], attn_mask=visible, scale=scale, enable_gqa=grouped
        )
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _attend_openly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, scale: float,
                   softcap: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """As `_attend`, with scores in the open: for soft caps and sinks, which no public kernel takes everywhere."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(repeats, dim=1) if repeats > 1 else t for t in (k, v))
    parts = []
    for rows, keys, visible in _blocks(q.shape[2], k.shape[2], window, _EAGER_BLOCK, q.device):
        scores = (q[:, :, rows] @ k[:, :, keys].transpose(2, 3)) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.float().masked_fill(~visible, -math.inf)
        if sinks is not None:
            sink = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        parts.append(weights.to(v.dtype) @ v[:, :, keys])
    return torch.cat(parts, dim=2)


def _blocks(
    n: int, total: int, window: int, size: int, device: torch.device
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Queries in blocks, the keys that each block may see, and which of them each query sees, [block, keys] bool."""
    for start in range(0, n, size):
        stop = min(start + size, n)
        positions = torch.arange(total - n + start, total - n + stop, device=device)
        last = total - n + stop
        first = max(0, last - (stop - start) - window + 1) if window else 0
        keys = torch.arange(first, last, device=device)
        visible = keys[None] <= positions[:, None]
        if window:
            visible &= positions[:, None] - keys[None] < window
        yield slice(start, stop), slice(first, last), visible
