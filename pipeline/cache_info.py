"""`dflash cache ls` and `info`: what a cache is made of and what it holds, from its markers and a listing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from cache_schema.garbage import find_garbage
from cache_schema.marker import CommitMarker
from cache_schema.storage import Location
from cache_schema.survey import Survey, survey

_STATES = ("features", "feature_scale")
_BFLOAT16_BYTES = 2


def cache_info(cache: Location) -> dict[str, Any]:
    """Everything that is known without opening a shard.

    Raises:
        CacheError: no cache here, or cache.json or plan is damaged.
        OSError: as the storage gave it.
    """
    found = survey(cache)
    markers = list(found.markers.values())
    garbage = find_garbage(found.storage)
    return {
        "path": found.storage.url,
        "fingerprint": found.identity.fingerprint(),
        "identity": found.identity.to_json(),
        "planned": {"shards": found.plan.n_shards, "samples": len(found.plan), "tokens": _planned_tokens(found)},
        "stored": {
            "shards": len(markers),
            "samples": sum(m.samples for m in markers),
            "tokens": sum(m.tokens for m in markers),
            "bytes": found.bytes,
        },
        "arrays": _arrays(markers),
        "compression": _compression(markers),
        "lengths": length_statistics(n for m in markers for n in m.lengths),
        "ledger": _ledger(markers),
        "missing": found.missing,
        "evicted": found.evicted,
        "damaged": found.damaged,
        "strays": found.strays,
        "garbage": {"items": len(garbage), "bytes": sum(g.bytes for g in garbage)},
        "timings": _timings(markers),
    }


def cache_shards(cache: Location) -> dict[str, Any]:
    """`dflash cache ls`: the cache in short, and one row per planned shard.

    Raises:
        CacheError, OSError: as `cache_info`.
    """
    found = survey(cache)
    evicted = set(found.evicted)
    rows = [_shard_row(found, shard, shard in evicted) for shard in found.plan.shards()]
    committed = [row for row in rows if row["status"] == "committed"]
    about = {
        "path": found.storage.url,
        "fingerprint": found.identity.fingerprint(),
        "identity": found.identity.to_json(),
        "planned_shards": found.plan.n_shards,
        "planned_samples": len(found.plan),
        "committed_shards": len(committed),
        **{key: sum(row[key] for row in committed) for key in ("samples", "tokens", "bytes", "dropped")},
        "ledger": _ledger(found.markers.values()),
    }
    return {"cache": about, "shards": rows}


def _shard_row(found: Survey, shard: str, evicted: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"shard": shard, "planned_samples": len(found.plan.samples(shard))}
    if shard in found.damaged:
        return row | {"status": "corrupt", "problem": found.damaged[shard]}
    if shard not in found.markers:
        planned = int(found.plan.lengths(shard).sum())
        return row | {"status": "evicted" if evicted else "missing", "planned_tokens": planned}
    marker = found.markers[shard]
    return row | {
        "status": "committed",
        "samples": marker.samples,
        "tokens": marker.tokens,
        "bytes": marker.bytes,
        "dropped": len(marker.dropped()),
        "noted": sum(line["kept"] for line in marker.ledger),
        "attempt": marker.attempt,
        "seconds": marker.timings.get("total_s"),
        "group": marker.group,
    }


def _planned_tokens(found: Survey) -> int:
    return sum(int(found.plan.lengths(shard).sum()) for shard in found.plan.shards())


def _arrays(markers: Iterable[CommitMarker]) -> dict[str, dict[str, Any]]:
    """Per array: type, bytes on the storage, and bytes of the plain values."""
    found: dict[str, dict[str, Any]] = {}
    for marker in markers:
        for name, record in marker.arrays.items():
            spec = record.spec(name)
            row = found.setdefault(
                name, {"dtype": record.dtype, "compression": set(), "row_shape": list(spec.row_shape), "bytes": 0,
                       "plain_bytes": 0}
            )  # fmt: skip
            row["compression"].add(record.compression)
            row["bytes"] += record.bytes
            row["plain_bytes"] += record.shape[0] * spec.row_bytes
    return {name: row | {"compression": sorted(row["compression"])} for name, row in found.items()}


def _compression(markers: list[CommitMarker]) -> dict[str, Any]:
    """Stored bytes of the features (with their scales) against the same values in bfloat16."""
    stored = sum(m.arrays[name].bytes for m in markers for name in _STATES if name in m.arrays)
    values = sum(int(np.prod(m.arrays["features"].shape, dtype=np.int64)) for m in markers)
    plain = values * _BFLOAT16_BYTES
    return {"bfloat16_bytes": plain, "stored_bytes": stored, "ratio": stored / plain if plain else None}


def length_statistics(lengths: Iterable[int]) -> dict[str, float] | None:
    """Smallest, mean, median, 95th percentile and largest number of tokens; None without samples."""
    values = np.fromiter(lengths, np.int64)
    if not len(values):
        return None
    middle, high = np.percentile(values, [50, 95])
    return {
        "min": int(values.min()),
        "mean": round(float(values.mean()), 2),
        "p50": round(float(middle), 2),
        "p95": round(float(high), 2),
        "max": int(values.max()),
    }


def _ledger(markers: Iterable[CommitMarker]) -> dict[str, dict[str, int]]:
    """Ledger rows by reason: samples that are not stored, and samples that are but changed."""
    counts = Counter((row["reason"], bool(row["kept"])) for m in markers for row in m.ledger)
    return {
        reason: {"dropped": counts[reason, False], "changed": counts[reason, True]}
        for reason in sorted({reason for reason, _ in counts})
    }


def _timings(markers: list[CommitMarker]) -> dict[str, float | None]:
    """Seconds of all shards together, and how fast each one was written (by the writer alone, and with the target)."""
    total = {key: round(sum(m.timings.get(key, 0.0) for m in markers), 3) for key in sorted(
        {key for m in markers for key in m.timings}
    )}  # fmt: skip
    size = sum(m.bytes for m in markers)
    writing = sum(total.get(key, 0.0) for key in ("write_s", "sync_s", "check_s"))
    whole = total.get("total_s", 0.0)
    return total | {
        "writer_mb_per_s": round(size / writing / 1e6, 1) if writing else None,
        "worker_mb_per_s": round(size / whole / 1e6, 1) if whole else None,
    }
