"""Reads ranges of rows of one array straight from its object: one request per range, every CRC checked.

Rows `a:b` lie in the chunks `a // 64 … (b − 1) // 64`, which are neighbours in the object, so they are one range
of bytes. Without compression the bytes of the chunks go straight to where the rows belong (a vectored read that
puts each chunk's checksum, and the rows before and behind the range, aside); with compression the range is
read into scratch memory first.

A local file is read in pieces, each of which is checked while it is still in the processor's cache: the CRC then costs
0.02–0.05 s per GB and not 0.1–0.2, where the read itself costs 0.15.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from cache_schema.codec import CRC_BYTES, crc32c, crc32c_value
from cache_schema.errors import ShardCorrupt
from cache_schema.layout import CHUNK_ROWS, ArraySpec, index_bytes, n_chunks
from cache_schema.storage import ObjectReader, Storage

_SCRATCH = threading.local()
_SMALL_CHUNK = 16 << 10
"""Up to here taking the chunks of a range apart costs less than reading each to its place."""
_Piece = tuple[memoryview, bool]
"""Where some of an object's next bytes go; whether they are a chunk's checksum."""


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
            if self.spec.codec.fixed and self.spec.chunk_bytes <= _SMALL_CHUNK:
                self._read_small(start, stop, raw, sample_id)
            elif self.spec.codec.fixed:
                self._read_fixed(start, stop, raw, sample_id)
            else:
                self._read_compressed(start, stop, raw, sample_id)
        return out

    def _read_small(self, start: int, stop: int, out: NDArray[np.uint8], sample_id: str | None) -> None:
        row, size = self.spec.row_bytes, self.spec.chunk_bytes
        first, last = start // CHUNK_ROWS, (stop - 1) // CHUNK_ROWS
        stored = np.empty((last + 1 - first, size + CRC_BYTES), np.uint8)
        self._fill(int(self._starts[first]), [stored], f"{self._whose(sample_id)}rows {start}:{stop}")
        chunks = stored.reshape(-1).data
        found = [crc32c_value(chunks[at : at + size]) for at in range(0, len(chunks), size + CRC_BYTES)]
        self._require_sums(first, stored[:, size:], found, sample_id)
        begin = (start - first * CHUNK_ROWS) * row
        out[:] = stored[:, :size].reshape(-1)[begin : begin + len(out)]

    def _require_sums(self, first: int, stored: NDArray[np.uint8], found: Sequence[int], sample_id: str | None) -> None:
        """Compare the stored checksums, [chunks, 4], with those of the bytes that were read."""
        sums = np.ascontiguousarray(stored).view("<u4")[:, 0]
        wrong = np.flatnonzero(sums != np.asarray(found, np.uint32))
        if len(wrong):
            raise self._bad_chunk(first + int(wrong[0]), sample_id)

    def _read_fixed(self, start: int, stop: int, out: NDArray[np.uint8], sample_id: str | None) -> None:
        first, last = start // CHUNK_ROWS, (stop - 1) // CHUNK_ROWS
        stored = np.empty((last + 1 - first, CRC_BYTES), np.uint8)
        buffers = self._fixed_buffers(start, stop, out.data, stored.reshape(-1).data)
        what = f"{self._whose(sample_id)}rows {start}:{stop}"
        place, value, found = int(self._starts[first]), 0, []
        for request in _requests(buffers, self._piece_bytes):
            self._fill(place, [buffer for buffer, _ in request], what)
            for buffer, is_sum in request:
                place += len(buffer)
                if is_sum:
                    found.append(value)
                    value = 0
                else:
                    value = crc32c_value(buffer, value)
        self._require_sums(first, stored, found, sample_id)

    def _fixed_buffers(self, start: int, stop: int, out: memoryview, sums: memoryview) -> Iterator[_Piece]:
        """Where the bytes of the chunks of rows `start:stop` go, in order."""
        row, size = self.spec.row_bytes, self.spec.chunk_bytes
        first, last = start // CHUNK_ROWS, (stop - 1) // CHUNK_ROWS
        before = (start - first * CHUNK_ROWS) * row
        behind = ((last + 1) * CHUNK_ROWS - stop) * row
        aside = _scratch(before + behind).data
        at = 0
        for i in range(last + 1 - first):
            if i == 0 and before:
                yield aside[:before], False
            n = size - (before if i == 0 else 0) - (behind if i == last - first else 0)
            yield out[at : at + n], False
            at += n
            if i == last - first and behind:
                yield aside[before:], False
            yield sums[i * CRC_BYTES : (i + 1) * CRC_BYTES], True

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

    @property
    def _piece_bytes(self) -> int | None:
        return self._object.piece_bytes if self._object is not None else None

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


def _requests(pieces: Iterable[_Piece], size: int | None) -> Iterator[list[_Piece]]:
    """The same, divided into requests of about `size` bytes each; None makes one request of all."""
    limit = size if size is not None else sys.maxsize
    request: list[_Piece] = []
    free = limit
    for buffer, is_sum in pieces:
        while len(buffer) > free and not is_sum:
            yield [*request, (buffer[:free], False)]
            request, buffer, free = [], buffer[free:], limit
        request.append((buffer, is_sum))
        free = max(0, free - len(buffer))
    yield request


def _scratch(n: int) -> NDArray[np.uint8]:
    """Memory of this thread for what is read but not kept; valid until the next call."""
    buffer: NDArray[np.uint8] | None = getattr(_SCRATCH, "buffer", None)
    if buffer is None or len(buffer) < n:
        buffer = _SCRATCH.buffer = np.empty(max(n, 1 << 20), np.uint8)
    return buffer[:n]
