"""Whether a store keeps the promises that the protocol of the cache stands on.

Some servers that speak S3 ignore `If-None-Match` (then two workers both commit a shard) or answer a ranged GET with
other bytes (then a sample is read from the wrong place). Neither shows before the harm is done, so the first writer
asks the store, with one small object that it removes again.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable
from contextlib import suppress

from cache_schema.errors import CacheError
from cache_schema.storage import FolderStorage, Storage

PROBES = "probes"
"""Folder of the probes' objects; what a killed probe left there means nothing."""
PROBE_BYTES = 20_000


def require_sound(storage: Storage) -> None:
    """Prove on a small object that `create`, ranged reads, `list` and `delete` do what `Storage` says.

    Nothing to prove for a local folder. Costs about fifteen requests on an object store.

    Raises:
        CacheError: the store breaks a promise; the message names the store, the promise and what was found.
        PermissionError: the store refuses the credentials, or there are none.
        OSError: the store cannot be reached.
    """
    if isinstance(storage, FolderStorage):
        return
    key = f"{PROBES}/{secrets.token_hex(8)}"
    content = secrets.token_bytes(PROBE_BYTES)
    try:
        for promise, probe in (
            ("an object is created only where none is (PUT with If-None-Match: *)", _create_once),
            ("a range is read exactly (GET with Range)", _ranges),
            ("what was written is listed", _listed),
            ("what was removed is not found", _removed),
        ):
            found = _answer(probe, storage, key, content)
            if found:
                raise CacheError(
                    f"{storage.where()} cannot hold a cache. It has to keep this promise: {promise}. Found: {found}. "
                    "Use another server or service (AWS S3, Google Cloud Storage, Azure, Ceph RGW keep it; "
                    "`rclone serve s3` does not), or a local folder"
                )
    finally:
        with suppress(OSError):
            storage.delete(key)


_Probe = Callable[[Storage, str, bytes], str | None]


def _answer(probe: _Probe, storage: Storage, key: str, content: bytes) -> str | None:
    try:
        return probe(storage, key, content)
    except (EOFError, FileNotFoundError) as error:
        return str(error)
    except OSError as error:
        if error.errno != errno.EPROTO:
            raise
        return str(error.strerror)


def _create_once(storage: Storage, key: str, content: bytes) -> str | None:
    if not storage.create(key, content):
        return "a first create was refused although nothing was there"
    second = storage.create(key, content[::-1])
    kept = storage.read(key)
    if second:
        return f"a second create succeeded too{'' if kept == content else ' and replaced the first object'}"
    return None if kept == content else "a second create was refused, but the object is no longer what the first wrote"


def _ranges(storage: Storage, key: str, content: bytes) -> str | None:
    reader = storage.open(key)
    if reader.size != len(content):
        return f"an object of {len(content)} bytes is said to have {reader.size}"
    end = len(content)
    for start, n_bytes in ((0, 1), (0, 4096), (4095, 4098), (end // 2 + 1, 777), (end - 1, 1), (end - 4096, 4096)):
        first, second = bytearray(n_bytes // 3), bytearray(n_bytes - n_bytes // 3)
        reader.read_into(start, [first, second])
        if first + second != content[start : start + n_bytes]:
            return f"{n_bytes} bytes from byte {start} on are not those that were written"
    return None


def _listed(storage: Storage, key: str, content: bytes) -> str | None:
    listed = dict(storage.list(PROBES)).get(key)
    if listed is None:
        return "an object that was just written is not in the list"
    return None if listed == len(content) else f"the list gives {listed} bytes for an object of {len(content)}"


def _removed(storage: Storage, key: str, content: bytes) -> str | None:
    storage.delete(key)
    for what, look in (("opens", storage.open), ("is read", storage.read)):
        try:
            look(key)
        except FileNotFoundError:
            continue
        return f"an object still {what} after it was removed"
    return None
