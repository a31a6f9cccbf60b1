"""One driver of a run at a time.

In a local folder the holder has an exclusive `flock` on `.lock`; the system lets go of it when the process ends. In an
object store there are numbered leases, `.lock/000007.json`, and the highest number counts: `create` lets one of several
drivers have the next, and the holder writes its own anew every `REFRESH_S`. The next may be taken when the holder has
let go, when it ran on this machine and is gone, or when it has not written for `STALE_S`; ages are told by the store's
own clock. A holder that finds a higher number, or not its own, stops, at most `REFRESH_S` after it has lost the run.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_schema.durable import make_dirs
from cache_schema.names import random_tag
from cache_schema.soundness import require_sound
from cache_schema.storage import FolderStorage, Storage
from pipeline.errors import RunInUse
from pipeline.holder import Holder

LOCK = ".lock"
REFRESH_S = 10.0
STALE_S = 60.0
_TRIES, _BETWEEN_S = 3, 0.1
"""Whoever only looks has the lock for an instant."""


class Hold:
    """That this process holds a run."""

    def require(self) -> None:
        """Check that it still does.

        Raises:
            RunInUse: another driver has taken over.
        """


@contextmanager
def hold_run(storage: Storage) -> Iterator[Hold]:
    """Hold a run while the block runs.

    Raises:
        RunInUse: another driver holds it, or takes it over meanwhile; names it.
        CacheError: the object store breaks a promise that leases stand on.
    """
    with (_flock(storage.root) if isinstance(storage, FolderStorage) else _lease(storage)) as hold:
        yield hold


def holder_of(storage: Storage) -> Holder | None:
    """Who holds a run now; None if nobody does. Changes nothing."""
    if isinstance(storage, FolderStorage):
        return _flock_holder(storage.root / LOCK)
    newest = _newest(storage)
    if newest is None or newest.is_over:
        return None
    written = dict(storage.written(LOCK)).get(newest.key, time.time())
    return newest.holder if time.time() - written <= STALE_S else None


# --- a local folder -----------------------------------------------------------------------------------


@contextmanager
def _flock(folder: Path) -> Iterator[Hold]:
    make_dirs(folder)
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not _try_lock(file, fcntl.LOCK_EX):
            raise _in_use(str(folder), _read_holder(file))
        os.ftruncate(file, 0)
        os.write(file, json.dumps(Holder.me().to_json()).encode())
        yield Hold()
    finally:
        os.close(file)


def _try_lock(file: int, kind: int) -> bool:
    for i in range(_TRIES):
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if i + 1 < _TRIES:
                time.sleep(_BETWEEN_S)
    return False


def _read_holder(file: int) -> Holder | None:
    try:
        return Holder.of(json.loads(os.pread(file, 4096, 0)))
    except ValueError:
        return None


def _flock_holder(path: Path) -> Holder | None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if _try_lock(file, fcntl.LOCK_SH):
            return None
        return _read_holder(file) or Holder(0, "an unknown machine", "an unknown time")
    finally:
        os.close(file)


def _in_use(where: str, holder: Holder | None) -> RunInUse:
    return RunInUse(
        f"{where} is in use by {holder or 'another process'}; wait for it, or give this run another folder"
    )


# --- an object store ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Lease:
    number: int
    holder: Holder
    released: bool

    @property
    def key(self) -> str:
        return _key(self.number)

    @property
    def is_over(self) -> bool:
        """Whether its holder has let go, or has died on this machine."""
        return self.released or self.holder.is_gone

    def is_free(self, storage: Storage) -> bool:
        """Whether the next number may be taken."""
        return self.is_over or _age_s(storage, self.key) > STALE_S


def _key(number: int) -> str:
    return f"{LOCK}/{number:06d}.json"


def _numbers(storage: Storage) -> list[int]:
    stems = (key.removeprefix(f"{LOCK}/").removesuffix(".json") for key, _ in storage.list(LOCK))
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def _newest(storage: Storage) -> _Lease | None:
    for number in reversed(_numbers(storage)):
        try:
            found = json.loads(storage.read(_key(number)))
        except FileNotFoundError:  # its successor has cleared it away
            continue
        except ValueError:
            found = {}
        holder = Holder.of(found) or Holder(0, "an unknown machine", "an unknown time")
        return _Lease(number, holder, bool(found.get("released")))
    return None


def _age_s(storage: Storage, key: str) -> float:
    """Seconds since an object was written, by the store's clock: this machine's may differ."""
    probe = f"{LOCK}/clock-{random_tag()}"
    storage.replace(probe, b"")
    try:
        times = dict(storage.written(LOCK))
    finally:
        storage.delete(probe)
    return times[probe] - times[key] if key in times and probe in times else 0.0


@contextmanager
def _lease(storage: Storage) -> Iterator[Hold]:
    require_sound(storage)
    hold = _take(storage)
    with hold:
        try:
            yield hold
        except KeyboardInterrupt:
            if hold.lost is not None:  # so the refreshing thread stops this one
                raise RunInUse(hold.lost) from None
            raise


def _take(storage: Storage) -> _LeaseHold:
    me = Holder.me()
    while True:
        newest = _newest(storage)
        if newest is not None and not newest.is_free(storage):
            raise _in_use(storage.where(), newest.holder)
        number = newest.number + 1 if newest is not None else 1
        if not storage.create(_key(number), _body(me)):
            continue
        found = _numbers(storage)
        if found[-1] > number:  # this one was slow: a later lease has been taken, and those before it cleared away
            storage.delete(_key(number))
            continue
        for older in found[:-1]:
            storage.delete(_key(older))
        return _LeaseHold(storage, number, me)


def _body(holder: Holder, *, released: bool = False) -> bytes:
    body: dict[str, Any] = holder.to_json() | {"refreshed": time.time(), "released": released}
    return json.dumps(body).encode()


class _LeaseHold(Hold):
    """A lease that is kept fresh by a thread while it is entered."""

    def __init__(self, storage: Storage, number: int, me: Holder) -> None:
        self.storage, self.number, self.me = storage, number, me
        self.lost: str | None = None
        self._ending = threading.Event()
        self._in_main = threading.current_thread() is threading.main_thread()
        self._interrupt = signal.SIGINT
        self._handler: Any = None
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def __enter__(self) -> _LeaseHold:
        if self._in_main and not callable(signal.getsignal(signal.SIGINT)):
            # Ignored, as in what a script starts with `&`: then another signal stops the main thread.
            self._interrupt = signal.SIGUSR1
            self._handler = signal.signal(self._interrupt, signal.default_int_handler)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ending.set()
        self._thread.join()
        if self._interrupt != signal.SIGINT:
            signal.signal(self._interrupt, self._handler or signal.SIG_DFL)
        if self.lost is None:
            with suppress(OSError):  # it lapses by itself
                if _numbers(self.storage)[-1:] == [self.number]:
                    self.storage.replace(_key(self.number), _body(self.me, released=True))

    def require(self) -> None:
        if self.lost is None and self._in_main and threading.current_thread() is threading.main_thread():
            self._look()
        if self.lost is not None:
            raise RunInUse(self.lost)

    def _keep(self) -> None:
        while not self._ending.wait(REFRESH_S):
            try:
                self._look()
                if self.lost is None:
                    self.storage.replace(_key(self.number), _body(self.me))
            except OSError:
                continue  # the store is away: this driver's other requests say so
            if self.lost is not None:
                if self._in_main and not self._ending.is_set():
                    # A call that waits for workers ends at once, and the block is left.
                    signal.pthread_kill(threading.main_thread().ident or 0, self._interrupt)
                return

    def _look(self) -> None:
        """Find out whether the run is still this process's."""
        if self.lost is not None or _numbers(self.storage)[-1:] == [self.number]:
            return
        newest = _newest(self.storage)
        who = f"by {newest.holder}" if newest is not None and newest.number > self.number else "by another driver"
        self.lost = (
            f"{self.storage.where()} was taken over {who}, after this one had not refreshed its lease for "
            f"{STALE_S:.0f} s or more; this driver stops. What it committed stays"
        )
