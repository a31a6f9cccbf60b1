"""Names of parts, shards and samples, and where things lie in a run folder."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

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


def cache_json(cache: Path) -> Path:
    """Where a cache's identity lies."""
    return cache / "cache.json"


def plan_file(cache: Path) -> Path:
    """Where a cache's plan lies."""
    return cache / "plan.parquet"


def shards_dir(cache: Path) -> Path:
    """The folder of Zarr groups, committed or not."""
    return cache / "shards"


def commits_dir(folder: Path) -> Path:
    """The folder of commit markers, of a cache or of a responses table."""
    return folder / "commits"


def commit_file(folder: Path, name: str) -> Path:
    """The commit marker of a shard or part."""
    return commits_dir(folder) / f"{name}.json"


def responses_json(responses: Path) -> Path:
    """Where the identity of a responses table lies."""
    return responses / "responses.json"


def parts_dir(responses: Path) -> Path:
    """The folder of a responses table's Parquet parts, committed or not."""
    return responses / "parts"


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
