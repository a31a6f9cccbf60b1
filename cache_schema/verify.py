"""Full check of a cache, and plain summaries of what it holds.

`verify_cache` reads every byte: chunks against their CRCs, indexes and metadata against their hashes, values against
the content hash, offsets and ids against marker and plan. No byte of a cache is outside one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from cache_schema import names
from cache_schema.errors import CacheError, ShardNotCommitted
from cache_schema.identity import CacheIdentity, sha256_bytes
from cache_schema.layout import GROUP_JSON, PER_SAMPLE, decode_ids, offsets_of
from cache_schema.manifest import read_identity
from cache_schema.marker import CommitMarker, committed_shards, decode_marker, read_marker, shard_sha256
from cache_schema.plan import ShardPlan
from cache_schema.reader import OpenShard, require_fingerprint
from cache_schema.storage import Location, Storage, open_storage


@dataclass(frozen=True, slots=True)
class ShardReport:
    """What was found about one shard."""

    shard: str
    status: Literal["ok", "missing", "corrupt"]
    problems: list[str]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was found about a cache."""

    path: str
    shards: list[ShardReport]
    problems: list[str]
    """About the cache as a whole, e.g. a marker that the plan does not know."""

    @property
    def ok(self) -> bool:
        """Whether every looked-at shard is there and whole."""
        return not self.problems and all(s.status == "ok" for s in self.shards)

    def counts(self) -> dict[str, int]:
        """Number of shards by status."""
        return {status: sum(s.status == status for s in self.shards) for status in ("ok", "missing", "corrupt")}


def verify_cache(
    location: Location | Storage, shards: Iterable[str] | None = None, progress: Callable[[str], None] | None = None
) -> VerifyReport:
    """Check shards completely: hashes, CRCs, offsets, ids, and that each planned sample is stored or in the ledger.

    Args:
        location: the cache's folder or URL.
        shards: names of the shards to look at; None takes the whole plan.
        progress: called with each shard's name when it is done.

    Raises:
        CacheError: no cache here, cache.json or plan is damaged, or a named shard is not planned.
        OSError: as the storage gave it.
    """
    storage = open_storage(location)
    identity, plan = read_identity(storage), ShardPlan.read(storage)
    reports: list[ShardReport] = []
    for shard in plan.shards() if shards is None else shards:
        reports.append(verify_shard(storage, identity, plan.samples(shard), shard))
        if progress is not None:
            progress(shard)
    return VerifyReport(storage.url, reports, cache_problems(storage, plan))


def cache_problems(storage: Storage, plan: ShardPlan) -> list[str]:
    """What is wrong with a cache beside its shards: markers that the plan does not know, damaged evicted markers."""
    strays = sorted(set(committed_shards(storage)) - set(plan.shards()))
    problems = [f"{s} has a commit marker, but is not in the plan" for s in strays]
    for key, _ in storage.list(names.EVICTED):
        shard = key.removeprefix(f"{names.EVICTED}/").removesuffix(".json")
        try:
            decode_marker(storage.read(key), shard, storage.where(key))
        except CacheError as error:
            problems.append(str(error))
    return problems


def verify_shard(storage: Storage, identity: CacheIdentity, planned: list[str], shard: str) -> ShardReport:
    """Check one shard completely.

    Args:
        storage: of the cache.
        identity: of the cache.
        planned: the shard's samples by the plan.
        shard: its name.

    Raises:
        OSError: as the storage gave it.
    """
    try:
        marker = read_marker(storage, shard)
    except ShardNotCommitted as error:
        return ShardReport(shard, "missing", [str(error)])
    except CacheError as error:
        return ShardReport(shard, "corrupt", [str(error)])
    return verify_group(storage, identity, planned, marker)


def verify_group(storage: Storage, identity: CacheIdentity, planned: list[str], marker: CommitMarker) -> ShardReport:
    """Check a shard's group against a marker, which need not be committed (a copy is checked before it is).

    Args:
        storage, identity, planned: as for `verify_shard`.
        marker: what the group should be.

    Raises:
        OSError: as the storage gave it.
    """
    shard = marker.shard
    problems = _object_problems(storage, marker)
    try:
        require_fingerprint(marker, identity, storage.where())
        opened = OpenShard(storage, marker, marker.stored(planned))
    except CacheError as error:
        problems.append(str(error))
    else:
        problems += _value_problems(opened)
    return ShardReport(shard, "corrupt" if problems else "ok", problems)


def _object_problems(storage: Storage, marker: CommitMarker) -> list[str]:
    """Objects of the group that are missing, too many, or of another size; metadata that has changed."""
    prefix = names.group_key(marker.group)
    hashes = {GROUP_JSON: marker.group_sha256}
    sizes = {r.object: r.bytes for r in marker.arrays.values() if r.object is not None}
    for name, record in marker.arrays.items():
        hashes[f"{name}/{GROUP_JSON}"] = record.metadata_sha256
    found = {key.removeprefix(f"{prefix}/"): size for key, size in storage.list(prefix)}
    expected = hashes.keys() | sizes.keys()
    where = f"{marker.shard}: {storage.where(prefix)}"
    problems = [f"{where}/{key} is missing" for key in sorted(expected - found.keys())]
    problems += [f"{where}/{key} does not belong to the shard" for key in sorted(found.keys() - expected)]
    for key in sorted(hashes.keys() & found.keys()):
        sha256 = sha256_bytes(storage.read(f"{prefix}/{key}"))
        if sha256 != hashes[key]:
            problems.append(f"{where}/{key} has SHA-256 {sha256}, expected {hashes[key]}")
    for key in sorted(sizes.keys() & found.keys()):
        if found[key] != sizes[key]:
            problems.append(f"{where}/{key} has {found[key]} bytes, expected {sizes[key]}")
    if not problems and sum(found.values()) != marker.bytes:
        problems.append(f"{where} has {sum(found.values())} bytes, the marker says {marker.bytes}")
    return problems


def _value_problems(shard: OpenShard) -> list[str]:
    problems: list[str] = []
    for name in shard.marker.arrays:
        try:
            problems += _array_problems(shard, name)
        except CacheError as error:
            problems.append(str(error))
    if shard_sha256(shard.marker.arrays, shard.marker.ledger) != shard.marker.content_sha256:
        problems.append(f"{shard.marker.shard}: arrays and ledger do not give the marker's content_sha256")
    return problems


def _array_problems(shard: OpenShard, name: str) -> list[str]:
    """One array read from front to back, every CRC checked, and compared with what the marker says of it."""
    marker, record, array = shard.marker, shard.marker.arrays[name], shard.array(name)
    array.read_index()
    digest = xxhash.xxh3_128()
    kept: list[NDArray[Any]] = []
    for block in array.blocks():
        digest.update(block.reshape(-1).view(np.uint8).data)
        if name in PER_SAMPLE:
            kept.append(block.copy())
    problems = []
    if digest.hexdigest() != record.content_xxh128:
        problems.append(
            f"{marker.shard}: values of {name} have XXH3-128 {digest.hexdigest()}, expected {record.content_xxh128}"
        )
    if name not in PER_SAMPLE:
        if record.shape[0] != marker.tokens:
            problems.append(f"{marker.shard}: {name} has {record.shape[0]} rows, expected {marker.tokens} (tokens)")
        return problems
    values = np.concatenate(kept) if kept else np.zeros(record.shape, record.stored)
    return problems + (_offset_problems(marker, values) if name == "offsets" else _id_problems(shard, values))


def _offset_problems(marker: CommitMarker, offsets: NDArray[Any]) -> list[str]:
    expected = offsets_of(marker.lengths)
    if np.array_equal(offsets, expected) and expected[-1] == marker.tokens:
        return []
    return [
        f"{marker.shard}: offsets end at {offsets[-1:]}, the lengths in the marker at {expected[-1]} and its tokens "
        f"are {marker.tokens}, or they differ before"
    ]


def _id_problems(shard: OpenShard, matrix: NDArray[Any]) -> list[str]:
    try:
        found = decode_ids(matrix)
    except UnicodeDecodeError as error:
        return [f"{shard.marker.shard}: sample_id is not UTF-8: {error}"]
    if found == shard.sample_ids:
        return []
    pairs = zip(found, shard.sample_ids, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(shard.sample_ids)))
    return [
        f"{shard.marker.shard}: sample {at} is {found[at : at + 1]}, by plan and ledger it is "
        f"{shard.sample_ids[at : at + 1]}"
    ]


def list_shards(location: Location | Storage) -> list[dict[str, Any]]:
    """One dict per planned shard, from markers only: shard, status, samples, tokens, bytes, …"""
    storage = open_storage(location)
    plan = ShardPlan.read(storage)
    return [_summary(storage, plan, shard) for shard in plan.shards()]


def _summary(storage: Storage, plan: ShardPlan, shard: str) -> dict[str, Any]:
    row: dict[str, Any] = {"shard": shard, "status": "committed", "planned_samples": len(plan.samples(shard))}
    try:
        marker = read_marker(storage, shard)
    except ShardNotCommitted:
        return row | {"status": "missing", "planned_tokens": int(plan.lengths(shard).sum())}
    except CacheError as error:
        return row | {"status": "corrupt", "problem": str(error)}
    kept = sum(r["kept"] for r in marker.ledger)
    return row | {
        "samples": marker.samples,
        "tokens": marker.tokens,
        "bytes": marker.bytes,
        "dropped": len(marker.dropped()),
        "noted": kept,
        "attempt": marker.attempt,
        "seconds": marker.timings.get("total_s"),
        "group": marker.group,
    }


def describe_cache(location: Location | Storage) -> dict[str, Any]:
    """A cache in one dict: identity, totals over committed shards, missing and damaged shards, ledger by reason."""
    storage = open_storage(location)
    identity, rows = read_identity(storage), list_shards(storage)
    committed = [r for r in rows if r["status"] == "committed"]
    reasons: dict[str, int] = {}
    for r in committed:
        for row in read_marker(storage, r["shard"]).ledger:
            reasons[row["reason"]] = reasons.get(row["reason"], 0) + 1
    return {
        "path": storage.url,
        "fingerprint": identity.fingerprint(),
        "identity": identity.to_json(),
        "planned_shards": len(rows),
        "planned_samples": sum(r["planned_samples"] for r in rows),
        "committed_shards": len(committed),
        **{key: sum(r[key] for r in committed) for key in ("samples", "tokens", "bytes", "dropped")},
        "missing": [r["shard"] for r in rows if r["status"] == "missing"],
        "corrupt": [r["shard"] for r in rows if r["status"] == "corrupt"],
        "ledger_reasons": dict(sorted(reasons.items())),
    }


def describe_shard(location: Location | Storage, shard: str) -> dict[str, Any]:
    """A committed shard in one dict: its summary, arrays, samples with lengths, and ledger.

    Raises:
        ShardNotCommitted: no marker.
        CacheError: not planned, or damaged.
    """
    storage = open_storage(location)
    plan = ShardPlan.read(storage)
    planned = plan.samples(shard)
    marker = read_marker(storage, shard)
    arrays = {
        name: {
            "shape": list(a.shape),
            "dtype": a.dtype,
            "stored": a.stored,
            "bytes": a.bytes,
            "compression": a.compression,
            "content_xxh128": a.content_xxh128,
        }
        for name, a in marker.arrays.items()
    }
    pairs = zip(marker.stored(planned), marker.lengths, strict=True)
    return _summary(storage, plan, shard) | {
        "fingerprint": marker.fingerprint,
        "content_sha256": marker.content_sha256,
        "timings": dict(marker.timings),
        "arrays": arrays,
        "stored": [{"sample_id": s, "tokens": n} for s, n in pairs],
        "ledger": [dict(row) for row in marker.ledger],
    }


def equal_caches(a: Location | Storage, b: Location | Storage) -> list[str]:
    """How two caches differ, by their markers: identity, plan, arrays and ledgers; tags, attempts and times aside.

    Returns:
        One line per difference; empty if they are equal. `verify_cache` tells whether the bytes are what the
        markers say.
    """
    a, b = open_storage(a), open_storage(b)
    one, two = read_identity(a).to_json(), read_identity(b).to_json()
    differences = [f"identity: {k} is {one[k]!r} and {two[k]!r}" for k in one if one[k] != two[k]]
    if ShardPlan.read(a) != ShardPlan.read(b):
        return [*differences, "the plans differ"]
    in_a, in_b = set(committed_shards(a)), set(committed_shards(b))
    differences += [
        f"{shard}: committed only in {(a if shard in in_a else b).where()}" for shard in sorted(in_a ^ in_b)
    ]
    for shard in sorted(in_a & in_b):
        differences += _shard_differences(shard, read_marker(a, shard), read_marker(b, shard))
    return differences


def _shard_differences(shard: str, a: CommitMarker, b: CommitMarker) -> list[str]:
    if a.content_sha256 == b.content_sha256:
        return []
    differing = [
        name
        for name in sorted(set(a.arrays) | set(b.arrays))
        if name not in a.arrays
        or name not in b.arrays
        or a.arrays[name].content_xxh128 != b.arrays[name].content_xxh128
    ]
    lines = [f"{shard}: {name} differs" for name in differing]
    if a.ledger != b.ledger:
        lines.append(f"{shard}: the ledgers differ ({len(a.ledger)} and {len(b.ledger)} rows)")
    return lines or [f"{shard}: shapes or types differ"]
