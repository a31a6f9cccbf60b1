"""Reads ranges of rows of one array straight from its object: one request per range, every CRC checked.

Rows `a:b` lie in the chunks `a // 64 … (b − 1) // 64`, which are neighbours in the object, so they are one range
of bytes. Without compression the bytes of the chunks go straight to where the rows belong (a vectored read that
puts each chunk's checksum, and the rows before and behind the range, aside); with compression the range is
read into scratch memory first.

Measured: the CRC of a chunk costs about 0.1 s per GB, as much as one copy in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from cache_schema.codec import CRC_BYTES, crc32c
from cache_schema.errors import ShardCorrupt
from cache_schema.layout import CHUNK_ROWS, ArraySpec, index_bytes, n_chunks
from cache_schema.storage import ObjectReader, Storage

_SCRATCH = threading.local()


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
            if self.spec.codec.fixed:
                self._read_fixed(start, stop, raw, sample_id)
            else:
                self._read_compressed(start, stop, raw, sample_id)
        return out

    def _read_fixed(self, start: int, stop: int, out: NDArray[np.uint8], sample_id: str | None) -> None:
        row, size = self.spec.row_bytes, self.spec.chunk_bytes
        first, last = start // CHUNK_ROWS, (stop - 1) // CHUNK_ROWS
        before = (start - first * CHUNK_ROWS) * row
        behind = ((last + 1) * CHUNK_ROWS - stop) * row
        aside = _scratch(before + behind)
        sums = np.empty((last + 1 - first, CRC_BYTES), np.uint8)
        pieces: list[list[NDArray[np.uint8]]] = []
        at = 0
        for chunk in range(first, last + 1):
            head = before if chunk == first else 0
            tail = behind if chunk == last else 0
            body = out[at : at + size - head - tail]
            at += len(body)
            ends = [aside[:head]] if head else [], [aside[before : before + tail]] if tail else []
            pieces.append([*ends[0], body, *ends[1]])
        buffers = [b for own, crc in zip(pieces, sums, strict=True) for b in (*own, crc)]
        self._fill(int(self._starts[first]), buffers, f"{self._whose(sample_id)}rows {start}:{stop}")
        for i, own in enumerate(pieces):
            if crc32c(*own) != sums[i].tobytes():
                raise self._bad_chunk(first + i, sample_id)

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
        if self._object is None:
            raise self._corrupt(f"{what} are asked for, but it has no rows")
        try:
            self._object.read_into(start, buffers)
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


def _scratch(n: int) -> NDArray[np.uint8]:
    """Memory of this thread for what is read but not kept; valid until the next call."""
    buffer: NDArray[np.uint8] | None = getattr(_SCRATCH, "buffer", None)
    if buffer is None or len(buffer) < n:
        buffer = _SCRATCH.buffer = np.empty(max(n, 1 << 20), np.uint8)
    return buffer[:n]
