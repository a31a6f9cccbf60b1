"""Which samples go through the target together, and where their tokens lie in one packed row.

Shapes: R rows (tokens of a packed batch), T tokens of a sample.

Packed: samples lie end to end in one row `[1, R]`, without padding, so linear layers see all tokens at once and
attention runs sample by sample. Batches are consecutive samples in the cache's order, so what is captured can be
written as it comes. A sample that begins as the one before it (several answers to one prompt, turns of one
conversation) has rows of its own only behind what they share; its attention takes the keys and values of the shared
rows. Only token ids decide what is shared: states at a position depend on the ids up to it and on nothing else.

Padded: for targets that cannot be packed. Samples of similar length go together, chosen within a window of
consecutive samples, so no more than a window is ever held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

MIN_SHARED = 32
"""Shorter common beginnings are computed again: attention over scattered keys would cost as much."""
WINDOW_BATCHES = 8
"""A window of padded batches holds about this many batches' tokens."""
Ids = NDArray[np.integer]
Rows = slice | torch.Tensor
"""Rows of one sample in a batch: consecutive, or their indices, [T] int64 on the CPU."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A sample's own rows in a packed batch, and all rows whose keys they see."""

    start: int
    stop: int
    rows: Rows
    """Of the whole sample, shared ones first."""
    n_tokens: int
    """Of the whole sample, T."""


@dataclass(frozen=True, slots=True)
class Packing:
    """One packed batch.

    Attributes:
        ids_R: token ids, int64.
        positions_R: each row's position in its sample, int64.
        segments: one per sample, in order.
    """

    ids_R: torch.Tensor
    positions_R: torch.Tensor
    segments: tuple[Segment, ...]


def common_beginning(first: Ids, second: Ids) -> int:
    """How many ids two sequences share at their beginning."""
    n = min(len(first), len(second))
    differing = np.flatnonzero(first[:n] != second[:n])
    return int(differing[0]) if len(differing) else n


def _shared(before: Ids | None, ids: Ids) -> int:
    """Tokens that a sample need not compute again; at least its last one is always its own."""
    if before is None:
        return 0
    n = min(common_beginning(before, ids), len(ids) - 1)
    return n if n >= MIN_SHARED else 0


def packed_batches(sequences: Sequence[Ids], batch_tokens: int) -> Iterator[range]:
    """Consecutive sequences whose own rows are at most `batch_tokens` (one sequence at least), as index ranges."""
    first, used = 0, 0
    for i, ids in enumerate(sequences):
        own = len(ids) - _shared(sequences[i - 1] if i > first else None, ids)
        if i > first and used + own > batch_tokens:
            yield range(first, i)
            first, used, own = i, 0, len(ids)
        used += own
    if len(sequences) > first:
        yield range(first, len(sequences))


def padded_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of sequences of similar length, padding included at most `batch_tokens` a batch (one at least).

    Each window of consecutive sequences is complete before the next begins.
    """
    window: list[int] = []
    used = 0
    for i, n in enumerate(lengths):
        if window and used + n > WINDOW_BATCHES * batch_tokens:
            yield from _by_length(window, lengths, batch_tokens)
            window, used = [], 0
        window.append(i)
        used += n
    yield from _by_length(window, lengths, batch_tokens)


def _by_length(window: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    batch: list[int] = []
    for i in sorted(window, key=lambda i: lengths[i]):
        if batch and lengths[i] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def pack(sequences: Sequence[Ids]) -> Packing:
    """Lay sequences end to end.

    Args:
        sequences: ids of each sample, at least one.
    """
    ids: list[Ids] = []
    positions: list[NDArray[np.int64]] = []
    segments: list[Segment] = []
    before: Ids | None = None
    at = 0
    for sequence in sequences:
        shared = _shared(before, sequence)
        stop = at + len(sequence) - shared
        rows = _rows(segments[-1].rows, shared, at, stop) if shared else slice(at, stop)
        segments.append(Segment(at, stop, rows, len(sequence)))
        ids.append(sequence[shared:])
        positions.append(np.arange(shared, len(sequence), dtype=np.int64))
        before, at = sequence, stop
    packed = torch.from_numpy(np.concatenate(ids).astype(np.int64))
    return Packing(packed, torch.from_numpy(np.concatenate(positions)), tuple(segments))


def _rows(before: Rows, shared: int, start: int, stop: int) -> torch.Tensor:
    """The first `shared` rows of the sample before, then the own ones."""
    if isinstance(before, slice):
        before = torch.arange(before.start, before.stop)
    return torch.cat([before[:shared], torch.arange(start, stop)])
