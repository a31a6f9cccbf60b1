"""Samples of a cache as an export writes them: array by array, read when they are asked for.

Shapes: T tokens, L feature layers, D hidden, G groups of channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_schema.identity import CacheIdentity
from cache_schema.layout import feature_format, last_hidden_dtype
from cache_schema.quantized import dequantize
from cache_schema.reader import FeatureCache
from pipeline.cache_samples import Floats

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1, "float32": 4, "int32": 4, "uint8": 1}


class ExportSamples:
    """Some samples of a cache, in order.

    Args:
        cache: it.
        ids: stored samples.
        raw: features as they are stored; else quantised ones become bfloat16.

    Attributes:
        ids: as given.
        kinds: arrays and the types of their values, the widest first.
    """

    def __init__(self, cache: FeatureCache, ids: Sequence[str], raw: bool) -> None:
        self.ids = list(ids)
        self.kinds = array_kinds(cache.identity, raw)
        self._cache, self._raw = cache, raw

    def lengths(self) -> list[int]:
        """Tokens of each sample, without reading any."""
        return [self._cache.n_tokens(s) for s in self.ids]

    def row_shape(self, name: str) -> tuple[int, ...]:
        """Shape of one token of an array."""
        marker = next(iter(self._cache.markers.values()))
        return tuple(marker.arrays[name].shape[1:])

    def array(self, sample_id: str, name: str) -> NDArray[Any]:
        """One array of a sample, [T, ...]: bfloat16 and float8 as their bits.

        Raises:
            ShardCorrupt: it is damaged.
            OSError: as the storage gave it.
        """
        if name in ("input_ids", "loss_mask"):
            return self._cache.tokens(sample_id)[name == "loss_mask"]
        form = feature_format(self._cache.identity)
        stored = self._read(sample_id, name)
        if name == "features" and form.quantised and not self._raw:
            return to_bfloat16(dequantize(stored, self._read(sample_id, "feature_scale"), form))
        return stored

    def _read(self, sample_id: str, name: str) -> NDArray[Any]:
        shard = self._cache.shard(self._cache.plan.shard_of(sample_id))
        values: NDArray[Any] = shard.array(name).read(*shard.rows(sample_id), sample_id=sample_id)
        return values


def array_kinds(identity: CacheIdentity, raw: bool) -> dict[str, str]:
    """Arrays of a sample and the types of their values, the widest first."""
    form = feature_format(identity)
    kinds = {
        "input_ids": "int32",
        "feature_scale": "float32",
        "last_hidden": last_hidden_dtype(form.dtype),
        "features": "bfloat16" if form.quantised and not raw else form.dtype,
        "loss_mask": "uint8",
    }
    if not (raw and form.quantised):
        del kinds["feature_scale"]
    if not identity.last_hidden:
        del kinds["last_hidden"]
    return kinds


def to_bfloat16(values: Floats) -> NDArray[np.uint16]:
    """Finite float32 as the bits of the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
