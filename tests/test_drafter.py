"""The drafter: who sees what (figure 3, case 9), training pass against drafting pass, and its spec (case 14).

Shapes: T tokens, A anchors, B block size, Q = A·B slots, L feature layers, D hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Phi3Config, Qwen3Config

from stages.attention_dense import visible_mask
from stages.batch import TrainingSample, make_batch
from stages.checkpoint_format import CheckpointError, from_config, load_drafter, to_config
from stages.config import ConfigError, DrafterConfig
from stages.drafter import Drafter, spec_for_target
from stages.export import export_drafter
from stages.layout import Layout, visible_spans
from stages.sessions import DraftSession
from tests.tiny import FEATURE_LAYERS, HIDDEN, MASK_ID, SIZES, VOCAB, make_drafter, make_spec, make_target

TARGET = make_target()
FULL = make_drafter(n_layers=3)
SLIDING = make_drafter(n_layers=3, layer_types=("sliding_attention", "full_attention", "sliding_attention"),
                       sliding_window=5)  # fmt: skip
ALL_SLIDING = make_drafter(n_layers=2, layer_types=("sliding_attention",) * 2, sliding_window=3, is_causal=False)


@st.composite
def placed_blocks(draw: st.DrawFn) -> tuple[int, list[int], int]:
    """T, anchors (near each other as often as not, so that blocks overlap) and B."""
    n_tokens = draw(st.integers(3, 24))
    anchors = draw(st.sets(st.integers(0, n_tokens - 2), min_size=1, max_size=5))
    return n_tokens, sorted(anchors), draw(st.sampled_from([2, 4, 8]))


def sample_of(features_TLD: torch.Tensor, ids: np.ndarray[Any, Any], anchors: list[int]) -> TrainingSample:
    return TrainingSample("s", features_TLD, ids, np.ones(len(ids), np.uint8), np.array(anchors, np.int64))


def random_sample(n_tokens: int, seed: int) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n_tokens, len(FEATURE_LAYERS), HIDDEN, generator=generator)
    return features, np.random.default_rng(seed).integers(0, VOCAB - 1, n_tokens).astype(np.int32)


@torch.no_grad()
def logits_ABV(drafter: Drafter, sample: TrainingSample, block_size: int) -> torch.Tensor:
    batch = make_batch([sample], block_size, MASK_ID)
    hidden = drafter(batch.features_CLD, batch.embedded(TARGET.embed, torch.float32), batch.layout)
    return hidden @ TARGET.head.T


@pytest.mark.parametrize("drafter", [FULL, SLIDING, ALL_SLIDING], ids=["full", "sliding", "symmetric"])
@settings(max_examples=25, deadline=None)
@given(placed=placed_blocks(), seed=st.integers(0, 1000), which=st.integers(0, 4))
def test_nothing_at_or_after_the_anchor_reaches_a_block(
    drafter: Drafter, placed: tuple[int, list[int], int], seed: int, which: int
) -> None:
    n_tokens, anchors, block_size = placed
    own = which % len(anchors)
    a = anchors[own]
    features, ids = random_sample(n_tokens, seed)
    before = logits_ABV(drafter, sample_of(features, ids, anchors), block_size)[own]
    other_features, other_ids = random_sample(n_tokens, seed + 5000)
    # Every token but the anchor's own: the other blocks' tokens are among them.
    other_ids[a] = ids[a]
    changed = torch.cat([features[:a], 100 * other_features[a:]])
    after = logits_ABV(drafter, sample_of(changed, other_ids, anchors), block_size)[own]
    torch.testing.assert_close(after, before, rtol=0, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(placed=placed_blocks(), seed=st.integers(0, 1000), which=st.integers(0, 4))
def test_a_block_does_not_depend_on_which_other_blocks_there_are(
    placed: tuple[int, list[int], int], seed: int, which: int
) -> None:
    n_tokens, anchors, block_size = placed
    own = which % len(anchors)
    features, ids = random_sample(n_tokens, seed)
    together = logits_ABV(FULL, sample_of(features, ids, anchors), block_size)[own]
    alone = logits_ABV(FULL, sample_of(features, ids, [anchors[own]]), block_size)[0]
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(placed=placed_blocks(), seed=st.integers(0, 1000), where=st.integers(0, 100))
def test_every_feature_before_the_anchor_reaches_every_drafted_slot(
    placed: tuple[int, list[int], int], seed: int, where: int
) -> None:
    n_tokens, anchors, block_size = placed
    features, ids = random_sample(n_tokens, seed)
    changed = features.clone()
    at = where % n_tokens
    changed[at] += 1.0
    before, after = (logits_ABV(FULL, sample_of(f, ids, anchors), block_size) for f in (features, changed))
    moved_A = (after - before).abs().amax(dim=2).amin(dim=1) > 1e-6
    assert moved_A.tolist() == [at < a for a in anchors]


def test_slots_of_a_block_see_each_other_in_both_directions() -> None:
    features, _ = random_sample(10, 1)
    embedded = torch.randn(1, 4, HIDDEN, generator=torch.Generator().manual_seed(2))
    changed = embedded.clone()
    changed[0, 3] += 1.0
    with torch.no_grad():
        before, after = (FULL(features, e, Layout(torch.tensor([5]), (10,), (1,))) for e in (embedded, changed))
    assert ((after - before).abs().amax(dim=-1) > 1e-6).all()


def slow_mask(
    anchors: list[int], block_size: int, n_context: int, window: int | None, causal: bool
) -> list[list[bool]]:
    """The rule of the specification, pair by pair."""
    slots = [(block, a + k) for block, a in enumerate(anchors) for k in range(block_size)]
    rows = []
    for block, q in slots:
        keys = [(k, k < anchors[block]) for k in range(n_context)]
        keys += [(position, other == block) for other, position in slots]
        row = []
        for k, visible in keys:
            if window is not None and causal:
                visible = visible and 0 <= q - k < window
            elif window is not None:
                visible = visible and abs(q - k) < window
            row.append(visible)
        rows.append(row)
    return rows


@settings(max_examples=60, deadline=None)
@given(placed=placed_blocks(), window=st.none() | st.integers(1, 12), causal=st.booleans())
def test_the_mask_follows_the_rule(placed: tuple[int, list[int], int], window: int | None, causal: bool) -> None:
    n_tokens, anchors, block_size = placed
    layout = Layout(torch.tensor(anchors), (n_tokens,), (len(anchors),))
    spans = visible_spans(layout, block_size, window=window, causal=causal)
    found = visible_mask(spans, n_tokens, len(anchors) * block_size)
    assert found.tolist() == slow_mask(anchors, block_size, n_tokens, window, causal)
    assert found.any(dim=-1).all()  # a slot that saw nothing would turn into NaN


@pytest.mark.parametrize("drafter", [FULL, SLIDING, ALL_SLIDING], ids=["full", "sliding", "symmetric"])
def test_the_training_pass_is_the_drafting_pass(drafter: Drafter) -> None:
    """Context that grows by verified positions, keys and values kept, gives what one pass over the sequence gives."""
    features, ids = random_sample(23, 3)
    anchors = [1, 4, 6, 7, 12, 20]
    trained = logits_ABV(drafter, sample_of(features, ids, anchors), 4)
    session = DraftSession(drafter, TARGET)
    for a, expected in zip(anchors, trained, strict=True):
        with torch.inference_mode():
            new = slice(session.kv.longest, a)
            session.extend(features[None, new], [a - new.start], torch.as_tensor(ids)[None, new])
            logits = session.draft(torch.tensor([int(ids[a])]), 4)[0]
        torch.testing.assert_close(logits, expected[1:], rtol=1e-5, atol=1e-5)


def test_an_anchor_at_the_very_first_token_has_no_context() -> None:
    features, ids = random_sample(5, 4)
    assert torch.isfinite(logits_ABV(FULL, sample_of(features, ids, [0]), 4)).all()


def test_samples_packed_together_do_not_see_each_other() -> None:
    samples = [sample_of(*random_sample(n, n), anchors) for n, anchors in ((20, [3, 9, 17]), (9, [2, 5]), (6, [0]))]
    batch = make_batch(samples, 4, MASK_ID)
    assert (batch.layout.n_context, batch.layout.n_blocks) == ((17, 5, 0), (3, 2, 1))
    assert batch.layout.anchors_N.tolist() == [3, 9, 17, 2, 5, 0]
    with torch.no_grad():
        hidden = FULL(batch.features_CLD, batch.embedded(TARGET.embed, torch.float32), batch.layout)
    for together, sample in zip(hidden.split(batch.layout.n_blocks), samples, strict=True):
        alone = logits_ABV(FULL, sample, 4)
        torch.testing.assert_close(together @ TARGET.head.T, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**SIZES, rope_parameters={
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 5e5,
        }),
        Phi3Config(**SIZES, partial_rotary_factor=0.5, rope_parameters={
            "rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5,
        }),
    ],
    ids=["scaled", "partial"],
)  # fmt: skip
def test_a_targets_special_rotation_is_not_copied(config: Any, tmp_path: Path) -> None:
    """Case 14: what is exported is what was trained, and the files give the same logits."""
    spec = spec_for_target(DrafterConfig(n_layers=2, block_size=4), config, feature_layer_ids=FEATURE_LAYERS,
                           mask_token_id=MASK_ID)  # fmt: skip
    written = to_config(spec)
    assert spec.rope_theta == 5e5
    assert written["rope_parameters"] == {"rope_theta": 5e5, "rope_type": "default"}
    assert written["rope_scaling"] is None
    assert "partial_rotary_factor" not in json.dumps(written)
    drafter = Drafter(spec, seed=3).eval()
    loaded = load_drafter(export_drafter(drafter, tmp_path / "out", card="", dtype=torch.float32))
    features, ids = random_sample(12, 7)
    sample = sample_of(features, ids, [4, 7])
    assert torch.equal(logits_ABV(loaded, sample, 4), logits_ABV(drafter, sample, 4))


def test_a_drafter_folder_with_a_special_rotation_is_refused() -> None:
    config = to_config(make_spec())
    for change in ({"partial_rotary_factor": 0.5}, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}):
        with pytest.raises(CheckpointError, match="plain rotary embeddings"):
            from_config(config | change, "config.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dflash_config": [1]}, r"dflash_config is \[1\], expected an object"),
        ({"rope_parameters": "default"}, 'rope_parameters is "default", expected an object'),
        ({"rope_parameters": {"rope_theta": "1e6"}}, 'rope_theta is "1e6", expected a number above 0'),
        ({"hidden_size": "32"}, 'hidden_size is "32", expected an integer, 1 or above'),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0, expected an integer"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, expected an integer, 1 or above"),
        ({"head_dim": True}, "head_dim is true, expected an integer"),
        ({"block_size": 1, "dflash_config.block_size": 1}, "block_size is 1, expected an integer, 2 or above"),
        ({"dflash_config.target_layer_ids": [True, 2]}, "target_layer_ids is .true, 2., expected a rising list"),
        ({"dflash_config.target_layer_ids": [3, 1]}, "target_layer_ids is .3, 1., expected a rising list"),
        ({"dflash_config.target_layer_ids": [-1, 1]}, "target_layer_ids is .-1, 1., expected a rising list"),
        ({"dflash_config.target_layer_ids": "1"}, 'target_layer_ids is "1", expected a rising list'),
        ({"dflash_config.mask_token_id": -1}, "dflash_config: mask_token_id is -1, expected an integer, 0 or above"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, expected a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN, expected a number"),
        ({"layer_types": ["full_attention", "chunked"]}, "layer_types is .*expected a list of full_attention and"),
        ({"layer_types": "full_attention"}, "layer_types is .*expected a list"),
        ({"sliding_window": "64"}, 'sliding_window is "64", expected an integer'),
        ({"is_causal": "no"}, 'is_causal is "no", expected true or false'),
        ({"initializer_range": "x"}, 'initializer_range is "x", expected a number'),
    ],
)
def test_a_config_value_of_another_kind_is_named(change: dict[str, Any], words: str) -> None:
    config = to_config(make_spec())
    for dotted, value in change.items():
        *section, key = dotted.split(".")
        (config[section[0]] if section else config)[key] = value
    with pytest.raises(CheckpointError, match=f"^config.json: .*{words}"):
        from_config(config, "config.json")


def test_a_config_may_leave_out_what_has_a_default() -> None:
    config = to_config(make_spec())
    left_out = {"initializer_range": None, "head_dim": None, "rope_parameters": None}
    found = from_config(config | left_out, "config.json")
    assert found == dataclasses.replace(from_config(config, "config.json"), initializer_range=0.02)
    with pytest.raises(CheckpointError, match=r"^config.json: found \[\], expected a drafter's config"):
        from_config([], "config.json")


def test_sizes_come_from_the_target_unless_set() -> None:
    config = Qwen3Config(**SIZES)
    ids: dict[str, Any] = {"feature_layer_ids": FEATURE_LAYERS, "mask_token_id": MASK_ID}
    own = spec_for_target(DrafterConfig(n_layers=3, block_size=8), config, **ids)
    assert (own.hidden_size, own.intermediate_size, own.n_heads, own.n_kv_heads, own.head_dim) == (32, 48, 4, 2, 8)
    assert (own.n_layers, own.block_size, own.vocab_size, own.n_target_layers) == (3, 8, VOCAB, 6)
    given_sizes = DrafterConfig(n_layers=1, block_size=2, intermediate_size=16, n_heads=2, n_kv_heads=1, head_dim=4)
    other = spec_for_target(given_sizes, config, **ids)
    assert (other.intermediate_size, other.n_heads, other.n_kv_heads, other.head_dim) == (16, 2, 1, 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_heads": 4, "n_kv_heads": 3}, "3 key/value heads"),
        ({"head_dim": 7}, "even width"),
        ({"layer_types": ("full_attention",)}, "1 layer_types for 2 layers"),
        ({"layer_types": ("full_attention", "sliding_attention")}, "needs sliding_window"),
        ({"layer_types": ("full_attention", "chunked_attention")}, "chunked_attention"),
    ],
)
def test_an_impossible_spec_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_spec(**changes)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    one, same, other = make_drafter(seed=1), make_drafter(seed=1), make_drafter(seed=2)
    weights = [torch.cat([p.flatten() for p in d.parameters()]) for d in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("spoil", ["missing", "torn", "nan", "shape", "config", "blocks"])
def test_a_damaged_drafter_folder_is_refused(spoil: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = export_drafter(make_drafter(), tmp_path / "out", card="")
    weights, config = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(weights)
    if spoil == "missing":
        del tensors["fc.weight"]
        save_file(tensors, weights)
    elif spoil == "torn":
        weights.write_bytes(weights.read_bytes()[:-40])
    elif spoil == "nan":
        tensors["norm.weight"][0] = float("nan")
        save_file(tensors, weights)
    elif spoil == "shape":
        save_file(tensors | {"norm.weight": torch.ones(5)}, weights)
    elif spoil == "config":
        config.write_text(config.read_text()[:50])
    else:
        config.write_text(json.dumps(json.loads(config.read_text()) | {"block_size": 99}))
    words = {"missing": "fc.weight is missing", "torn": "cannot be read", "nan": "NaN or Inf", "shape": "shape",
             "config": "cannot be read", "blocks": "block_size is 99"}  # fmt: skip
    with pytest.raises(CheckpointError, match=words[spoil]):
        load_drafter(folder)
