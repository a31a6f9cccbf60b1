"""What stored features mean: their four types, the scales of the two quantised ones, and the values in float32.

Shapes: T tokens, L feature layers, D hidden, G = ceil(D / group) groups of channels. Groups start at channel 0;
if `group` does not divide D, the last one is smaller.

A quantised value is `code · scale`, with one scale per token, layer and group:

| type | code | error of a value, at most | scale |
|---|---|---|---|
| `int8`, b bits | integer, magnitude below 2^(b−1) | scale / 2 | largest magnitude / (2^(b−1) − 1) |
| `float8_e4m3fn` | sign, 4 bits exponent, 3 mantissa | 1/16 of the value, or scale · 2^−10 | largest magnitude / 448 |
| `float8_e4m3fn`, b bits | the same | the same | median magnitude · 2^(12−b), or the above if that is larger |

Fewer bits take the same bytes and fewer levels: the entropy coder behind them does the packing.

float8 with bits puts the typical value where float8 has a fixed step (below scale · 2^−5 all codes are
scale · 2^−9 apart, here 1/2^(b−3) of the median magnitude), which an entropy coder packs best, and leaves the floating
steps, and a range of 2^17, to the outliers. So a few large channels cost nothing: neither bytes nor what the other
channels keep. b is roughly what a value takes after compression. With int8 the largest channel sets the step of all.

Every scale is rounded to the nearest *bfloat16* and kept as float32. That costs nothing (int8's largest code stays the
largest, because it is below 2^7), it halves the scales' bytes once they are compressed, and it makes every product
of code and scale exact in float32: each reader, device and library gets the same numbers, in any order of operations.

Source: `float8_e4m3fn` is the OCP 8-bit floating point specification's E4M3 (no infinities; NaN is S.1111.111).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_schema.errors import CacheError

STORED = {"bfloat16": "uint16", "float16": "float16", "float8_e4m3fn": "uint8", "int8": "int8"}
"""Types of features, and the numpy type that each is stored as."""
QUANTISED = ("float8_e4m3fn", "int8")
"""The types that come with scales."""
MIN_BITS, MAX_BITS = 4, 8
_FLOAT8_MAX = 448.0
_SCALE_BYTES = 4

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureFormat:
    """How features are stored; all of it is part of the cache's identity.

    Raises:
        CacheError: a field has a value that no cache can have, or one that the type does not use.
    """

    dtype: str
    """`bfloat16`, `float16`, `float8_e4m3fn` or `int8`."""
    bits: int | None = None
    """How fine, 4 to 8: `int8` needs it; for `float8_e4m3fn` None is as fine as it goes; the others have none."""
    group: int | None = None
    """Channels that share a scale; None is all of them. Quantised types only."""

    def __post_init__(self) -> None:
        if self.dtype not in STORED:
            raise CacheError(f"the feature dtype is {self.dtype!r}; known are {', '.join(STORED)}")
        if self.bits is not None and not self.quantised:
            raise CacheError(f"{self.dtype} features have bits {self.bits}; they have no such setting, leave it out")
        if self.bits not in range(MIN_BITS, MAX_BITS + 1) and (self.bits is not None or self.dtype == "int8"):
            raise CacheError(f"{self.dtype} features have bits {self.bits!r}; it must be {MIN_BITS} to {MAX_BITS}")
        if self.group is not None and not self.quantised:
            raise CacheError(f"{self.dtype} features have a group of {self.group}; they have no scales, leave it out")
        if self.group is not None and self.group < 1:
            raise CacheError(f"a group of {self.group} channels is none; it must be 1 or more, or absent for all")

    @property
    def quantised(self) -> bool:
        """Whether scales come with the codes."""
        return self.dtype in QUANTISED

    @property
    def stored(self) -> str:
        """The numpy type of the codes on disk."""
        return STORED[self.dtype]

    @property
    def largest_code(self) -> float:
        """The largest magnitude of a code; only for quantised types."""
        if self.dtype == "int8" and self.bits is not None:
            return float(2 ** (self.bits - 1) - 1)
        return _FLOAT8_MAX

    @property
    def median_share(self) -> float | None:
        """float8 with bits: the scale over the group's median magnitude (2^9 steps of a scale, 2^(3−b) medians)."""
        return 2.0 ** (12 - self.bits) if self.dtype == "float8_e4m3fn" and self.bits is not None else None

    def n_groups(self, hidden: int) -> int:
        """Scales per token and layer; 0 if the type has none."""
        if not self.quantised:
            return 0
        return 1 if self.group is None else -(-hidden // self.group)

    def code_bytes(self, n_layers: int, hidden: int) -> int:
        """Bytes of the codes of one token, before compression."""
        return n_layers * hidden * np.dtype(self.stored).itemsize

    def scale_bytes(self, n_layers: int, hidden: int) -> int:
        """Bytes of the scales of one token, before compression."""
        return n_layers * self.n_groups(hidden) * _SCALE_BYTES

    def group_starts(self, hidden: int) -> NDArray[np.int64]:
        """First channel of each group, [G]."""
        return np.arange(0, hidden, self.group or hidden, dtype=np.int64)


def dequantize(codes_TLD: NDArray[Any], scale_TLG: NDArray[Any] | None, format: FeatureFormat) -> Floats:
    """The values that stored features stand for.

    Args:
        codes_TLD: [T, L, D] (any leading shape) in the stored type: uint16 bits of bfloat16, float16, uint8 bits
            of float8, int8.
        scale_TLG: [T, L, G] float32; None for the types without scales.
        format: what the codes mean.

    Returns:
        float32, the codes' shape. Exact: no value is rounded.

    Raises:
        CacheError: codes or scales are not of the type and shape that the format says.
    """
    require_shapes(codes_TLD.shape, codes_TLD.dtype, None if scale_TLG is None else scale_TLG.shape, format)
    values = _values(codes_TLD, format)
    if scale_TLG is not None:
        sizes = np.diff(format.group_starts(codes_TLD.shape[-1]), append=codes_TLD.shape[-1])
        values *= np.repeat(scale_TLG.astype(np.float32, copy=False), sizes, axis=-1)
    return values


def require_shapes(
    codes: tuple[int, ...], stored: np.dtype[Any], scale: tuple[int, ...] | None, format: FeatureFormat
) -> None:
    """Check codes and scales against a format.

    Raises:
        CacheError: says what was found and what the format says.
    """
    groups = format.n_groups(codes[-1])
    expected = (*codes[:-1], groups) if groups else None
    if str(stored) != format.stored or scale != expected:
        raise CacheError(
            f"features are {stored}{list(codes)} with scales of shape {scale}; {format.dtype} with group "
            f"{format.group} is {format.stored} with scales of shape {expected}"
        )


def float8_values() -> Floats:
    """The 256 values of float8_e4m3fn by their bits, [256]."""
    bits = np.arange(256)
    exponent, mantissa = (bits >> 3) & 15, (bits & 7) / 8
    value = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7.0))
    value[(bits & 127) == 127] = np.nan
    return np.where(bits > 127, -value, value).astype(np.float32)


_FLOAT8 = float8_values()


def _values(codes: NDArray[Any], format: FeatureFormat) -> Floats:
    """What the codes stand for before any scale; always a new array."""
    if format.dtype == "bfloat16":
        wide: Floats = (codes.astype(np.uint32) << 16).view(np.float32)
        return wide
    if format.dtype == "float8_e4m3fn":
        looked_up: Floats = _FLOAT8[codes]
        return looked_up
    return codes.astype(np.float32)
