"""Starting from a drafter that exists: an exported folder, or a published one (z-lab's layout)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import safe_open

from stages.checkpoint_format import load_drafter
from stages.drafter import DrafterSpec
from stages.errors import TrainingError

_MUST_AGREE = (
    "hidden_size", "intermediate_size", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size",
    "feature_layer_ids", "mask_token_id", "rope_theta", "rms_norm_eps", "attention_bias", "features",
)  # fmt: skip
"""What the weights mean something by. The block size may differ: drafters are used with other ones than their own."""


def read_initial(folder: Path, spec: DrafterSpec) -> dict[str, torch.Tensor]:
    """The weights of an exported drafter in float32, for a drafter of this spec.

    Raises:
        TrainingError: the folder's drafter is another one; names each thing that differs.
        CheckpointError: the folder cannot be read.
    """
    loaded = load_drafter(folder)
    lines = [
        f"{name}: the folder has {getattr(loaded.spec, name)!r}, this run {getattr(spec, name)!r}"
        for name in _MUST_AGREE
        if getattr(loaded.spec, name) != getattr(spec, name)
    ]
    if lines:
        raise TrainingError(
            f"train.init_from: the drafter in {folder} is another one than this run trains:\n  " + "\n  ".join(lines)
            + "\nMake the settings of drafter, cache and target agree with it, or leave train.init_from out"
        )
    return {name: p.detach().float() for name, p in loaded.named_parameters()}


def initial_sha256(folder: Path) -> str:
    """A hash of an exported drafter's weights: names, types, shapes and values, wherever the folder lies.

    Raises:
        TrainingError: there is no such file.
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
    return digest.hexdigest()
