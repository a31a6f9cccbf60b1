"""What features must satisfy before a shard may be committed.

Legend of shapes: T tokens, L feature layers, D hidden size.

Values are looked at as bit patterns, in blocks of rows, so memory stays bounded whatever the sample's length:
bfloat16 and float8 have no numpy type, and the bits alone tell what is asked here: all exponent bits set is an
infinity or NaN, nothing but the sign set is a zero, and equal bits are equal values (for quantised features:
equal codes under equal scales).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_schema.errors import CacheError, ShardCorrupt, ShardRefused

_BLOCK_VALUES = 1 << 18
# Bits of a stored value without its sign; a value whose other bits reach the second number is NaN or infinite.
_BITS: dict[str, tuple[Any, Any]] = {
    "bfloat16": (np.uint16(0x7FFF), np.uint16(0x7F80)),
    "float16": (np.uint16(0x7FFF), np.uint16(0x7C00)),
    "float8_e4m3fn": (np.uint8(0x7F), np.uint8(0x7F)),
    "float32": (np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)),
}


def non_finite(values: NDArray[np.generic], dtype: str) -> bool:
    """Whether any value is NaN or infinite (case 5: the caller quarantines that sample).

    Args:
        values: any shape, as stored.
        dtype: what the bits mean: a feature type, or `float32` (scales). Codes of int8 are always finite.
    """
    if dtype == "int8":
        return False
    if dtype not in _BITS:
        raise CacheError(f"values are {dtype!r}; this version checks {sorted(_BITS)}")
    magnitude, limit = _BITS[dtype]
    return any(bool((block & magnitude).max() >= limit) for block in _blocks(values) if block.size)


class LayerCheck:
    """Refuses samples in which a layer is all zero or two layers are identical (cases 3 and 4).

    Such states come from a hook on the wrong tensor: they train without a complaint and draft nothing.

    A sample of one token is no proof on its own (a padding-like token whose embedding is zero honestly gives
    zero in every layer), so one-token samples are judged together: `finish` refuses the shard if the fault
    is in all of them and there are at least two.
    """

    def __init__(self, shard: str, layer_ids: Sequence[int], dtype: str = "bfloat16"):
        self._shard = shard
        self._magnitude = np.uint8(0xFF) if dtype == "int8" else _BITS[dtype][0]
        self._layers = tuple(layer_ids)
        n = len(self._layers)
        self._short = 0
        self._short_zero = np.ones(n, bool)
        self._short_equal = np.ones((n, n), bool)

    def add(
        self, sample_id: str, features_TLD: NDArray[np.generic], scale_TLG: NDArray[np.generic] | None = None
    ) -> None:
        """Look at one sample.

        Args:
            features_TLD: [T, L, D] as stored.
            scale_TLG: [T, L, G] float32 of quantised features.

        Raises:
            ShardRefused: names layer(s), sample and shard.
        """
        zero, equal = _zero_layers(features_TLD, self._magnitude), _equal_layers(features_TLD)
        if scale_TLG is not None and equal.any():
            equal &= _equal_layers(scale_TLG)
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


def _zero_layers(features_TLD: NDArray[np.generic], magnitude: np.generic) -> NDArray[np.bool_]:
    zero = np.ones(features_TLD.shape[1], bool)
    for block in _blocks(features_TLD):
        zero &= ~(block & magnitude).any(axis=(0, 2))
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


def _blocks(values: NDArray[np.generic]) -> Iterator[NDArray[Any]]:
    """Bit patterns in blocks of rows; the first block is one row, which settles most layers at once."""
    bits = values.view(f"u{values.itemsize}")
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
