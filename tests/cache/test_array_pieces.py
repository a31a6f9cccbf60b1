"""Ranges of rows read whole, in pieces and from small chunks give the same values; damage in any piece is found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cache_schema.array_reader import ArrayReader
from cache_schema.array_writer import FLUSH_BYTES, ArrayWriter
from cache_schema.codec import ChunkCodec
from cache_schema.errors import ShardCorrupt
from cache_schema.layout import CHUNK_ROWS, ArraySpec
from cache_schema.storage import PIECE_BYTES, FolderStorage
from tests.cache.builders import flip_byte

ROWS = 5 * CHUNK_ROWS + 7
WIDTHS = [1, 100, PIECE_BYTES // CHUNK_ROWS // 2, 3 * PIECE_BYTES // CHUNK_ROWS // 2, FLUSH_BYTES // CHUNK_ROWS]
"""Values of a row: small chunks, less and more than a piece, exactly one, and more than a flush."""


def written(storage: FolderStorage, width: int, compression: str) -> tuple[np.ndarray, ArrayReader]:
    spec = ArraySpec("x", "uint16", np.dtype(np.uint16), (width,), {}, ChunkCodec(compression))
    rows = np.random.default_rng(width).integers(0, 1 << 16, (ROWS, width)).astype(np.uint16)
    writer = ArrayWriter(storage, "group", spec)
    for start in range(0, ROWS, 50):
        writer.append(rows[start : start + 50])
    done = writer.close()
    return rows, ArrayReader(storage, "group", spec, ROWS, done.bytes, done.index_xxh128, shard="s", remedy="r")


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_range_is_what_was_written(tmp_path: Path, width: int, compression: str) -> None:
    rows, reader = written(FolderStorage(tmp_path), width, compression)
    for start, stop in [(0, ROWS), (0, 1), (63, 65), (64, 128), (70, 71), (5, ROWS), (ROWS - 1, ROWS), (9, 9)]:
        assert np.array_equal(reader.read(start, stop), rows[start:stop]), (start, stop)
    buffer = np.empty((ROWS, width), np.uint16)
    assert np.array_equal(reader.read(10, 300, buffer[:290]), rows[10:300])


@pytest.mark.parametrize("width", WIDTHS)
def test_one_request_for_a_storage_that_asks_for_it(
    tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, reader = written(FolderStorage(tmp_path), width, "none")
    opened = reader._object
    assert opened is not None
    requests: list[int] = []
    read_into = opened.read_into
    monkeypatch.setattr(opened, "piece_bytes", None)
    monkeypatch.setattr(opened, "read_into", lambda at, buffers: (requests.append(at), read_into(at, buffers))[1])
    assert np.array_equal(reader.read(65, 250), rows[65:250])
    assert requests == [CHUNK_ROWS * width * 2 + 4]


@pytest.mark.parametrize("width", WIDTHS)
def test_damage_in_any_part_of_a_chunk_is_found(tmp_path: Path, width: int) -> None:
    rows, reader = written(FolderStorage(tmp_path), width, "none")
    path, chunk = tmp_path / "group" / "x" / "c" / "0" / "0", CHUNK_ROWS * width * 2
    for at in (0, chunk // 2, chunk - 1, chunk, chunk + 3):  # the first chunk's values, then its checksum
        flip_byte(path, at)
        with pytest.raises(ShardCorrupt, match="rows 0:64 fail their checksum"):
            reader.read(10, 20)
        assert np.array_equal(reader.read(64, 200), rows[64:200])
        flip_byte(path, at)
    assert np.array_equal(reader.read(10, 20), rows[10:20])
