"""The drafter's checkpoint folder, section 5 of the specification: writing and reading it.

`config.json` plus `model.safetensors`: what SGLang and vLLM load as they are. Reading accepts the
published variants too: an optional `model.` prefix, `block_size` at either place, rotary base under
`rope_theta` or `rope_parameters`, sliding windows by `layer_types` or by `dflash_config.use_swa`, causality under any
of the names that are in use.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from stages.config import ConfigError
from stages.drafter import Drafter, DrafterSpec
from stages.drafter_spec import LAYER_TYPES
from stages.errors import StageError
from stages.layers import feature_layer_ids

ARCHITECTURE = "DFlashDraftModel"


class CheckpointError(StageError):
    """A drafter folder is not what the specification says. The message names file, key and remedy."""


def to_config(spec: DrafterSpec, dtype: str = "bfloat16") -> dict[str, Any]:
    """`config.json` of a drafter."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "attention_bias": spec.attention_bias,
        "attention_dropout": 0.0,
        "block_size": spec.block_size,
        "bos_token_id": spec.bos_token_id,
        "dflash_config": {
            "block_size": spec.block_size,
            "mask_token_id": spec.mask_token_id,
            "target_layer_ids": list(spec.feature_layer_ids),
            # vLLM reads `causal` here, or `is_causal` at the top; the specification has `is_causal`.
            **({} if spec.is_causal else {"is_causal": False, "causal": False}),
        },
        "dtype": dtype,
        "eos_token_id": spec.eos_token_id,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "initializer_range": spec.initializer_range,
        "intermediate_size": spec.intermediate_size,
        **({} if spec.is_causal else {"is_causal": False}),
        "layer_types": list(spec.layer_types) or ["full_attention"] * spec.n_layers,
        "max_position_embeddings": spec.max_position_embeddings,
        "max_window_layers": spec.n_layers,
        "num_attention_heads": spec.n_heads,
        "num_hidden_layers": spec.n_layers,
        "num_key_value_heads": spec.n_kv_heads,
        "num_target_layers": spec.n_target_layers,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_parameters": {"rope_theta": spec.rope_theta, "rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": spec.rope_theta,
        "sliding_window": spec.sliding_window,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "use_cache": True,
        "use_sliding_window": spec.sliding_window is not None,
        "vocab_size": spec.vocab_size,
    }


def from_config(config: Any, where: str) -> DrafterSpec:
    """The spec that a `config.json` describes.

    Args:
        config: what the file holds.
        where: the file, for messages.

    Raises:
        CheckpointError: not a DFlash drafter, a key is missing or its value of another kind, or both block sizes
            differ; names file, key, what was found and what was expected.
    """
    if not isinstance(config, dict):
        raise CheckpointError(f"{where}: found {_shown(config)}, expected a drafter's config, a JSON object")
    _refuse_other_kinds(config, where)
    flash = _object(config, "dflash_config", where)
    if not flash:
        raise CheckpointError(f"{where}: the key 'dflash_config' is missing or empty")
    layer_types, window, causal = _attention(config, flash, where)
    given = {key: value for key, value in config.items() if value is not None}
    hidden_size, n_heads = _integer(config, "hidden_size", where), _integer(config, "num_attention_heads", where)
    return DrafterSpec(
        hidden_size=hidden_size,
        intermediate_size=_integer(config, "intermediate_size", where),
        n_layers=_integer(config, "num_hidden_layers", where),
        n_heads=n_heads,
        n_kv_heads=_integer(config, "num_key_value_heads", where),
        head_dim=_integer({"head_dim": hidden_size // n_heads} | given, "head_dim", where),
        vocab_size=_integer(config, "vocab_size", where),
        block_size=_block_size(config, flash, where),
        n_target_layers=_integer(config, "num_target_layers", where),
        feature_layer_ids=_layer_ids(config, flash, where),
        mask_token_id=_integer(flash, "mask_token_id", f"{where}: dflash_config", least=0),
        rope_theta=_rope_theta(config, where),
        rms_norm_eps=_number(config, "rms_norm_eps", where),
        max_position_embeddings=_integer(config, "max_position_embeddings", where),
        attention_bias=bool(config.get("attention_bias", False)),
        layer_types=layer_types,
        sliding_window=window,
        is_causal=causal,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        bos_token_id=config.get("bos_token_id"),
        eos_token_id=config.get("eos_token_id"),
        initializer_range=_number({"initializer_range": 0.02} | given, "initializer_range", where),
    )


def _refuse_other_kinds(config: dict[str, Any], where: str) -> None:
    if config.get("architectures") != [ARCHITECTURE]:
        raise CheckpointError(f"{where}: architectures is {config.get('architectures')!r}, expected [{ARCHITECTURE!r}]")
    _refuse_other_rotations(config, where)
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{where}: hidden_act is {config['hidden_act']!r}, but a drafter's MLP is SwiGLU (silu)")
    for key in ("attention_bias", "tie_word_embeddings", "is_causal"):
        if config.get(key) not in (None, True, False):
            raise _wrong(where, key, config[key], "true or false")


def _block_size(config: dict[str, Any], flash: dict[str, Any], where: str) -> int:
    inner, outer = flash.get("block_size"), config.get("block_size")
    if inner is not None and outer is not None and inner != outer:
        raise CheckpointError(f"{where}: block_size is {outer}, dflash_config.block_size is {inner}; make them equal")
    if inner is None and outer is None:
        raise CheckpointError(f"{where}: no block_size, neither at the top nor in dflash_config")
    return _integer({"block_size": inner if outer is None else outer}, "block_size", where, least=2)


def _layer_ids(config: dict[str, Any], flash: dict[str, Any], where: str) -> tuple[int, ...]:
    """The target's layers whose states are taken. Folders of before the key mean as many as the drafter has."""
    ids = flash.get("target_layer_ids")
    if ids is None or ids == []:
        n_target_layers = _integer(config, "num_target_layers", where)
        return feature_layer_ids(n_target_layers, _integer(config, "num_hidden_layers", where))
    sound = isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)
    if not sound or any(a >= b for a, b in pairwise(ids)):
        raise _wrong(where, "dflash_config.target_layer_ids", ids, "a rising list of integers, each 0 or above")
    return tuple(ids)


def _rope_theta(config: dict[str, Any], where: str) -> float:
    rope = _object(config, "rope_parameters", where)
    if rope.get("rope_theta") is not None:
        return _number(rope, "rope_theta", f"{where}: rope_parameters")
    return _number(config, "rope_theta", where)


def _attention(config: dict[str, Any], flash: dict[str, Any], where: str) -> tuple[tuple[str, ...], int | None, bool]:
    """Layer types, window, and whether sliding layers are causal in the block; read as vLLM reads them.

    `dflash_config.use_swa` makes every layer sliding where `layer_types` has none that is, and then none is causal
    unless the config says so.
    """
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind not in LAYER_TYPES for kind in layer_types):
        raise _wrong(where, "layer_types", layer_types, f"a list of {' and '.join(LAYER_TYPES)}")
    if config.get("sliding_window") is not None:
        _integer(config, "sliding_window", where)
    if flash.get("swa_window_size") is not None:
        _integer(flash, "swa_window_size", f"{where}: dflash_config")
    layer_types = tuple(layer_types)
    said = [v for v in (config.get("is_causal"), flash.get("is_causal"), flash.get("causal")) if v is not None]
    if "sliding_attention" in layer_types:
        window = flash.get("swa_window_size") or config.get("sliding_window")
        return layer_types, window, bool(said[0]) if said else True
    if flash.get("use_swa"):
        window = flash.get("swa_window_size") or _need(config, "sliding_window", where)
        return ("sliding_attention",) * _need(config, "num_hidden_layers", where), window, bool(said and said[0])
    if flash.get("causal"):
        raise CheckpointError(f"{where}: dflash_config.causal is true, but full-attention layers look both ways")
    return layer_types, None, True


def _need(config: dict[str, Any], key: str, where: str) -> Any:
    if config.get(key) is None:
        raise CheckpointError(f"{where}: the key {key!r} is missing")
    return config[key]


def _object(config: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    """The object under `key`; an empty one where it is absent or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise _wrong(where, key, value, "an object")
    return value or {}


def _integer(config: dict[str, Any], key: str, where: str, least: int = 1) -> int:
    value = _need(config, key, where)
    if type(value) is not int or value < least:
        raise _wrong(where, key, value, f"an integer, {least} or above")
    return value


def _number(config: dict[str, Any], key: str, where: str) -> float:
    """A finite number above 0."""
    value = _need(config, key, where)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise _wrong(where, key, value, "a number above 0")
    return float(value)


def _wrong(where: str, key: str, value: Any, expected: str) -> CheckpointError:
    return CheckpointError(f"{where}: {key} is {_shown(value)}, expected {expected}; export or fetch the drafter again")


def _shown(value: Any) -> str:
    """A value as JSON has it, cut short."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse_other_rotations(config: dict[str, Any], where: str) -> None:
    kinds = [_object(config, k, where).get("rope_type", "default") for k in ("rope_scaling", "rope_parameters")]
    if any(kind != "default" for kind in kinds) or config.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            f"{where}: a drafter has plain rotary embeddings; found rope types {kinds} and "
            f"partial_rotary_factor {config.get('partial_rotary_factor', 1.0)}"
        )


def tensor_shapes(spec: DrafterSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint's tensors: exactly 11·N + 3 (plus biases when the spec has them)."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Drafter(spec).named_parameters()}


def save_drafter(drafter: Drafter, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write `config.json` and `model.safetensors` into an existing folder (the caller renames it into place)."""
    tensors = {name: p.detach().to("cpu", dtype).contiguous() for name, p in sorted(drafter.named_parameters())}
    name = str(dtype).removeprefix("torch.")
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    (folder / "config.json").write_text(json.dumps(to_config(drafter.spec, name), indent=2, sort_keys=True) + "\n")


def load_drafter(folder: Path) -> Drafter:
    """Read a drafter folder; weights come in the dtype that the file has.

    Raises:
        CheckpointError: a file, key or tensor is missing, unexpected, of another shape, or not finite.
    """
    config_file, weights_file = folder / "config.json", folder / "model.safetensors"
    for file in (config_file, weights_file):
        if not file.is_file():
            raise CheckpointError(f"{folder}: {file.name} is missing; a drafter has config.json and model.safetensors")
    try:
        spec = from_config(json.loads(config_file.read_text()), str(config_file))
        stored = load_file(weights_file)
    except (ValueError, SafetensorError, ConfigError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}; export or fetch it again") from error
    apart = sorted(f.name for f in folder.glob("mask_embedding*"))
    if apart:
        raise CheckpointError(f"{folder}: {apart[0]}: a drafter with a MASK embedding of its own is not known here")
    tensors = {name.removeprefix("model."): t for name, t in stored.items()}
    check_tensors(spec, tensors, str(weights_file))
    drafter = Drafter(spec)
    drafter.load_state_dict(tensors, assign=True)
    return drafter


def check_tensors(spec: DrafterSpec, tensors: dict[str, torch.Tensor], where: str) -> None:
    """Compare names and shapes with what the spec implies.

    Raises:
        CheckpointError: names each tensor that is missing, unexpected or of another shape.
    """
    expected = tensor_shapes(spec)
    problems = [f"{n} is missing" for n in sorted(expected.keys() - tensors.keys())]
    problems += [f"{n} is unexpected" for n in sorted(tensors.keys() - expected.keys())]
    problems += [f"{n} has shape {tuple(tensors[n].shape)}, expected {expected[n]}"
                 for n in sorted(expected.keys() & tensors.keys()) if tuple(tensors[n].shape) != expected[n]]
    problems += [f"{n} holds NaN or Inf" for n, t in sorted(tensors.items()) if not bool(torch.isfinite(t).all())]
    if problems:
        raise CheckpointError(f"{where}: {'; '.join(problems[:8])}{' …' if len(problems) > 8 else ''}")


def check_folder(folder: Path) -> DrafterSpec:
    """Read a drafter folder completely; returns its spec.

    Raises:
        CheckpointError: as `load_drafter`.
    """
    return load_drafter(folder).spec
