"""What an exported folder must be for the engines, and the published layouts that are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.checkpoint_format import CheckpointError, load_drafter, save_drafter
from stages.drafter import Drafter
from stages.export_check import check_export
from stages.layout import Layout
from stages.target import TargetShape
from tests.tiny import HIDDEN, LAYERS, MASK_ID, VOCAB, make_drafter, make_spec

SHAPE = TargetShape(n_layers=LAYERS, hidden_size=HIDDEN, vocab_size=VOCAB)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_drafter(make_drafter(), tmp_path)
    return tmp_path


def failed(folder: Path, shape: TargetShape | None = SHAPE, trained: Drafter | None = None) -> list[str]:
    return [check.name for check in check_export(folder, shape, trained) if not check.ok]


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["dflash_config"] |= values.pop("flash", {})
    path.write_text(json.dumps({k: v for k, v in (config | values).items() if v != "drop"}))


def retensor(folder: Path, how: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file({n: t.contiguous() for n, t in how(load_file(path)).items()}, path)


def test_what_is_exported_passes_every_check(folder: Path) -> None:
    checks = check_export(folder, SHAPE, make_drafter())
    assert all(check.ok for check in checks), checks
    assert len({check.name for check in checks}) == len(checks) == 17


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"auto_map": {"AutoModel": "x.Y"}}, "no auto_map"),
        ({"model_type": "llama"}, "architecture"),
        ({"flash": {"block_size": None}}, "block_size in both places"),
        ({"rope_theta": 5.0}, "rotary base in both places, no scaling"),
        ({"use_sliding_window": True}, "layer_types and sliding window"),
        ({"max_window_layers": "drop"}, "all keys"),
        ({"dtype": "float32"}, "dtype"),
    ],
)
def test_faults_of_the_config_are_named(folder: Path, values: dict[str, Any], name: str) -> None:
    change(folder, **values)
    assert failed(folder) == [name]


def test_faults_of_the_tensors_are_named(folder: Path) -> None:
    retensor(folder, lambda tensors: {f"model.{n}": t for n, t in tensors.items()})
    assert failed(folder) == ["tensor names"]
    retensor(folder, lambda tensors: {n.removeprefix("model."): t.float() for n, t in tensors.items()})
    assert failed(folder) == ["tensor types"]
    retensor(folder, lambda tensors: {n: t.bfloat16() for n, t in tensors.items() if n != "norm.weight"})
    assert failed(folder) == ["loads"]


def test_a_folder_with_pickled_weights_or_code_or_nothing(folder: Path, tmp_path: Path) -> None:
    (folder / "modeling.py").write_text("")
    assert failed(folder) == ["nothing else in the folder"]
    assert failed(tmp_path / "absent") == ["files", "loads"]


def test_other_weights_than_the_trained_ones_are_noticed(folder: Path) -> None:
    assert failed(folder, trained=make_drafter(seed=1)) == ["computes what was trained"]


def test_a_mask_id_that_the_target_does_not_embed(folder: Path) -> None:
    (found,) = [c for c in check_export(folder, TargetShape(LAYERS, HIDDEN, MASK_ID)) if not c.ok]
    assert f"mask_token_id is {MASK_ID}, but the target embeds ids 0…{MASK_ID - 1}" in found.detail


# --- published layouts -------------------------------------------------------------------------------------------


def states(drafter: Drafter) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(14, 3, HIDDEN, generator=generator)
    block = torch.randn(1, 4, HIDDEN, generator=generator)
    with torch.no_grad():
        out: torch.Tensor = drafter.float()(features, block, Layout(torch.tensor([12]), (14,), (1,)))
    return out


@pytest.mark.parametrize("place", ["top", "inside"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_the_published_layout_is_read(folder: Path, place: str, prefix: str) -> None:
    expected = states(load_drafter(folder))
    change(folder, auto_map={"AutoModel": "dflash.DFlashDraftModel"}, rope_theta="drop", initializer_range="drop",
           **({"flash": {"block_size": None}} if place == "top" else {"block_size": "drop"}))  # fmt: skip
    retensor(folder, lambda tensors: {prefix + n: t for n, t in tensors.items()})
    (folder / "modeling.py").write_text("raise RuntimeError('never run')")
    found = load_drafter(folder)
    assert found.spec == make_spec(layer_types=("full_attention",) * 2, initializer_range=0.02)
    assert torch.equal(states(found), expected)


def test_sliding_layers_by_every_name_in_use(tmp_path: Path) -> None:
    sliding = ("sliding_attention",) * 2
    both = {"layer_types": sliding, "sliding_window": 5}
    drafters = {causal: make_drafter(**both, is_causal=causal) for causal in (True, False)}
    for causal, drafter in drafters.items():
        save_drafter(drafter, tmp_path)
        assert load_drafter(tmp_path).spec == drafter.spec
        config = json.loads((tmp_path / "config.json").read_text())
        # What vLLM reads: `is_causal` at the top, else `dflash_config.causal`, else sliding layers are causal.
        said = config.get("is_causal", config["dflash_config"].get("causal", True))
        assert said is causal
    change(tmp_path, layer_types=None, sliding_window=None, is_causal="drop",
           flash={"use_swa": True, "swa_window_size": 5, "is_causal": None, "causal": None})  # fmt: skip
    assert load_drafter(tmp_path).spec == drafters[False].spec
    assert not torch.equal(states(drafters[True]), states(drafters[False]))


def test_layers_that_are_not_named_follow_the_rule(folder: Path) -> None:
    retensor(folder, lambda tensors: tensors | {"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN, dtype=torch.bfloat16)})
    change(folder, flash={"target_layer_ids": None})
    assert load_drafter(folder).spec.feature_layer_ids == (1, 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"flash": {"causal": True}}, "full-attention layers look both ways"),
    ],
)
def test_what_this_drafter_cannot_be_is_refused(folder: Path, values: dict[str, Any], message: str) -> None:
    change(folder, **values)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(folder)


def test_a_mask_embedding_of_its_own_is_refused_unopened(folder: Path) -> None:
    (folder / "mask_embedding.pt").write_bytes(b"no pickle is ever opened")
    with pytest.raises(CheckpointError, match="MASK embedding of its own"):
        load_drafter(folder)
