"""The commit marker of a shard: the shard exists if and only if this object does.

It names the group and says all that a reader needs before it opens a shard (lengths, sizes, hashes, ledger),
so that a training run starts after reading markers only. It carries a checksum of itself.

Hashes of values are XXH3-128: they guard against accidents (damage, mixing up), for which 128 bits are plenty, and
cost about 0.1 s per GB where SHA-256 costs 0.9.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache_schema import names
from cache_schema.array_writer import WrittenArray
from cache_schema.codec import ChunkCodec
from cache_schema.errors import CacheError, SchemaVersion, ShardCorrupt, ShardNotCommitted
from cache_schema.identity import CACHE_SCHEMA_VERSION, canonical_json, sha256_bytes, sha256_json
from cache_schema.layout import ArraySpec
from cache_schema.ledger import LedgerRow
from cache_schema.storage import FolderStorage, Storage

_REQUESTS = 32
_SHOWN = 80
"""Characters of what is wrong with a marker that a message shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayRecord:
    """One array of a committed shard."""

    shape: tuple[int, ...]
    dtype: str
    """What the values are, e.g. `bfloat16`."""
    stored: str
    """The Zarr data type, e.g. `uint16`."""
    compression: str
    """Of the inner chunks: one of `codec.COMPRESSIONS`."""
    object: str | None
    """Key of the object inside the group; None if the array has no rows, and so no object."""
    bytes: int
    """Size of the object."""
    content_xxh128: str
    """XXH3-128 of the values, little-endian in C order: independent of chunks and codecs."""
    index_xxh128: str
    """XXH3-128 of the index at the object's end."""
    metadata_sha256: str
    """Of the array's zarr.json."""

    def spec(self, name: str) -> ArraySpec:
        """The array as `array_reader` needs it (without attributes)."""
        codec = ChunkCodec(self.compression)
        return ArraySpec(name, self.dtype, np.dtype(self.stored), tuple(self.shape[1:]), {}, codec)


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
    """Of all objects of the group."""
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
    return f"`dflash cache repair` makes it again (or remove {names.commit_key(shard)} and run the extract stage)"


def record_array(spec: ArraySpec, written: WrittenArray) -> ArrayRecord:
    """What a marker says about one array."""
    return ArrayRecord(
        shape=(written.rows, *spec.row_shape),
        dtype=spec.dtype,
        stored=str(spec.stored),
        compression=spec.codec.compression,
        object=spec.key if written.rows else None,
        bytes=written.bytes,
        content_xxh128=written.content_xxh128,
        index_xxh128=written.index_xxh128,
        metadata_sha256=sha256_bytes(spec.metadata(written.rows)),
    )


def shard_sha256(arrays: Mapping[str, ArrayRecord], ledger: tuple[LedgerRow, ...]) -> str:
    """The `content_sha256` of a shard."""
    content = {name: [a.dtype, list(a.shape), a.content_xxh128] for name, a in arrays.items()}
    return sha256_json({"arrays": content, "ledger": list(ledger)})


def _encode(marker: CommitMarker) -> bytes:
    body = dataclasses.asdict(marker)
    return canonical_json(body | {"checksum": sha256_json(body)}).encode() + b"\n"


def create_marker(storage: Storage, marker: CommitMarker) -> bool:
    """Commit: one line of canonical JSON with a checksum of the rest; False if another attempt was first."""
    return storage.create(names.commit_key(marker.shard), _encode(marker))


def read_marker(storage: Storage, shard: str) -> CommitMarker:
    """The commit marker of a shard.

    Raises:
        ShardNotCommitted: there is none.
        SchemaVersion: written by another version of the format.
        ShardCorrupt: the marker is damaged.
        OSError: as the storage gave it.
    """
    key = names.commit_key(shard)
    try:
        raw = storage.read(key)
    except FileNotFoundError:
        raise ShardNotCommitted(
            f"{shard} is not committed: {storage.where(key)} is missing; run the extract stage, it goes on where it "
            "stopped"
        ) from None
    except IsADirectoryError:
        raise ShardCorrupt(f"{storage.where(key)} is a folder, no commit marker; {remedy(shard)}") from None
    return decode_marker(raw, shard, storage.where(key))


def decode_marker(raw: bytes, shard: str, where: str) -> CommitMarker:
    """A marker from its bytes, every one of which must be as it was written.

    Raises:
        SchemaVersion, ShardCorrupt: as `read_marker`.
    """
    try:
        body = json.loads(raw)
        checksum = body.pop("checksum")
        # The text that the checksum was made of; quotes inside of a JSON text are escaped, so it is found only once.
        signed, end = raw.replace(f'"checksum":"{checksum}",'.encode(), b"", 1)[:-1], raw[-1:]
        if body["schema_version"] != CACHE_SCHEMA_VERSION:
            raise SchemaVersion(
                f"{where} has schema version {str(body['schema_version'])[:_SHOWN]}, but this code reads "
                f"{CACHE_SCHEMA_VERSION}"
            )
        if sha256_bytes(signed) != checksum or end != b"\n":
            raise ShardCorrupt(f"{where} does not match its own checksum; {remedy(shard)}")
        marker = _from_json(body)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        # No cause: that of bytes which are no text has all of them in its repr.
        what = f"{type(error).__name__}: {str(error)[:_SHOWN]}"
        raise ShardCorrupt(f"{where} is not a commit marker ({what}); {remedy(shard)}") from None
    if marker.shard != shard:
        raise ShardCorrupt(f"{where} is the marker of {marker.shard}, expected {shard}; {remedy(shard)}")
    return marker


def _from_json(body: dict[str, Any]) -> CommitMarker:
    arrays = {name: ArrayRecord(**(a | {"shape": tuple(a["shape"])})) for name, a in body["arrays"].items()}
    changes = {"arrays": arrays, "lengths": tuple(body["lengths"]), "ledger": tuple(body["ledger"])}
    return CommitMarker(**(body | changes))


def read_markers(storage: Storage, shards: Iterable[str]) -> dict[str, CommitMarker]:
    """The markers of several shards; those that are gone by now are left out. On object stores many at a time.

    Raises:
        SchemaVersion, ShardCorrupt, OSError: as `read_marker`.
    """

    def read(shard: str) -> CommitMarker | None:
        try:
            return read_marker(storage, shard)
        except ShardNotCommitted:
            return None

    wanted = list(shards)
    if isinstance(storage, FolderStorage):
        found = [read(shard) for shard in wanted]
    else:
        with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="markers") as pool:
            found = list(pool.map(read, wanted))
    return {shard: marker for shard, marker in zip(wanted, found, strict=True) if marker is not None}


def committed_shards(storage: Storage) -> list[str]:
    """Names of all committed shards, in order; resume is the plan minus these."""
    found = [key.removeprefix(f"{names.COMMITS}/") for key, _ in storage.list(names.COMMITS)]
    if isinstance(storage, FolderStorage):
        found += storage.folders(names.COMMITS)  # one in a marker's place is damage, no missing shard
    stems = [name.removesuffix(".json") for name in found if name.startswith("shard-") and name.endswith(".json")]
    return sorted(stems, key=names.shard_index)


def evict(storage: Storage, shard: str) -> int:
    """Remove a committed shard to make room; extract can make it again.

    Its marker is kept as `evicted/<shard>.json`, so that what the shard was remains known. The marker goes
    first: killed in between, the group is garbage that no reader sees.

    Returns:
        Bytes that were freed.

    Raises:
        ShardNotCommitted: it is not there.
        ShardCorrupt, OSError: as `read_marker`.
    """
    marker = read_marker(storage, shard)
    storage.replace(names.evicted_key(shard), _encode(marker))
    storage.delete(names.commit_key(shard))
    storage.delete_tree(names.group_key(marker.group))
    return marker.bytes


def discard(storage: Storage, shard: str) -> str | None:
    """Take a damaged shard out of the cache, so that extract makes it again. Its marker may be unreadable.

    Returns:
        Name of the group that was removed; None if the marker does not tell (`dflash cache gc` finds it).
    """
    try:
        group = read_marker(storage, shard).group
    except (CacheError, FileNotFoundError):
        group = None
    try:
        storage.delete(names.commit_key(shard))
    except IsADirectoryError:
        storage.delete_tree(names.commit_key(shard))
    if group is not None and names.group_shard(group) == shard:
        storage.delete_tree(names.group_key(group))
        return group
    return None
