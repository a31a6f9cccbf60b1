"""What libraries want as files (checkpoints, logs, an exported model), for a place that may be in an object store.

A local place is its own folder, and nothing here does anything. For a URL there is a scratch folder on this machine:
files are written there and carried to the store, or fetched from it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from cache_schema.durable import TEMPORARY_SUFFIX, fsync_dir, fsync_file
from cache_schema.names import random_tag
from cache_schema.storage import FolderStorage, Location, Storage, open_storage

SCRATCH = "DFLASH_SCRATCH"
"""Environment variable: where scratch folders lie; `dflash/scratch` in the user's cache folder unless set."""
PIECE_BYTES = 8 << 20


def scratch_folder(url: str) -> Path:
    """This machine's folder for the files of a place in an object store; the same for every process of a user."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(os.environ.get(SCRATCH) or Path(caches) / "dflash" / "scratch")
    plain = re.sub(r"[^A-Za-z0-9.-]+", "-", url.partition("://")[2])[-40:].strip("-.")
    return root / f"{plain}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"


class Carried:
    """A place whose files are used as files.

    Args:
        location: a folder or a URL.

    Attributes:
        storage: the place.
        path: where its files lie on this machine: the folder itself, or scratch.
        is_remote: whether the two differ.
    """

    storage: Storage
    path: Path
    is_remote: bool

    def __init__(self, location: Location) -> None:
        self.storage = open_storage(location)
        local = isinstance(self.storage, FolderStorage)
        self.path = Path(self.storage.url) if local else scratch_folder(self.storage.url)
        self.is_remote = not local

    def keep(self, key: str) -> None:
        """Carry one file to the store, if it is there.

        Raises:
            OSError: as the store gave it.
        """
        if self.is_remote and (self.path / key).is_file():
            upload(self.path / key, self.storage, key)

    def keep_tree(self, prefix: str, *, exactly: bool = False) -> None:
        """Carry every file below a folder to the store; `exactly` removes there what the folder does not hold."""
        if not self.is_remote:
            return
        keys = [f"{prefix}/{p.relative_to(self.path / prefix).as_posix()}" for p in _files(self.path / prefix)]
        for key in keys:
            upload(self.path / key, self.storage, key)
        for key, _ in list(self.storage.list(prefix)) if exactly else ():
            if key not in keys:
                self.storage.delete(key)

    def fetch(self, key: str) -> bool:
        """Bring one file from the store in place of what scratch holds; returns whether there is one.

        Raises:
            OSError: as the store or the system gave it.
        """
        if not self.is_remote:
            return (self.path / key).is_file()
        try:
            download(self.storage, key, self.path / key)
        except FileNotFoundError:
            (self.path / key).unlink(missing_ok=True)
            return False
        return True

    def fetch_tree(self, prefix: str) -> None:
        """Bring all files below a prefix from the store; what else scratch holds there goes."""
        if not self.is_remote:
            return
        keys = [key for key, _ in self.storage.list(prefix)]
        for key in keys:
            self.fetch(key)
        for path in list(_files(self.path / prefix)):
            if path.relative_to(self.path).as_posix() not in keys:
                path.unlink(missing_ok=True)


def _files(folder: Path) -> Iterator[Path]:
    return (p for p in sorted(folder.rglob("*")) if p.is_file() and not p.name.endswith(TEMPORARY_SUFFIX))


def upload(path: Path, storage: Storage, key: str) -> None:
    """Write a file into a storage, in pieces.

    Raises:
        OSError: as the system or the store gave it; nothing is there under the key then that was not before.
    """
    writer = storage.writer(key)
    try:
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                writer.write(piece)
        writer.close()
    except BaseException:
        writer.abort()
        raise


def download(storage: Storage, key: str, path: Path) -> None:
    """Read an object into a file, which appears whole.

    Raises:
        FileNotFoundError: no such object.
        OSError: as the system or the store gave it.
    """
    reader = storage.open(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{random_tag()}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("xb") as file:
            for start in range(0, reader.size, PIECE_BYTES):
                piece = bytearray(min(PIECE_BYTES, reader.size - start))
                reader.read_into(start, [piece])
                file.write(piece)
        fsync_file(temporary)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)
