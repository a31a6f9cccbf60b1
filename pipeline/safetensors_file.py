"""Writes samples as a safetensors file, one after the other, so that memory holds one sample.

Tensors are `<sample id>/features`, `<sample id>/input_ids`, `<sample id>/loss_mask` and so on; `sample_ids` of the
metadata lists the ids in order, as JSON. The file goes array by array, the widest type first: so every tensor is
aligned to its type, which readers that map the file need.

Source: the safetensors format: the header's length (uint64, little-endian), the header as JSON, then the tensors'
bytes end to end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cache_schema.errors import CacheError
from pipeline.export_samples import ITEM_BYTES, ExportSamples

_NAMES = {
    "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3", "int8": "I8", "float32": "F32", "int32": "I32",
    "uint8": "U8",
}  # fmt: skip
_ALIGNMENT = 8
_MAX_HEADER_BYTES = 100_000_000
"""Readers refuse a larger one."""


def write_safetensors(file: BinaryIO, samples: ExportSamples, metadata: Mapping[str, str]) -> None:
    """Write samples to an open file.

    Raises:
        CacheError: there are too many samples for one file.
        ShardCorrupt, OSError: as `ExportSamples.array`.
    """
    header = _header(samples, metadata)
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
    for name in samples.kinds:
        for sample_id in samples.ids:
            values = samples.array(sample_id, name)
            file.write(np.ascontiguousarray(values, values.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data)


def safetensors_metadata(path: Path) -> dict[str, str] | None:
    """The metadata of a file; None if it is no whole safetensors file: a part of it is missing or unreadable.

    Raises:
        OSError: as the system gave it.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        n = int.from_bytes(file.read(8), "little")
        if 8 + n > size or n > _MAX_HEADER_BYTES:
            return None
        try:
            header = json.loads(file.read(n))
            metadata = header.pop("__metadata__")
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return None
    return metadata if isinstance(metadata, dict) and 8 + n + end == size else None


def _header(samples: ExportSamples, metadata: Mapping[str, str]) -> bytes:
    """The header, padded with blanks so that the tensors begin aligned."""
    texts = dict(metadata) | {"sample_ids": json.dumps(samples.ids, ensure_ascii=False)}
    body: dict[str, Any] = {"__metadata__": texts}
    at, lengths = 0, samples.lengths()
    for name, dtype in samples.kinds.items():
        row = samples.row_shape(name)
        for sample_id, n_tokens in zip(samples.ids, lengths, strict=True):
            size = n_tokens * math.prod(row) * ITEM_BYTES[dtype]
            body[f"{sample_id}/{name}"] = {
                "dtype": _NAMES[dtype], "shape": [n_tokens, *row], "data_offsets": [at, at + size],
            }  # fmt: skip
            at += size
    raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    if len(raw) > _MAX_HEADER_BYTES - _ALIGNMENT:
        raise CacheError(f"{len(samples.ids)} samples are too many for one safetensors file; export fewer, or as arrow")
    return raw + b" " * (-len(raw) % _ALIGNMENT)
