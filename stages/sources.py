"""The rows of a prompt source, one by one: JSON Lines, Parquet, a saved `datasets` folder, or a hub dataset.

A damaged line costs that line only. What makes the whole source unreadable is a `PromptError`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.config import SourceConfig
from stages.conversation import FIELDS, Reason, shown
from stages.errors import PromptError, SampleRefused

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_FILE_SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".gz", ".zst", ".txt", ".csv")
_BOM = b"\xef\xbb\xbf"
_BATCH_ROWS = 256


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as the source has it."""

    line: int
    """1-based: the line of a file, or the row of a table."""
    value: Any = None
    problem: SampleRefused | None = None
    """Set when the row could not even be parsed."""


@dataclass(frozen=True, slots=True)
class BlankLine:
    """A line without anything on it: not a row."""

    line: int


def read_rows(source: SourceConfig, base: Path) -> Iterator[RawRow | BlankLine]:
    """The rows of a source, at most `source.limit` of them (blank lines are no rows).

    Args:
        source: what to read. A local file or folder is taken first, then a hub id.
        base: folder that relative paths start from.

    Raises:
        PromptError: there is no such source, or it cannot be read.
    """
    n_rows = 0
    for row in _open(source, base):
        yield row
        n_rows += isinstance(row, RawRow)
        if source.limit is not None and n_rows >= source.limit:
            return


def _open(source: SourceConfig, base: Path) -> Iterator[RawRow | BlankLine]:
    path = base / Path(source.path).expanduser()
    if path.is_file():
        return _read_parquet(path) if _is_parquet(path) else _read_jsonl(path)
    if path.is_dir():
        return _read_dataset(_load_folder(path, source))
    if _HUB_ID.fullmatch(source.path) and not source.path.endswith(_FILE_SUFFIXES):
        return _read_dataset(_load_hub(source.path, source, path))
    raise PromptError(
        f"prompt source {source.path}: there is no file or folder {path}; relative paths start from the recipe's folder"
    )


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return path.suffix == ".parquet" or file.read(4) == b"PAR1"


def _read_jsonl(path: Path) -> Iterator[RawRow | BlankLine]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(_BOM) if number == 1 else line
            yield _parse_line(number, text) if text.strip() else BlankLine(number)


def _parse_line(number: int, line: bytes) -> RawRow:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        detail = f"byte {error.start} of the line is {line[error.start]:#04x} ({error.reason}); expected UTF-8"
        return RawRow(number, problem=SampleRefused(Reason.BAD_UTF8, detail))
    try:
        return RawRow(number, json.loads(text, parse_constant=_refuse_constant))
    except (ValueError, RecursionError) as error:
        why = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)
        detail = f"the line {shown(text.strip())} is not JSON ({why}); expected one JSON object on a line"
        return RawRow(number, problem=SampleRefused(Reason.BAD_JSON, detail))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _read_parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in FIELDS if name in file.schema_arrow.names] or None
            numbers = itertools.count(1)
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
                for row in range(batch.num_rows):
                    yield _table_row(next(numbers), batch.slice(row, 1))
    except (OSError, pa.ArrowException) as error:
        raise PromptError(f"prompt source {path} cannot be read: {error}; expected a whole Parquet file") from error


def _table_row(number: int, row: Any) -> RawRow:
    try:
        return RawRow(number, without_nulls(row.to_pylist()[0]))
    except UnicodeDecodeError as error:
        detail = f"a text has bytes that are not UTF-8 ({error.reason}); expected UTF-8"
        return RawRow(number, problem=SampleRefused(Reason.BAD_UTF8, detail))


def _load_folder(path: Path, source: SourceConfig) -> Any:
    import datasets

    saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    if not saved:
        return _load_hub(str(path), source, path)
    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise PromptError(f"prompt source {path}: the saved dataset is damaged: {error}; save it again") from error
    if not isinstance(found, datasets.DatasetDict):
        return found
    if source.split not in found:
        splits = ", ".join(map(str, found))
        raise PromptError(f"prompt source {path} has no split {source.split!r}; set split to one of {splits}")
    return found[source.split]


def _load_hub(name: str, source: SourceConfig, path: Path) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, name=source.subset, split=source.split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise PromptError(
            f"prompt source {source.path}: {path} is neither a file nor a folder with data, and the dataset cannot be "
            f"loaded (subset {source.subset!r}, split {source.split!r}): {first}; give a .jsonl or .parquet file, "
            "a saved dataset, or the id of a dataset that this machine can reach"
        ) from error


def _read_dataset(dataset: Any) -> Iterator[RawRow]:
    wanted = [name for name in FIELDS if name in dataset.column_names]
    rows: Iterable[Any] = dataset.select_columns(wanted) if wanted else dataset
    for number, row in enumerate(rows, start=1):
        yield RawRow(number, without_nulls(row))


def without_nulls(value: Any) -> Any:
    """The value without the null fields that a table puts into every object so that all have the same keys."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_nulls(v) for v in value]
    return value
