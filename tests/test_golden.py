"""Parity with the reference implementation, on `golden/reference_a` of the shared folder (figure 1 of the issue).

The last tests show that the tolerances mean something: each of the three faults that go wrong without being
noticed is far outside.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from stages.checkpoint_format import from_config, load_drafter
from stages.config import TargetConfig
from stages.decode import decode_plain, decode_speculative
from stages.drafter import Drafter, rotary
from stages.export import export_drafter
from stages.features import capture_features
from stages.layout import KeysValues, Layout
from stages.target import Target, load_target

GOLDEN = Path(os.environ.get("DFLASH_SHARED", Path(__file__).parents[2] / "shared")) / "golden" / "reference_a"
TOLERANCE = 1e-4
NEVER: frozenset[int] = frozenset()

pytestmark = pytest.mark.skipif(
    not (GOLDEN / "expected.safetensors").is_file(), reason=f"no reference numbers in {GOLDEN}; set DFLASH_SHARED"
)


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "expected.safetensors")


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TargetConfig(model=str(GOLDEN / "target")), dtype="float32", tokenizer=False)


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return load_drafter(GOLDEN / "drafter").float().eval()


def prompt(expected: dict[str, torch.Tensor]) -> list[int]:
    ids: list[int] = expected["input_ids"][0].tolist()
    return ids


def features(target: Target, layer_ids: tuple[int, ...], ids: list[int]) -> torch.Tensor:
    return capture_features(target, layer_ids, [ids])[0][0]


@torch.no_grad()
def block_hidden(
    target: Target, drafter: Drafter, features_TLD: torch.Tensor, anchor: int, block: torch.Tensor
) -> torch.Tensor:
    layout = Layout(torch.tensor([anchor]), (len(features_TLD),), (1,))
    hidden: torch.Tensor = drafter(features_TLD, target.embed(block.view(1, -1)), layout)[0]
    return hidden


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max())


def test_features_are_those_of_the_reference(expected: dict[str, torch.Tensor], target: Target) -> None:
    found = features(target, (1, 2, 3, 4, 5), prompt(expected)).flatten(1)
    scale = float(expected["features"].abs().max())
    assert found.shape == expected["features"][0].shape
    assert distance(found, expected["features"][0]) <= 1e-5 * scale


def test_block_states_and_logits_are_those_of_the_reference(
    expected: dict[str, torch.Tensor], target: Target, drafter: Drafter
) -> None:
    captured = features(target, drafter.spec.feature_layer_ids, prompt(expected))
    hidden = block_hidden(target, drafter, captured, int(expected["anchor"]), expected["block_ids"])
    torch.testing.assert_close(hidden, expected["block_hidden"][0], rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(hidden @ target.head.T, expected["block_logits"][0], rtol=TOLERANCE, atol=TOLERANCE)


def test_plain_decoding_is_that_of_the_reference(expected: dict[str, torch.Tensor], target: Target) -> None:
    found = decode_plain(target, prompt(expected), 40, NEVER)
    assert prompt(expected) + found.ids == expected["ar_ids"][0].tolist()


def test_speculative_decoding_is_that_of_the_reference(
    expected: dict[str, torch.Tensor], target: Target, drafter: Drafter
) -> None:
    found = decode_speculative(target, drafter, prompt(expected), 40, NEVER)
    assert prompt(expected) + found.ids == expected["spec_ids"][0].tolist()
    assert found.cycles == expected["acceptance_lengths"].tolist()
    assert max(found.cycles) > 1


def test_loading_and_exporting_again_changes_nothing(tmp_path: Path, drafter: Drafter) -> None:
    given = load_file(GOLDEN / "drafter" / "model.safetensors")
    dtype = next(iter(given.values())).dtype
    folder = export_drafter(load_drafter(GOLDEN / "drafter"), tmp_path / "again", card="", dtype=dtype)
    made = load_file(folder / "model.safetensors")
    assert made.keys() == given.keys()
    assert len(made) == 11 * drafter.spec.n_layers + 3 == 58
    assert all(made[name].dtype == given[name].dtype and torch.equal(made[name], given[name]) for name in given)
    before, after = (json.loads((p / "config.json").read_text()) for p in (GOLDEN / "drafter", folder))
    assert from_config(before, "given") == from_config(after, "made") == drafter.spec
    assert after["block_size"] == after["dflash_config"]["block_size"] == drafter.spec.block_size
    assert "auto_map" not in after


def test_the_anchors_own_feature_inside_the_context_is_noticed(
    expected: dict[str, torch.Tensor], target: Target, drafter: Drafter
) -> None:
    anchor = int(expected["anchor"])
    captured = features(target, drafter.spec.feature_layer_ids, prompt(expected))
    with torch.no_grad():
        kv = drafter.context_kv(drafter.context(captured))
        layout = Layout(torch.tensor([anchor]), (len(captured),), (1,))
        embedded = target.embed(expected["block_ids"].view(1, -1))
        own = drafter.blocks(embedded, layout, kv)[0]
        wrong = leaky_blocks(drafter, embedded, layout, kv)
    assert distance(own @ target.head.T, expected["block_logits"][0]) < TOLERANCE
    assert distance(wrong @ target.head.T, expected["block_logits"][0]) > 100 * TOLERANCE


def leaky_blocks(
    drafter: Drafter, embedded: torch.Tensor, layout: Layout, kv: list[KeysValues]
) -> torch.Tensor:
    """`Drafter.blocks` without a mask: all T positions are context, the anchor's own among them."""
    rotation = rotary(layout.slot_positions(embedded.shape[1]), drafter.spec.head_dim, drafter.spec.rope_theta)
    h = embedded[0]
    for layer, context in zip(drafter.layers, kv, strict=True):
        h = layer(h, context, rotation, see_everything)
    out: torch.Tensor = drafter.norm(h)
    return out


def see_everything(queries_RHE: torch.Tensor, context: KeysValues, slots: KeysValues) -> torch.Tensor:
    keys, values = (torch.cat([c, s]).transpose(0, 1)[None] for c, s in zip(context, slots, strict=True))
    queries = queries_RHE.transpose(0, 1)[None]
    return F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)[0].transpose(0, 1)


def test_features_of_the_layer_before_are_noticed(
    expected: dict[str, torch.Tensor], target: Target, drafter: Drafter
) -> None:
    one_early = tuple(i - 1 for i in drafter.spec.feature_layer_ids)
    captured = features(target, one_early, prompt(expected))
    hidden = block_hidden(target, drafter, captured, int(expected["anchor"]), expected["block_ids"])
    assert distance(captured.flatten(1), expected["features"][0]) > 1e-2
    assert distance(hidden @ target.head.T, expected["block_logits"][0]) > 100 * TOLERANCE


def test_shifted_labels_are_noticed(expected: dict[str, torch.Tensor], target: Target, drafter: Drafter) -> None:
    """Slot k predicts token a+k, not a+k+1 as in a causal model."""
    captured = features(target, drafter.spec.feature_layer_ids, prompt(expected))
    hidden = block_hidden(target, drafter, captured, int(expected["anchor"]), expected["block_ids"])
    logits, reference = hidden @ target.head.T, expected["block_logits"][0]
    assert distance(logits[1:], reference[1:]) < TOLERANCE
    assert distance(logits[:-1], reference[1:]) > 100 * TOLERANCE
