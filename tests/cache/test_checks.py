from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_schema import checks
from cache_schema.checks import LayerCheck, non_finite, require_same_ids
from cache_schema.errors import CacheError, ShardCorrupt, ShardRefused
from tests.cache.builders import HIDDEN, LAYERS, features


@given(st.integers(0, 0xFFFF))
def test_non_finite_agrees_with_numpy_on_every_pattern(bits: int) -> None:
    pattern = np.full((3, 2, 4), 0x3F80, np.uint16)
    pattern[2, 1, 3] = bits
    as_float32 = (pattern.astype(np.uint32) << 16).view(np.float32)
    assert non_finite(pattern, "bfloat16") == (not np.isfinite(as_float32).all())
    assert non_finite(pattern.view(np.float16), "float16") == (not np.isfinite(pattern.view(np.float16)).all())


def test_one_nan_in_a_large_array_is_found_in_any_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_BLOCK_VALUES", 5 * 3 * HIDDEN)
    for row in range(23):
        states = features("x", 23)
        assert not non_finite(states, "bfloat16")
        states[row, 2, 7] = 0x7FC0
        assert non_finite(states, "bfloat16")


def test_unknown_type_is_refused() -> None:
    with pytest.raises(CacheError, match="int4"):
        non_finite(features("x", 2), "int4")


@pytest.mark.parametrize("zero", [0x0000, 0x8000])
def test_zero_layer_is_refused(zero: int) -> None:
    """Case 3."""
    states = features("x", 20)
    states[:, 1] = zero
    with pytest.raises(ShardRefused, match=r"shard-00003, sample 'x' \(20 tokens\): every state of layer 4 is zero"):
        LayerCheck("shard-00003", LAYERS).add("x", states)


@pytest.mark.parametrize("pair", [(0, 1), (0, 2), (1, 2)])
def test_identical_layers_are_refused(pair: tuple[int, int]) -> None:
    """Case 4."""
    states = features("x", 20)
    states[:, pair[1]] = states[:, pair[0]]
    message = f"layers {LAYERS[pair[0]]} and {LAYERS[pair[1]]} are identical"
    with pytest.raises(ShardRefused, match=message):
        LayerCheck("shard-00003", LAYERS).add("x", states)


def test_layers_that_differ_in_one_value_of_the_last_block_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_BLOCK_VALUES", 4 * 3 * HIDDEN)
    states = features("x", 21)
    states[:, 1] = states[:, 0]
    states[20, 1, 0] ^= 1
    states[:20, 2] = 0
    LayerCheck("shard-00003", LAYERS).add("x", states)


def test_zero_first_token_alone_is_no_fault() -> None:
    states = features("x", 5)
    states[0] = 0
    LayerCheck("shard-00003", LAYERS).add("x", states)


def test_one_token_samples_are_judged_together() -> None:
    odd = np.zeros((1, len(LAYERS), HIDDEN), np.uint16)
    check = LayerCheck("shard-00003", LAYERS)
    check.add("x", odd)
    check.finish()
    check.add("y", features("y", 1))
    check.finish()

    check = LayerCheck("shard-00003", LAYERS)
    for sample_id in "xyz":
        states = features(sample_id, 1)
        states[:, 2] = 0
        check.add(sample_id, states)
    with pytest.raises(ShardRefused, match="all 3 samples of one token: every state of layer 7 is zero"):
        check.finish()


def test_ids_that_differ_name_sample_and_position() -> None:
    """Case 18."""
    found, expected = np.array([5, 6, 7, 8], np.int32), np.array([5, 6, 9, 8], np.int32)
    require_same_ids("x", found, found.copy(), "shard-00001")
    with pytest.raises(ShardCorrupt, match=r"shard-00001: .*'x' differ .* at position 2: found 7, expected 9"):
        require_same_ids("x", found, expected, "shard-00001")
    with pytest.raises(ShardCorrupt, match="at position 3: found nothing, expected 8"):
        require_same_ids("x", found[:3], found, "shard-00001")


@pytest.mark.parametrize(
    ("dtype", "bad", "good"),
    [
        ("float16", [0x7C00, 0xFC01], 0x7BFF),
        ("float8_e4m3fn", [0x7F, 0xFF], 0x7E),
        ("float32", [0x7F800000, 0xFFC00000], 0x7F7FFFFF),
    ],
)
def test_non_finite_bits_of_every_type(dtype: str, bad: list[int], good: int) -> None:
    width = {"float16": np.uint16, "float8_e4m3fn": np.uint8, "float32": np.uint32}[dtype]
    values = np.full((3, 2, 4), good, width)
    assert not non_finite(values, dtype)
    for value in bad:
        for at in ((0, 0, 0), (2, 1, 3)):
            damaged = values.copy()
            damaged[at] = value
            assert non_finite(damaged, dtype)


def test_equal_codes_under_other_scales_are_other_states() -> None:
    codes = np.ones((4, 2, 8), np.int8)
    scale = np.ones((4, 2, 1), np.float32)
    with pytest.raises(ShardRefused, match="identical"):
        LayerCheck("shard-00003", (1, 4), "int8").add("x", codes, scale)
    scale[:, 1] = 2
    LayerCheck("shard-00003", (1, 4), "int8").add("x", codes, scale)
    codes[:, 1] = 0
    with pytest.raises(ShardRefused, match="zero"):
        LayerCheck("shard-00003", (1, 4), "int8").add("x", codes, scale)
