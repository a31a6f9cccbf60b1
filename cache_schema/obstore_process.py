"""obstore, usable in every process, a forked one included.

obstore runs its requests on threads of a runtime that it keeps for the life of the process. A forked child
inherits the runtime without the threads, and each request in it waits for ever. Such a child therefore loads a
second copy of obstore's library (a copy, because the loader knows a library by its inode), which starts a runtime
of its own: 20 ms once per child, nothing for a process that was spawned.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import threading
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

from cache_schema.errors import CacheError

_LIBRARY = "obstore._obstore"

_lock = threading.Lock()
_module: Any = None
_library: str | None = None  # where the library lies that a forked child must not use
_generation = 0
_left_behind: list[Any] = []


def generation() -> int:
    """Differs between a process and what is forked from it: a client of another generation must not be used."""
    return _generation


def lock() -> threading.Lock:
    """Guards what is made once per process; never held by a thread that a fork left behind."""
    return _lock


def leave_behind(inherited: object) -> None:
    """Keep a client that was inherited through a fork, so that nothing here runs its destructor."""
    _left_behind.append(inherited)


def load() -> Any:
    """The module obstore of this process. The caller holds the lock.

    Raises:
        CacheError: obstore is not installed, or cannot be loaded again in a forked process.
    """
    global _module, _library
    if _module is None:
        _module = _import() if _library is None else _import_copy(_library)
        _library = _library or sys.modules[_LIBRARY].__file__
    return _module


def _import() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise CacheError(
            f"caches in an object store need obstore, which cannot be imported ({error}): pip install 'dflash[cloud]'"
        ) from error
    return obstore


def _import_copy(library: str) -> Any:
    for name in [n for n in sys.modules if n == "obstore" or n.startswith("obstore.")]:
        leave_behind(sys.modules.pop(name))
    try:
        descriptor = os.memfd_create("obstore")
        try:
            with Path(library).open("rb") as source, open(descriptor, "wb", closefd=False) as copy:
                shutil.copyfileobj(source, copy)
            loader = ExtensionFileLoader(_LIBRARY, f"/proc/self/fd/{descriptor}")
            spec = importlib.util.spec_from_loader(_LIBRARY, loader)
            assert spec is not None
            sys.modules[_LIBRARY] = module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
        finally:
            os.close(descriptor)
    except (OSError, ImportError) as error:
        raise CacheError(
            f"obstore cannot be loaded again in this forked process ({error}): start workers with 'spawn' instead "
            "(for a DataLoader: multiprocessing_context='spawn')"
        ) from error
    return _import()


def _after_fork() -> None:
    global _lock, _module, _library, _generation
    _lock = threading.Lock()
    _generation += 1
    library = sys.modules.get(_LIBRARY)
    if library is not None:
        _library = _library or library.__file__
    _module = None


os.register_at_fork(after_in_child=_after_fork)
