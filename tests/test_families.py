"""Targets of many families: what is captured is transformers' `output_hidden_states`, however samples are batched."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from stages.capture import PackedWay, PaddedWay, Way, take_rows
from stages.probe import choose_way, output_hidden_states
from stages.target import Target
from tests.families import FAMILIES, PACKED
from tests.tiny import LAYERS, VOCAB, model_of

LAYER_IDS = (0, 2, LAYERS - 1)
RNG = np.random.default_rng(3)
SEQUENCES = [RNG.integers(0, VOCAB, n).astype(np.int32) for n in (23, 1, 40, 8)]
SEQUENCES.append(np.concatenate([SEQUENCES[2][:36], SEQUENCES[0][:15]]))
SEQUENCES[3:] = SEQUENCES[:2:-1]
"""Unequal lengths; the fourth begins as the third."""


@cache
def target_of(family: str) -> Target:
    return Target(model_of(FAMILIES[family]()), None, family)


def assert_gives_hidden_states(way: Way, target: Target) -> None:
    """Also after the final norm, and before it for the last layer, where transformers gives the normed states."""
    captured = way.capture(SEQUENCES)
    for i, ids in enumerate(SEQUENCES):
        hidden, final = output_hidden_states(target, ids)
        found = captured.features(i)
        for place, layer in enumerate(LAYER_IDS[:-1]):
            torch.testing.assert_close(found[:, place], hidden[layer + 1], rtol=1e-3, atol=1e-4)
            assert not torch.allclose(found[:, place], hidden[layer], rtol=1e-2, atol=1e-3)
        assert captured.final_RD is not None
        torch.testing.assert_close(take_rows(captured.final_RD, captured.rows[i]), final, rtol=1e-3, atol=1e-4)
        residual = residual_behind_last_layer(target, ids)
        torch.testing.assert_close(found[:, -1], residual, rtol=1e-3, atol=1e-4)


@torch.inference_mode()
def residual_behind_last_layer(target: Target, ids: np.ndarray) -> torch.Tensor:
    """[T, D]: what goes into the final norm."""
    given: list[torch.Tensor] = []
    norms = [m for m in target.decoder.children() if "Norm" in type(m).__name__]
    handle = norms[-1].register_forward_pre_hook(lambda _, args: given.append(args[0]))
    target.decoder(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False)
    handle.remove()
    return given[-1][0]


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_takes_a_way_that_gives_the_hidden_states_of_transformers(family: str) -> None:
    target = target_of(family)
    choice = choose_way(target, LAYER_IDS, last_hidden=True)
    assert choice.way.name == ("packed" if family in PACKED else "padded"), choice.reason
    assert bool(choice.reason) == (family not in PACKED)
    assert_gives_hidden_states(choice.way, target)


@pytest.mark.parametrize("family", PACKED)
def test_padded_batches_give_the_hidden_states_too(family: str) -> None:
    assert_gives_hidden_states(PaddedWay(target_of(family), LAYER_IDS, True), target_of(family))


@pytest.mark.parametrize(("family", "windows"), [("mistral", [5]), ("gpt-oss", [0, 5]), ("llama", [0])])
def test_windows_are_those_of_the_targets_masks(family: str, windows: list[int]) -> None:
    assert PackedWay(target_of(family), LAYER_IDS, False).windows == windows


def test_the_targets_own_attention_is_back_after_a_packed_pass() -> None:
    target = target_of("gpt-oss")
    before = target.decoder.config._attn_implementation  # type: ignore[union-attr]
    PackedWay(target, LAYER_IDS, False).capture(SEQUENCES)
    assert target.decoder.config._attn_implementation == before  # type: ignore[union-attr]
