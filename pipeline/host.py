"""The actor that a worker lives in: it says where it is, builds the worker, and turns what that raises into outcomes.

An outcome is a dict with one of: `receipt`; `error` (a DFlashError, which would come again); `failure` (one line, with
`traceback`), after which the process is not to be trusted.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from cache_schema.durable import is_storage_fault, storage_text
from cache_schema.errors import DFlashError
from pipeline.errors import StorageError

Receipt = dict[str, Any]
Outcome = dict[str, Any]


class Worker(Protocol):
    """Does units; built once per actor. With several units in flight, `run` is called by as many threads."""

    def run(self, unit: Any, attempt: int) -> Receipt:
        """Do and commit `unit` (attempts count from 1) and return a small receipt."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor runs.

    Attributes:
        text: process and host, for people.
        node_id: of Ray.
        address: of the node, as other nodes reach it.
        port: free on that node a moment ago.
    """

    text: str
    node_id: str
    address: str
    port: int


class Host:
    """The actor."""

    def place(self) -> Outcome:
        """Where this is; answers as soon as Ray has found room for the actor."""
        return guarded(_place)

    def build(self, factory: Callable[..., Worker], *member: Any) -> Outcome:
        """Make the worker; `member` says which one of a group this is."""

        def call() -> None:
            self._worker = factory(*member)

        return guarded(call)

    def run(self, unit: Any, attempt: int, shown: str) -> Outcome:
        """Let the worker do one unit, in a process that is called `shown` until Ray calls it otherwise again."""
        import ray

        set_title = getattr(ray._raylet, "setproctitle", None)  # not a public part of Ray
        if set_title is not None:
            set_title(f"ray::{shown}")
        return guarded(lambda: self._worker.run(unit, attempt))


def guarded(call: Callable[[], Any]) -> Outcome:
    """The outcome of a call, whatever it raises."""
    try:
        return {"receipt": call()}
    except DFlashError as error:
        return {"error": error}
    except OSError as error:
        if not is_storage_fault(error):
            return {"failure": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        return {"error": StorageError(storage_text(error))}
    except Exception as error:  # the one boundary where anything may arrive; the driver decides
        text = f"{type(error).__name__}: {error}"
        return {"failure": text, "traceback": traceback.format_exc()}


def _place() -> Place:
    import ray

    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    text = f"pid {os.getpid()} on {socket.gethostname()}"
    return Place(text, ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), port)
