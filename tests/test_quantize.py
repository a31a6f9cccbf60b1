"""Quantised features: what codes mean, how far values move, and that numpy, torch and devices agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_schema.errors import CacheError
from cache_schema.quantized import FeatureFormat, dequantize, float8_values
from stages import quantize as q
from stages.errors import SampleRefused

BFLOAT16_MAX = torch.finfo(torch.bfloat16).max
GROUPS = (None, 1, 3, 8, 32, 24)

int8_formats = st.builds(
    lambda bits, group: FeatureFormat(dtype="int8", bits=bits, group=group), st.integers(4, 8), st.sampled_from(GROUPS)
)
float8_formats = st.builds(
    lambda bits, group: FeatureFormat(dtype="float8_e4m3fn", bits=bits, group=group),
    st.sampled_from([None, 4, 5, 6, 7, 8]),
    st.sampled_from(GROUPS),
)
formats = int8_formats | float8_formats


@st.composite
def states(draw: st.DrawFn) -> torch.Tensor:
    """[T, 2, 24] bfloat16: normal values, magnitudes over the whole range, an outlier, zeros, denormals."""
    seed, exponent = draw(st.integers(0, 2**32)), draw(st.integers(-140, 112))
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(draw(st.integers(1, 5)), 2, 24, generator=rng)
    x = torch.ldexp(x, torch.tensor(exponent))
    if draw(st.booleans()):
        x[..., 7] *= 200
    if draw(st.booleans()):
        x[0, 0] = 0
    if draw(st.booleans()):
        x[-1, 1, 11] = draw(st.sampled_from([BFLOAT16_MAX, -BFLOAT16_MAX, 1e-40, -0.0]))
    return x.bfloat16()


def scale_of_each_value(scale: torch.Tensor, format: FeatureFormat, hidden: int) -> torch.Tensor:
    group = np.arange(hidden) // (format.group or hidden)
    return scale[..., torch.from_numpy(group)].double()


@settings(deadline=None)  # a shared machine may be busy
@given(x=states(), format=int8_formats)
def test_int8_values_move_by_half_a_scale_at_most(x: torch.Tensor, format: FeatureFormat) -> None:
    codes, scale = q.quantize(x, format)
    assert scale is not None
    error = (q.dequantize(codes, scale, format, torch.float32).double() - x.double()).abs()
    assert bool((error <= scale_of_each_value(scale, format, 24) / 2).all())
    assert int(codes.abs().max()) <= format.largest_code


@settings(deadline=None)
@given(x=states(), format=float8_formats)
def test_float8_values_move_by_a_sixteenth_at_most(x: torch.Tensor, format: FeatureFormat) -> None:
    codes, scale = q.quantize(x, format)
    assert scale is not None
    error = (q.dequantize(codes, scale, format, torch.float32).double() - x.double()).abs()
    bound = torch.maximum(x.double().abs() / 16, scale_of_each_value(scale, format, 24) * 2.0**-10)
    assert bool((error <= bound).all())


@settings(deadline=None)
@given(x=states(), format=formats.filter(lambda f: f.median_share is None))  # a median may move with the rounding
def test_quantising_what_was_dequantised_changes_nothing(x: torch.Tensor, format: FeatureFormat) -> None:
    codes, scale = q.quantize(x, format)
    for dtype in (torch.float32, torch.bfloat16):
        if dtype == torch.bfloat16 and format.dtype == "int8":
            continue  # a product has up to 15 significant bits, so rounding it to 8 may move it to another code
        values = q.dequantize(codes, scale, format, dtype)
        again, scale_again = q.quantize(values, format)
        assert torch.equal(again.float(), codes.float())
        # Not the scales: a group whose denormals all became 0 has another one the second time.
        assert torch.equal(q.dequantize(again, scale_again, format, dtype), values)


@settings(deadline=None)
@given(x=states(), format=formats)
def test_numpy_and_torch_dequantise_to_the_same_numbers(x: torch.Tensor, format: FeatureFormat) -> None:
    codes, scale = q.to_stored(x, format)
    wide = dequantize(codes, scale, format)
    assert wide.dtype == np.float32
    assert np.isfinite(wide).all()
    for dtype in (torch.float32, torch.bfloat16):
        back = q.dequantize(*q.from_stored(codes, scale, format), format, dtype)
        assert back.dtype == dtype
        assert bool(torch.isfinite(back).all())
        assert torch.equal(back, torch.from_numpy(wide).to(dtype))


@settings(deadline=None)
@given(x=states(), format=formats)
def test_scales_are_bfloat16_values_and_products_exact(x: torch.Tensor, format: FeatureFormat) -> None:
    codes, scale = q.quantize(x, format)
    assert scale is not None
    assert torch.equal(scale, scale.bfloat16().float())
    exact = codes.double() * scale_of_each_value(scale, format, 24)
    assert torch.equal(q.dequantize(codes, scale, format, torch.float32).double(), exact)
    assert torch.equal(scale_of_each_value(scale, format, 24) == 0, group_absmax(x, format) == 0)


def group_absmax(x: torch.Tensor, format: FeatureFormat) -> torch.Tensor:
    size = format.group or 24
    parts = [p.abs().amax(-1, keepdim=True).expand_as(p) for p in x.split(size, dim=-1)]
    return torch.cat(parts, dim=-1)


@pytest.mark.parametrize(
    "format", [FeatureFormat(dtype="int8", bits=8, group=7), FeatureFormat(dtype="float8_e4m3fn", bits=5)]
)
def test_the_result_does_not_depend_on_blocks_or_strides(
    format: FeatureFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(9, 3, 40, generator=torch.Generator().manual_seed(1))
    codes, scale = q.quantize(x, format)
    monkeypatch.setattr(q, "_CPU_BLOCK", 100)
    for view in (x, x.permute(2, 0, 1).contiguous().permute(1, 2, 0), torch.stack([x, x], -1)[..., 0]):
        codes_again, scale_again = q.quantize(view, format)
        assert torch.equal(codes.view(torch.int8), codes_again.view(torch.int8))
        assert scale is not None
        assert scale_again is not None
        assert torch.equal(scale, scale_again)
    strided = codes.permute(1, 0, 2).contiguous().permute(1, 0, 2)
    assert torch.equal(q.dequantize(strided, scale, format), q.dequantize(codes, scale, format))


def test_dequantise_fills_a_given_tensor() -> None:
    format = FeatureFormat(dtype="int8", bits=6, group=8)
    codes, scale = q.quantize(torch.randn(4, 2, 24), format)
    padded = torch.zeros(6, 2, 24, dtype=torch.bfloat16)
    given = q.dequantize(codes, scale, format, out=padded[:4])
    assert given.data_ptr() == padded.data_ptr()
    assert torch.equal(padded[:4], q.dequantize(codes, scale, format))
    assert not padded[4:].any()
    sideways = torch.zeros(2, 4, 24, dtype=torch.float32).transpose(0, 1)
    q.dequantize(codes, scale, format, torch.float32, out=sideways)
    assert torch.equal(sideways, q.dequantize(codes, scale, format, torch.float32))


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_float8_with_bits_has_a_step_by_the_median_that_outliers_do_not_change(bits: int) -> None:
    format = FeatureFormat(dtype="float8_e4m3fn", bits=bits)
    x = torch.randn(50, 2, 201, generator=torch.Generator().manual_seed(0))
    loud = x.clone()
    loud[..., :2] = 3000.0
    errors = []
    for states in (x, loud):
        codes, scale = q.quantize(states, format)
        assert scale is not None
        median = states.abs().median(-1, keepdim=True).values
        assert torch.allclose(scale * 2.0**-9, median * 2.0 ** (3 - bits), rtol=2**-8)
        error = (q.dequantize(codes, scale, format, torch.float32) - states)[..., 2:]
        errors.append(float(error.norm() / states[..., 2:].norm()))
    assert errors[0] == pytest.approx(errors[1], rel=0.1)
    assert errors[0] < {4: 0.1, 5: 0.055, 6: 0.04}[bits]


def test_float8_with_bits_covers_a_group_whose_median_is_zero() -> None:
    format = FeatureFormat(dtype="float8_e4m3fn", bits=4, group=8)
    x = torch.zeros(1, 1, 8)
    x[..., 0] = 5.0
    back = q.dequantize(*q.quantize(x, format), format, torch.float32)
    assert float(back[0, 0, 0]) == pytest.approx(5.0, rel=1 / 16)
    assert not back[..., 1:].any()


def test_float8_keeps_one_zero() -> None:
    for bits in (None, 4):
        x = torch.tensor([448.0, -1e-9, -0.0, 1.0, -1.0]).view(1, 1, -1)
        codes, _ = q.quantize(x, FeatureFormat(dtype="float8_e4m3fn", bits=bits))
        assert 0x80 not in codes.view(torch.uint8).flatten().tolist()


def test_a_group_that_does_not_divide_leaves_a_smaller_last_one() -> None:
    format = FeatureFormat(dtype="int8", bits=8, group=10)
    x = torch.ones(3, 2, 24)
    x[..., 20:] = 100.0
    codes, scale = q.quantize(x, format)
    assert scale is not None
    assert scale.shape == (3, 2, 3)
    assert format.n_groups(24) == 3
    assert format.group_starts(24).tolist() == [0, 10, 20]
    assert bool((codes == 127).all())
    assert scale[0, 0].tolist() == pytest.approx([1 / 127, 1 / 127, 100 / 127], rel=2**-8)
    whole, one = FeatureFormat(dtype="int8", bits=8, group=100), FeatureFormat(dtype="int8", bits=8)
    assert whole.n_groups(24) == one.n_groups(24) == 1
    assert torch.equal(q.quantize(x, whole)[0], q.quantize(x, one)[0])


def test_a_group_of_zeros_has_scale_and_codes_zero() -> None:
    x = torch.zeros(2, 1, 8)
    x[1, 0, 4:] = 3.0
    for format in (FeatureFormat(dtype="int8", bits=4, group=4), FeatureFormat(dtype="float8_e4m3fn", group=4)):
        codes, scale = q.quantize(x, format)
        assert scale is not None
        assert scale[0].eq(0).all()
        assert scale[1, 0].tolist()[0] == 0.0
        assert torch.equal(q.dequantize(codes, scale, format, torch.float32), codes.float() * 0 + x.sign() * 3) or (
            (q.dequantize(codes, scale, format, torch.float32) - x).abs().max() < 3 * 2**-8
        )


@pytest.mark.parametrize(("bits", "levels"), [(8, 127), (7, 63), (6, 31), (5, 15), (4, 7)])
def test_fewer_bits_are_fewer_levels(bits: int, levels: int) -> None:
    format = FeatureFormat(dtype="int8", bits=bits)
    codes, _ = q.quantize(torch.linspace(-1, 1, 4001).view(1, 1, -1), format)
    assert sorted(set(codes.flatten().tolist())) == list(range(-levels, levels + 1))


def test_ties_go_to_the_even_code() -> None:
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5]).view(1, 1, -1)
    codes, scale = q.quantize(x, FeatureFormat(dtype="int8", bits=8))
    assert scale is not None
    assert scale.item() == 1.0
    assert codes.flatten().tolist() == [127, 0, 2, 2, 0, -2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("format", [FeatureFormat(dtype="int8", bits=8, group=8), FeatureFormat(dtype="float8_e4m3fn")])
def test_states_that_are_not_finite_are_refused(bad: float, format: FeatureFormat) -> None:
    x = torch.randn(3, 2, 20)
    x[1, 0, 17] = bad
    x[2, 1, 3] = bad
    with pytest.raises(SampleRefused, match="2 of 6 rows") as refused:
        q.to_stored(x, format)
    assert refused.value.reason == "non_finite"


def test_float16_results_stay_finite() -> None:
    format = FeatureFormat(dtype="int8", bits=8)
    x = torch.full((1, 1, 4), 65504.0)
    back = q.dequantize(*q.quantize(x, format), format, torch.float16)
    assert bool(torch.isfinite(back).all())


@pytest.mark.parametrize(("dtype", "stored"), [("bfloat16", np.uint16), ("float16", np.float16)])
def test_types_without_scales_are_kept_bit_for_bit(dtype: str, stored: type) -> None:
    format = FeatureFormat(dtype=dtype)
    x = torch.randn(3, 2, 8).to(getattr(torch, dtype))
    codes, scale = q.to_stored(x.permute(1, 0, 2).contiguous().permute(1, 0, 2), format)
    assert scale is None
    assert codes.dtype == stored
    assert format.n_groups(8) == 0
    back = q.dequantize(*q.from_stored(codes, None, format), format, x.dtype)
    assert torch.equal(back, x)
    assert np.array_equal(dequantize(codes, None, format), x.float().numpy())


def test_the_table_of_float8_is_torchs() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    expected = bits.view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(float8_values(), expected, equal_nan=True)
    assert np.array_equal(np.signbit(float8_values()), np.signbit(expected))


def test_bytes_of_a_token() -> None:
    compact = FeatureFormat(dtype="int8", bits=6, group=64)
    assert (compact.code_bytes(5, 576), compact.scale_bytes(5, 576)) == (2880, 180)
    exact = FeatureFormat(dtype="bfloat16")
    assert (exact.code_bytes(5, 576), exact.scale_bytes(5, 576)) == (5760, 0)
    assert FeatureFormat(dtype="float8_e4m3fn").scale_bytes(5, 576) == 20


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"dtype": "int8"}, "bits None"),
        ({"dtype": "int8", "bits": 3}, "4 to 8"),
        ({"dtype": "int8", "bits": 9}, "4 to 8"),
        ({"dtype": "bfloat16", "bits": 8}, "leave it out"),
        ({"dtype": "float8_e4m3fn", "bits": 3}, "4 to 8"),
        ({"dtype": "float16", "group": 64}, "no scales"),
        ({"dtype": "int8", "bits": 8, "group": 0}, "1 or more"),
    ],
)
def test_formats_that_no_cache_can_have(settings: dict[str, object], text: str) -> None:
    with pytest.raises(CacheError, match=text):
        FeatureFormat(**settings)  # type: ignore[arg-type]


def test_arrays_of_another_format_are_refused() -> None:
    format = FeatureFormat(dtype="int8", bits=8, group=4)
    codes, scale = q.to_stored(torch.randn(2, 1, 8), format)
    assert scale is not None
    for other in (codes.view(np.uint8), codes[..., :4]):
        with pytest.raises(CacheError, match="int8 with scales of shape"):
            dequantize(other, scale, format)
    with pytest.raises(CacheError, match="None"):
        q.from_stored(codes, None, format)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "format",
    [
        FeatureFormat(dtype="int8", bits=6, group=100),
        FeatureFormat(dtype="float8_e4m3fn", group=64),
        FeatureFormat(dtype="float8_e4m3fn", bits=5, group=100),
    ],
)
def test_a_gpu_gives_the_same_bits(format: FeatureFormat, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(500, 5, 576, generator=generator) * torch.randn(576, generator=generator).exp() ** 2).to(dtype)
    here, there = q.quantize(x, format), q.quantize(x.cuda(), format)
    assert torch.equal(here[0].view(torch.int8), there[0].cpu().view(torch.int8))
    assert here[1] is not None
    assert there[1] is not None
    assert torch.equal(here[1], there[1].cpu())
    for out in (torch.bfloat16, torch.float32):
        assert torch.equal(q.dequantize(*here, format, out), q.dequantize(*there, format, out).cpu())
