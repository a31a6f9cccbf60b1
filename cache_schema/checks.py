"""What features must satisfy before a shard may be committed.

Legend of shapes: T tokens, L feature layers, D hidden size.

Features are looked at as 16-bit patterns, in blocks of rows, so memory stays bounded whatever the sample's
length: bfloat16 has no numpy type, and for both 16-bit types the bits alone tell what is asked here: all
exponent bits set is an infinity or NaN, nothing but the sign set is a zero, and equal bits are equal values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_schema.errors import CacheError, ShardCorrupt, ShardRefused

_BLOCK_VALUES = 1 << 20
_EXPONENT = {"bfloat16": np.uint16(0x7F80), "float16": np.uint16(0x7C00)}
_MAGNITUDE = np.uint16(0x7FFF)


def non_finite(features: NDArray[np.generic], dtype: str) -> bool:
    """Whether any value is NaN or infinite (case 5: the caller quarantines that sample).

    Args:
        features: any shape, uint16 (bit patterns) or float16.
        dtype: what the bits mean, `bfloat16` or `float16`.
    """
    if dtype not in _EXPONENT:
        raise CacheError(f"features are {dtype!r}; this version checks {sorted(_EXPONENT)}")
    exponent = _EXPONENT[dtype]
    return any(bool(((block & exponent) == exponent).any()) for block in _blocks(features))


class LayerCheck:
    """Refuses samples in which a layer is all zero or two layers are identical (cases 3 and 4).

    Such states come from a hook on the wrong tensor: they train without a complaint and draft nothing.

    A sample of one token is no proof on its own (a padding-like token whose embedding is zero honestly gives
    zero in every layer), so one-token samples are judged together: `finish` refuses the shard if the fault
    is in all of them and there are at least two.
    """

    def __init__(self, shard: str, layer_ids: Sequence[int]):
        self._shard = shard
        self._layers = tuple(layer_ids)
        n = len(self._layers)
        self._short = 0
        self._short_zero = np.ones(n, bool)
        self._short_equal = np.ones((n, n), bool)

    def add(self, sample_id: str, features_TLD: NDArray[np.generic]) -> None:
        """Look at one sample.

        Args:
            features_TLD: [T, L, D], uint16 bit patterns or float16.

        Raises:
            ShardRefused: names layer(s), sample and shard.
        """
        zero, equal = _zero_layers(features_TLD), _equal_layers(features_TLD)
        if len(features_TLD) == 1:
            self._short += 1
            self._short_zero &= zero
            self._short_equal &= equal
            return
        self._refuse(zero, equal, f"sample {sample_id!r} ({len(features_TLD)} tokens)")

    def finish(self) -> None:
        """Judge the samples of one token.

        Raises:
            ShardRefused: the fault is in all of them.
        """
        if self._short >= 2:
            self._refuse(self._short_zero, self._short_equal, f"all {self._short} samples of one token")

    def _refuse(self, zero_L: NDArray[np.bool_], equal_LL: NDArray[np.bool_], what: str) -> None:
        remedy = "states were taken from the wrong place; check the layer ids and the hooks for this target"
        if zero_L.any():
            layers = [self._layers[i] for i in np.flatnonzero(zero_L)]
            raise ShardRefused(f"{self._shard}, {what}: every state of layer {_list(layers)} is zero; {remedy}")
        pairs = np.argwhere(np.triu(equal_LL, 1))
        if len(pairs):
            i, j = pairs[0]
            raise ShardRefused(
                f"{self._shard}, {what}: the states of layers {self._layers[i]} and {self._layers[j]} are identical; "
                f"{remedy}"
            )


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def _zero_layers(features_TLD: NDArray[np.generic]) -> NDArray[np.bool_]:
    zero = np.ones(features_TLD.shape[1], bool)
    for block in _blocks(features_TLD):
        zero &= ~(block & _MAGNITUDE).any(axis=(0, 2))
        if not zero.any():
            break
    return zero


def _equal_layers(features_TLD: NDArray[np.generic]) -> NDArray[np.bool_]:
    n = features_TLD.shape[1]
    equal = np.triu(np.ones((n, n), bool), 1)
    for block in _blocks(features_TLD):
        for i, j in np.argwhere(equal):
            equal[i, j] = np.array_equal(block[:, i], block[:, j])
        if not equal.any():
            break
    return equal


def _blocks(features: NDArray[np.generic]) -> Iterator[NDArray[np.uint16]]:
    """Bit patterns in blocks of rows; the first block is one row, which settles most layers at once."""
    bits = features.view(np.uint16)
    rows = max(1, _BLOCK_VALUES // max(1, bits[:1].size))
    yield bits[:1]
    for start in range(1, len(bits), rows):
        yield bits[start : start + rows]


def require_same_ids(sample_id: str, found: NDArray[Any], expected: NDArray[Any], where: object) -> None:
    """Check that the token ids stored for a sample are those of the responses table (case 18).

    Raises:
        ShardCorrupt: names the sample and the first position that differs.
    """
    if np.array_equal(found, expected):
        return
    shared = min(len(found), len(expected))
    differing = np.flatnonzero(found[:shared] != expected[:shared])
    at = int(differing[0]) if len(differing) else shared
    values = [str(int(ids[at])) if at < len(ids) else "nothing" for ids in (found, expected)]
    raise ShardCorrupt(
        f"{where}: token ids of sample {sample_id!r} differ from the responses table at position {at}: found "
        f"{values[0]}, expected "
        f"{values[1]} (lengths {len(found)} and {len(expected)}); cache and responses do not belong together, "
        "extract again"
    )
