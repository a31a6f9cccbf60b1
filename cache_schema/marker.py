"""The commit marker of a shard: the shard exists if and only if this file does.

It names the group and says all that a reader needs before it opens a shard (lengths, sizes, hashes, ledger),
so that a training run starts after reading markers only. It carries a checksum of itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_schema import names
from cache_schema.durable import create_once
from cache_schema.errors import SchemaVersion, ShardCorrupt, ShardNotCommitted
from cache_schema.identity import CACHE_SCHEMA_VERSION, canonical_json, sha256_file, sha256_json
from cache_schema.layout import ArraySpec, group_files, object_key
from cache_schema.ledger import LedgerRow


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayRecord:
    """One array of a committed shard."""

    shape: tuple[int, ...]
    dtype: str
    """What the values are, e.g. `bfloat16`."""
    stored: str
    """The Zarr data type, e.g. `uint16`."""
    object: str | None
    """Path of the object inside the group; None if the array has no rows, and so no object."""
    bytes: int
    """Size of the object."""
    sha256: str
    """Of the object's bytes."""
    content_sha256: str
    """Of the values, little-endian in C order: independent of codecs."""
    metadata_sha256: str
    """Of the array's zarr.json."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitMarker:
    """What a shard is. Equal runs give equal markers but for `group`, `attempt` and `timings`."""

    schema_version: int = CACHE_SCHEMA_VERSION
    shard: str
    group: str
    """Name of the Zarr group below `shards/`."""
    samples: int
    tokens: int
    bytes: int
    """Of all files of the group."""
    lengths: tuple[int, ...]
    """Tokens of each stored sample, in order."""
    arrays: dict[str, ArrayRecord]
    group_sha256: str
    """Of the group's zarr.json."""
    fingerprint: str
    """Of the cache's identity."""
    content_sha256: str
    """Of arrays and ledger; two shards are equal if and only if these are."""
    attempt: int
    timings: dict[str, float]
    """Seconds, for the record."""
    ledger: tuple[LedgerRow, ...]

    def dropped(self) -> set[str]:
        """Ids of the samples that the ledger says are not stored."""
        return {row["sample_id"] for row in self.ledger if not row["kept"]}

    def stored(self, planned: list[str]) -> list[str]:
        """Ids of the stored samples, in order.

        Args:
            planned: the shard's samples by the plan.

        Raises:
            ShardCorrupt: plan, ledger and number of stored samples do not add up (case 2).
        """
        dropped = self.dropped()
        kept = [s for s in planned if s not in dropped]
        if len(kept) != self.samples or not dropped <= set(planned):
            raise ShardCorrupt(
                f"{self.shard}: the plan has {len(planned)} samples, the ledger drops {len(dropped)} and the marker "
                "says "
                f"{self.samples} are stored; every planned sample must be stored or in the ledger; {remedy(self.shard)}"
            )
        return kept


def remedy(shard: str) -> str:
    """What to do about a damaged shard."""
    return f"remove commits/{shard}.json and run the extract stage again to rebuild this shard"


def content_sha256(values: NDArray[Any]) -> str:
    """SHA-256 of an array's values: little-endian, C order."""
    plain = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return hashlib.sha256(plain.reshape(-1).view(np.uint8).data).hexdigest()


def record_array(path: Path, spec: ArraySpec, values: NDArray[Any]) -> ArrayRecord:
    """What a marker says about one array of the group at `path`.

    Raises:
        ShardCorrupt: the array is not one object where the layout puts it.
    """
    folder = path / spec.name
    key = object_key(values.ndim) if len(values) else None
    files = set(group_files(folder))
    if files != {"zarr.json"} | ({key} if key else set()):
        raise ShardCorrupt(
            f"{folder} has the files {sorted(files)}, expected zarr.json and {key}; this zarr version lays arrays "
            "out otherwise"
        )
    stored = folder / key if key else None
    return ArrayRecord(
        shape=values.shape,
        dtype=spec.dtype,
        stored=str(spec.stored),
        object=f"{spec.name}/{key}" if key else None,
        bytes=stored.stat().st_size if stored else 0,
        sha256=sha256_file(stored) if stored else "",
        content_sha256=content_sha256(values),
        metadata_sha256=sha256_file(folder / "zarr.json"),
    )


def shard_sha256(arrays: Mapping[str, ArrayRecord], ledger: tuple[LedgerRow, ...]) -> str:
    """The `content_sha256` of a shard."""
    content = {name: [a.dtype, list(a.shape), a.content_sha256] for name, a in arrays.items()}
    return sha256_json({"arrays": content, "ledger": list(ledger)})


def create_marker(cache: Path, marker: CommitMarker) -> bool:
    """Commit: one line of canonical JSON with a checksum of the rest; False if another attempt was first."""
    body = dataclasses.asdict(marker)
    data = canonical_json(body | {"checksum": sha256_json(body)}).encode() + b"\n"
    return create_once(names.commit_file(cache, marker.shard), data)


def read_marker(cache: Path, shard: str) -> CommitMarker:
    """The commit marker of a shard.

    Raises:
        ShardNotCommitted: there is none.
        SchemaVersion: written by another version of the format.
        ShardCorrupt: the marker is damaged.
    """
    path = names.commit_file(cache, shard)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ShardNotCommitted(
            f"{shard} is not committed: {path} is missing; run the extract stage, it goes on where it stopped"
        ) from None
    try:
        body = json.loads(raw)
        checksum = body.pop("checksum")
        if body["schema_version"] != CACHE_SCHEMA_VERSION:
            raise SchemaVersion(
                f"{path} has schema version {body['schema_version']!r}, but this code reads {CACHE_SCHEMA_VERSION}"
            )
        if sha256_json(body) != checksum:
            raise ShardCorrupt(f"{path} does not match its own checksum; {remedy(shard)}")
        marker = _from_json(body)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ShardCorrupt(f"{path} is not a commit marker ({error!r}); {remedy(shard)}") from error
    if marker.shard != shard:
        raise ShardCorrupt(f"{path} is the marker of {marker.shard}, expected {shard}; {remedy(shard)}")
    return marker


def _from_json(body: dict[str, Any]) -> CommitMarker:
    arrays = {name: ArrayRecord(**(a | {"shape": tuple(a["shape"])})) for name, a in body["arrays"].items()}
    changes = {"arrays": arrays, "lengths": tuple(body["lengths"]), "ledger": tuple(body["ledger"])}
    return CommitMarker(**(body | changes))


def committed_shards(cache: Path) -> list[str]:
    """Names of all committed shards, in order; resume is the plan minus these."""
    found = [p.stem for p in names.commits_dir(cache).glob("shard-*.json")]
    return sorted(found, key=names.shard_index)
