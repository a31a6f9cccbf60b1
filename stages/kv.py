"""Keys and values of a batch of sequences that have different lengths and grow at different speeds.

Shapes: R rows (sequences), Q new tokens of a pass, G key/value heads, C slots, E head width.

Every row is left-aligned: its token at position p lies in slot p. A pass writes its Q tokens behind each row's own
length, and only `advance` makes them count, so forgetting rejected drafts costs nothing: the next pass overwrites them.
What lies in a row's slots behind the position of a query is never seen: masks come from lengths, never from ids.
Buffers start as zeros, since a NaN in a masked slot would still spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import Cache

Ints = npt.NDArray[np.int64]
GROW_SLOTS = 64


class RaggedKV:
    """Keys and values per layer, [R, G, C, E] each.

    Args:
        n_rows: R.
        device: where it lies.
        reserve: slots to make room for at once, if known.

    Attributes:
        lengths: tokens of each row that count, int64 [R], on the host.
    """

    def __init__(self, n_rows: int, device: torch.device, reserve: int = 0) -> None:
        self.device = device
        self.reserve = reserve
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.peak_bytes = 0
        """Largest size so far of what counts: slots up to the longest row."""
        self._set_lengths(np.zeros(n_rows, np.int64))

    def _set_lengths(self, lengths: Ints) -> None:
        self.lengths = lengths
        self.longest = int(lengths.max(initial=0))
        self.even = bool((lengths == self.longest).all())
        self._lengths_R: torch.Tensor | None = None

    @property
    def lengths_R(self) -> torch.Tensor:
        """The lengths on the device."""
        if self._lengths_R is None:
            self._lengths_R = torch.as_tensor(self.lengths, device=self.device)
        return self._lengths_R

    def positions(self, n_new: int) -> torch.Tensor:
        """Positions of the next tokens, [R, Q]."""
        return self.lengths_R[:, None] + torch.arange(n_new, device=self.device)

    def write(
        self, layer: int, keys_RGQE: torch.Tensor, values_RGQE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put a pass's keys and values behind each row's length; returns all slots up to the longest row's end."""
        n_new = keys_RGQE.shape[2]
        end = self.longest + n_new
        stored = self._room(layer, keys_RGQE, values_RGQE, end)
        for buffer, new in zip(stored, (keys_RGQE, values_RGQE), strict=True):
            if self.even:
                buffer[:, :, self.longest : end] = new
            else:
                slots = self.positions(n_new)[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3])
                buffer.scatter_(2, slots, new.to(buffer.dtype))
        return stored[0][:, :, :end], stored[1][:, :, :end]

    def _room(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        old = self.layers.get(layer)
        if old is not None and old[0].shape[2] >= end:
            return old
        slots = max(end, self.reserve) if old is None and self.reserve else end + GROW_SLOTS
        made = []
        for i, new in enumerate((keys, values)):
            buffer = new.new_zeros(new.shape[0], new.shape[1], slots, new.shape[3])
            if old is not None:
                buffer[:, :, : old[i].shape[2]] = old[i]
            made.append(buffer)
        self.layers[layer] = (made[0], made[1])
        return self.layers[layer]

    def context(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """By layer, keys and values of all slots up to the longest row, [R, G, longest, E]."""
        return {i: (k[:, :, : self.longest], v[:, :, : self.longest]) for i, (k, v) in self.layers.items()}

    def advance(self, counts: Sequence[int] | Ints) -> None:
        """Let the first `counts[r]` tokens of the last pass count; the others are forgotten."""
        self._set_lengths(self.lengths + np.asarray(counts, np.int64))
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        index = torch.as_tensor(rows, device=self.device)
        self.layers = {i: (k.index_select(0, index), v.index_select(0, index)) for i, (k, v) in self.layers.items()}
        self._set_lengths(self.lengths[list(rows)])

    @property
    def bytes(self) -> int:
        """Of all rows, each as long as the longest (that is what a padded batch takes)."""
        per_slot = sum(t[:, :, :1].numel() * t.element_size() for pair in self.layers.values() for t in pair)
        return per_slot * self.longest


class RaggedCache(Cache):
    """`RaggedKV` in the form that transformers' models take."""

    def __init__(self, kv: RaggedKV) -> None:
        super().__init__(layers=[])
        self.kv = kv

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv.write(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.kv.longest

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.kv.longest

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        # transformers before 5 gives the positions of the queries instead of their number.
        n_new = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        return self.kv.longest + n_new, 0

    @property
    def is_compileable(self) -> bool:
        return False
