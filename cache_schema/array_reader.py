"""Reads ranges of rows of one array straight from its object: one request per range, every CRC checked.

Rows `a:b` lie in the chunks `a // 64 … (b − 1) // 64`, which are neighbours in the object, so they are one range
of bytes. Without compression the bytes of the chunks go straight to where the rows belong (a vectored read that
puts each chunk's checksum, and the rows before and behind the range, aside); with compression the range is
read into scratch memory first.

A local file is read in pieces, each of which is checked while it is still in the processor's cache: the CRC then costs
0.02–0.05 s per GB and not 0.1–0.2, where the read itself costs 0.15.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from cache_schema.codec import CRC_BYTES, crc32c, crc32c_value
from cache_schema.errors import ShardCorrupt
from cache_schema.layout import CHUNK_ROWS, ArraySpec, index_bytes, n_chunks
from cache_schema.storage import Buffer, ObjectReader, Storage

_SCRATCH = threading.local()
_SMALL_CHUNK = 16 << 10
"""Up to here taking the chunks of a range apart costs less than reading each to its place."""
_Chunk = list[memoryview]
"""Where the bytes of a stored chunk go; the last one is its checksum's place."""


class ArrayReader:
    """One array of a committed shard; may be used by several threads at once.

    Args:
        storage: of the cache.
        prefix: the shard's group.
        spec: the array, as the marker describes it.
        rows: its length.
        size: bytes of its object, by the marker.
        index_xxh128: hash of the object's index, by the marker.
        shard, remedy: for messages.

    Raises:
        ShardCorrupt: the object is missing, of another size, or its index is damaged.
        OSError: as the storage gave it.
    """

    def __init__(
        self, storage: Storage, prefix: str, spec: ArraySpec, rows: int, size: int, index_xxh128: str,
        *, shard: str, remedy: str,
    ) -> None:  # fmt: skip
        self.spec, self.rows = spec, rows
        self._size, self._index_xxh128 = size, index_xxh128
        self._shard, self._remedy = shard, remedy
        self._where = storage.where(f"{prefix}/{spec.key}")
        self._object = self._opened(storage, f"{prefix}/{spec.key}") if rows else None
        # With chunks of one size their places need no index, which saves a request per object.
        self._row_bytes, self._chunk_bytes = spec.row_bytes, spec.chunk_bytes  # properties that take 5 µs each
        self._starts = self._computed_starts() if spec.codec.fixed else self.read_index()

    def _opened(self, storage: Storage, key: str) -> ObjectReader:
        try:
            found = storage.open(key)
        except FileNotFoundError:
            raise self._corrupt(f"its object is missing ({self._where}, {self._size} bytes)") from None
        if found.size != self._size:
            raise self._corrupt(f"its object ({self._where}) has {found.size} bytes, expected {self._size}")
        return found

    def _computed_starts(self) -> NDArray[np.int64]:
        chunks, stored = n_chunks(self.rows), self.spec.chunk_bytes + CRC_BYTES
        if chunks and chunks * stored + index_bytes(chunks) != self._size:
            raise self._corrupt(
                f"its object has {self._size} bytes by the marker, but {self.rows} rows take "
                f"{chunks * stored + index_bytes(chunks)}"
            )
        return np.arange(chunks + 1, dtype=np.int64) * stored

    def read_index(self) -> NDArray[np.int64]:
        """Where each chunk begins, [chunks + 1] (the last is the end of the last chunk), from the object itself.

        Raises:
            ShardCorrupt: the index fails its checksum, is not the marker's, or its chunks are not end to end.
        """
        chunks = n_chunks(self.rows)
        if not chunks:
            return np.zeros(1, np.int64)
        n = index_bytes(chunks)
        raw = bytearray(n)
        self._fill(self._size - n, [raw], "its index")
        pairs = np.frombuffer(raw, "<u8", 2 * chunks).reshape(chunks, 2).astype(np.int64)
        starts = np.append(pairs[:, 0], self._size - n)
        whole = crc32c(raw[:-CRC_BYTES]) == raw[-CRC_BYTES:] and xxhash.xxh3_128_hexdigest(raw) == self._index_xxh128
        if not whole or starts[0] != 0 or not np.array_equal(np.diff(starts), pairs[:, 1]):
            raise self._corrupt(f"its index, the last {n} bytes of {self._where}, is damaged")
        return starts

    def read(self, start: int, stop: int, out: NDArray[Any] | None = None, sample_id: str | None = None) -> Any:
        """Rows `start:stop`, [stop − start, *row_shape] of the stored type.

        Args:
            start, stop: 0 ≤ start ≤ stop ≤ rows.
            out: where to put them; contiguous. None makes a new array.
            sample_id: whose rows they are, for messages.

        Raises:
            ShardCorrupt: a chunk fails its checksum, or the object ends early; names shard, array, sample and bytes.
            OSError: as the storage gave it.
        """
        if out is None:
            out = np.empty((stop - start, *self.spec.row_shape), self.spec.stored)
        if stop > start:
            raw = out.reshape(-1).view(np.uint8)
            if self.spec.codec.fixed and self._chunk_bytes <= _SMALL_CHUNK:
                self._read_small(start, stop, raw, sample_id)
            elif self.spec.codec.fixed:
                self._read_fixed(start, stop, raw, sample_id)
            else:
                self._read_compressed(start, stop, raw, sample_id)
        return out

    def _read_small(self, start: int, stop: int, out: NDArray[np.uint8], sample_id: str | None) -> None:
        row, size = self._row_bytes, self._chunk_bytes
        first, last = start // CHUNK_ROWS, (stop - 1) // CHUNK_ROWS
        stored = np.empty((last + 1 - first, size + CRC_BYTES), np.uint8)
        self._fill(int(self._starts[first]), [stored], f"{self._whose(sample_id)}rows {start}:{stop}")
        chunks = stored.reshape(-1).data
        found = [crc32c_value(chunks[at : at + size]) for at in range(0, len(chunks), size + CRC_BYTES)]
        self._require_sums(first, stored[:, size:].tobytes(), found, sample_id)
        begin = (start - first * CHUNK_ROWS) * row
        out[:] = stored[:, :size].reshape(-1)[begin : begin + len(out)]

    def _require_sums(self, first: int, stored: Buffer, found: Sequence[int], sample_id: str | None) -> None:
        """Compare the stored checksums, 4 bytes each, with those of the bytes that were read."""
        expected = struct.unpack(f"<{len(found)}I", stored)
        if expected != tuple(found):
            wrong = next(i for i, value in enumerate(found) if value != expected[i])
            raise self._bad_chunk(first + wrong, sample_id)

    def _read_fixed(self, start: int, stop: int, out: NDArray[np.uint8], sample_id: str | None) -> None:
        first, last = start // CHUNK_ROWS, (stop - 1) // CHUNK_ROWS
        sums = bytearray((last + 1 - first) * CRC_BYTES)
        chunks = self._chunk_buffers(start, stop, out.data, memoryview(sums))
        with self._missing_is_corrupt(f"{self._whose(sample_id)}rows {start}:{stop}") as opened:
            stored, piece = self._chunk_bytes + CRC_BYTES, opened.piece_bytes
            if piece is not None and stored > piece * 3 // 2:
                found = _read_in_parts(opened, first * stored, chunks, piece)
            else:
                together = len(chunks) if piece is None else max(1, piece // stored)
                found = _read_together(opened, first * stored, chunks, stored, together)
        self._require_sums(first, sums, found, sample_id)

    def _chunk_buffers(self, start: int, stop: int, out: memoryview, sums: memoryview) -> list[_Chunk]:
        """Where the bytes of each chunk of rows `start:stop` go."""
        row, size = self._row_bytes, self._chunk_bytes
        first, last = start // CHUNK_ROWS, (stop - 1) // CHUNK_ROWS
        before = (start - first * CHUNK_ROWS) * row
        behind = ((last + 1) * CHUNK_ROWS - stop) * row
        aside = _scratch(before + behind).data
        ends = [min(at, len(out)) for at in range(size - before, len(out) + size, size)]
        chunks = [
            [out[low:high], sums[at : at + CRC_BYTES]]
            for low, high, at in zip([0, *ends], ends, range(0, len(sums), CRC_BYTES), strict=False)
        ]
        if before:
            chunks[0].insert(0, aside[:before])
        if behind:
            chunks[-1].insert(-1, aside[before:])
        return chunks

    def _read_compressed(self, start: int, stop: int, out: NDArray[np.uint8], sample_id: str | None) -> None:
        first, last = start // CHUNK_ROWS, (stop - 1) // CHUNK_ROWS
        begin, end = int(self._starts[first]), int(self._starts[last + 1])
        scratch = _scratch(end - begin + self.spec.chunk_bytes)
        stored, plain = scratch[: end - begin], scratch[end - begin :]
        self._fill(begin, [stored], f"{self._whose(sample_id)}rows {start}:{stop}")
        row, at = self.spec.row_bytes, 0
        for chunk in range(first, last + 1):
            low = max(start - chunk * CHUNK_ROWS, 0) * row
            high = min(stop - chunk * CHUNK_ROWS, CHUNK_ROWS) * row
            rows = out[at : at + high - low]
            at += len(rows)
            whole = len(rows) == self.spec.chunk_bytes
            self._decode(chunk, stored, begin, rows if whole else plain, sample_id)
            if not whole:
                rows[:] = plain[low:high]

    def _decode(
        self, chunk: int, stored: NDArray[np.uint8], begin: int, out: NDArray[np.uint8], sample_id: str | None
    ) -> None:
        piece = stored[int(self._starts[chunk]) - begin : int(self._starts[chunk + 1]) - begin]
        body, crc = piece[:-CRC_BYTES], piece[-CRC_BYTES:]
        if crc32c(body) != crc.tobytes():
            raise self._bad_chunk(chunk, sample_id)
        try:
            self.spec.codec.decompress(body, out)
        except ValueError as error:
            raise self._bad_chunk(chunk, sample_id) from error

    def blocks(self) -> Iterator[NDArray[Any]]:
        """All rows in order, a few chunks at a time, each checked; the array is reused for the next block.

        Raises:
            ShardCorrupt, OSError: as `read`.
        """
        step = CHUNK_ROWS * max(1, (4 << 20) // max(1, self.spec.chunk_bytes))
        buffer = np.empty((min(step, self.rows), *self.spec.row_shape), self.spec.stored)
        for start in range(0, self.rows, step):
            stop = min(start + step, self.rows)
            yield self.read(start, stop, buffer[: stop - start])

    def _fill(self, start: int, buffers: list[Any], what: str) -> None:
        with self._missing_is_corrupt(what) as opened:
            opened.read_into(start, buffers)

    @contextmanager
    def _missing_is_corrupt(self, what: str) -> Iterator[ObjectReader]:
        """The object, to read from; says what was asked for if the object has gone or ends early."""
        if self._object is None:
            raise self._corrupt(f"{what} are asked for, but it has no rows")
        try:
            yield self._object
        except (EOFError, FileNotFoundError) as error:
            raise self._corrupt(f"{what} cannot be read from {self._where}: {error}") from error

    def _bad_chunk(self, chunk: int, sample_id: str | None) -> ShardCorrupt:
        rows = f"rows {chunk * CHUNK_ROWS}:{min((chunk + 1) * CHUNK_ROWS, self.rows)}"
        place = f"bytes {self._starts[chunk]}:{self._starts[chunk + 1]} of {self._where}"
        return self._corrupt(f"{self._whose(sample_id)}{rows} fail their checksum ({place})")

    def _whose(self, sample_id: str | None) -> str:
        return f"sample {sample_id!r}, " if sample_id is not None else ""

    def _corrupt(self, what: str) -> ShardCorrupt:
        return ShardCorrupt(f"{self._shard}: {self.spec.name} is damaged: {what}; {self._remedy}")


def _read_together(opened: ObjectReader, place: int, chunks: Sequence[_Chunk], stored: int, together: int) -> list[int]:
    """Read chunks that lie end to end from `place` on, some at a time; the CRC of each.

    The read has put the interpreter out of the processor's cache, so each call in this loop costs microseconds.
    """
    found = []
    for at in range(0, len(chunks), together):
        some = chunks[at : at + together]
        opened.read_into(place + at * stored, [buffer for chunk in some for buffer in chunk])
        for chunk in some:
            value = 0
            for buffer in chunk[:-1]:
                value = crc32c_value(buffer, value)
            found.append(value)
    return found


def _read_in_parts(opened: ObjectReader, place: int, chunks: Sequence[_Chunk], size: int) -> list[int]:
    """As `_read_together`, for chunks that each take several reads of up to `size` bytes."""
    found = []
    for *values, checksum in chunks:
        value = 0
        for buffer in values:
            for at in range(0, len(buffer), size):
                part = buffer[at : at + size]
                # The last part takes the checksum along.
                whole = buffer is values[-1] and at + size >= len(buffer)
                opened.read_into(place, [part, checksum] if whole else [part])
                value = crc32c_value(part, value)
                place += len(part)
        place += len(checksum)
        found.append(value)
    return found


def _scratch(n: int) -> NDArray[np.uint8]:
    """Memory of this thread for what is read but not kept; valid until the next call."""
    buffer: NDArray[np.uint8] | None = getattr(_SCRATCH, "buffer", None)
    if buffer is None or len(buffer) < n:
        buffer = _SCRATCH.buffer = np.empty(max(n, 1 << 20), np.uint8)
    return buffer[:n]
