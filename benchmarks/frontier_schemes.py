"""The ways of storing features that the frontier compares.

Shapes: T tokens, L feature layers, D hidden, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cache_schema.quantized import FeatureFormat
from stages import quantize as q

CALIBRATION_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way of storing features.

    Attributes:
        format: dtype, bits and group.
        normalised: divide by a static scale per layer and channel before quantising.
    """

    format: FeatureFormat
    normalised: bool = False

    @property
    def name(self) -> str:
        """`bfloat16`, `float8-64`, `float8-5b-D`, `int8-6b-D`, `norm-6b-D` …"""
        if not self.format.quantised:
            return self.format.dtype
        group = self.format.group or "D"
        kind = "float8" if self.format.dtype == "float8_e4m3fn" else "norm" if self.normalised else "int8"
        return f"{kind}-{group}" if self.format.bits is None else f"{kind}-{self.format.bits}b-{group}"

    def store(
        self, states_TLD: torch.Tensor, channel_scale_LD: torch.Tensor
    ) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
        """Codes and scales as the cache would hold them."""
        return q.to_stored(states_TLD.float() / channel_scale_LD if self.normalised else states_TLD, self.format)

    def restore(
        self, codes: NDArray[Any], scale: NDArray[np.float32] | None, channel_scale_LD: torch.Tensor,
        dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        """The states that were stored, rounded to `dtype`."""
        if not self.normalised:
            return q.dequantize(*q.from_stored(codes, scale, self.format), self.format, dtype)
        wide = q.dequantize(*q.from_stored(codes, scale, self.format), self.format, torch.float32)
        return wide.mul_(channel_scale_LD).to(dtype)


def parse(name: str) -> Scheme:
    """The scheme of a name.

    Raises:
        ValueError, CacheError: there is none of that name.
    """
    kind, *rest = name.split("-")
    if kind in ("bfloat16", "float16") and not rest:
        return Scheme(FeatureFormat(dtype=kind))
    group = None if rest[-1] == "D" else int(rest[-1])
    if kind not in ("float8", "int8", "norm"):
        raise ValueError(f"{name!r} is no scheme; known are bfloat16, float16, float8-G and float8-, int8-, norm-Bb-G")
    bits = int(rest[0].removesuffix("b")) if len(rest) > 1 else None
    if kind == "float8":
        return Scheme(FeatureFormat(dtype="float8_e4m3fn", bits=bits, group=group))
    return Scheme(FeatureFormat(dtype="int8", bits=bits, group=group), normalised=kind == "norm")


def channel_scale(states_TLD: torch.Tensor) -> torch.Tensor:
    """A static scale per layer and channel, [L, D] float32: the root mean square over calibration tokens, rounded
    to a power of two (so that products stay exact and rounding noise of the target does not change it)."""
    rms = states_TLD.float().pow(2).mean(0).sqrt().clamp_min(2.0**-60)
    return torch.exp2(rms.log2().round())
