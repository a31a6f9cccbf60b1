"""Will an exported drafter load and work? What SGLang and vLLM ask of a drafter folder, checked without either.

Each rule is one line of the outcome, so that a user sees what was looked at, not only what failed. Source:
specification, section 5, and vLLM 0.32's `qwen3_dflash` and `speculative`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from stages.checkpoint_format import ARCHITECTURE, CheckpointError, load_drafter, save_drafter, tensor_shapes, to_config
from stages.drafter import Drafter, DrafterSpec
from stages.layout import Layout
from stages.target import TargetShape

FILES = {"config.json", "model.safetensors", "README.md"}


@dataclass(frozen=True, slots=True)
class Check:
    """One rule.

    Attributes:
        name: what was looked at.
        ok: whether it is as it must be.
        detail: what was found.
    """

    name: str
    ok: bool
    detail: str


def misfits(spec: DrafterSpec, shape: TargetShape) -> list[str]:
    """What of a drafter does not fit a target, both values each."""
    wrong = []
    if spec.hidden_size != shape.hidden_size:
        wrong.append(f"hidden_size is {spec.hidden_size}, the target's is {shape.hidden_size}")
    if spec.n_target_layers != shape.n_layers:
        wrong.append(f"num_target_layers is {spec.n_target_layers}, the target has {shape.n_layers}")
    if spec.feature_layer_ids[-1] >= shape.n_layers:
        wrong.append(f"target_layer_ids {list(spec.feature_layer_ids)} reach beyond the target's {shape.n_layers}")
    if not 0 <= spec.mask_token_id < shape.vocab_size:
        wrong.append(f"mask_token_id is {spec.mask_token_id}, but the target embeds ids 0…{shape.vocab_size - 1}")
    if spec.vocab_size != shape.vocab_size:
        wrong.append(f"vocab_size is {spec.vocab_size}, the target's is {shape.vocab_size}")
    return wrong


def require_fit(spec: DrafterSpec, shape: TargetShape, where: str) -> None:
    """Refuse a drafter that was made for a target of another shape.

    Raises:
        CheckpointError: names each thing that differs, both values.
    """
    if wrong := misfits(spec, shape):
        raise CheckpointError(f"{where}: this drafter is for another target: {'; '.join(wrong)}")


def check_export(folder: Path, shape: TargetShape | None = None, trained: Drafter | None = None) -> list[Check]:
    """Look at a drafter folder as the engines would.

    Args:
        folder: what was exported.
        shape: the target's, to check the fit.
        trained: the drafter that was exported, to compare what it computes.

    Returns:
        Every rule with its outcome. Where the folder cannot be read, the rules behind are left out.
    """
    checks = list(_files(folder))
    try:
        config = json.loads((folder / "config.json").read_bytes())
        checks += _config(config)
        checks += _tensors(folder)
        drafter = load_drafter(folder)
    except (OSError, ValueError, CheckpointError, SafetensorError) as error:
        return [*checks, Check("loads", False, str(error))]
    checks.append(Check("loads", True, f"{len(dict(drafter.named_parameters()))} tensors, all finite"))
    if shape is not None:
        wrong = misfits(drafter.spec, shape)
        checks.append(Check("fits the target, MASK id included", not wrong, "; ".join(wrong) or "sizes and ids agree"))
    checks.append(_round_trip(drafter))
    if trained is not None:
        checks.append(_same("computes what was trained", _rounded(trained), drafter))
    return checks


def _files(folder: Path) -> Iterator[Check]:
    found = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    missing = sorted({"config.json", "model.safetensors"} - found)
    yield Check("files", not missing, f"missing: {', '.join(missing)}" if missing else "config.json, model.safetensors")
    other = sorted(found - FILES)
    yield Check("nothing else in the folder", not other, ", ".join(other) or "no code, no pickled weights")


def _config(config: dict[str, Any]) -> Iterator[Check]:
    flash = config.get("dflash_config") or {}
    names, kind = config.get("architectures"), config.get("model_type")
    yield Check("architecture", names == [ARCHITECTURE] and kind == "qwen3", f"{names}, model_type {kind!r}")
    yield Check("no auto_map", "auto_map" not in config, "no code of the model is asked for")
    sizes = config.get("block_size"), flash.get("block_size")
    ok = sizes[0] == sizes[1] and isinstance(sizes[0], int) and sizes[0] >= 2
    yield Check("block_size in both places", ok, f"{sizes[0]} at the top, {sizes[1]} in dflash_config")
    ids = flash.get("target_layer_ids")
    rising = isinstance(ids, list) and len(ids) > 0 and all(a < b for a, b in pairwise(ids))
    yield Check("target_layer_ids and mask_token_id", rising and isinstance(flash.get("mask_token_id"), int),
                f"layers {ids}, MASK {flash.get('mask_token_id')}")  # fmt: skip
    base = (config.get("rope_parameters") or {}).get("rope_theta")
    ok = base is not None and base == config.get("rope_theta") and config.get("rope_scaling") is None
    yield Check("rotary base in both places, no scaling", ok, f"rope_theta {config.get('rope_theta')} and {base}")
    yield _layer_types(config)
    absent = sorted(_needed_keys() - config.keys())
    yield Check("all keys", not absent, f"missing: {', '.join(absent)}" if absent else f"{len(config)} keys")
    yield Check("dtype", config.get("dtype") == "bfloat16", f"{config.get('dtype')!r} in config.json")


def _layer_types(config: dict[str, Any]) -> Check:
    types, window = config.get("layer_types") or [], config.get("sliding_window")
    slides = "sliding_attention" in types
    ok = len(types) == config.get("num_hidden_layers") and slides == bool(config.get("use_sliding_window"))
    ok = ok and (window is not None and window > 0 if slides else window is None)
    return Check("layer_types and sliding window", ok, f"{len(types)} types, window {window}")


def _needed_keys() -> set[str]:
    spec = DrafterSpec(
        hidden_size=2, intermediate_size=2, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=2, vocab_size=2, block_size=2,
        n_target_layers=4, feature_layer_ids=(1,), mask_token_id=1, rope_theta=1.0,
    )  # fmt: skip
    return set(to_config(spec))


def _tensors(folder: Path) -> Iterator[Check]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = list(file.keys())
        kinds = {str(file.get_slice(n).get_dtype()) for n in names}
        shapes = {n: tuple(file.get_slice(n).get_shape()) for n in names}
    expected = tensor_shapes(load_drafter(folder).spec)
    strange = sorted(shapes.keys() ^ expected.keys())
    yield Check("tensor names", not strange, ", ".join(strange[:4]) or f"{len(names)}: no prefix, embedding or head")
    wrong = [n for n in sorted(shapes.keys() & expected.keys()) if shapes[n] != expected[n]]
    yield Check("tensor shapes", not wrong, ", ".join(wrong[:4]) or "as config.json implies")
    yield Check("tensor types", kinds == {"BF16"}, ", ".join(sorted(kinds)))


def _round_trip(drafter: Drafter) -> Check:
    """What was loaded, saved and loaded again, computes the same bits."""
    with tempfile.TemporaryDirectory() as name:
        save_drafter(drafter, Path(name), next(drafter.parameters()).dtype)
        return _same("logits after a round trip", drafter, load_drafter(Path(name)))


def _rounded(drafter: Drafter) -> Drafter:
    """A drafter as it is exported."""
    out = Drafter(drafter.spec)
    out.load_state_dict({n: p.detach().cpu().to(torch.bfloat16) for n, p in drafter.named_parameters()}, assign=True)
    return out


@torch.no_grad()
def _same(name: str, one: Drafter, other: Drafter) -> Check:
    """Two drafters over the same made-up features and blocks."""
    spec, generator = one.spec, torch.Generator().manual_seed(0)
    features = torch.randn(12, len(spec.feature_layer_ids), spec.hidden_size, generator=generator)
    block = torch.randn(2, spec.block_size, spec.hidden_size, generator=generator)
    head = torch.randn(64, spec.hidden_size, generator=generator)
    layout = Layout(torch.tensor([5, 11]), (12,), (2,))
    logits = [d.float()(features, block, layout) @ head.T for d in (_copy(one), _copy(other))]
    equal = torch.equal(logits[0], logits[1])
    return Check(name, equal, "equal to the last bit" if equal else
                 f"differ by up to {float((logits[0] - logits[1]).abs().max()):.3g}")  # fmt: skip


def _copy(drafter: Drafter) -> Drafter:
    out = Drafter(drafter.spec)
    out.load_state_dict({n: p.detach().cpu().clone() for n, p in drafter.named_parameters()}, assign=True)
    return out
