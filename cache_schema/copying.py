"""Copies a cache, or some of its shards, from one storage to another, under the same protocol as writing one.

A shard's objects are copied into a group with a tag of its own, read back and checked against the marker byte by
byte and value by value, and only then committed. So a copy that was killed is gone on with by starting it again:
what is committed is not copied twice, and what was half copied is a group that no marker names (`dflash cache
gc`). The tag is new because a second copy, or a resumed one, could otherwise remove objects that the first has just
committed; everything else of the marker is the source's.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace

from cache_schema import names
from cache_schema.errors import CacheError, ShardCorrupt, ShardNotCommitted
from cache_schema.manifest import create_cache
from cache_schema.marker import CommitMarker, create_marker, read_marker
from cache_schema.storage import FolderStorage, Location, ObjectWriter, Storage, open_storage
from cache_schema.survey import Survey, survey
from cache_schema.verify import verify_group

_BLOCK_BYTES = 8 << 20
Progress = Callable[[int], None]
"""Called with numbers of bytes that were copied, from any thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyPlan:
    """What a copy will do."""

    source: Survey
    destination: Storage
    todo: list[CommitMarker]
    present: list[str]
    """Shards that the destination has already, with the same content."""
    missing: list[str]
    """Selected shards that the source has not: not made yet, or evicted."""

    @property
    def bytes(self) -> int:
        """To be copied."""
        return sum(marker.bytes for marker in self.todo)


class CopyStopped(CacheError):
    """The copy was told to stop; what is committed stays."""


def plan_copy(source: Location, destination: Location, shards: Iterable[str] | None = None) -> CopyPlan:
    """Create the destination (cache.json and plan) if need be, and find out which shards it lacks.

    Args:
        source, destination: folders or URLs.
        shards: names of the shards to copy; None takes all.

    Raises:
        FingerprintMismatch: the destination is a cache of another identity; names each field.
        CacheError: no cache at the source, another plan at the destination, or a shard there with other content.
        ShardCorrupt: a selected shard's marker is damaged.
        OSError: as the storages gave it.
    """
    found, target = survey(source), open_storage(destination)
    _require_apart(found.storage, target)
    selected = found.plan.shards() if shards is None else list(dict.fromkeys(shards))
    for shard in selected:
        found.plan.samples(shard)
        if shard in found.damaged:
            raise ShardCorrupt(f"{found.storage.where()}: {found.damaged[shard]}")
    if create_cache(target, found.identity, found.plan) != found.plan:
        raise CacheError(
            f"{target.where()} holds a cache of the same identity whose samples are divided into other shards than in "
            f"{found.storage.where()}, so no shard fits; copy to another place"
        )
    here = survey(target)
    todo: list[CommitMarker] = []
    present: list[CommitMarker] = []
    for shard in selected:
        if shard in found.markers:
            (present if _is_there(here, found.markers[shard]) else todo).append(found.markers[shard])
    return CopyPlan(
        source=found,
        destination=target,
        todo=todo,
        present=[marker.shard for marker in present],
        missing=[shard for shard in selected if shard not in found.markers],
    )


def _require_apart(source: Storage, destination: Storage) -> None:
    """Refuse a destination that is the source, or lies in it, however the two are written."""
    a, b = (str(s.root.resolve()) if isinstance(s, FolderStorage) else s.url for s in (source, destination))
    if a == b:
        raise CacheError(f"{destination.url} is both source and destination; give another destination")
    if b.startswith(a.rstrip("/") + "/"):
        raise CacheError(f"{destination.url} lies inside the source, {source.url}; give another destination")


def _is_there(destination: Survey, marker: CommitMarker) -> bool:
    """Whether the destination has a shard.

    Raises:
        CacheError: it has one with other content, or its marker is damaged.
    """
    if marker.shard in destination.damaged:
        raise ShardCorrupt(f"{destination.storage.where()}: {destination.damaged[marker.shard]}")
    found = destination.markers.get(marker.shard)
    if found is not None:
        _require_equal(destination.storage, found, marker)
    return found is not None


def _require_equal(storage: Storage, found: CommitMarker, expected: CommitMarker) -> None:
    if found.content_sha256 != expected.content_sha256:
        raise CacheError(
            f"{storage.where(names.commit_key(found.shard))} commits {found.shard} with content "
            f"{found.content_sha256[:16]}…, the source has {expected.content_sha256[:16]}… under the same identity; "
            "nothing is overwritten: `dflash cache diff` shows what differs, copy to another place"
        )


def run_copy(plan: CopyPlan, workers: int = 4, progress: Progress | None = None) -> dict[str, str]:
    """Copy what a plan lacks, several shards at a time.

    A shard that is damaged at the source, or does not arrive whole, is not committed; the others are copied
    nevertheless.

    Args:
        plan: from `plan_copy`.
        workers: shards at a time.
        progress: called with numbers of bytes.

    Returns:
        Shards that were not copied, and why; empty if all were.

    Raises:
        OSError: as the storages gave it (a full disk); what was committed before stays.
    """
    stop = threading.Event()
    failed: dict[str, str] = {}
    with ThreadPoolExecutor(workers, thread_name_prefix="copy") as pool:
        running = {pool.submit(copy_shard, plan, marker, progress, stop): marker.shard for marker in plan.todo}
        try:
            for future in as_completed(running):
                try:
                    future.result()
                except CacheError as error:
                    failed[running[future]] = str(error)
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return dict(sorted(failed.items()))


def copy_shard(
    plan: CopyPlan, marker: CommitMarker, progress: Progress | None = None, stop: threading.Event | None = None
) -> CommitMarker:
    """Copy one shard and commit it.

    Returns:
        The destination's marker.

    Raises:
        ShardCorrupt: it is damaged at the source, or did not arrive whole; nothing of it is left behind.
        CacheError: someone else has committed other content meanwhile.
        OSError: as the storages gave it.
    """
    copied = replace(marker, group=f"{marker.shard}.{names.random_tag()}")
    storage, prefix = plan.destination, names.group_key(copied.group)
    try:
        _copy_objects(plan.source.storage, names.group_key(marker.group), storage, prefix, progress, stop)
        _require_whole(plan, marker, copied)
        storage.sync(prefix)
        if create_marker(storage, copied):
            return copied
    except BaseException:
        if not _is_committed(storage, copied):
            with contextlib.suppress(OSError):
                storage.delete_tree(prefix)
        raise
    storage.delete_tree(prefix)
    first = read_marker(storage, marker.shard)
    _require_equal(storage, first, marker)
    return first


def _copy_objects(
    source: Storage, group: str, destination: Storage, prefix: str, progress: Progress | None,
    stop: threading.Event | None,
) -> None:  # fmt: skip
    for key, size in source.list(group):
        writer = destination.writer(f"{prefix}/{key.removeprefix(f'{group}/')}")
        try:
            _copy_object(source, key, size, writer, progress, stop)
            writer.close()
        except BaseException:
            writer.abort()
            raise


def _copy_object(
    source: Storage, key: str, size: int, writer: ObjectWriter, progress: Progress | None, stop: threading.Event | None
) -> None:
    try:
        reader = source.open(key)
        for start in range(0, size, _BLOCK_BYTES):
            if stop is not None and stop.is_set():
                raise CopyStopped(f"{source.where(key)}: the copy was stopped")
            block = bytearray(min(_BLOCK_BYTES, size - start))
            reader.read_into(start, [block])
            writer.write(block)
            if progress is not None:
                progress(len(block))
    except (EOFError, FileNotFoundError) as error:
        raise ShardCorrupt(f"{source.where(key)} has changed while it was copied: {error}") from error


def _require_whole(plan: CopyPlan, marker: CommitMarker, copied: CommitMarker) -> None:
    planned = plan.source.plan.samples(marker.shard)
    report = verify_group(plan.destination, plan.source.identity, planned, copied)
    if report.status == "ok":
        return
    before = verify_group(plan.source.storage, plan.source.identity, planned, marker)
    if before.status != "ok":
        raise ShardCorrupt(f"the source is damaged, the shard was not copied: {before.problems[0]}")
    raise ShardCorrupt(f"the shard did not arrive whole and was not committed: {report.problems[0]}")


def _is_committed(storage: Storage, marker: CommitMarker) -> bool:
    # An interrupt can arrive between the marker's creation and the return from it.
    try:
        return read_marker(storage, marker.shard).group == marker.group
    except ShardNotCommitted:
        return False
    except (CacheError, OSError):
        return True
