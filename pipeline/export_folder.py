"""The folder that an export goes to: what it holds, and which of its files are whole.

Every file says in its own metadata what it was made from (the cache's fingerprint, its plan, the content of the shards
behind it), so nothing beside the file can be out of step with it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from cache_schema.durable import create_once, fsync_dir, make_dirs
from cache_schema.errors import CacheError

DESCRIPTION = "export.json"
_LEFT_OVER = re.compile(
    r"\.(?:shard-\d+|samples-\d+-seed-?\d+|export)\.(?:safetensors|arrow|json)\.(\d{1,9})\.(?:[0-9a-f]+\.)?tmp"
)
"""Names of `atomic_file` and `create_once`, and the process that wrote them."""
Metadata = Callable[[Path], dict[str, str] | None]
"""Reads the metadata of a file; None if the file is not whole."""


def claim(out: Path, about: Mapping[str, Any]) -> None:
    """Say in a folder what is exported there, once, and remove what killed exports left in it.

    Raises:
        CacheError: it holds another export.
        OSError: as the system gave it.
    """
    make_dirs(out)
    file = out / DESCRIPTION
    text = json.dumps(about, indent=1, ensure_ascii=False).encode() + b"\n"
    if not create_once(file, text):
        _require_same(file, json.loads(text))
    for path in out.iterdir():
        found = _LEFT_OVER.fullmatch(path.name)
        if found is not None and not _is_at_work(int(found[1])):
            path.unlink(missing_ok=True)


def _require_same(file: Path, about: dict[str, Any]) -> None:
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CacheError(f"{file} is damaged ({str(error)[:80]}); export to another folder") from None
    differs = [k for k, v in about.items() if not isinstance(found, dict) or found.get(k) != v]
    if differs:
        raise CacheError(
            f"{file.parent} holds an export of another cache or of another kind, it differs in {', '.join(differs)}; "
            "export to another folder"
        )


def _is_at_work(process: int) -> bool:
    """Whether another process of this machine has this number."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def is_there(path: Path, expected: Mapping[str, str], read: Metadata) -> bool:
    """Whether a file was exported already; one that is not whole (truncated, empty) does not count.

    Args:
        path: of the file.
        expected: what its metadata must say.
        read: reads them.

    Raises:
        CacheError: it is whole, but made from something else.
    """
    if not path.exists():
        return False
    found = read(path)
    if found is None:
        return False
    differs = [k for k, v in expected.items() if found.get(k) != v]
    if differs:
        raise CacheError(
            f"{path} was exported from something else, it differs in {', '.join(differs)}; nothing is overwritten: "
            "export to another folder, or remove that file"
        )
    return True


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name when the block is through, whole and on the disk; else nothing is left."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)
