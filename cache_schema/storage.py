"""Where a cache lies: a tree of objects under one root, in a local folder or in an object store.

The protocol of the cache needs five things of a storage, and every storage gives them alike (one conformance
suite proves it): an object is there whole or not at all; `create` succeeds for exactly one of several who try;
what `close` and `create` have returned from survives a power cut; a range read gives exactly these bytes or
raises; and an object that is not there raises, it never reads as zeros.

Keys are relative, with `/` between their parts, and never start with one.
"""

from __future__ import annotations

import functools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache_schema import durable
from cache_schema.errors import CacheError

if TYPE_CHECKING:
    from zarr.abc.store import Store

Location = str | Path
"""A local folder, or the URL of one (`file:///…`) or of a place in an object store (`s3://bucket/path`, …)."""
Buffer = Any
"""Anything with the buffer protocol that is contiguous: bytes, bytearray, memoryview, numpy array."""
IOV_MAX = 1024
"""Buffers of one vectored read (Linux)."""
PIECE_BYTES = 256 << 10
"""What fits into a core's own cache beside other things: read, or written, and hashed in one go."""


class ObjectReader(ABC):
    """One object that is open for reading at any place; may be used by several threads at once.

    Attributes:
        size: bytes of the object when it was opened.
        piece_bytes: how much to read at once where several reads cost no more than one; None where each is a request.
    """

    size: int
    piece_bytes: int | None = None

    @abstractmethod
    def read_into(self, start: int, buffers: Sequence[Buffer]) -> None:
        """Fill the buffers, one after the other, with the bytes from `start` on: one request.

        Raises:
            EOFError: the object ends before the last buffer is full.
            FileNotFoundError: the object has gone (object stores; an open local file stays readable).
            OSError: as the system or the store gave it.
        """


class ObjectWriter(ABC):
    """An object that is being written, front to back. Nothing is there under its key before `close` returns
    (object stores) or it is there but unnamed by any marker (folders)."""

    @abstractmethod
    def write(self, data: Buffer) -> None:
        """Append bytes. The buffer may be reused once this returns."""

    @abstractmethod
    def close(self) -> None:
        """Finish. When this returns, the object is on the storage for good."""

    @abstractmethod
    def abort(self) -> None:
        """Give up; frees what was written as far as the storage allows. Does nothing after `close`, or twice."""


class Storage(ABC):
    """A root and the objects below it. Can be sent to another process.

    Attributes:
        url: opens the same storage again (`open_storage(url)`): a path for a folder, else a URL. No secrets in it.
    """

    url: str

    @abstractmethod
    def read(self, key: str) -> bytes:
        """A whole object.

        Raises:
            FileNotFoundError: it is not there.
            OSError: as the system or the store gave it.
        """

    @abstractmethod
    def open(self, key: str) -> ObjectReader:
        """An object, for reading ranges.

        Raises:
            FileNotFoundError: it is not there.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Keys and sizes of all objects below a folder-like prefix (whole parts only), sorted by key."""

    @abstractmethod
    def folders(self, prefix: str) -> Sequence[str]:
        """Names of the folders right below a prefix, sorted; none if the prefix is not there."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> bool:
        """Create an object whole, for good, if none has this key.

        Returns:
            True if this call made it; False if it was there.
        """

    @abstractmethod
    def replace(self, key: str, data: bytes) -> None:
        """Write an object whole, for good; readers see the old one or the new one."""

    @abstractmethod
    def writer(self, key: str) -> ObjectWriter:
        """Start an object of a key that nothing else uses."""

    @abstractmethod
    def sync(self, prefix: str) -> None:
        """Make the names below a prefix, and its own, permanent, once all objects below it are closed."""

    @abstractmethod
    def written(self, prefix: str) -> Sequence[tuple[str, float]]:
        """Keys of all objects below a prefix, sorted, and when each was last written (seconds since the epoch)."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object; nothing happens if it is not there."""

    @abstractmethod
    def delete_tree(self, prefix: str) -> None:
        """Remove all objects below a folder-like prefix."""

    @abstractmethod
    def age_s(self, prefix: str) -> float:
        """Seconds since anything below a prefix was last written; infinite if nothing is there."""

    @abstractmethod
    def zarr_store(self, prefix: str) -> Store:
        """The place below a prefix as a store for zarr-python, read-only."""

    @abstractmethod
    def where(self, key: str = "") -> str:
        """A key for messages: a path, or a URL."""

    def exists(self, key: str) -> bool:
        """Whether an object is there."""
        try:
            self.open(key)
        except FileNotFoundError:
            return False
        return True

    def below(self, prefix: str) -> Storage:
        """The place below a prefix as a storage of its own."""
        return open_storage(self.where(prefix))


def open_storage(location: Location | Storage) -> Storage:
    """The storage at a path or URL. Object stores need the extra `cloud` and take their credentials from the
    environment or a profile, never from the URL.

    Raises:
        CacheError: the URL has a scheme that nothing here can open, or carries credentials.
    """
    if isinstance(location, Storage):
        return location
    text = str(location)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return FolderStorage(Path(text))
    if scheme == "file":
        return FolderStorage(Path("/" + rest.lstrip("/")))
    from cache_schema.object_storage import ObjectStorage

    return ObjectStorage(text)


def is_remote(location: Location) -> bool:
    """Whether a location is a place in an object store, and no local path."""
    text = str(location)
    return "://" in text and not text.startswith("file://")


def join(location: Location, key: str) -> Location:
    """The location of a key below another location."""
    text = str(location)
    return f"{text.rstrip('/')}/{key}" if "://" in text else Path(text) / key


def read_at(location: Location) -> bytes:
    """A whole object by its own location.

    Raises:
        FileNotFoundError: it is not there.
        OSError: as the system or the store gave it.
    """
    storage, key = _parent(location)
    return storage.read(key)


def replace_at(location: Location, data: bytes) -> None:
    """Write an object whole, for good, by its own location; readers see the old one or the new one."""
    storage, key = _parent(location)
    storage.replace(key, data)


def _parent(location: Location) -> tuple[Storage, str]:
    text = str(location)
    if "://" not in text:
        path = Path(text)
        return FolderStorage(path.parent), path.name
    parent, _, name = text.rpartition("/")
    return _opened(parent), name


@functools.lru_cache(maxsize=16)
def _opened(url: str) -> Storage:
    """A client takes its time to make, and a place that is looked at once is looked at again."""
    return open_storage(url)


class FolderStorage(Storage):
    """A local folder (or any mounted file system with `link`, `fsync` and atomic `rename`)."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self.url = str(self.root)

    def __repr__(self) -> str:
        return f"FolderStorage({self.url!r})"

    def where(self, key: str = "") -> str:
        if key.startswith("/") or ".." in key.split("/"):
            raise CacheError(f"{key!r} is no key of {self.url}: keys are relative and stay below the root")
        return f"{self.url}/{key}" if key else self.url

    def read(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except NotADirectoryError as error:
            raise FileNotFoundError(error.errno, "a file lies where a folder should be", self.where(key)) from error

    def open(self, key: str) -> ObjectReader:
        return _FileReader(self._path(key))

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        start = len(f"{self.url}/")  # texts, for a Path of each marker would take as long as reading it
        walk = os.walk(self.where(prefix), onerror=_unless_gone)
        found = (f"{folder}/{name}" for folder, _, files in walk for name in files)
        for path in sorted(p for p in found if not p.endswith(durable.TEMPORARY_SUFFIX)):
            try:
                yield path[start:], Path(path).stat().st_size
            except FileNotFoundError:
                continue  # removed since the walk

    def folders(self, prefix: str) -> Sequence[str]:
        try:
            return sorted(entry.name for entry in os.scandir(self._path(prefix)) if entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def create(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        durable.make_dirs(path.parent)
        return durable.create_once(path, data)

    def replace(self, key: str, data: bytes) -> None:
        path = self._path(key)
        durable.make_dirs(path.parent)
        durable.write_atomic(path, data)

    def writer(self, key: str) -> ObjectWriter:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        return _FileWriter(path)

    def sync(self, prefix: str) -> None:
        top = self._path(prefix)
        for folder, _, _ in os.walk(top, topdown=False):
            durable.fsync_dir(Path(folder))
        for parent in top.parents:
            durable.fsync_dir(parent)
            if parent == self.root:
                return

    def written(self, prefix: str) -> Sequence[tuple[str, float]]:
        found = []
        for key, _ in self.list(prefix):
            with suppress(FileNotFoundError):
                found.append((key, self._path(key).stat().st_mtime))
        return found

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def delete_tree(self, prefix: str) -> None:
        for folder, _, files in os.walk(self.where(prefix), topdown=False, onerror=_unless_gone):
            for name in files:
                Path(folder, name).unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                Path(folder).rmdir()

    def age_s(self, prefix: str) -> float:
        top = self._path(prefix)
        newest = max((p.stat().st_mtime for p in [top, *top.rglob("*")] if p.exists()), default=float("-inf"))
        return time.time() - newest

    def zarr_store(self, prefix: str) -> Store:
        from zarr.storage import LocalStore

        return LocalStore(self._path(prefix), read_only=True)

    def _path(self, key: str) -> Path:
        return Path(self.where(key))


def _unless_gone(error: OSError) -> None:
    """What a walk meets: a folder that is not there (any more) is empty, one that cannot be read is no empty one."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


class _FileReader(ObjectReader):
    piece_bytes = 2 * PIECE_BYTES  # hashed while it lies in the core's cache; smaller ones cost more in calls

    def __init__(self, path: Path) -> None:
        try:
            # The file object closes its descriptor when the last reader lets go of it, so a cache may forget an
            # open shard while another thread still reads from it.
            self._file = path.open("rb", buffering=0)
        except NotADirectoryError as error:
            raise FileNotFoundError(error.errno, "a file lies where a folder should be", str(path)) from error
        self._descriptor = self._file.fileno()
        self.size = os.fstat(self._descriptor).st_size

    def read_into(self, start: int, buffers: Sequence[Buffer]) -> None:
        views = [memoryview(b).cast("B") for b in buffers if len(b)]
        for first in range(0, len(views), IOV_MAX):
            start = self._fill(start, views[first : first + IOV_MAX])

    def _fill(self, start: int, views: list[memoryview]) -> int:
        while views:
            n = os.preadv(self._descriptor, views, start)
            if n == sum(map(len, views)):
                return start + n
            if n == 0:
                raise EOFError(f"{self._file.name} ends at byte {start}, where {len(views[0])} more are expected")
            start += n
            while views and n >= len(views[0]):
                n -= len(views.pop(0))
            if views:
                views[0] = views[0][n:]
        return start

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


class _FileWriter(ObjectWriter):
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("xb", buffering=0)

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        while view:
            view = view[self._file.write(view) :]

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def abort(self) -> None:
        if not self._file.closed:
            self._file.close()
            self._path.unlink(missing_ok=True)
