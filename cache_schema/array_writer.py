"""Writes one array of a shard as a stream of rows, in the layout of `layout`.

Memory: one inner chunk that is being filled, and up to `FLUSH_BYTES` of finished chunks that are not yet
handed to the storage. Nothing depends on how many rows there will be; the metadata is written at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from cache_schema.codec import crc32c
from cache_schema.layout import CHUNK_ROWS, ArraySpec
from cache_schema.storage import ObjectWriter, Storage

FLUSH_BYTES = 8 << 20


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
        self._chunk = np.zeros((CHUNK_ROWS, *spec.row_shape), spec.stored.newbyteorder("<"))
        self._filled = 0
        self._rows = 0
        self._object: ObjectWriter | None = None
        self._buffer = bytearray()
        self._sizes: list[int] = []
        self._content = xxhash.xxh3_128()

    def append(self, rows: NDArray[Any]) -> None:
        """Add rows, [n, *row_shape] of the stored type; they are taken over before this returns."""
        self._rows += len(rows)
        at = 0
        while at < len(rows):
            n = min(CHUNK_ROWS - self._filled, len(rows) - at)
            self._chunk[self._filled : self._filled + n] = rows[at : at + n]
            self._filled, at = self._filled + n, at + n
            if self._filled == CHUNK_ROWS:
                self._put_chunk()

    def _put_chunk(self) -> None:
        self._content.update(self._chunk[: self._filled].reshape(-1).view(np.uint8).data)
        self._chunk[self._filled :] = 0
        self._filled = 0
        size = 0
        for piece in self.spec.codec.encode(self._chunk):
            self._buffer += piece
            size += len(piece)
        self._sizes.append(size)
        if len(self._buffer) >= FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._object is None:
            self._object = self._storage.writer(f"{self._prefix}/{self.spec.key}")
        self._object.write(self._buffer)
        self._buffer.clear()

    def close(self) -> WrittenArray:
        """Write what is left, the index and the metadata; all of it is on the storage when this returns.

        Raises:
            OSError: as the storage gave it.
        """
        if self._filled:
            self._put_chunk()
        index, written = b"", 0
        if self._sizes:
            index = encode_index(self._sizes)
            self._buffer += index
            self._flush()
            written = sum(self._sizes) + len(index)
            if self._object is not None:
                self._object.close()
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
