"""Full check of a cache, and plain summaries of what it holds.

`verify_cache` reads every byte twice: the objects against their SHA-256, and the values through Zarr against
their CRCs and the content hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cache_schema import names
from cache_schema.errors import CacheError, ShardNotCommitted
from cache_schema.identity import CacheIdentity, sha256_file
from cache_schema.layout import group_files
from cache_schema.manifest import read_identity
from cache_schema.marker import CommitMarker, committed_shards, read_marker, shard_sha256
from cache_schema.plan import ShardPlan
from cache_schema.reader import OpenShard, require_fingerprint

_ROWS = 4096


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
    path: Path, shards: Iterable[str] | None = None, progress: Callable[[str], None] | None = None
) -> VerifyReport:
    """Check shards completely: hashes, CRCs, offsets, ids, and that each planned sample is stored or in the ledger.

    Args:
        path: the cache's folder.
        shards: names of the shards to look at; None takes the whole plan.
        progress: called with each shard's name when it is done.

    Raises:
        CacheError: no cache here, cache.json or plan is damaged, or a named shard is not planned.
    """
    path = Path(path)
    identity, plan = read_identity(path), ShardPlan.read(names.plan_file(path))
    reports: list[ShardReport] = []
    for shard in plan.shards() if shards is None else shards:
        reports.append(_verify_shard(path, identity, plan.samples(shard), shard))
        if progress is not None:
            progress(shard)
    strays = sorted(set(committed_shards(path)) - set(plan.shards()))
    return VerifyReport(str(path), reports, [f"{s} has a commit marker, but is not in the plan" for s in strays])


def _verify_shard(path: Path, identity: CacheIdentity, planned: list[str], shard: str) -> ShardReport:
    try:
        marker = read_marker(path, shard)
    except ShardNotCommitted as error:
        return ShardReport(shard, "missing", [str(error)])
    except CacheError as error:
        return ShardReport(shard, "corrupt", [str(error)])
    problems = _file_problems(path, marker)
    try:
        require_fingerprint(marker, identity, path)
        opened = OpenShard(path, marker, marker.stored(planned))
    except CacheError as error:
        problems.append(str(error))
    else:
        problems += _value_problems(opened)
    return ShardReport(shard, "corrupt" if problems else "ok", problems)


def _file_problems(path: Path, marker: CommitMarker) -> list[str]:
    folder = names.shards_dir(path) / marker.group
    expected = {"zarr.json": marker.group_sha256}
    for name, record in marker.arrays.items():
        expected[f"{name}/zarr.json"] = record.metadata_sha256
        if record.object is not None:
            expected[record.object] = record.sha256
    problems: list[str] = []
    sizes = group_files(folder)
    for file, sha256 in expected.items():
        if file not in sizes:
            problems.append(f"{marker.shard}: {folder / file} is missing")
        elif (found := sha256_file(folder / file)) != sha256:
            problems.append(f"{marker.shard}: {folder / file} has SHA-256 {found}, expected {sha256}")
    problems += [
        f"{marker.shard}: {folder / file} does not belong to the shard" for file in sizes if file not in expected
    ]
    if not problems and sum(sizes.values()) != marker.bytes:
        problems.append(f"{marker.shard}: the group has {sum(sizes.values())} bytes, the marker says {marker.bytes}")
    return problems


def _value_problems(shard: OpenShard) -> list[str]:
    problems: list[str] = []
    for name in shard.array_names:
        try:
            problems += _array_problems(shard, name)
        except CacheError as error:
            problems.append(str(error))
    if shard_sha256(shard.marker.arrays, shard.marker.ledger) != shard.marker.content_sha256:
        problems.append(f"{shard.marker.shard}: arrays and ledger do not give the marker's content_sha256")
    return problems


def _array_problems(shard: OpenShard, name: str) -> list[str]:
    record = shard.marker.arrays[name]
    digest = hashlib.sha256()
    for start in range(0, record.shape[0], _ROWS):
        rows = shard.read_rows(name, start, min(start + _ROWS, record.shape[0]))
        digest.update(np.ascontiguousarray(rows, rows.dtype.newbyteorder("<")).tobytes())
    problems = []
    if digest.hexdigest() != record.content_sha256:
        problems.append(
            f"{shard.marker.shard}: values of {name} have SHA-256 {digest.hexdigest()}, expected "
            f"{record.content_sha256}"
        )
    per_token = name not in ("offsets", "sample_id")
    if per_token and record.shape[0] != shard.marker.tokens:
        problems.append(
            f"{shard.marker.shard}: {name} has {record.shape[0]} rows, expected {shard.marker.tokens} (tokens)"
        )
    return problems


def list_shards(path: Path) -> list[dict[str, Any]]:
    """One dict per planned shard, from markers only: shard, status, samples, tokens, bytes, …"""
    path = Path(path)
    plan = ShardPlan.read(names.plan_file(path))
    return [_summary(path, plan, shard) for shard in plan.shards()]


def _summary(path: Path, plan: ShardPlan, shard: str) -> dict[str, Any]:
    row: dict[str, Any] = {"shard": shard, "status": "committed", "planned_samples": len(plan.samples(shard))}
    try:
        marker = read_marker(path, shard)
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


def describe_cache(path: Path) -> dict[str, Any]:
    """A cache in one dict: identity, totals over committed shards, missing and damaged shards, ledger by reason."""
    path = Path(path)
    identity, rows = read_identity(path), list_shards(path)
    committed = [r for r in rows if r["status"] == "committed"]
    reasons: dict[str, int] = {}
    for r in committed:
        for row in read_marker(path, r["shard"]).ledger:
            reasons[row["reason"]] = reasons.get(row["reason"], 0) + 1
    return {
        "path": str(path),
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


def describe_shard(path: Path, shard: str) -> dict[str, Any]:
    """A committed shard in one dict: its summary, arrays, samples with lengths, and ledger.

    Raises:
        ShardNotCommitted: no marker.
        CacheError: not planned, or damaged.
    """
    path = Path(path)
    plan = ShardPlan.read(names.plan_file(path))
    planned = plan.samples(shard)
    marker = read_marker(path, shard)
    arrays = {
        name: {"shape": list(a.shape), "dtype": a.dtype, "stored": a.stored, "bytes": a.bytes, "sha256": a.sha256}
        for name, a in marker.arrays.items()
    }
    pairs = zip(marker.stored(planned), marker.lengths, strict=True)
    return _summary(path, plan, shard) | {
        "fingerprint": marker.fingerprint,
        "content_sha256": marker.content_sha256,
        "timings": dict(marker.timings),
        "arrays": arrays,
        "stored": [{"sample_id": s, "tokens": n} for s, n in pairs],
        "ledger": [dict(row) for row in marker.ledger],
    }


def equal_caches(a: Path, b: Path) -> list[str]:
    """How two caches differ, by their markers: identity, plan, arrays and ledgers; tags, attempts and times aside.

    Returns:
        One line per difference; empty if they are equal. `verify_cache` tells whether the bytes are what the
        markers say.
    """
    a, b = Path(a), Path(b)
    one, two = read_identity(a).to_json(), read_identity(b).to_json()
    differences = [f"identity: {k} is {one[k]!r} and {two[k]!r}" for k in one if one[k] != two[k]]
    if ShardPlan.read(names.plan_file(a)) != ShardPlan.read(names.plan_file(b)):
        return [*differences, "the plans differ"]
    in_a, in_b = set(committed_shards(a)), set(committed_shards(b))
    differences += [f"{shard}: committed only in {a if shard in in_a else b}" for shard in sorted(in_a ^ in_b)]
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
        or a.arrays[name].content_sha256 != b.arrays[name].content_sha256
    ]
    lines = [f"{shard}: {name} differs" for name in differing]
    if a.ledger != b.ledger:
        lines.append(f"{shard}: the ledgers differ ({len(a.ledger)} and {len(b.ledger)} rows)")
    return lines or [f"{shard}: shapes or types differ"]
