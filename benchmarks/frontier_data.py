"""Real hidden states for the storage frontier: read once from a cache of the demo, kept in one safetensors file.

Shapes: T tokens, L feature layers, D hidden.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from cache_schema.reader import FeatureCache


@dataclass(frozen=True, slots=True)
class Features:
    """Samples end to end.

    Attributes:
        features_TLD: bfloat16, as the target gave them.
        input_ids, loss_mask: [T].
        offsets: [samples + 1].
        sample_ids: one per sample.
        layer_ids: 0-based target layers.
    """

    features_TLD: torch.Tensor
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    sample_ids: list[str]
    layer_ids: tuple[int, ...]

    def rows(self, index: int) -> slice:
        """The rows of a sample."""
        return slice(int(self.offsets[index]), int(self.offsets[index + 1]))


def collect(cache_folder: Path, file: Path) -> None:
    """Write the exact features of a bfloat16 cache into one file.

    Raises:
        ValueError: the cache is not bfloat16.
        CacheError: it is incomplete or damaged.
    """
    cache = FeatureCache.open(cache_folder, require_complete=True)
    if cache.identity.feature_dtype != "bfloat16":
        raise ValueError(f"{cache_folder} holds {cache.identity.feature_dtype}; exact features need a bfloat16 cache")
    samples = [cache.read(sample_id) for sample_id in cache.sample_ids]
    arrays = {
        "features": np.concatenate([s.features for s in samples]),
        "input_ids": np.concatenate([s.input_ids for s in samples]),
        "loss_mask": np.concatenate([s.loss_mask for s in samples]),
        "lengths": np.array([len(s.input_ids) for s in samples], dtype=np.int64),
    }
    about = {"sample_ids": json.dumps(cache.sample_ids), "layer_ids": json.dumps(list(cache.identity.layer_ids))}
    save_file(arrays, file, metadata=about)


def load(file: Path) -> Features:
    """What `collect` wrote."""
    with safe_open(file, framework="np") as source:
        about = source.metadata()
        bits, lengths = source.get_tensor("features"), source.get_tensor("lengths")
        return Features(
            features_TLD=torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16),
            input_ids=source.get_tensor("input_ids"),
            loss_mask=source.get_tensor("loss_mask"),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            sample_ids=json.loads(about["sample_ids"]),
            layer_ids=tuple(json.loads(about["layer_ids"])),
        )
