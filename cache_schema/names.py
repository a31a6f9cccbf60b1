"""Names of parts, shards and samples, and where things lie: keys in a cache and in a responses table."""

from __future__ import annotations

import re
import secrets

from cache_schema.errors import CacheError

MAX_SAMPLE_ID_BYTES = 255
"""Longest sample id in UTF-8 bytes: ids are stored at fixed width, so one long id widens all of its shard."""
_SHARD = re.compile(r"shard-(\d{5,})")


def shard_name(index: int) -> str:
    """`shard-00042` for 42."""
    return f"shard-{index:05d}"


def shard_index(name: str) -> int:
    """42 for `shard-00042`.

    Raises:
        CacheError: the text is not a shard's name.
    """
    match = _SHARD.fullmatch(name)
    if match is None or shard_name(int(match[1])) != name:
        raise CacheError(f"{name!r} is not a shard's name; one looks like {shard_name(42)!r}")
    return int(match[1])


def part_name(index: int) -> str:
    """`part-00042` for 42."""
    return f"part-{index:05d}"


def random_tag() -> str:
    """Eight random hex digits: what one attempt writes never has the name of what another wrote."""
    return secrets.token_hex(4)


CACHE_JSON = "cache.json"
"""Key of a cache's identity."""
PLAN = "plan.parquet"
"""Key of a cache's plan."""
PLAN_SHA256 = "plan.sha256"
"""Key of the plan's checksum, as `sha256sum -c` reads it."""
SHARDS = "shards"
"""The Zarr groups of a cache, committed or not."""
COMMITS = "commits"
"""The commit markers of a cache or of a responses table."""
EVICTED = "evicted"
"""Markers of shards that were removed to make room (rolling mode)."""


def commit_key(shard: str) -> str:
    """Key of the commit marker of a shard, or of a part of a responses table."""
    return f"{COMMITS}/{shard}.json"


def evicted_key(shard: str) -> str:
    """Key of what is kept of an evicted shard: its marker."""
    return f"{EVICTED}/{shard}.json"


def group_key(group: str) -> str:
    """Prefix of a shard's Zarr group."""
    return f"{SHARDS}/{group}"


def group_shard(group: str) -> str:
    """The shard that a group (`shard-00042.7f3a…`) was written for."""
    return group.partition(".")[0]


RESPONSES_JSON = "responses.json"
"""Key of a responses table's identity."""
PARTS = "parts"
"""The Parquet parts of a responses table, committed or not."""


def part_key(file: str) -> str:
    """Key of a Parquet part of a responses table."""
    return f"{PARTS}/{file}"


def require_sample_id(sample_id: str) -> None:
    """Check that an id can be stored at fixed width.

    Raises:
        CacheError: empty, too long, with a NUL character, or not encodable as UTF-8.
    """
    try:
        raw = sample_id.encode()
    except UnicodeEncodeError as error:
        raise CacheError(
            f"sample id {sample_id!r} is not valid Unicode: {error}; give the sample another id"
        ) from error
    if not 0 < len(raw) <= MAX_SAMPLE_ID_BYTES or b"\0" in raw:
        raise CacheError(
            f"sample id {sample_id!r} has {len(raw)} bytes; an id has 1 to {MAX_SAMPLE_ID_BYTES} bytes of UTF-8 "
            "and no NUL character; give the sample another id"
        )
