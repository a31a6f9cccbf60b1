"""What training starts from: the target's two ends, and a drafter that exists."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline import train_step
from stages import ends
from stages.checkpoint_format import CheckpointError, save_drafter
from stages.config import DrafterConfig, TargetConfig, TrainConfig
from stages.drafter import Drafter
from stages.ends import load_ends
from stages.errors import TargetError, TrainingError
from stages.initial import initial_sha256, read_initial, spec_from
from stages.target import load_target
from tests.tiny import make_spec, make_target, save_target

CPU = torch.device("cpu")


def saved(folder: Path, **changes: Any) -> TargetConfig:
    save_target(folder, make_target(**changes))
    return TargetConfig(model=str(folder))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bf16", [True, False])
def test_the_ends_are_the_targets_and_nothing_else_is_loaded(
    tied: bool, bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = saved(tmp_path / "target", tie_word_embeddings=tied)
    whole = load_target(config, dtype="bfloat16" if bf16 else "float32", tokenizer=False)
    monkeypatch.setattr(ends, "load_target", lambda *_args, **_kwargs: pytest.fail("the whole target was loaded"))
    found = load_ends(config, CPU, bf16=bf16)
    ids = torch.arange(whole.shape.vocab_size)
    assert torch.equal(found.embed(ids), whole.embed(ids))
    assert torch.equal(found.head_VD, whole.head)
    assert found.head_VD.dtype == (torch.bfloat16 if bf16 else torch.float32)
    assert not found.head_VD.requires_grad
    assert not any(p.requires_grad for p in found.embed.parameters())


def test_an_embedding_that_scales_is_taken_from_the_whole_model(tmp_path: Path) -> None:
    """Gemma 3 multiplies embeddings by √D inside the embedding module."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8,
             "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": None}
    Gemma3ForCausalLM(Gemma3TextConfig(**sizes)).save_pretrained(tmp_path)
    config = TargetConfig(model=str(tmp_path))
    found, whole = load_ends(config, CPU, bf16=False), load_target(config, dtype="float32", tokenizer=False)
    ids = torch.arange(40)
    assert torch.equal(found.embed(ids), whole.embed(ids))
    assert torch.equal(found.head_VD, whole.head)


def test_a_head_that_is_missing_is_refused(tmp_path: Path) -> None:
    """Case 13: not tied, and the checkpoint has none."""
    config = saved(tmp_path, tie_word_embeddings=False)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"lacks 1 weights.*lm_head\.weight"):
        load_ends(config, CPU, bf16=False)


# --- a drafter that exists ---------------------------------------------------------------------------------------


def exported(folder: Path, prefix: str = "", **spec: Any) -> Path:
    folder.mkdir()
    save_drafter(Drafter(make_spec(**spec), seed=7), folder)
    if prefix:
        file = folder / "model.safetensors"
        save_file({f"{prefix}{k}": v for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("prefix", ["", "model."])
def test_training_starts_from_an_exported_drafter(prefix: str, tmp_path: Path) -> None:
    """With the prefix that published folders may have, and with another block size."""
    folder = exported(tmp_path / "drafter", prefix, block_size=8)
    found = read_initial(folder, make_spec(block_size=4))
    expected = Drafter(make_spec(), seed=7)
    assert found.keys() == dict(expected.named_parameters()).keys()
    for name, parameter in expected.named_parameters():
        assert torch.equal(found[name], parameter.detach().bfloat16().float())


def test_a_drafter_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path / "drafter", feature_layer_ids=(0, 1, 2), rope_theta=5.0)
    with pytest.raises(TrainingError) as error:
        read_initial(folder, make_spec())
    assert "layer_types" not in str(error.value)
    for words in ("feature_layer_ids: the folder has (0, 1, 2), this run (1, 3, 4)", "rope_theta", "leave train.init"):
        assert words in str(error.value)
    with pytest.raises(CheckpointError, match="missing"):
        read_initial(tmp_path, make_spec())


def test_identity_is_the_weights_and_not_the_path(tmp_path: Path) -> None:
    hashes = {
        initial_sha256(exported(tmp_path / "a")),
        initial_sha256(exported(tmp_path / "b")),
        initial_sha256(exported(tmp_path / "c", "model.")),
    }
    assert len(hashes) == 1
    other = exported(tmp_path / "d")
    tensors = load_file(other / "model.safetensors")
    tensors["norm.weight"][3] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert initial_sha256(other) not in hashes
    with pytest.raises(TrainingError, match="does not exist"):
        initial_sha256(tmp_path / "nothing")


SLIDING: dict[str, Any] = {
    "layer_types": ("sliding_attention", "full_attention"), "sliding_window": 3, "is_causal": False,
}  # fmt: skip


def test_a_drafter_with_windows_is_trained_with_them(tmp_path: Path) -> None:
    folder = exported(tmp_path / "drafter", **SLIDING)
    found = spec_from(folder, make_spec(block_size=8))
    assert found == make_spec(block_size=8, **SLIDING)
    assert read_initial(folder, found).keys() == dict(Drafter(found).named_parameters()).keys()
    assert spec_from(exported(tmp_path / "full"), make_spec()) == make_spec()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (SLIDING, "layer_types: the folder has ('sliding_attention', 'full_attention'), this run ('full_attention', "),
        (SLIDING, "sliding_window: the folder has 3, this run None"),
        (SLIDING, "is_causal: the folder has False, this run True"),
        ({"n_target_layers": 9}, "n_target_layers: the folder has 9, this run"),
    ],
)
def test_weights_that_mean_something_else_are_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as error:
        read_initial(exported(tmp_path / "drafter", **change), make_spec())
    assert words in str(error.value)


def test_another_number_of_layers_or_no_config_is_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path / "drafter")
    with pytest.raises(TrainingError, match="n_layers: the folder has 2, this run 3"):
        spec_from(folder, make_spec(n_layers=3))
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        spec_from(folder, make_spec())
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        initial_sha256(folder)


def test_windows_are_identity(tmp_path: Path) -> None:
    folder = exported(tmp_path / "drafter", **SLIDING)
    hashes = {initial_sha256(folder), initial_sha256(exported(tmp_path / "full"))}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 4}))
    assert len(hashes | {initial_sha256(folder)}) == 3


@pytest.mark.parametrize("given", ["drafter", "~/drafter"])
def test_init_from_is_relative_to_the_recipe(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = exported(tmp_path / "drafter")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(train_step, "cache_identity", lambda _run: SimpleNamespace(to_json=dict))
    made_of: dict[str, Any] = {}
    run: Any = SimpleNamespace(cache="cache", pin=lambda _stage, _folder, found: made_of.update(found) or "f")
    recipe: Any = SimpleNamespace(
        base=tmp_path if given == "drafter" else elsewhere, train=TrainConfig(init_from=given), seed=0,
        drafter=DrafterConfig(), target=TargetConfig(model="m"),
    )
    job = train_step.job_in(run, recipe, tmp_path / "train")
    assert job.train == dataclasses.replace(recipe.train, init_from=str(folder))
    assert made_of["initial_sha256"] == initial_sha256(folder)
