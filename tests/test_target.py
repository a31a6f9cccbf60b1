"""The target: what is captured (cases 13 and 15), its head, its MASK id, its hashes, and clear refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from stages.config import TargetConfig
from stages.errors import TargetError
from stages.features import capture_features
from stages.layout import Layout
from stages.target import Target, choose_mask_token, hash_target, load_config, load_target, load_tokenizer, shape_of
from tests.tiny import CHATML, LAYERS, SIZES, VOCAB, make_drafter, make_target, make_tokenizer, model_of, save_target

FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen2": lambda: Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=5),
    "gemma2": lambda: Gemma2Config(**SIZES, sliding_window=5, query_pre_attn_scalar=8),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, sliding_window=5, query_pre_attn_scalar=8),
    "phi3": lambda: Phi3Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
}
SEQUENCES = [[5, 9, 80, 5, 33, 2, 71, 18, 40], [7], [2, 2, 2, 61, 12], [90, 3, 4, 11, 25, 60, 60, 1]]
"""Unequal lengths; pad and eos ids stand among the tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = make_target(tokenizer=make_tokenizer(), vocab_size=320)
    return save_target(tmp_path_factory.mktemp("target"), target)


def config_of(folder: Path) -> TargetConfig:
    return TargetConfig(model=str(folder), dtype="float32")


def copy_with(folder: Path, to: Path, **changes: Any) -> Path:
    """A copy of a target folder with other values in config.json."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return to


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_the_outputs_of_the_chosen_layers(family: str) -> None:
    target = Target(model_of(FAMILIES[family]()), None, family)
    ids = (0, 2, 4)
    with torch.no_grad():
        out = target.decoder(input_ids=torch.tensor([SEQUENCES[0]]), output_hidden_states=True)
    (found,), last = capture_features(target, ids, [SEQUENCES[0]], last_hidden=True)
    for place, layer in enumerate(ids):
        torch.testing.assert_close(found[:, place], out.hidden_states[layer + 1][0], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(found[:, place], out.hidden_states[layer][0], atol=1e-3)
    assert last is not None
    torch.testing.assert_close(last[0], out.last_hidden_state[0], rtol=1e-5, atol=1e-5)
    logits = target.model(input_ids=torch.tensor([SEQUENCES[0]])).logits[0]
    torch.testing.assert_close((last[0] @ target.head.T).argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("last_hidden", [False, True])
def test_a_batch_of_unequal_lengths_gives_what_single_sequences_give(family: str, last_hidden: bool) -> None:
    """Case 15."""
    target = Target(model_of(FAMILIES[family]()), None, family)
    layer_ids = (1, 3, LAYERS - 1)
    together, finals = capture_features(target, layer_ids, SEQUENCES, last_hidden=last_hidden)
    assert (finals is not None) == last_hidden
    for row, ids in enumerate(SEQUENCES):
        (alone,), final = capture_features(target, layer_ids, [ids], last_hidden=last_hidden)
        assert together[row].shape == (len(ids), 3, target.shape.hidden_size)
        torch.testing.assert_close(together[row], alone, rtol=1e-4, atol=1e-4)
        if finals is not None and final is not None:
            torch.testing.assert_close(finals[row], final[0], rtol=1e-4, atol=1e-4)


def test_the_last_layer_is_taken_before_the_final_norm() -> None:
    target = make_target()
    (found,), final = capture_features(target, (LAYERS - 1,), [SEQUENCES[0]], last_hidden=True)
    assert final is not None
    torch.testing.assert_close(target.decoder.norm(found[:, 0]), final[0])  # type: ignore[operator]
    assert not torch.allclose(found[:, 0], final[0], atol=1e-3)


@pytest.mark.parametrize(("last_hidden", "expected"), [(False, [0, 1, 2, 3]), (True, [0, 1, 2, 3, 4, 5, "norm"])])
def test_nothing_runs_behind_the_last_chosen_layer(last_hidden: bool, expected: list[Any]) -> None:
    target = make_target()
    ran: list[Any] = []
    named = [*enumerate(target.layers), ("norm", target.decoder.norm), ("head", target.model.lm_head)]
    for name, module in named:
        module.register_forward_pre_hook(lambda *_, name=name: ran.append(name))  # type: ignore[union-attr]
    capture_features(target, (1, 3), SEQUENCES, last_hidden=last_hidden)
    assert ran == expected
    assert not any(layer._forward_hooks for layer in target.layers)  # none is left behind


def test_a_failure_inside_the_pass_is_not_swallowed() -> None:
    target = make_target()
    with pytest.raises(IndexError):
        capture_features(target, (1,), [[VOCAB + 5]])
    assert not any(layer._forward_hooks for layer in target.layers)


def test_a_tied_head_is_the_embedding(folder: Path) -> None:
    """Case 13: the checkpoint has no head, and none is made up."""
    assert not [name for name in load_file(folder / "model.safetensors") if "lm_head" in name]
    target = load_target(config_of(folder))
    embedding = target.model.get_input_embeddings().weight  # type: ignore[operator]
    assert target.head.data_ptr() == embedding.data_ptr()
    assert target.dtype == torch.float32
    assert not target.head.requires_grad


def test_a_random_head_gives_other_drafts() -> None:
    tied, untied = make_target(), make_target(tie_word_embeddings=False)
    untied.model.model.load_state_dict(tied.model.model.state_dict())  # type: ignore[union-attr,operator]
    drafter = make_drafter()
    (features,), _ = capture_features(tied, drafter.spec.feature_layer_ids, [SEQUENCES[0]])
    block = torch.tensor([[7, 96, 96, 96]])
    layout = Layout(torch.tensor([5]), (len(features),), (1,))
    with torch.inference_mode():
        hidden = [drafter(features, t.embed(block), layout) for t in (tied, untied)]
    assert torch.equal(hidden[0], hidden[1])
    logits = [h @ t.head.T for h, t in zip(hidden, (tied, untied), strict=True)]
    assert float((logits[0] - logits[1]).abs().max()) > 0.1


def test_a_missing_head_is_refused(folder: Path, tmp_path: Path) -> None:
    untied = copy_with(folder, tmp_path / "untied", tie_word_embeddings=False)
    with pytest.raises(TargetError, match=r"lacks 1 weights .*lm_head\.weight.*tie_word_embeddings"):
        load_target(config_of(untied))


def test_a_tied_config_with_another_head_is_refused() -> None:
    model = make_target().model
    model.lm_head = torch.nn.Linear(32, VOCAB, bias=False)
    with pytest.raises(TargetError, match="the loaded head is another tensor"):
        Target(model, None, "tiny")


def test_a_head_with_a_bias_is_refused() -> None:
    model = make_target(tie_word_embeddings=False).model
    model.lm_head = torch.nn.Linear(32, VOCAB)
    with pytest.raises(TargetError, match="a Linear without bias is needed"):
        Target(model, None, "tiny")


@pytest.mark.parametrize("what", ["absent", "empty", "torn", "sizes", "type", "pickled"])
def test_a_target_that_cannot_be_loaded_is_one_clear_error(what: str, folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    if what == "empty":
        broken.mkdir()
    elif what != "absent":
        changes = {"sizes": {"intermediate_size": 50}, "type": {"model_type": "nonesuch"}}.get(what, {})
        copy_with(folder, broken, **changes)
        weights = broken / "model.safetensors"
        if what == "torn":
            weights.write_bytes(weights.read_bytes()[:-100])
        elif what == "pickled":
            weights.rename(broken / "pytorch_model.bin")
    with pytest.raises(TargetError, match="no such folder" if what == "absent" else "cannot be loaded"):
        load_target(config_of(broken))
    if what in ("absent", "empty", "type"):
        with pytest.raises(TargetError):
            load_config(config_of(broken))


def test_a_folder_without_a_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    """transformers would make up a tokenizer of one token."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, bare)
    with pytest.raises(TargetError, match=r"has no tokenizer: .*tokenizer\.json"):
        load_tokenizer(config_of(bare))
    with pytest.raises(TargetError, match="has no tokenizer"):
        load_target(config_of(bare))
    assert load_target(config_of(bare), tokenizer=False).tokenizer is None
    assert len(load_tokenizer(config_of(folder))) == 259


@pytest.mark.parametrize("ids", [(1, 6), (-1, 2), (3, 3), (4, 2), ()])
def test_layers_that_the_target_lacks_are_refused(ids: tuple[int, ...]) -> None:
    shape = shape_of(Qwen3Config(**SIZES))
    assert shape.layer_ids(3, (0, 5)) == (0, 5)
    assert shape.layer_ids(3, None) == (1, 2, 3)
    with pytest.raises(TargetError, match=r"target of 6 layers.*cache\.layer_ids"):
        shape.layer_ids(3, ids)


def test_a_structure_without_decoder_layers_is_refused() -> None:
    model = make_target().model
    model.config.num_hidden_layers = 7
    with pytest.raises(TargetError, match="no list of 7 decoder layers"):
        Target(model, None, "tiny")


RESERVED = ["<|reserved_special_token_0|>", "<|reserved_special_token_1|>"]


def test_the_tokenizers_own_mask_token_comes_first() -> None:
    tokenizer = make_tokenizer(extra_specials=["<mask>", *RESERVED], mask_token="<mask>")
    found = choose_mask_token(tokenizer, 400)
    assert found.id == tokenizer.convert_tokens_to_ids("<mask>")
    assert "own mask token" in found.source


def test_then_the_first_spare_row_of_a_padded_vocabulary() -> None:
    found = choose_mask_token(make_tokenizer(extra_specials=RESERVED), 320)
    assert found.id == 261  # 256 bytes, 3 + 2 special tokens
    assert "past the tokenizer's last id" in found.source


def test_then_a_reserved_token() -> None:
    tokenizer = make_tokenizer(extra_specials=["<|tool|>", *RESERVED])
    found = choose_mask_token(tokenizer, len(tokenizer))
    assert found.id == tokenizer.convert_tokens_to_ids(RESERVED[0])
    assert RESERVED[0] in found.source


def test_then_a_special_token_that_the_template_does_not_use() -> None:
    tokenizer = make_tokenizer(extra_specials=["<|tool|>"], unk_token="<|endoftext|>")
    found = choose_mask_token(tokenizer, len(tokenizer))
    assert found.id == tokenizer.convert_tokens_to_ids("<|tool|>")


@pytest.mark.parametrize("role", ["pad_token", "eos_token", "bos_token", "unk_token"])
def test_it_is_never_an_id_with_a_role(role: str) -> None:
    named = {"pad_token": "<|im_end|>", "eos_token": "<|im_end|>", "mask_token": RESERVED[0], role: RESERVED[0]}
    tokenizer = make_tokenizer(extra_specials=RESERVED, **named)
    assert choose_mask_token(tokenizer, len(tokenizer)).id == tokenizer.convert_tokens_to_ids(RESERVED[1])


def test_without_any_the_error_names_the_option() -> None:
    tokenizer = make_tokenizer(template=CHATML, unk_token="<|endoftext|>")
    with pytest.raises(TargetError, match=r"set target\.mask_token_id"):
        choose_mask_token(tokenizer, len(tokenizer))
    assert choose_mask_token(tokenizer, len(tokenizer), override=200).id == 200


def test_a_chosen_mask_id_is_checked() -> None:
    tokenizer = make_tokenizer()
    for wrong, words in [(-1, "rows 0…319"), (320, "rows 0…319"), (tokenizer.eos_token_id, "pad, eos, bos or unk")]:
        with pytest.raises(TargetError, match=rf"target\.mask_token_id is {wrong}.*{words}"):
            choose_mask_token(tokenizer, 320, override=wrong)


def test_hashes_do_not_depend_on_where_the_folder_lies(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "copy"
    shutil.copytree(folder, moved)
    first, second = (hash_target(config_of(f), load_tokenizer(config_of(f))) for f in (folder, moved))
    assert first == second
    weights = moved / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    changed = hash_target(config_of(moved), load_tokenizer(config_of(moved)))
    assert changed.weights != first.weights
    assert (changed.tokenizer, changed.chat_template) == (first.tokenizer, first.chat_template)


def test_the_tokenizers_hash_does_not_depend_on_what_it_was_used_for(folder: Path) -> None:
    config = config_of(folder)
    tokenizer = load_tokenizer(config)
    before = hash_target(config, tokenizer)
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert hash_target(config, tokenizer) == before
    other = make_tokenizer(template=CHATML + " ", extra_specials=RESERVED)
    after = hash_target(config, other)
    assert after.weights == before.weights
    assert after.tokenizer != before.tokenizer
    assert after.chat_template != before.chat_template


def test_weights_in_no_safetensors_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"no \.safetensors weights"):
        hash_target(TargetConfig(model=str(tmp_path)), make_tokenizer())
