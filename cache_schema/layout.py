"""The Zarr v3 group of a shard: which arrays it has, how they are stored, and their object on disk.

Every array is one object through the `sharding_indexed` codec, inner chunks of 64 rows along axis 0, inner
codecs `bytes` and `crc32c`. Three choices need a reason:

- zarr-python leaves out chunks that equal the fill value, and readers take a chunk that is not there for
  zeros. A whole object would be missing when every value is 0, as damage looks too; so empty chunks are
  written.
- bfloat16 is stored as its bits in uint16, with the attribute `"dtype": "bfloat16"`: zarr-python has no such type.
- `sample_id` is UTF-8 padded with NUL in a uint8 array [samples, width], with attributes that say so. The
  fixed-length text type of zarr-python has no Zarr v3 specification (it warns that others may be unable to
  read it, and that its form may change).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import Crc32cCodec

from cache_schema.errors import CacheError, ShardCorrupt
from cache_schema.identity import CacheIdentity

CHUNK_ROWS = 64
"""Rows of an inner chunk: tokens, or samples for `offsets` and `sample_id`."""
STORED_DTYPE = {"bfloat16": np.dtype(np.uint16), "float16": np.dtype(np.float16)}
"""How a feature type is stored."""

_CHECK_ROWS = 4096


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


def array_specs(identity: CacheIdentity, hidden_size: int, id_width: int) -> dict[str, ArraySpec]:
    """The arrays of a shard, in the order in which they are written.

    Raises:
        CacheError: a feature type that this version cannot store.
    """
    dtype = identity.feature_dtype
    if dtype not in STORED_DTYPE:
        raise CacheError(f"cache.dtype is {dtype!r}; this version stores {sorted(STORED_DTYPE)}")
    stored = STORED_DTYPE[dtype]
    meaning = {"dtype": dtype} if dtype == "bfloat16" else {}
    text = {"encoding": "utf-8", "padding": "nul"}
    specs = [ArraySpec("features", dtype, stored, (len(identity.layer_ids), hidden_size), meaning)]
    if identity.last_hidden:
        specs.append(ArraySpec("last_hidden", dtype, stored, (hidden_size,), meaning))
    specs += [
        ArraySpec("input_ids", "int32", np.dtype(np.int32), (), {}),
        ArraySpec("loss_mask", "uint8", np.dtype(np.uint8), (), {}),
        ArraySpec("offsets", "int64", np.dtype(np.int64), (), {}),
        ArraySpec("sample_id", "uint8", np.dtype(np.uint8), (id_width,), text),
    ]
    return {spec.name: spec for spec in specs}


def write_group(path: Path, specs: dict[str, ArraySpec], data: dict[str, NDArray[Any]]) -> None:
    """Write a shard's group with zarr-python, each array in one go."""
    group = zarr.create_group(path, zarr_format=3)
    for name, spec in specs.items():
        values = data[name]
        rows = max(1, -(-len(values) // CHUNK_ROWS)) * CHUNK_ROWS
        array = group.create_array(
            name,
            shape=values.shape,
            dtype=spec.stored,
            chunks=(CHUNK_ROWS, *spec.row_shape),
            shards=(rows, *spec.row_shape),
            compressors=[Crc32cCodec()],
            fill_value=0,
            attributes=spec.attributes,
            config={"write_empty_chunks": True},
        )
        if len(values):
            array[...] = values


def require_written(path: Path, specs: dict[str, ArraySpec], data: dict[str, NDArray[Any]]) -> None:
    """Read a group back, every CRC checked, and compare it with what was to be written.

    Raises:
        ShardCorrupt: names the array and the rows.
    """
    group = zarr.open_group(path, mode="r")
    for name, spec in specs.items():
        array, expected = group[name], data[name]
        if not isinstance(array, zarr.Array) or array.shape != expected.shape or array.dtype != spec.stored:
            raise ShardCorrupt(
                f"{path}: {name} was written as {array!r}, expected {spec.stored}{list(expected.shape)}; check the disk"
            )
        for start in range(0, len(expected), _CHECK_ROWS):
            rows = slice(start, start + _CHECK_ROWS)
            try:
                found: NDArray[Any] = np.asarray(array[rows])
            except ValueError as error:
                raise ShardCorrupt(f"{path}: {name} cannot be read back from row {start} on: {error}") from error
            if found.tobytes() != expected[rows].tobytes():
                raise ShardCorrupt(f"{path}: {name} reads back differently from row {start} on; check the disk")


def object_key(ndim: int) -> str:
    """Path of an array's one object below the array's folder: `c/0/0/0` for three axes."""
    return "/".join(["c", *["0"] * ndim])


def group_files(path: Path) -> dict[str, int]:
    """Relative paths (with `/`) and sizes of all files below a folder, sorted."""
    found = (Path(folder, name) for folder, _, files in os.walk(path) for name in files)
    return {f.relative_to(path).as_posix(): f.stat().st_size for f in sorted(found)}


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
