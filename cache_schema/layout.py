"""The Zarr v3 group of a shard: which arrays it has, how they are stored, and their metadata.

Every array is one object through the `sharding_indexed` codec: inner chunks of 64 rows along axis 0, each with its
CRC-32C, end to end in order, and then an index of their places (pairs of offset and size, uint64) with a CRC of
its own. We write and read this layout ourselves (`array_writer`, `array_reader`); every Zarr v3 implementation
reads it too. Three choices need a reason:

- A chunk that is not stored reads as the fill value, and so would a missing object. So all chunks are stored,
  also those that hold nothing but zeros, and the marker knows each object's size.
- bfloat16 and float8 are stored as unsigned integers of their width, with the attribute `"dtype"`: zarr-python and
  zarrs have no such types.
- `sample_id` is UTF-8 padded with NUL in a uint8 array [samples, width], with attributes that say so. The
  fixed-length text type of zarr-python has no Zarr v3 specification (it warns that others may be unable to
  read it, and that its form may change).

Source: the Zarr v3 core specification and its `sharding_indexed` codec, version 1.0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_schema.codec import CRC_BYTES, ChunkCodec
from cache_schema.identity import CacheIdentity
from cache_schema.quantized import FeatureFormat

CHUNK_ROWS = 64
"""Rows of an inner chunk: tokens, or samples for `offsets` and `sample_id`."""
GROUP_JSON = "zarr.json"
PER_SAMPLE = ("offsets", "sample_id")
"""Arrays whose rows are samples; the rows of all others are tokens."""
PLAIN = ChunkCodec()
_BITS_ONLY = ("bfloat16", "float8_e4m3fn")


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of a shard's group."""

    name: str
    dtype: str
    """What the values are; differs from `stored` only for types that Zarr lacks."""
    stored: np.dtype[Any]
    row_shape: tuple[int, ...]
    """Shape without axis 0."""
    attributes: dict[str, Any]
    codec: ChunkCodec = PLAIN

    @property
    def row_bytes(self) -> int:
        """Bytes of a row before compression."""
        return int(np.prod(self.row_shape, dtype=np.int64)) * self.stored.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Bytes of an inner chunk before compression."""
        return CHUNK_ROWS * self.row_bytes

    @property
    def key(self) -> str:
        """Where the array's one object lies in the group: `features/c/0/0/0`."""
        return f"{self.name}/{object_key(1 + len(self.row_shape))}"

    @property
    def metadata_key(self) -> str:
        """Where the array's metadata lies in the group."""
        return f"{self.name}/{GROUP_JSON}"

    def metadata(self, rows: int) -> bytes:
        """The array's `zarr.json`."""
        sharding = {
            "chunk_shape": [CHUNK_ROWS, *self.row_shape],
            "codecs": self.codec.metadata(self.stored.itemsize),
            "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
            "index_location": "end",
        }
        grid = {"chunk_shape": [max(1, n_chunks(rows)) * CHUNK_ROWS, *self.row_shape]}
        body = {
            "shape": [rows, *self.row_shape],
            "data_type": str(self.stored),
            "chunk_grid": {"name": "regular", "configuration": grid},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0.0 if self.stored.kind == "f" else 0,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "attributes": self.attributes,
            "zarr_format": 3,
            "node_type": "array",
            "storage_transformers": [],
        }
        return (json.dumps(body, indent=2) + "\n").encode()


def group_metadata() -> bytes:
    """The `zarr.json` of a shard's group."""
    return (json.dumps({"attributes": {}, "zarr_format": 3, "node_type": "group"}, indent=2) + "\n").encode()


def array_specs(
    identity: CacheIdentity, hidden_size: int, id_width: int, codec: ChunkCodec | None = None
) -> dict[str, ArraySpec]:
    """The arrays of a shard, in the order in which they are written.

    Args:
        identity: of the cache.
        hidden_size: D.
        id_width: bytes of the longest sample id.
        codec: of features, their scales and `last_hidden`; None stores them as they are.

    Raises:
        CacheError: a feature type that this version cannot store.
    """
    form, codec = feature_format(identity), codec or PLAIN
    n_layers = len(identity.layer_ids)
    specs = [_states("features", form, (n_layers, hidden_size), codec)]
    if form.quantised:
        shape = (n_layers, form.n_groups(hidden_size))
        specs.append(ArraySpec("feature_scale", "float32", np.dtype(np.float32), shape, {}, codec))
    if identity.last_hidden:
        last = FeatureFormat(dtype=last_hidden_dtype(form.dtype))
        specs.append(_states("last_hidden", last, (hidden_size,), codec))
    text = {"encoding": "utf-8", "padding": "nul"}
    specs += [
        ArraySpec("input_ids", "int32", np.dtype(np.int32), (), {}),
        ArraySpec("loss_mask", "uint8", np.dtype(np.uint8), (), {}),
        ArraySpec("offsets", "int64", np.dtype(np.int64), (), {}),
        ArraySpec("sample_id", "uint8", np.dtype(np.uint8), (id_width,), text),
    ]
    return {spec.name: spec for spec in specs}


def _states(name: str, form: FeatureFormat, row_shape: tuple[int, ...], codec: ChunkCodec) -> ArraySpec:
    meaning = {"dtype": form.dtype} if form.dtype in _BITS_ONLY else {}
    return ArraySpec(name, form.dtype, np.dtype(form.stored), row_shape, meaning, codec)


def feature_format(identity: CacheIdentity) -> FeatureFormat:
    """How the features of a cache are stored.

    Raises:
        CacheError: a type that this version cannot store.
    """
    return FeatureFormat(dtype=identity.feature_dtype, bits=identity.feature_bits, group=identity.feature_group)


def last_hidden_dtype(feature_dtype: str) -> str:
    """Type of `last_hidden`: it is never quantised, since the target's distribution is made from it."""
    return "float16" if feature_dtype == "float16" else "bfloat16"


def n_chunks(rows: int) -> int:
    """Inner chunks of an array."""
    return -(-rows // CHUNK_ROWS)


def index_bytes(chunks: int) -> int:
    """Bytes of the index at the end of an array's object."""
    return 16 * chunks + CRC_BYTES


def object_key(ndim: int) -> str:
    """Path of an array's one object below the array's folder: `c/0/0/0` for three axes."""
    return "/".join(["c", *["0"] * ndim])


def encode_ids(sample_ids: Sequence[str]) -> NDArray[np.uint8]:
    """Ids as UTF-8 padded with NUL, uint8 [samples, width of the longest]."""
    raw = [s.encode() for s in sample_ids]
    width = max(map(len, raw), default=1)
    return np.frombuffer(b"".join(r.ljust(width, b"\0") for r in raw), np.uint8).reshape(len(raw), width)


def decode_ids(matrix: NDArray[np.uint8]) -> list[str]:
    """The inverse of `encode_ids`.

    Raises:
        ValueError: the bytes are not UTF-8.
    """
    return [row.tobytes().rstrip(b"\0").decode() for row in matrix]


def offsets_of(lengths: Sequence[int]) -> NDArray[np.int64]:
    """[samples + 1] int64: sample s is rows `offsets[s]:offsets[s + 1]`."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(lengths, np.int64))])
