"""Read access to a feature cache by sample, with zarr-python.

Opening reads `cache.json`, the plan and the commit markers, never a shard (case 17). A shard is opened at its
first sample, when existence and size of each object are checked against the marker: Zarr readers take a
missing object for zeros. Every chunk that is read has its CRC checked. Damage raises and is never skipped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from cache_schema import names
from cache_schema.errors import CacheError, FingerprintMismatch, ShardCorrupt, ShardNotCommitted
from cache_schema.identity import CacheIdentity, require_same
from cache_schema.layout import decode_ids, offsets_of
from cache_schema.ledger import LedgerRow
from cache_schema.manifest import create_cache, read_identity
from cache_schema.marker import CommitMarker, committed_shards, read_marker, remedy
from cache_schema.plan import ShardPlan

__all__ = ["CachedSample", "FeatureCache", "OpenShard", "create_cache"]

_MAX_OPEN = 64


@dataclass(frozen=True, slots=True)
class CachedSample:
    """One sample as it is stored."""

    sample_id: str
    features: NDArray[Any]
    """[T, L, D]; uint16 bit patterns if `features_dtype` is `bfloat16`, else float16."""
    input_ids: NDArray[np.int32]
    """[T] int32."""
    loss_mask: NDArray[np.uint8]
    """[T] uint8."""
    last_hidden: NDArray[Any] | None
    """[T, D] like the features; None if the cache has none."""
    features_dtype: str
    """`bfloat16` or `float16`."""


class OpenShard:
    """A committed shard whose objects, ids and offsets agree with its marker.

    Args:
        cache: the cache's folder.
        marker: the shard's commit marker.
        sample_ids: the ids that should be stored, in order.

    Raises:
        ShardCorrupt: an object is missing or of another size, or the small arrays disagree with the marker.
    """

    def __init__(self, cache: Path, marker: CommitMarker, sample_ids: list[str]):
        self.marker = marker
        self.path = names.shards_dir(cache) / marker.group
        self._row = {sample_id: i for i, sample_id in enumerate(sample_ids)}
        self._offsets = offsets_of(marker.lengths)
        self.require_objects()
        self._arrays = self._open_arrays()
        self._require_index(sample_ids)

    def require_objects(self) -> None:
        """Check that each array's object is there, with the size that the marker says.

        Raises:
            ShardCorrupt: names shard, array and file.
        """
        for name, record in self.marker.arrays.items():
            if record.object is None:
                continue
            path = self.path / record.object
            try:
                size = path.stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                raise ShardCorrupt(
                    f"{self.marker.shard}: the object of {name} is missing ({path}, {record.bytes} bytes); "
                    f"{self._remedy}"
                ) from None
            if size != record.bytes:
                raise ShardCorrupt(
                    f"{self.marker.shard}: the object of {name} ({path}) has {size} bytes, expected {record.bytes}; "
                    f"{self._remedy}"
                )

    def read(self, sample_id: str) -> CachedSample:
        """One sample.

        Raises:
            ShardCorrupt: a chunk fails its checksum; names shard, array, sample and rows.
        """
        # zarr gives zeros for an object that has gone since the shard was opened.
        self.require_objects()
        row = self._row[sample_id]
        start, stop = int(self._offsets[row]), int(self._offsets[row + 1])
        found = {
            name: self.read_rows(name, start, stop, sample_id)
            for name in self._arrays
            if name not in ("offsets", "sample_id")
        }
        return CachedSample(
            sample_id=sample_id,
            features=found["features"],
            input_ids=found["input_ids"],
            loss_mask=found["loss_mask"],
            last_hidden=found.get("last_hidden"),
            features_dtype=self.marker.arrays["features"].dtype,
        )

    def read_rows(self, name: str, start: int, stop: int, sample_id: str | None = None) -> NDArray[Any]:
        """Rows `start:stop` of an array, every chunk's CRC checked.

        Raises:
            ShardCorrupt: a chunk or the shard's index fails its checksum.
        """
        try:
            return np.asarray(self._arrays[name][start:stop])
        except (ValueError, FileNotFoundError) as error:
            whose = f"sample {sample_id!r}, " if sample_id is not None else ""
            raise ShardCorrupt(
                f"{self.marker.shard}: {name} is damaged ({whose}rows {start}:{stop}): {error} {self._remedy}"
            ) from error

    @property
    def array_names(self) -> list[str]:
        """Names of the shard's arrays."""
        return list(self._arrays)

    @property
    def _remedy(self) -> str:
        return remedy(self.marker.shard)

    def _open_arrays(self) -> dict[str, zarr.Array[Any]]:
        arrays: dict[str, zarr.Array[Any]] = {}
        for name, record in self.marker.arrays.items():
            try:
                array = zarr.open_array(self.path / name, mode="r")
            except (ValueError, TypeError, KeyError, FileNotFoundError) as error:
                raise ShardCorrupt(
                    f"{self.marker.shard}: zarr.json of {name} cannot be read ({error!r}); {self._remedy}"
                ) from error
            dtype = array.attrs.get("dtype", record.dtype)
            if array.shape != record.shape or str(array.dtype) != record.stored or dtype != record.dtype:
                raise ShardCorrupt(
                    f"{self.marker.shard}: {name} is {array.dtype}{list(array.shape)} for {dtype}, the marker says "
                    f"{record.stored}{list(record.shape)} for {record.dtype}; {self._remedy}"
                )
            arrays[name] = array
        return arrays

    def _require_index(self, sample_ids: list[str]) -> None:
        offsets = self.read_rows("offsets", 0, len(self._offsets))
        if not np.array_equal(offsets, self._offsets) or self._offsets[-1] != self.marker.tokens:
            raise ShardCorrupt(
                f"{self.marker.shard}: offsets end at {offsets[-1:]} and the lengths in the marker at "
                f"{self._offsets[-1]}, or differ before; "
                f"{self._remedy}"
            )
        try:
            found = decode_ids(self.read_rows("sample_id", 0, len(sample_ids)))
        except UnicodeDecodeError as error:
            raise ShardCorrupt(f"{self.marker.shard}: sample_id is not UTF-8: {error}; {self._remedy}") from error
        if found != sample_ids:
            at = next(
                (i for i, (a, b) in enumerate(zip(found, sample_ids, strict=False)) if a != b),
                min(len(found), len(sample_ids)),
            )
            raise ShardCorrupt(
                f"{self.marker.shard}: sample {at} is {found[at : at + 1]}, by plan and ledger it is "
                f"{sample_ids[at : at + 1]}; {self._remedy}"
            )


class FeatureCache:
    """A cache that can be read. Make one with `open`; it can be sent to another process."""

    def __init__(self, path: Path, identity: CacheIdentity, plan: ShardPlan, markers: Mapping[str, CommitMarker]):
        self.path = path
        self.identity = identity
        self.plan = plan
        self.markers = dict(markers)
        self._stored = {shard: marker.stored(plan.samples(shard)) for shard, marker in self.markers.items()}
        self._lengths = {
            sample_id: length
            for shard, marker in self.markers.items()
            for sample_id, length in zip(self._stored[shard], marker.lengths, strict=True)
        }
        self._open: OrderedDict[str, OpenShard] = OrderedDict()

    @classmethod
    def open(cls, path: Path, expected: CacheIdentity | None = None, require_complete: bool = False) -> FeatureCache:
        """Read `cache.json`, the plan and all markers; no shard is opened.

        Args:
            path: the cache's folder.
            expected: refuse a cache of another identity.
            require_complete: refuse a cache that lacks shards.

        Raises:
            FingerprintMismatch: another identity than expected (names each field), or a marker of another one.
            ShardNotCommitted: shards are missing and `require_complete` is set.
            ShardCorrupt: a marker is damaged.
            CacheError: no cache here, or cache.json or plan is damaged.
            SchemaVersion: written by another version of the format.
        """
        path = Path(path)
        identity = read_identity(path)
        if expected is not None:
            require_same(identity, expected, path)
        plan = ShardPlan.read(names.plan_file(path))
        markers = {shard: read_marker(path, shard) for shard in committed_shards(path)}
        for marker in markers.values():
            require_fingerprint(marker, identity, path)
        cache = cls(path, identity, plan, markers)
        missing = cache.missing_shards()
        if require_complete and missing:
            raise ShardNotCommitted(
                f"{path} has {len(markers)} of {plan.n_shards} shards (first missing: {missing[0]}); "
                "run the extract stage, it goes on where it stopped"
            )
        return cache

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": OrderedDict()}

    def __len__(self) -> int:
        """Number of stored samples in committed shards."""
        return len(self._lengths)

    @property
    def sample_ids(self) -> list[str]:
        """Stored samples of committed shards, in the plan's order."""
        return list(self._lengths)

    def n_tokens(self, sample_id: str) -> int:
        """Stored tokens of a sample, without opening its shard.

        Raises:
            ShardNotCommitted, CacheError: as `read`.
        """
        self._require_stored(sample_id)
        return self._lengths[sample_id]

    def missing_shards(self) -> list[str]:
        """Planned shards without a commit marker, in order."""
        return [shard for shard in self.plan.shards() if shard not in self.markers]

    def ledger(self) -> list[LedgerRow]:
        """Ledger rows of all committed shards, in order."""
        return [row for marker in self.markers.values() for row in marker.ledger]

    def read(self, sample_id: str) -> CachedSample:
        """One sample.

        Raises:
            ShardNotCommitted: its shard is not committed.
            ShardCorrupt: its shard is damaged; names shard, array and sample.
            CacheError: the plan has no such sample, or the ledger says why it is not stored.
        """
        return self.shard(self._require_stored(sample_id)).read(sample_id)

    def shard(self, shard: str) -> OpenShard:
        """A committed shard, opened and checked against its marker.

        Raises:
            ShardNotCommitted: no marker.
            ShardCorrupt: the shard is damaged.
        """
        if shard not in self.markers:
            self.plan.samples(shard)
            raise ShardNotCommitted(
                f"{shard} of {self.path} is not committed; run the extract stage, it goes on where it stopped"
            )
        if shard not in self._open:
            self._open[shard] = OpenShard(self.path, self.markers[shard], self._stored[shard])
            if len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(shard)
        return self._open[shard]

    def _require_stored(self, sample_id: str) -> str:
        shard = self.plan.shard_of(sample_id)
        if shard not in self.markers:
            raise ShardNotCommitted(
                f"sample {sample_id!r} belongs to {shard} of {self.path}, which is not committed; run the extract stage"
            )
        if sample_id not in self._lengths:
            rows = [row for row in self.markers[shard].ledger if row["sample_id"] == sample_id]
            why = "; ".join(f"{row['reason']}: {row['detail']}" for row in rows)
            raise CacheError(f"sample {sample_id!r} is not stored in {shard} of {self.path}: {why}")
        return shard


def require_fingerprint(marker: CommitMarker, identity: CacheIdentity, path: Path) -> None:
    """Check that a marker belongs to its cache.

    Raises:
        FingerprintMismatch: names the shard and both fingerprints.
    """
    if marker.fingerprint != identity.fingerprint():
        raise FingerprintMismatch(
            f"{marker.shard} of {path} has fingerprint {marker.fingerprint}, but cache.json has "
            f"{identity.fingerprint()}; "
            f"it comes from another cache: {remedy(marker.shard)}"
        )
