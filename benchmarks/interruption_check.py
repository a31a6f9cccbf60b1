"""Whether a cache that was interrupted and finished is the same as one that nothing disturbed."""

from __future__ import annotations

from dataclasses import dataclass, field

from cache_schema import names
from cache_schema.garbage import find_garbage
from cache_schema.marker import read_markers
from cache_schema.reader import FeatureCache
from cache_schema.storage import Location, Storage, open_storage
from cache_schema.verify import equal_caches, verify_cache


@dataclass(kw_only=True)
class Outcome:
    """What one interruption led to."""

    kind: str
    what: str
    """When it came, and how it ended what it met."""
    interrupted: bool
    """Whether it met the writer at work (or the writer had just finished)."""
    garbage_groups: int = 0
    problems: list[str] = field(default_factory=list)


def differences(location: Location, undisturbed: Location) -> tuple[list[str], int]:
    """How a finished cache differs from an undisturbed one, and how many groups in it no marker names."""
    storage, reference = open_storage(location), open_storage(undisturbed)
    problems = equal_caches(storage, reference)
    report = verify_cache(storage)
    problems += report.problems + [p for shard in report.shards for p in shard.problems]
    ours, theirs = _objects(storage), _objects(reference)
    problems += [f"{key} is only in one of both" for key in sorted(ours.keys() ^ theirs.keys())]
    problems += [f"{key} has other bytes" for key in sorted(ours.keys() & theirs.keys()) if ours[key] != theirs[key]]
    problems += _samples_problems(storage)
    garbage = find_garbage(storage, 0)
    problems += [f"{item.key} is neither the project's nor named" for item in garbage if item.kind == "unknown"]
    return problems, sum(item.kind == "group" for item in garbage)


def _objects(storage: Storage) -> dict[str, bytes]:
    """All that counts, with names that do not depend on the groups' tags."""
    plain = (names.CACHE_JSON, names.PLAN, names.PLAN_SHA256)
    found = {key: storage.read(key) for key in plain}
    cache = FeatureCache.open(storage)
    for shard, marker in cache.markers.items():
        prefix = names.group_key(marker.group)
        for key, _ in storage.list(prefix):
            found[f"{shard}{key.removeprefix(prefix)}"] = storage.read(key)
    return found


def _samples_problems(storage: Storage) -> list[str]:
    """Every planned sample is stored once, or in the ledger."""
    cache = FeatureCache.open(storage)
    markers = read_markers(storage, cache.plan.shards())
    dropped = [s for marker in markers.values() for s in marker.dropped()]
    there = sorted([*cache.sample_ids, *dropped])
    return [] if there == sorted(cache.plan.sample_ids) else ["stored and dropped samples are not the planned ones"]
