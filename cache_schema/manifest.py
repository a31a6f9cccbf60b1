"""`cache.json` and the plan: what a cache is made of, written once before any shard."""

from __future__ import annotations

import json
from pathlib import Path

from cache_schema import names
from cache_schema.durable import create_once, make_dirs
from cache_schema.errors import CacheError, FingerprintMismatch
from cache_schema.identity import CacheIdentity, canonical_json, require_same
from cache_schema.plan import ShardPlan


def create_cache(path: Path, identity: CacheIdentity, plan: ShardPlan) -> ShardPlan:
    """Create a cache, or go on with one of the same identity.

    `cache.json` comes first, so that a plan which lies in a folder always belongs to its identity: killed
    between the two, a run of another identity is refused, and one of the same identity adds the plan.

    Args:
        path: the cache's folder; made if missing.
        identity: what the cache will be made of.
        plan: the shards this run would make.

    Returns:
        The plan that counts. If the cache has one it is kept (the size of shards is an execution setting),
        otherwise it is `plan`.

    Raises:
        FingerprintMismatch: the folder holds a cache of another identity; names each field and both values.
        CacheError: same identity, but other samples or lengths.
    """
    path = Path(path)
    make_dirs(path)
    body = {
        "schema_version": identity.schema_version,
        "identity": identity.to_json(),
        "fingerprint": identity.fingerprint(),
    }
    if not create_once(names.cache_json(path), canonical_json(body).encode() + b"\n"):
        require_same(read_identity(path), identity, path)
    make_dirs(names.shards_dir(path))
    make_dirs(names.commits_dir(path))
    if plan.create(names.plan_file(path)):
        return plan
    found = ShardPlan.read(names.plan_file(path))
    if found.samples_sha != plan.samples_sha:
        raise CacheError(
            f"{names.plan_file(path)} plans {len(found)} samples, this run {len(plan)}, and ids, order or lengths "
            "differ, though the "
            "identity is the same; use another folder"
        )
    return found


def read_identity(path: Path) -> CacheIdentity:
    """The identity of a cache.

    Raises:
        CacheError: no cache here, or `cache.json` is damaged.
        SchemaVersion: written by another version of the format.
    """
    file = names.cache_json(path)
    try:
        data = json.loads(file.read_bytes())
        body, fingerprint = data["identity"], data["fingerprint"]
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CacheError(
            f"{file} is missing: no feature cache here; run the extract stage first, or check the path"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise CacheError(
            f"{file} is damaged ({error!r}); restore it from a copy, or make the cache again elsewhere"
        ) from error
    identity = CacheIdentity.from_json(body)
    if identity.fingerprint() != fingerprint:
        raise FingerprintMismatch(
            f"{file} records fingerprint {fingerprint}, but its fields give {identity.fingerprint()}; it was changed "
            "by hand or damaged: "
            "restore it"
        )
    return identity
