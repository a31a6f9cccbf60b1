"""Features from the target's states to stored codes and back, on whatever device they are.

Shapes: T tokens, L feature layers, D hidden, G groups of channels, N = all leading dimensions together.
What codes and scales mean is `cache_schema.quantized`'s; this is how they come about.

Work goes through the states in blocks of rows, so the float32 copy that rounding needs stays in a core's cache
(CPU) or small (GPU), whatever the sample's length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cache_schema.quantized import FeatureFormat, float8_values, require_shapes
from stages.errors import SampleRefused

_TORCH = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn, "int8": torch.int8,
}
_BITS_OF = {"bfloat16": torch.uint16, "float8_e4m3fn": torch.uint8}
"""Types that numpy lacks, and the integer of the same width that carries their bits."""
_CPU_BLOCK, _GPU_BLOCK = 1 << 18, 1 << 24
"""Values in a block."""
_SMALLEST_SCALE = 2.0**-126
"""The smallest normal bfloat16: below it a rounded scale could be zero or far off its group's values."""
_LARGEST = torch.finfo(torch.bfloat16).max
_FLOAT8 = torch.from_numpy(float8_values())
_FLOAT8_HALF_STEP = 2.0**-10
"""The largest magnitude that rounds to zero (a tie, so to even)."""


def quantize(states_TLD: torch.Tensor, format: FeatureFormat) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes and scales of states.

    `cache_schema.quantized` says how scales are chosen and why. A group of zeros has scale 0 and codes 0. Rounding is
    to nearest, ties to even. Codes and scales depend on the values alone, not on the device or the block.

    Args:
        states_TLD: [..., L, D], any floating type, any strides.
        format: what to make of it. For bfloat16 and float16 the states are only converted.

    Returns:
        Codes [..., L, D] (int8, float8_e4m3fn, bfloat16 or float16) and scales [..., L, G] float32, or None for
        the types without; both on the states' device.

    Raises:
        SampleRefused: a state is NaN or infinite (reason `non_finite`). Quantised types only: the others keep
            such values, and the cache's writer finds them.
    """
    if not format.quantised:
        return states_TLD.to(_TORCH[format.dtype]).contiguous(), None
    shape, hidden = states_TLD.shape[:-1], states_TLD.shape[-1]
    states_ND = states_TLD.reshape(-1, hidden)
    codes_ND = torch.empty(states_ND.shape, dtype=_TORCH[format.dtype], device=states_ND.device)
    scale_NG = states_ND.new_empty(len(states_ND), format.n_groups(hidden), dtype=torch.float32)
    for rows in _blocks(states_ND):
        for channels, groups, size in _parts(hidden, format):
            wide = states_ND[rows, channels].float().unflatten(-1, (-1, size))
            scale = _scale(wide, format)
            scale_NG[rows, groups] = scale
            codes_ND[rows, channels] = _codes(wide, scale, format).flatten(-2)
    if not bool(torch.isfinite(scale_NG).all()):
        bad = int((~torch.isfinite(scale_NG)).any(-1).sum())
        raise SampleRefused("non_finite", f"NaN or infinite states in {bad} of {len(states_ND)} rows (token, layer)")
    return codes_ND.view(*shape, hidden), scale_NG.view(*shape, -1)


def dequantize(
    codes_TLD: torch.Tensor, scale_TLG: torch.Tensor | None, format: FeatureFormat,
    dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The values that codes stand for, each rounded once to `dtype` (float32: exact).

    Args:
        codes_TLD: [..., L, D] as `quantize` or `from_stored` gave them.
        scale_TLG: [..., L, G] float32 on the same device, or None for the types without.
        format: what the codes mean.
        dtype: of the result. In float16 a value beyond its range becomes its largest.
        out: filled and returned instead of a new tensor; [..., L, D] of `dtype`, e.g. rows of a padded batch.
    """
    result = torch.empty(codes_TLD.shape, dtype=dtype, device=codes_TLD.device) if out is None else out
    if scale_TLG is None:
        return result.copy_(codes_TLD)
    hidden = codes_TLD.shape[-1]
    flat = result.view(-1, hidden) if result.is_contiguous() else result.new_empty(result.shape).view(-1, hidden)
    codes_ND, scale_NG = codes_TLD.reshape(-1, hidden), scale_TLG.reshape(-1, scale_TLG.shape[-1])
    for rows in _blocks(codes_ND):
        for channels, groups, size in _parts(hidden, format):
            values = _wide(codes_ND[rows, channels]).unflatten(-1, (-1, size))
            values *= scale_NG[rows, groups, None]
            if dtype == torch.float16:
                values.clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max)
            flat[rows, channels] = values.flatten(-2)
    return result if result.is_contiguous() else result.copy_(flat.view(result.shape))


def to_stored(states_TLD: torch.Tensor, format: FeatureFormat) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    """States as the cache stores them: codes [T, L, D] in the stored numpy type, and scales [T, L, G] or None.

    Quantised on the states' device; only codes and scales are copied to the host.

    Raises:
        SampleRefused: as `quantize`.
    """
    codes, scale = quantize(states_TLD, format)
    return stored_bits(codes, format).cpu().numpy(), None if scale is None else scale.cpu().numpy()


def stored_bits(codes_TLD: torch.Tensor, format: FeatureFormat) -> torch.Tensor:
    """Codes in a type that numpy has too: bfloat16 and float8 as the integer of the same width. No copy is made."""
    return codes_TLD.view(_BITS_OF.get(format.dtype, codes_TLD.dtype))


def from_stored(
    codes_TLD: NDArray[Any], scale_TLG: NDArray[Any] | None, format: FeatureFormat
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stored arrays as tensors for `dequantize`, without a copy where the arrays are contiguous.

    Raises:
        CacheError: the arrays are not of the type and shape that the format says.
    """
    require_shapes(codes_TLD.shape, codes_TLD.dtype, None if scale_TLG is None else scale_TLG.shape, format)
    codes = torch.from_numpy(np.ascontiguousarray(codes_TLD)).view(_TORCH[format.dtype])
    return codes, None if scale_TLG is None else torch.from_numpy(np.ascontiguousarray(scale_TLG))


def _scale(wide_NGC: torch.Tensor, format: FeatureFormat) -> torch.Tensor:
    """[N, G] from float32 values in groups. Not finite where a value is not."""
    magnitudes = wide_NGC.abs()
    absmax = magnitudes.amax(-1)
    scale = (absmax / format.largest_code).bfloat16().float()
    if format.median_share is not None:
        scale = torch.maximum(scale, _median(magnitudes) * format.median_share)
    # Both bounds keep code · scale within bfloat16; infinity is put back behind them.
    highest = torch.tensor(_LARGEST / format.largest_code).view(torch.int32).bitwise_and(-65536).view(torch.float32)
    scale = scale.clamp(_SMALLEST_SCALE, highest.item())
    return torch.where(torch.isfinite(absmax), scale, absmax).masked_fill_(absmax == 0, 0.0)


def _median(magnitudes_NGC: torch.Tensor) -> torch.Tensor:
    """[N, G]: the lower median, rounded to bfloat16: an order statistic, so no device sums it up differently.

    numpy's partition of 16-bit integers takes a tenth of the time of torch's median on a CPU.
    """
    rounded = magnitudes_NGC.bfloat16()
    if rounded.device.type != "cpu":
        return rounded.float().median(-1).values
    middle = (rounded.shape[-1] - 1) // 2
    bits = np.partition(rounded.view(torch.int16).numpy(), middle, axis=-1)[..., middle]
    return torch.from_numpy(np.ascontiguousarray(bits)).view(torch.bfloat16).float()


def _codes(wide_NGC: torch.Tensor, scale_NG: torch.Tensor, format: FeatureFormat) -> torch.Tensor:
    """Codes of float32 values in groups; divides (a product with the reciprocal would round twice)."""
    safe = torch.where(scale_NG > 0, scale_NG, 1.0)[..., None]
    ratio = (wide_NGC / safe).clamp_(-format.largest_code, format.largest_code)
    if format.dtype == "int8":
        return ratio.round_().to(torch.int8)
    # One zero, not two: the sign of a value that rounds to zero would only cost bytes.
    return torch.nn.functional.hardshrink(ratio, _FLOAT8_HALF_STEP).to(torch.float8_e4m3fn)


def _wide(codes: torch.Tensor) -> torch.Tensor:
    """Codes as float32. torch converts float8 one by one on a CPU (2.8 s per 0.5 G values); the table takes 0.6 s."""
    if codes.dtype == torch.float8_e4m3fn and codes.device.type == "cpu":
        bits = codes.view(torch.uint8).to(torch.int32)
        return _FLOAT8.index_select(0, bits.flatten()).view(codes.shape)
    return codes.float()


def _blocks(rows_ND: torch.Tensor) -> Iterator[slice]:
    values = _CPU_BLOCK if rows_ND.device.type == "cpu" else _GPU_BLOCK
    n = max(1, values // max(1, rows_ND.shape[1]))
    for start in range(0, len(rows_ND), n):
        yield slice(start, start + n)


def _parts(hidden: int, format: FeatureFormat) -> list[tuple[slice, slice, int]]:
    """Channels, their groups and the groups' size: the whole groups, then the smaller last one if there is one."""
    size = min(format.group or hidden, hidden)
    whole = hidden // size
    parts = [(slice(0, whole * size), slice(0, whole), size)]
    if hidden % size:
        parts.append((slice(whole * size, hidden), slice(whole, whole + 1), hidden % size))
    return parts
