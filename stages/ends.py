"""The target's embedding and head, which is all of the target that training needs, read by themselves.

An 8B target has 16 GB of weights, of which these two are 2.5 GB. Where they are is found by structure: the model is
built without weights (on the meta device), and its own accessors say which parameters they are.

Shapes: V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from stages.config import TargetConfig
from stages.target import load_config, load_target, local_folder

_PLAIN = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class FrozenEnds:
    """The target's embedding and head, frozen."""

    embed: nn.Module
    head_VD: torch.Tensor


def load_ends(target: TargetConfig, device: torch.device, *, bf16: bool) -> FrozenEnds:
    """The target's embedding and head in the dtype of the computation.

    Targets of a structure that is not plain (an embedding that scales, a quantised head, names that its files do not
    have) are loaded whole, and all but the two is freed: the same result, more memory for a moment.

    Raises:
        TargetError: as `load_target`.
    """
    dtype = torch.bfloat16 if bf16 else torch.float32
    found = _read_ends(target, dtype)
    if found is None:
        loaded = load_target(target, device="cpu", dtype="bfloat16" if bf16 else "float32", tokenizer=False)
        found = FrozenEnds(loaded.embed, loaded.head)
    return FrozenEnds(found.embed.to(device), found.head_VD.to(device))


def _read_ends(target: TargetConfig, dtype: torch.dtype) -> FrozenEnds | None:
    """The two, read from the weight files; None when only the whole model can say what they are."""
    config = load_config(target)
    model = _without_weights(config, target)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embedding) is not nn.Embedding or type(output) is not nn.Linear or output.bias is not None:
        return None
    tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    try:
        files = dict(_tensors(local_folder(target)))
        embed_VD = _read(files, names[id(embedding)], embedding.weight.shape)
        head_VD = _read(files, names[id(output)], output.weight.shape)
    except (OSError, SafetensorError):
        return None  # `load_target` finds the words for it
    if embed_VD is None or (head_VD is None) != tied:
        return None
    plain = nn.Embedding(*embed_VD.shape, padding_idx=embedding.padding_idx, _weight=embed_VD.to(dtype))
    plain.requires_grad_(False)
    weight: torch.Tensor = plain.weight.detach()
    return FrozenEnds(plain, weight if head_VD is None else head_VD.to(dtype))


def _without_weights(config: Any, target: TargetConfig) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=target.trust_remote_code)


def _tensors(folder: Path) -> Iterator[tuple[str, Path]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  (no mapping)
                yield name, file


def _read(files: dict[str, Path], name: str, shape: torch.Size) -> torch.Tensor | None:
    """The tensor of this name; None when there is none, or it is not what the model would hold."""
    if name not in files:
        return None
    with safe_open(files[name], framework="pt") as stored:
        tensor: torch.Tensor = stored.get_tensor(name)
    return tensor if tensor.shape == shape and tensor.dtype in _PLAIN else None
