"""`cache.json` and the plan: what a cache is made of, written once before any shard."""

from __future__ import annotations

import json
from typing import Any

from cache_schema import names
from cache_schema.errors import CacheError, FingerprintMismatch
from cache_schema.identity import CacheIdentity, canonical_json, require_same
from cache_schema.plan import ShardPlan
from cache_schema.soundness import require_sound
from cache_schema.storage import Location, Storage, open_storage


def create_cache(location: Location | Storage, identity: CacheIdentity, plan: ShardPlan) -> ShardPlan:
    """Create a cache, or go on with one of the same identity.

    `cache.json` comes first, so that a plan which lies in a folder always belongs to its identity: killed
    between the two, a run of another identity is refused, and one of the same identity adds the plan.

    Args:
        location: the cache's folder (made if missing) or URL.
        identity: what the cache will be made of.
        plan: the shards this run would make.

    Returns:
        The plan that counts. If the cache has one it is kept (the size of shards is an execution setting),
        otherwise it is `plan`.

    Raises:
        FingerprintMismatch: the folder holds a cache of another identity; names each field and both values.
        CacheError: same identity, but other samples or lengths; or an object store that breaks a promise.
        OSError: as the storage gave it.
    """
    storage = open_storage(location)
    require_sound(storage)
    if not storage.create(names.CACHE_JSON, _encode(identity)):
        require_same(read_identity(storage), identity, storage.where())
    if plan.create(storage):
        return plan
    found = ShardPlan.read(storage)
    if found.samples_sha != plan.samples_sha:
        raise CacheError(
            f"{storage.where(names.PLAN)} plans {len(found)} samples, this run {len(plan)}, and ids, order or lengths "
            "differ, though the identity is the same; use another folder"
        )
    return found


def _encode(identity: CacheIdentity) -> bytes:
    body: dict[str, Any] = {
        "schema_version": identity.schema_version,
        "identity": identity.to_json(),
        "fingerprint": identity.fingerprint(),
    }
    return canonical_json(body).encode() + b"\n"


def read_identity(storage: Storage) -> CacheIdentity:
    """The identity of a cache.

    Raises:
        CacheError: no cache here, or `cache.json` is damaged.
        SchemaVersion: written by another version of the format.
        OSError: as the storage gave it.
    """
    where = storage.where(names.CACHE_JSON)
    try:
        raw = storage.read(names.CACHE_JSON)
        data = json.loads(raw)
        body, fingerprint = data["identity"], data["fingerprint"]
        identity = CacheIdentity.from_json(body)
    except FileNotFoundError as error:
        raise CacheError(
            f"{where} is missing: no feature cache here; run the extract stage first, or check the path"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CacheError(
            f"{where} is damaged ({error!r}); restore it from a copy, or make the cache again elsewhere"
        ) from error
    if identity.fingerprint() != fingerprint:
        raise FingerprintMismatch(
            f"{where} records fingerprint {fingerprint}, but its fields give {identity.fingerprint()}; it was changed "
            "by hand or damaged: restore it"
        )
    if raw != _encode(identity):
        raise CacheError(f"{where} is damaged: it holds more or other bytes than were written; restore it from a copy")
    return identity
