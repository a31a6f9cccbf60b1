"""The rejects table: rows of a prompt source that could not be used, by line and reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from cache_schema.errors import ResponsesError
from cache_schema.storage import Location, read_at, replace_at

REJECTS_SCHEMA = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("line", pa.int64(), nullable=False),
        pa.field("sample_id", pa.string()),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class Reject:
    """One row of a source that was refused."""

    source: str
    """File or dataset id."""
    line: int
    """1-based line of a file, or row of a dataset."""
    sample_id: str | None
    reason: str
    """One word for the kind."""
    detail: str
    """What was found and what was expected."""


def write_rejects(location: Location, rejects: Iterable[Reject]) -> None:
    """Write the whole rejects table, in one atomic step; an older one is replaced."""
    table = pa.Table.from_pylist([dataclasses.asdict(r) for r in rejects], schema=REJECTS_SCHEMA)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    replace_at(location, sink.getvalue().to_pybytes())


def read_rejects(location: Location) -> list[Reject]:
    """The rows of a rejects table.

    Raises:
        ResponsesError: the file is missing or is not a rejects table.
    """
    try:
        table = pq.read_table(pa.BufferReader(read_at(location)))
    except (FileNotFoundError, pa.ArrowException) as error:
        raise ResponsesError(
            f"{location} cannot be read as a rejects table: {error}; run the generate stage again"
        ) from error
    if table.schema != REJECTS_SCHEMA:
        raise ResponsesError(f"{location} has columns {table.schema.names}, expected {REJECTS_SCHEMA.names}")
    return [Reject(**row) for row in table.to_pylist()]
