"""A cache in an object store (S3 and what speaks its protocol, Google Cloud Storage, Azure), through obstore.

An object appears whole when its upload is complete, `create` is a conditional put (`If-None-Match: *`), and a read
of a range is one ranged GET. `soundness.require_sound` proves that a store keeps these promises.
"""

from __future__ import annotations

import builtins
import errno
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from cache_schema import obstore_process
from cache_schema.errors import CacheError
from cache_schema.object_client import MEMORY, make_client, parse_url, translated
from cache_schema.storage import Buffer, ObjectReader, ObjectWriter, Storage

if TYPE_CHECKING:
    from zarr.abc.store import Store

PART_BYTES = 8 << 20
"""Bytes of one part of an upload: S3 wants 5 MiB or more and takes 10,000 parts, so an object may have 78 GiB."""
PARTS_IN_FLIGHT = 4
"""A writer holds at most this many parts and the one that it fills: 40 MiB."""
ATTEMPT = "attempt"
"""Metadata of an object that `create` made: which call it was."""

_memories: dict[str, tuple[Any, Any]] = {}


class ObjectStorage(Storage):
    """A place in an object store, `scheme://bucket/prefix`.

    The client is made on first use, in each process anew (fork and spawn); only the URL is pickled.

    Raises (every method, besides what `Storage` names):
        PermissionError: the store refuses the credentials, or there are none.
        OSError: the store cannot be reached (EHOSTUNREACH, after bounded retries) or answers wrongly (EPROTO).
    """

    def __init__(self, url: str) -> None:
        """
        Raises:
            CacheError: the scheme is unknown, or the URL carries a credential.
        """
        self._place = parse_url(url)
        self.url = self._place.text
        self._clients: tuple[int, Any, Any] | None = None

    def __repr__(self) -> str:
        return f"ObjectStorage({self.url!r})"

    def __reduce__(self) -> tuple[type[ObjectStorage], tuple[str]]:
        return ObjectStorage, (self.url,)

    def where(self, key: str = "") -> str:
        return f"{self.url}/{key}" if key else self.url

    def read(self, key: str) -> bytes:
        with self._errors(key) as (obstore, client):
            return bytes(obstore.get(client, self._path(key)).bytes())

    def open(self, key: str) -> ObjectReader:
        with self._errors(key) as (obstore, client):
            size = obstore.head(client, self._path(key))["size"]
        return _RangeReader(self, key, size)

    def read_range(self, key: str, start: int, n_bytes: int) -> memoryview:
        """Bytes of an object: one ranged GET.

        Raises:
            FileNotFoundError: it is not there.
            EOFError: the object ends within the range.
        """
        with self._errors(key) as (obstore, client):
            data = memoryview(obstore.get_range(client, self._path(key), start=start, length=n_bytes))
        if len(data) < n_bytes:
            raise EOFError(f"{self.where(key)} gave {len(data)} of the {n_bytes} bytes from byte {start} on")
        if len(data) > n_bytes:
            raise OSError(errno.EPROTO, f"asked for {n_bytes} bytes, the store sent {len(data)}", self.where(key))
        return data

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        return iter(sorted((key, meta["size"]) for key, meta in self._objects(prefix)))

    def folders(self, prefix: str) -> builtins.list[str]:
        with self._errors(prefix) as (obstore, client):
            found = obstore.list_with_delimiter(client, self._path(prefix) or None)
        return sorted(folder.rstrip("/").rsplit("/", 1)[-1] for folder in found["common_prefixes"])

    def create(self, key: str, data: bytes) -> bool:
        # A put whose answer was lost is sent again and then finds its own object: the metadata tells whose it is.
        attempt = secrets.token_hex(16)
        for last in (False, True):
            try:
                with self._errors(key) as (obstore, client):
                    obstore.put(client, self._path(key), data, mode="create", attributes={ATTEMPT: attempt})
                return True
            except FileExistsError:
                with suppress(FileNotFoundError), self._errors(key) as (obstore, client):
                    return bool(obstore.get(client, self._path(key)).attributes.get(ATTEMPT) == attempt)
            except OSError as error:
                if last or error.errno != errno.EHOSTUNREACH:
                    raise
        raise OSError(errno.EPROTO, "a conditional put finds an object there that a read does not", self.where(key))

    def replace(self, key: str, data: bytes) -> None:
        with self._errors(key) as (obstore, client):
            obstore.put(client, self._path(key), data, use_multipart=False)

    def writer(self, key: str) -> ObjectWriter:
        return _PartsWriter(self, key)

    def start_upload(self, key: str) -> Any:
        """obstore's own writer of an object, for whole parts; it keeps the buffers that it is given."""
        with self._errors(key) as (obstore, client):
            return obstore.open_writer(
                client, self._path(key), buffer_size=PART_BYTES, max_concurrency=PARTS_IN_FLIGHT
            )

    def sync(self, prefix: str) -> None:
        """Nothing: an object whose upload has succeeded is there for good, its name with it."""

    def written(self, prefix: str) -> builtins.list[tuple[str, float]]:
        return sorted((key, meta["last_modified"].timestamp()) for key, meta in self._objects(prefix))

    def delete(self, key: str) -> None:
        with suppress(FileNotFoundError), self._errors(key) as (obstore, client):
            obstore.delete(client, self._path(key))

    def delete_tree(self, prefix: str) -> None:
        keys = [key for key, _ in self._objects(prefix)]
        try:
            with self._errors(prefix) as (obstore, client):
                if keys:
                    obstore.delete(client, [self._path(key) for key in keys])
        except FileNotFoundError:  # another process removes the same: go on one by one
            for key in keys:
                self.delete(key)

    def age_s(self, prefix: str) -> float:
        newest = max((meta["last_modified"].timestamp() for _, meta in self._objects(prefix)), default=float("-inf"))
        return time.time() - newest

    def zarr_store(self, prefix: str) -> Store:
        from zarr.core.buffer import default_buffer_prototype
        from zarr.storage import MemoryStore, ObjectStore

        if self._place.scheme == MEMORY:  # obstore's memory has no prefixes: zarr gets a copy of these objects
            buffer = default_buffer_prototype().buffer
            start = len(f"{prefix}/") if prefix else 0
            objects = {key[start:]: buffer.from_bytes(self.read(key)) for key, _ in self.list(prefix)}
            return MemoryStore(objects, read_only=True)
        with obstore_process.lock():
            client = make_client(obstore_process.load(), self._place, self._path(prefix))
        return ObjectStore(client, read_only=True)

    def run(self, key: str, call: Callable[[], Any]) -> Any:
        """Call something of obstore, its errors as those of a storage."""
        with self._errors(key):
            return call()

    def _objects(self, prefix: str) -> Iterator[tuple[str, Any]]:
        start = len(self._path("")) + 1 if self._path("") else 0
        with self._errors(prefix) as (obstore, client):
            for page in obstore.list(client, prefix=self._path(prefix) or None):
                for meta in page:
                    yield meta["path"][start:], meta

    def _path(self, key: str) -> str:
        parts = key.split("/") if key else []
        if any(part in ("", ".", "..") for part in parts):
            raise CacheError(f"{key!r} is no key of {self.url}: keys are relative and stay below the root")
        return "/".join([self._place.prefix, *parts] if self._place.prefix else parts)

    @contextmanager
    def _errors(self, key: str) -> Iterator[tuple[Any, Any]]:
        """obstore and its client, with obstore's errors turned into those of a storage."""
        client = self._client()
        try:
            yield client
        except Exception as error:
            ours = translated(error, self.where(key))
            if ours is error:
                raise
            # Not chained: what obstore prints can hold a signed URL.
            raise ours from None

    def _client(self) -> tuple[Any, Any]:
        made = self._clients
        if made is None or made[0] != obstore_process.generation():
            with obstore_process.lock():
                made = self._clients
                if made is None or made[0] != obstore_process.generation():
                    obstore_process.leave_behind(made)
                    self._clients = made = (obstore_process.generation(), *self._make())
        return made[1:]

    def _make(self) -> tuple[Any, Any]:
        name = self._place.bucket
        if self._place.scheme != MEMORY:
            obstore = obstore_process.load()
            return obstore, make_client(obstore, self._place)
        if name not in _memories:
            obstore = obstore_process.load()
            _memories[name] = obstore, obstore.store.MemoryStore()
        return _memories[name]


class _RangeReader(ObjectReader):
    def __init__(self, storage: ObjectStorage, key: str, size: int) -> None:
        self._storage = storage
        self._key = key
        self.size = size

    def read_into(self, start: int, buffers: Sequence[Buffer]) -> None:
        views = [memoryview(b).cast("B") for b in buffers if memoryview(b).nbytes]
        n_bytes = sum(map(len, views))
        if start + n_bytes > self.size:
            where = self._storage.where(self._key)
            raise EOFError(f"{where} has {self.size} bytes, where {n_bytes} are expected from byte {start} on")
        if not n_bytes:
            return
        data = self._storage.read_range(self._key, start, n_bytes)
        for view in views:
            view[:] = data[: len(view)]
            data = data[len(view) :]


class _PartsWriter(ObjectWriter):
    """Fills parts and hands each over whole, since obstore sends from the buffers that it was given.

    What fits into one part is put in one request when it is closed.
    """

    def __init__(self, storage: ObjectStorage, key: str) -> None:
        self._storage = storage
        self._key = key
        self._part = bytearray()
        self._upload: Any = None
        self._done = False

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        while view:
            if len(self._part) == PART_BYTES:
                self._send()
            n = min(len(view), PART_BYTES - len(self._part))
            self._part += view[:n]
            view = view[n:]

    def close(self) -> None:
        if self._upload is None:
            self._storage.replace(self._key, bytes(self._part))
        else:
            self._send()
            self._storage.run(self._key, self._upload.close)
        self._done = True

    def abort(self) -> None:
        if self._upload is not None and not self._done:
            # Left by an exception, obstore's writer ends the upload, and the store forgets the parts.
            given_up = InterruptedError("the upload is given up")
            with suppress(Exception):
                self._upload.__exit__(type(given_up), given_up, None)
        self._done, self._part = True, bytearray()

    def _send(self) -> None:
        part, self._part = self._part, bytearray()
        if self._upload is None:
            self._upload = self._storage.start_upload(self._key)
        self._storage.run(self._key, lambda: self._upload.write(part))
