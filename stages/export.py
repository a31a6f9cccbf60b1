"""Export: the trained drafter as the checkpoint folder that SGLang and vLLM load, written all or nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from cache_schema.durable import fsync_dir, fsync_tree
from cache_schema.names import random_tag
from stages.checkpoint_format import CheckpointError, load_drafter, save_drafter
from stages.drafter import Drafter, DrafterSpec


def export_drafter(drafter: Drafter, folder: Path, *, card: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the folder under a temporary name, read it back, compare, and rename it into place.

    Args:
        drafter: float32 weights.
        folder: replaced if it exists.
        card: text of README.md (the model card).
        dtype: of the stored weights.

    Raises:
        CheckpointError: it is a variant that no engine runs, or what was read back is not what was trained.
        OSError: as the system gave it (a full disk is ENOSPC); nothing half-written stays.
    """
    require_servable(drafter.spec)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.parent / f".{folder.name}.{random_tag()}"
    partial.mkdir()
    try:
        save_drafter(drafter, partial, dtype)
        (partial / "README.md").write_text(card)
        check_round_trip(drafter, partial, dtype)
        fsync_tree(partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
        fsync_dir(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def require_servable(spec: DrafterSpec) -> None:
    """Check that SGLang and vLLM would run the drafter as it was trained.

    Raises:
        CheckpointError: they would not.
    """
    if spec.features != "inject":
        raise CheckpointError(
            f"a drafter with drafter.features: {spec.features} cannot be exported: SGLang and vLLM inject the target's "
            "features into every layer, and would run it as something else than what was trained. This variant is for "
            "comparison; train one with drafter.features: inject to serve it"
        )


def check_round_trip(drafter: Drafter, folder: Path, dtype: torch.dtype) -> None:
    """Load the folder and compare spec and every tensor with what was trained.

    Raises:
        CheckpointError: names the first thing that differs.
    """
    loaded = load_drafter(folder)
    ours, theirs = _fields(drafter.spec), _fields(loaded.spec)
    for name, value in ours.items():
        found = theirs[name]
        if name == "layer_types":  # empty means that all are full
            value, found = (types or ("full_attention",) * drafter.spec.n_layers for types in (value, found))
        if found != value:
            raise CheckpointError(f"{folder}/config.json: {name} reads back as {found!r}, but {value!r} was trained")
    weights = dict(loaded.named_parameters())
    for name, parameter in drafter.named_parameters():
        if not torch.equal(weights[name].cpu(), parameter.detach().cpu().to(dtype)):
            raise CheckpointError(f"{folder}/model.safetensors: {name} does not read back as it was trained")


def _fields(spec: object) -> dict[str, object]:
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}  # type: ignore[attr-defined]
