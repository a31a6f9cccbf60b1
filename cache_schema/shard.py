"""A committed shard, open for reading by sample.

What a reader needs to know of a shard (lengths, sizes, hashes) is in its marker and its sample ids are in the plan,
both with checksums; so nothing of the shard is read before a sample asks for it. Token ids and masks are small
and read for the whole shard at once; features are read by sample, one range each.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from cache_schema import names
from cache_schema.array_reader import ArrayReader
from cache_schema.errors import ShardCorrupt
from cache_schema.layout import offsets_of
from cache_schema.marker import CommitMarker, remedy
from cache_schema.storage import Storage

_BY_SAMPLE = ("features", "feature_scale", "last_hidden")


@dataclass(frozen=True, slots=True)
class CachedSample:
    """One sample as it is stored.

    T is the number of rows that were asked for, S the number of tokens of the sample: T ≤ S.
    """

    sample_id: str
    features: NDArray[Any]
    """[T, L, D] as stored; `features_dtype` says what the bits mean."""
    input_ids: NDArray[np.int32]
    """[S] int32."""
    loss_mask: NDArray[np.uint8]
    """[S] uint8."""
    last_hidden: NDArray[Any] | None
    """[T, D]: bfloat16 bit patterns in uint16 (float16 beside float16 features); None if the cache has none."""
    features_dtype: str
    """`bfloat16` (stored as uint16), `float16`, `float8_e4m3fn` (as uint8) or `int8`."""
    scale: NDArray[np.float32] | None = None
    """[T, L, G] of quantised features, else None."""


class OpenShard:
    """A committed shard. May be used by several threads at once.

    Args:
        storage: of the cache.
        marker: the shard's commit marker.
        sample_ids: the ids that are stored, in order.
    """

    def __init__(self, storage: Storage, marker: CommitMarker, sample_ids: Sequence[str]):
        self.marker = marker
        self.sample_ids = list(sample_ids)
        self._storage = storage
        self._row = {sample_id: i for i, sample_id in enumerate(self.sample_ids)}
        self._offsets = offsets_of(marker.lengths)
        self._arrays: dict[str, ArrayReader] = {}
        self._tokens: tuple[NDArray[np.int32], NDArray[np.uint8]] | None = None
        self._lock = threading.Lock()

    def array(self, name: str) -> ArrayReader:
        """One of the shard's arrays; its object is opened and measured at the first call.

        Raises:
            ShardCorrupt: the object is missing, of another size, or its index is damaged.
            OSError: as the storage gave it.
        """
        with self._lock:
            if name not in self._arrays:
                marker, record = self.marker, self.marker.arrays[name]
                self._arrays[name] = ArrayReader(
                    self._storage, names.group_key(marker.group), record.spec(name), record.shape[0], record.bytes,
                    record.index_xxh128, shard=marker.shard, remedy=remedy(marker.shard),
                )  # fmt: skip
            return self._arrays[name]

    def tokens(self, sample_id: str) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Token ids and loss mask of a sample, [S] each; the shard's are read once and kept (5 bytes a token).

        Raises:
            ShardCorrupt, OSError: as `array` and its `read`.
        """
        if self._tokens is None:
            self._tokens = self._whole("input_ids"), self._whole("loss_mask")
        start, stop = self.rows(sample_id)
        return self._tokens[0][start:stop], self._tokens[1][start:stop]

    def _whole(self, name: str) -> NDArray[Any]:
        """A small array, read from front to back. Its hash also tells whether this group is the marker's at all."""
        array, expected = self.array(name), self.marker.arrays[name].content_xxh128
        values: NDArray[Any] = array.read(0, array.rows)
        found = xxhash.xxh3_128_hexdigest(values.reshape(-1).view(np.uint8).data)
        if found != expected:
            raise ShardCorrupt(
                f"{self.marker.shard}: {name} is damaged: its values have XXH3-128 {found}, expected {expected}; "
                f"{remedy(self.marker.shard)}"
            )
        return values

    def rows(self, sample_id: str) -> tuple[int, int]:
        """Where a sample's rows begin and end in the per-token arrays."""
        row = self._row[sample_id]
        return int(self._offsets[row]), int(self._offsets[row + 1])

    def read(self, sample_id: str, stop: int | None = None, out: NDArray[Any] | None = None) -> CachedSample:
        """One sample, or its first rows.

        Args:
            sample_id: one of `sample_ids`.
            stop: rows of features at or after this one are not read; None reads all.
            out: [at least T, L, D] contiguous, of the stored type: where the features go. None makes a new array.

        Raises:
            ShardCorrupt: a chunk fails its checksum, or an object is missing; names shard, array, sample and bytes.
            OSError: as the storage gave it.
        """
        begin, end = self.rows(sample_id)
        if stop is not None:
            end = min(end, begin + stop)
        found: dict[str, NDArray[Any]] = {}
        for name in _BY_SAMPLE:
            if name in self.marker.arrays:
                into = out[: end - begin] if out is not None and name == "features" else None
                found[name] = self.array(name).read(begin, end, into, sample_id)
        ids, mask = self.tokens(sample_id)
        return CachedSample(
            sample_id=sample_id,
            features=found["features"],
            input_ids=ids,
            loss_mask=mask,
            last_hidden=found.get("last_hidden"),
            features_dtype=self.marker.arrays["features"].dtype,
            scale=found.get("feature_scale"),
        )
