"""Writes one array of a shard as a stream of rows, in the layout of `layout`.

Memory: `FLUSH_BYTES` of finished chunks that are not yet handed to the storage, and the inner chunk that is being
filled. Nothing depends on how many rows there will be; the metadata is written at the end.

Rows are copied once, straight to where the storage takes them from, in pieces that stay in the processor's cache while
they are hashed: memory bandwidth is what limits a writer, and each pass over cold memory costs 0.1 s per GB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from cache_schema.codec import CRC_BYTES, crc32c, crc32c_value
from cache_schema.layout import ArraySpec
from cache_schema.storage import PIECE_BYTES, ObjectWriter, Storage

FLUSH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WrittenArray:
    """What was written: for the marker."""

    rows: int
    bytes: int
    """Of the object; 0 if there is none because the array has no rows."""
    content_xxh128: str
    index_xxh128: str


class ArrayWriter:
    """One array. Rows go in with `append`; `close` makes the object permanent.

    Args:
        storage: of the cache.
        prefix: the shard's group.
        spec: the array.
    """

    def __init__(self, storage: Storage, prefix: str, spec: ArraySpec) -> None:
        self._storage, self._prefix, self.spec = storage, prefix, spec
        self._buffer = np.empty(FLUSH_BYTES + spec.chunk_bytes + CRC_BYTES, np.uint8)
        self._used = 0
        # The chunk that is being filled lies in the buffer, unless its bytes will be others (compressed).
        self._chunk = self._buffer[: spec.chunk_bytes] if spec.codec.fixed else np.empty(spec.chunk_bytes, np.uint8)
        self._filled = 0
        self._crc = 0
        self._rows = 0
        self._object: ObjectWriter | None = None
        self._sizes: list[int] = []
        self._content = xxhash.xxh3_128()

    def append(self, rows: NDArray[Any]) -> None:
        """Add rows, [n, *row_shape] of the stored type; they are taken over before this returns."""
        self._rows += len(rows)
        raw = np.ascontiguousarray(rows, self.spec.stored.newbyteorder("<")).reshape(-1).view(np.uint8)
        at = 0
        while at < len(raw):
            n = min(len(self._chunk) - self._filled, len(raw) - at, PIECE_BYTES)
            self._content.update(self._take(raw[at : at + n]).data)
            at += n
            if self._filled == len(self._chunk):
                self._end_chunk()

    def _take(self, piece: NDArray[np.uint8]) -> NDArray[np.uint8]:
        taken = self._chunk[self._filled : self._filled + len(piece)]
        taken[:] = piece
        self._filled += len(piece)
        if self.spec.codec.fixed:
            self._crc = crc32c_value(taken, self._crc)
        return taken

    def _end_chunk(self) -> None:
        if self.spec.codec.fixed:
            self._used += len(self._chunk)
            self._put(self._crc.to_bytes(CRC_BYTES, "little"))
            self._sizes.append(len(self._chunk) + CRC_BYTES)
        else:
            body = self.spec.codec.compress(self._chunk, self.spec.stored.itemsize)
            self._put(body)
            self._put(crc32c(body))
            self._sizes.append(len(body) + CRC_BYTES)
        self._filled = self._crc = 0
        if self._used >= FLUSH_BYTES:
            self._flush()
        if self.spec.codec.fixed:
            self._chunk = self._buffer[self._used : self._used + len(self._chunk)]

    def _put(self, data: Any) -> None:
        end = self._used + len(data)
        if end > len(self._buffer):  # what a codec made longer than the chunk was
            self._flush()
            self._writer().write(data)
            return
        self._buffer[self._used : end] = np.frombuffer(data, np.uint8)
        self._used = end

    def _writer(self) -> ObjectWriter:
        if self._object is None:
            self._object = self._storage.writer(f"{self._prefix}/{self.spec.key}")
        return self._object

    def _flush(self) -> None:
        self._writer().write(self._buffer[: self._used])
        self._used = 0

    def close(self) -> WrittenArray:
        """Write what is left, the index and the metadata; all of it is on the storage when this returns.

        Raises:
            OSError: as the storage gave it.
        """
        if self._filled:
            self._take(np.zeros(len(self._chunk) - self._filled, np.uint8))
            self._end_chunk()
        index, written = b"", 0
        if self._sizes:
            index = encode_index(self._sizes)
            self._flush()
            self._writer().write(index)
            self._writer().close()
            written = sum(self._sizes) + len(index)
        metadata = self._storage.writer(f"{self._prefix}/{self.spec.metadata_key}")
        metadata.write(self.spec.metadata(self._rows))
        metadata.close()
        return WrittenArray(self._rows, written, self._content.hexdigest(), xxhash.xxh3_128_hexdigest(index))

    def abort(self) -> None:
        """Give the array up."""
        if self._object is not None:
            self._object.abort()


def encode_index(sizes: list[int]) -> bytes:
    """The index of an array's object: where each chunk lies, with a checksum.

    Args:
        sizes: stored bytes of each chunk, in order.
    """
    ends = np.cumsum(np.asarray(sizes, "<u8"))
    pairs = np.stack([ends - np.asarray(sizes, "<u8"), np.asarray(sizes, "<u8")], axis=1).astype("<u8")
    raw = pairs.tobytes()
    return raw + crc32c(raw)
