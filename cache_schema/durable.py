"""Files that survive a power cut: temporary name, fsync, then one atomic step.

A reader sees a file whole or not at all. Killed at any moment, these functions leave at most a hidden
temporary file (`.<name>.<pid>.<random>.tmp`) that no reader looks at.
"""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

TEMPORARY_SUFFIX = ".tmp"


def fsync_file(path: Path) -> None:
    """Force a file's bytes to the disk."""
    _fsync(path, os.O_RDONLY)


def fsync_dir(path: Path) -> None:
    """Force a folder's entries (names, not contents) to the disk."""
    _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(path: Path) -> None:
    """Force every file and folder below `path`, and `path` itself, to the disk; contents before names."""
    for folder, _, files in os.walk(path, topdown=False):
        for name in sorted(files):
            fsync_file(Path(folder, name))
        fsync_dir(Path(folder))


def make_dirs(path: Path) -> None:
    """Create a folder and its parents, each entry forced to the disk."""
    missing: list[Path] = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        fsync_dir(folder.parent)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that readers see the old or the new content, never a mixture.

    Raises:
        OSError: as the system gave it (a full disk is ENOSPC), or what has this name is no regular file (a device, a
            folder); no temporary file is left and an older file of this name is untouched.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "is there, and no regular file", str(path))
    temporary = _write_temporary(path, data)
    try:
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def create_once(path: Path, data: bytes) -> bool:
    """Create a file if none of this name exists; of several who try, exactly one succeeds.

    The content appears in one step (`link`, which fails if the name is taken, where `rename` would replace it).

    Returns:
        True if this call created the file, False if it was there already.

    Raises:
        OSError: as the system gave it (a full disk is ENOSPC); no temporary file is left.
    """
    if path.exists():
        return False
    temporary = _write_temporary(path, data)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    fsync_dir(path.parent)
    return True


def _write_temporary(path: Path, data: bytes) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def is_storage_fault(error: OSError) -> bool:
    """Whether the disk is full, over quota, read-only or not ours, or an object store is away or refuses us: a
    fault that trying again does not mend."""
    disk = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
    return error.errno in disk or (_is_object(error) and error.errno in (errno.EHOSTUNREACH, errno.EPROTO))


def storage_text(error: OSError) -> str:
    """Such a fault in words, with what to do."""
    where = error.filename or "while writing"
    remedy = "make room (or mend the folder's rights)"
    if _is_object(error):
        remedy = "see that the store is up, its address right, and the credentials (environment or profile) valid"
    return (
        f"{error.strerror}: {where}. Nothing half-written was kept; {remedy} and run the same command again, it goes "
        "on where it stopped"
    )


def _is_object(error: OSError) -> bool:
    return "://" in str(error.filename)
