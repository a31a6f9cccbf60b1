"""What lies in a cache that nothing names: groups of attempts that never committed, and temporary files.

A running job may own what no marker names yet, so nothing is removed silently, nothing that was written to within
the last hour (or a limit that the caller gives), and nothing of a shard whose own marker cannot be read.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cache_schema import durable, names
from cache_schema.errors import CacheError, ShardNotCommitted
from cache_schema.marker import CommitMarker
from cache_schema.soundness import PROBES
from cache_schema.storage import FolderStorage, Location, Storage, open_storage
from cache_schema.survey import read_each

MIN_AGE_S = 3600.0
"""Younger things are left alone unless the caller says otherwise."""
_GROUP = re.compile(r"shard-\d{5,}\.[0-9a-z]+")
_TEMPORARY = re.compile(r"\..+\.\d+\.[0-9a-f]{8}" + re.escape(durable.TEMPORARY_SUFFIX))


@dataclass(frozen=True, kw_only=True, slots=True)
class Garbage:
    """Something that nothing names."""

    key: str
    kind: Literal["group", "temporary", "unknown"]
    """A shard's group, a temporary file, or a folder below `shards/` that this project did not make."""
    bytes: int
    objects: int
    age_s: float
    """Since it was last written to."""
    state: Literal["old", "young", "kept", "deleted"]
    """`old` may go; `young` may belong to a running job; `kept` must not go, for the `reason`."""
    reason: str = ""


def find_garbage(location: Location | Storage, older_than_s: float = MIN_AGE_S) -> list[Garbage]:
    """List what nothing names, in order of the keys.

    Groups are listed before markers are read: one that is committed meanwhile is found in its marker.

    Args:
        location: the cache's folder or URL.
        older_than_s: age from which something may go.

    Raises:
        OSError: as the storage gave it.
    """
    storage = open_storage(location)
    groups = storage.folders(names.SHARDS)
    markers = read_each(storage, sorted({names.group_shard(group) for group in groups}))
    found = [item for group in groups if (item := _group(storage, group, older_than_s, markers)) is not None]
    found += (
        _temporaries(storage, older_than_s) if isinstance(storage, FolderStorage) else _probes(storage, older_than_s)
    )
    return found


def delete_garbage(
    location: Location | Storage, found: list[Garbage], older_than_s: float = MIN_AGE_S
) -> list[Garbage]:
    """Remove what `find_garbage` found old. Each is looked at again right before it goes.

    Returns:
        What was found, with its state now.

    Raises:
        OSError: as the storage gave it.
    """
    storage = open_storage(location)
    return [_delete(storage, item, older_than_s) if item.state == "old" else item for item in found]


def _delete(storage: Storage, item: Garbage, older_than_s: float) -> Garbage:
    if item.kind == "group":
        group = item.key.removeprefix(f"{names.SHARDS}/")
        again = _group(storage, group, older_than_s, read_each(storage, [names.group_shard(group)]))
        if again is None or again.state != "old":
            return again or replace(item, state="kept", reason="it was committed meanwhile")
        storage.delete_tree(item.key)
    elif item.key == PROBES:
        storage.delete_tree(PROBES)
    else:
        storage.delete(item.key)
    return replace(item, state="deleted")


def _group(
    storage: Storage, group: str, older_than_s: float, markers: dict[str, CommitMarker | CacheError]
) -> Garbage | None:
    """A group, or None if its shard's marker names it."""
    shard, reason = names.group_shard(group), ""
    marker = markers[shard]
    if isinstance(marker, CommitMarker) and marker.group == group:
        return None
    if not isinstance(marker, CommitMarker | ShardNotCommitted):
        reason = f"the marker of {shard} is damaged and may name it: repair the cache first"
    key = names.group_key(group)
    sizes = [size for _, size in storage.list(key)]
    age_s = storage.age_s(key)
    if not _GROUP.fullmatch(group):
        reason = "it has no group's name; look at it yourself"
    state: Literal["old", "young", "kept"] = "kept" if reason else ("old" if age_s >= older_than_s else "young")
    return Garbage(
        key=key,
        kind="group" if _GROUP.fullmatch(group) else "unknown",
        bytes=sum(sizes),
        objects=len(sizes),
        age_s=age_s,
        state=state,
        reason=reason,
    )


def _probes(storage: Storage, older_than_s: float) -> Iterator[Garbage]:
    """What a killed look at an object store left, as one item."""
    sizes = [size for _, size in storage.list(PROBES)]
    if sizes:
        age_s = storage.age_s(PROBES)
        state: Literal["old", "young"] = "old" if age_s >= older_than_s else "young"
        yield Garbage(key=PROBES, kind="temporary", bytes=sum(sizes), objects=len(sizes), age_s=age_s, state=state)


def _temporaries(storage: FolderStorage, older_than_s: float) -> Iterator[Garbage]:
    """Temporary files of killed processes, beside the objects that they were to become."""
    for folder in ("", names.COMMITS, names.EVICTED):
        for path in sorted(Path(storage.where(folder)).glob(f".*{durable.TEMPORARY_SUFFIX}")):
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            if not _TEMPORARY.fullmatch(path.name) or not path.is_file():
                continue
            age_s = time.time() - found.st_mtime
            yield Garbage(
                key=f"{folder}/{path.name}" if folder else path.name,
                kind="temporary",
                bytes=found.st_size,
                objects=1,
                age_s=age_s,
                state="old" if age_s >= older_than_s else "young",
            )
