"""What of a planned cache is there: markers of all shards, the damaged ones aside. No shard is opened."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from cache_schema import names
from cache_schema.errors import CacheError, ShardNotCommitted
from cache_schema.identity import CacheIdentity
from cache_schema.manifest import read_identity
from cache_schema.marker import CommitMarker, committed_shards, read_marker
from cache_schema.plan import ShardPlan
from cache_schema.reader import require_fingerprint
from cache_schema.storage import FolderStorage, Location, Storage, open_storage

_REQUESTS = 32
"""Markers that are read at a time from an object store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """A cache as its markers describe it; a damaged marker is a finding here, no exception."""

    storage: Storage
    identity: CacheIdentity
    plan: ShardPlan
    markers: dict[str, CommitMarker]
    """Of the planned shards whose marker is whole, in order."""
    damaged: dict[str, str]
    """Planned shards whose marker is damaged or of another cache, and what is wrong."""
    evicted: list[str]
    """Planned shards that were removed to make room, and are not there again."""
    strays: list[str]
    """Committed shards that the plan does not know."""

    @property
    def missing(self) -> list[str]:
        """Planned shards without a marker that were not evicted, in order."""
        gone = self.markers.keys() | self.damaged.keys() | set(self.evicted)
        return [shard for shard in self.plan.shards() if shard not in gone]

    @property
    def bytes(self) -> int:
        """Of the committed shards."""
        return sum(marker.bytes for marker in self.markers.values())


def survey(location: Location | Storage) -> Survey:
    """Look at identity, plan and markers.

    Raises:
        CacheError: no cache here, or cache.json or plan is damaged.
        SchemaVersion: written by another version of the format.
        OSError: as the storage gave it.
    """
    storage = open_storage(location)
    identity, plan = read_identity(storage), ShardPlan.read(storage)
    committed = committed_shards(storage)
    planned = [shard for shard in committed if shard in plan]
    found = _read_all(storage, identity, planned)
    evicted = {key.removeprefix(f"{names.EVICTED}/").removesuffix(".json") for key, _ in storage.list(names.EVICTED)}
    markers = {shard: marker for shard, marker in found.items() if isinstance(marker, CommitMarker)}
    return Survey(
        storage=storage,
        identity=identity,
        plan=plan,
        markers=markers,
        damaged={shard: marker for shard, marker in found.items() if isinstance(marker, str)},
        evicted=[shard for shard in plan.shards() if shard in evicted and shard not in found],
        strays=[shard for shard in committed if shard not in plan],
    )


def _read_all(storage: Storage, identity: CacheIdentity, shards: list[str]) -> dict[str, CommitMarker | str]:
    """Markers of shards, or what is wrong with them; those that are gone by now are left out."""
    found: dict[str, CommitMarker | str] = {}
    for shard, marker in read_each(storage, shards).items():
        if isinstance(marker, CommitMarker):
            try:
                require_fingerprint(marker, identity, storage.where())
            except CacheError as error:
                found[shard] = str(error)
                continue
            found[shard] = marker
        elif not isinstance(marker, ShardNotCommitted):
            found[shard] = str(marker)
    return found


def read_each(storage: Storage, shards: list[str]) -> dict[str, CommitMarker | CacheError]:
    """The marker of each shard, or what reading it raised. On object stores many at a time.

    Raises:
        OSError: as the storage gave it.
    """

    def read(shard: str) -> CommitMarker | CacheError:
        try:
            return read_marker(storage, shard)
        except CacheError as error:
            return error

    if isinstance(storage, FolderStorage):
        found = [read(shard) for shard in shards]
    else:
        with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="markers") as pool:
            found = list(pool.map(read, shards))
    return dict(zip(shards, found, strict=True))
