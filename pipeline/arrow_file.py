"""Writes samples as an Arrow IPC file (`pyarrow.ipc.open_file`, `datasets`, polars, DuckDB): one row per sample.

    sample_id      string
    input_ids      list<int32>
    loss_mask      list<uint8>
    features       list<fixed_size_list<T>[L·D]>: one item per token, its layers end to end
    feature_scale  list<fixed_size_list<float>[L·G]>, raw exports of quantised caches only
    last_hidden    list<fixed_size_list<T>[D]>, if the cache has it

T is halffloat for float16 and int8 for int8. Arrow has neither bfloat16 nor float8, so these are uint16 and uint8
bit patterns; the field's metadata says `dtype` and `shape` of a token in every case.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.export_samples import ExportSamples

_BATCH_BYTES = 64 << 20
"""Samples are gathered into record batches of about this size."""
_TYPES = {
    "bfloat16": pa.uint16(), "float16": pa.float16(), "float8_e4m3fn": pa.uint8(), "int8": pa.int8(),
    "float32": pa.float32(), "int32": pa.int32(), "uint8": pa.uint8(),
}  # fmt: skip
_ORDER = ("input_ids", "loss_mask", "features", "feature_scale", "last_hidden")


def write_arrow(file: BinaryIO, samples: ExportSamples, metadata: Mapping[str, str]) -> None:
    """Write samples to an open file.

    Raises:
        ShardCorrupt, OSError: as `ExportSamples.array`.
    """
    schema = _schema(samples, metadata)
    with pa.ipc.new_file(file, schema) as writer:
        rows: list[dict[str, NDArray[Any]]] = []
        ids: list[str] = []
        gathered = 0
        for sample_id in samples.ids:
            row = {name: samples.array(sample_id, name) for name in samples.kinds}
            rows.append(row)
            ids.append(sample_id)
            gathered += sum(values.nbytes for values in row.values())
            if gathered >= _BATCH_BYTES:
                writer.write_batch(_batch(schema, ids, rows))
                rows, ids, gathered = [], [], 0
        if ids:
            writer.write_batch(_batch(schema, ids, rows))


def arrow_metadata(path: Path) -> dict[str, str] | None:
    """The metadata of a file; None if it is no whole Arrow file: its end, which tells where all else is, is missing.

    Raises:
        OSError: as the system gave it.
    """
    try:
        with pa.OSFile(str(path)) as raw, pa.ipc.open_file(raw) as file:
            metadata = file.schema.metadata or {}
        return {k.decode(): v.decode() for k, v in metadata.items()}
    except (pa.ArrowException, ValueError):
        return None


def _schema(samples: ExportSamples, metadata: Mapping[str, str]) -> Any:
    fields = [pa.field("sample_id", pa.string(), nullable=False)]
    for name in (n for n in _ORDER if n in samples.kinds):
        dtype, shape = samples.kinds[name], samples.row_shape(name)
        about = {"dtype": dtype, "shape": json.dumps(list(shape))}
        fields.append(pa.field(name, pa.list_(_token(dtype, shape)), nullable=False, metadata=about))
    return pa.schema(fields, metadata=dict(metadata))


def _token(dtype: str, shape: tuple[int, ...]) -> Any:
    """Arrow type of one token."""
    return pa.list_(_TYPES[dtype], math.prod(shape)) if shape else _TYPES[dtype]


def _batch(schema: Any, ids: list[str], rows: list[dict[str, NDArray[Any]]]) -> Any:
    columns = [pa.array(ids, pa.string())]
    for field in list(schema)[1:]:
        columns.append(_column(field.type, [row[field.name] for row in rows]))
    return pa.record_batch(columns, schema=schema)


def _column(kind: Any, values: list[NDArray[Any]]) -> Any:
    """Arrays [T, ...] of several samples as one list column."""
    offsets = np.cumsum([0, *(len(v) for v in values)], dtype=np.int32)
    flat = pa.array(np.concatenate([v.reshape(-1) for v in values]))
    inner = kind.value_type
    tokens = pa.FixedSizeListArray.from_arrays(flat, inner.list_size) if pa.types.is_fixed_size_list(inner) else flat
    return pa.ListArray.from_arrays(pa.array(offsets), tokens)
