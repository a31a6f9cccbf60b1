"""Starting from a drafter that exists: an exported folder, or a published one (z-lab's layout)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open

from stages.checkpoint_format import CheckpointError, from_config, load_drafter
from stages.config import ConfigError
from stages.drafter import DrafterSpec
from stages.errors import TrainingError

_MUST_AGREE = (
    "hidden_size", "intermediate_size", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size",
    "feature_layer_ids", "n_target_layers", "mask_token_id", "rope_theta", "rms_norm_eps", "attention_bias", "features",
    "layer_types", "sliding_window", "is_causal",
)  # fmt: skip
"""What the weights mean something by. The block size may differ: drafters are used with other ones than their own."""


def spec_from(folder: Path, spec: DrafterSpec) -> DrafterSpec:
    """The spec of what is trained from the folder's drafter: this one, with the folder's sliding windows.

    No setting of a recipe says which layers look back over a window only, or whether those are causal inside a block;
    weights that were trained with windows go on with the same ones.

    Raises:
        TrainingError: the folder has another number of layers.
        CheckpointError: its `config.json` cannot be read.
    """
    found = _described(folder)
    if found.n_layers != spec.n_layers:
        raise TrainingError(_another(folder, [_difference("n_layers", found, spec)]))
    if "sliding_attention" not in found.layer_types:
        return spec
    return replace(
        spec, layer_types=found.layer_types, sliding_window=found.sliding_window, is_causal=found.is_causal
    )


def _described(folder: Path) -> DrafterSpec:
    file = folder / "config.json"
    try:
        return from_config(json.loads(file.read_text()), str(file))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: config.json is missing; a drafter has it beside model.safetensors") from error
    except (OSError, ValueError, ConfigError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; export or fetch it again") from error


def _meant(name: str, spec: DrafterSpec) -> object:
    """A field's value, one form for each meaning: without a sliding layer, nothing that is said of windows matters."""
    if "sliding_attention" not in spec.layer_types:
        plain = {"layer_types": ("full_attention",) * spec.n_layers, "sliding_window": None, "is_causal": True}
        return plain.get(name, getattr(spec, name))
    return getattr(spec, name)


def _difference(name: str, found: DrafterSpec, spec: DrafterSpec) -> str:
    return f"{name}: the folder has {_meant(name, found)!r}, this run {_meant(name, spec)!r}"


def _another(folder: Path, lines: list[str]) -> str:
    return (
        f"train.init_from: the drafter in {folder} is another one than this run trains:\n  " + "\n  ".join(lines)
        + "\nMake the settings of drafter, cache and target agree with it, or leave train.init_from out"
    )


def read_initial(folder: Path, spec: DrafterSpec) -> dict[str, torch.Tensor]:
    """The weights of an exported drafter in float32, for a drafter of this spec.

    Raises:
        TrainingError: the folder's drafter is another one; names each thing that differs.
        CheckpointError: the folder cannot be read.
    """
    loaded = load_drafter(folder)
    names = [name for name in _MUST_AGREE if _meant(name, loaded.spec) != _meant(name, spec)]
    if names:
        raise TrainingError(_another(folder, [_difference(name, loaded.spec, spec) for name in names]))
    return {name: p.detach().float() for name, p in loaded.named_parameters()}


def initial_sha256(folder: Path) -> str:
    """A hash of an exported drafter's weights (names, types, shapes and values) and windows, wherever the folder lies.

    Raises:
        TrainingError: there is no such file.
        CheckpointError: `config.json` cannot be read.
    """
    file = folder / "model.safetensors"
    if not file.is_file():
        raise TrainingError(f"train.init_from: {file} does not exist; name the folder of an exported drafter")
    digest = hashlib.sha256()
    with safe_open(file, framework="pt") as stored:
        for name in sorted(stored.keys()):
            tensor = stored.get_tensor(name)
            digest.update(f"{name.removeprefix('model.')} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    spec = _described(folder)
    if "sliding_attention" in spec.layer_types:
        digest.update(f"{spec.layer_types} {spec.sliding_window} {spec.is_causal}".encode())
    return digest.hexdigest()
