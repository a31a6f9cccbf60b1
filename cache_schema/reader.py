"""Read access to a feature cache by sample, with our own positioned reader.

Opening reads `cache.json`, the plan and the commit markers, never a shard (case 17). Every chunk that is read has
its CRC checked; an object that is missing or of another size than the marker says raises. Damage raises and is
never skipped.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_schema.errors import CacheError, FingerprintMismatch, ShardNotCommitted
from cache_schema.identity import CacheIdentity, require_same
from cache_schema.ledger import LedgerRow
from cache_schema.manifest import create_cache, read_identity
from cache_schema.marker import CommitMarker, committed_shards, read_markers, remedy
from cache_schema.plan import ShardPlan
from cache_schema.shard import CachedSample, OpenShard
from cache_schema.storage import Location, Storage, open_storage

__all__ = ["CachedSample", "FeatureCache", "OpenShard", "create_cache"]

_MAX_OPEN = 64


class FeatureCache:
    """A cache that can be read. Make one with `open`; it can be sent to another process, survives a fork, and may be
    used by several threads at once.

    Attributes:
        storage: where it lies.
        identity, plan: what it is made of.
        markers: of the committed shards, as of the last `refresh`.
    """

    def __init__(self, storage: Storage, identity: CacheIdentity, plan: ShardPlan, markers: Mapping[str, CommitMarker]):
        self.storage, self.identity, self.plan = storage, identity, plan
        self.markers: dict[str, CommitMarker] = {}
        self._lengths: dict[str, dict[str, int]] = {}
        self._forget_open()
        self._add(markers)

    @classmethod
    def open(
        cls, location: Location | Storage, expected: CacheIdentity | None = None, require_complete: bool = False
    ) -> FeatureCache:
        """Read `cache.json`, the plan and all markers; no shard is opened.

        Args:
            location: the cache's folder or URL.
            expected: refuse a cache of another identity.
            require_complete: refuse a cache that lacks shards.

        Raises:
            FingerprintMismatch: another identity than expected (names each field), or a marker of another one.
            ShardNotCommitted: shards are missing and `require_complete` is set.
            ShardCorrupt: a marker is damaged.
            CacheError: no cache here, or cache.json or plan is damaged.
            SchemaVersion: written by another version of the format.
            OSError: as the storage gave it.
        """
        storage = open_storage(location)
        identity = read_identity(storage)
        if expected is not None:
            require_same(identity, expected, storage.where())
        cache = cls(storage, identity, ShardPlan.read(storage), {})
        cache.refresh()
        if require_complete:
            cache.require_complete()
        return cache

    def require_complete(self) -> None:
        """Check that every planned shard is committed.

        Raises:
            ShardNotCommitted: says how many are not, and the first of them.
        """
        missing = self.missing_shards()
        if missing:
            raise ShardNotCommitted(
                f"{self.storage.where()} has {len(self.markers)} of {self.plan.n_shards} shards (first missing: "
                f"{missing[0]}); run the extract stage, it goes on where it stopped"
            )

    def refresh(self, shards: Iterable[str] | None = None) -> None:
        """Take up markers that appeared since, and forget shards whose markers have gone (evicted ones).

        Args:
            shards: look only at these; None looks at all.

        Raises:
            FingerprintMismatch, ShardCorrupt, OSError: as `open`.
        """
        if shards is None:
            present = committed_shards(self.storage)
            gone = self.markers.keys() - set(present)
            new = read_markers(self.storage, [s for s in present if s not in self.markers])
        else:
            new = read_markers(self.storage, shards)
            gone = set(shards) - new.keys()
        fingerprint = self.identity.fingerprint()
        for marker in new.values():
            if marker.fingerprint != fingerprint:
                require_fingerprint(marker, self.identity, self.storage.where())
        self._add(new)
        with self._lock_of_this_process():
            for shard in gone:
                self.markers.pop(shard, None)
                self._lengths.pop(shard, None)
                self._open.pop(shard, None)

    def _add(self, markers: Mapping[str, CommitMarker]) -> None:
        for shard, marker in markers.items():
            stored = marker.stored(self.plan.samples(shard)) if shard in self.plan else []
            if self.markers.get(shard, marker).group != marker.group:
                self._open.pop(shard, None)
            self._lengths[shard] = dict(zip(stored, marker.lengths, strict=True)) if stored else {}
            self.markers[shard] = marker

    def _forget_open(self) -> None:
        self._open: OrderedDict[str, OpenShard] = OrderedDict()
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def _lock_of_this_process(self) -> threading.Lock:
        # A fork copies the lock in whatever state another thread held it, and object-store clients do not survive one.
        if self._pid != os.getpid():
            self._forget_open()
        return self._lock

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_open", "_lock", "_pid")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_open()

    def __len__(self) -> int:
        """Number of stored samples in committed shards."""
        return sum(map(len, self._lengths.values()))

    @property
    def sample_ids(self) -> list[str]:
        """Stored samples of committed shards, in the plan's order."""
        return [s for shard in self.plan.shards() for s in self._lengths.get(shard, ())]

    def n_tokens(self, sample_id: str) -> int:
        """Stored tokens of a sample, without opening its shard.

        Raises:
            ShardNotCommitted, CacheError: as `read`.
        """
        return self._lengths[self._require_stored(sample_id)][sample_id]

    def missing_shards(self) -> list[str]:
        """Planned shards without a commit marker, in order."""
        return [shard for shard in self.plan.shards() if shard not in self.markers]

    def ledger(self) -> list[LedgerRow]:
        """Ledger rows of all committed shards, in order."""
        return [row for shard in self.plan.shards() if shard in self.markers for row in self.markers[shard].ledger]

    def dropped(self, sample_id: str) -> str | None:
        """Why a planned sample of a committed shard is not stored (`reason: detail`), or None if it is.

        Raises:
            ShardNotCommitted: its shard is not committed.
            CacheError: the plan has no such sample.
        """
        shard = self._require_committed(sample_id)
        if sample_id in self._lengths[shard]:
            return None
        rows = [row for row in self.markers[shard].ledger if row["sample_id"] == sample_id]
        return "; ".join(f"{row['reason']}: {row['detail']}" for row in rows)

    def read(self, sample_id: str, stop: int | None = None, out: NDArray[Any] | None = None) -> CachedSample:
        """One sample, or its first `stop` rows of features.

        Args:
            sample_id: a stored one.
            stop, out: as `OpenShard.read`.

        Raises:
            ShardNotCommitted: its shard is not committed.
            ShardCorrupt: its shard is damaged; names shard, array, sample and bytes.
            CacheError: the plan has no such sample, or the ledger says why it is not stored.
            OSError: as the storage gave it.
        """
        return self.shard(self._require_stored(sample_id)).read(sample_id, stop, out)

    def tokens(self, sample_id: str) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Token ids and loss mask of a sample, without its features.

        Raises:
            as `read`.
        """
        return self.shard(self._require_stored(sample_id)).tokens(sample_id)

    def shard(self, shard: str) -> OpenShard:
        """A committed shard.

        Raises:
            ShardNotCommitted: no marker.
            CacheError: not in the plan.
        """
        if shard not in self.markers:
            self.plan.samples(shard)
            raise ShardNotCommitted(
                f"{shard} of {self.storage.where()} is not committed; run the extract stage, it goes on where it "
                "stopped"
            )
        with self._lock_of_this_process():
            if shard not in self._open:
                self._open[shard] = OpenShard(self.storage, self.markers[shard], list(self._lengths[shard]))
                if len(self._open) > _MAX_OPEN:
                    self._open.popitem(last=False)
            self._open.move_to_end(shard)
            return self._open[shard]

    def _require_committed(self, sample_id: str) -> str:
        shard = self.plan.shard_of(sample_id)
        if shard not in self.markers:
            raise ShardNotCommitted(
                f"sample {sample_id!r} belongs to {shard} of {self.storage.where()}, which is not committed; run the "
                "extract stage"
            )
        return shard

    def _require_stored(self, sample_id: str) -> str:
        shard = self._require_committed(sample_id)
        if sample_id not in self._lengths[shard]:
            raise CacheError(
                f"sample {sample_id!r} is not stored in {shard} of {self.storage.where()}: {self.dropped(sample_id)}"
            )
        return shard


def require_fingerprint(marker: CommitMarker, identity: CacheIdentity, where: str) -> None:
    """Check that a marker belongs to its cache.

    Raises:
        FingerprintMismatch: names the shard and both fingerprints.
    """
    if marker.fingerprint != identity.fingerprint():
        raise FingerprintMismatch(
            f"{marker.shard} of {where} has fingerprint {marker.fingerprint}, but cache.json has "
            f"{identity.fingerprint()}; it comes from another cache: {remedy(marker.shard)}"
        )
