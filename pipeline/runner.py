"""A pool of Ray actors that works through units (shards, parts), one in flight per worker.

The queue is in the driver: a worker gets its next unit when it has finished the last, so a slow worker or
one that never starts holds nobody up, and what comes back is a small receipt, never a tensor. The work
itself lies on disk, committed by the worker, which makes every unit safe to run again.

What happens when something fails:

- **A worker dies** (killed, out of memory, node lost): a fresh one takes its place, its unit is queued again.
- **A unit raises** anything but a DFlashError: same, and the worker is replaced too, because after a CUDA
  fault every later call in that process fails.
- **A unit raises a DFlashError**: it will again, so it is not retried.
- **A unit runs out of attempts**: the rest is finished first; then `PoisonShard` tells the story of every
  attempt (or the DFlashError is raised again, with the unit named).
- **A worker cannot be built**: nothing will work, so that is raised at once.

Units may also come from a `Feed`, which says what to do next only when a worker asks: then a unit that failed for
good ends the pool at once, since what comes next may depend on it.

Ray is imported inside functions, so that importing this module costs nothing.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from cache_schema.durable import is_storage_fault, storage_text
from cache_schema.errors import DFlashError
from pipeline.errors import PipelineError, PoisonShard, StorageError

Receipt = dict[str, Any]
WAIT_S = 1.0  # how often the driver shows signs of life while nothing finishes
_STARTS = 3  # tries to start Ray
ASK_S = 0.1  # how often a feed is asked again while workers are idle


class Worker(Protocol):
    """Does one unit at a time; built once per actor."""

    def run(self, unit: Any, attempt: int) -> Receipt:
        """Do and commit `unit` (attempts count from 1) and return a small receipt."""
        ...


class Feed(Protocol):
    """Says what to do next, one unit at a time; asked in the driver, by one thread."""

    def next_unit(self) -> Any | None:
        """The next unit, or None when there is none just now.

        Raises:
            StopIteration: there will be none any more.
        """
        ...

    def given_up(self) -> bool:
        """Whether nothing is wanted any more, not even what is being done."""
        ...


class _Listed:
    """A feed of units that are all known."""

    def __init__(self, units: Sequence[Any]) -> None:
        self._left = iter(units)

    def next_unit(self) -> Any:
        return next(self._left)

    def given_up(self) -> bool:
        return False


class Shown(Protocol):
    """What a pool tells as it goes; `progress.Progress` is one."""

    def update(self, n: int = 1, failures: int = 0) -> None:
        """Count finished units and failed attempts."""

    def note(self, text: str) -> None:
        """One line, such as the reason of a retry."""


def unit_name(unit: Any) -> str:
    """What a unit is called in messages: its `name`, else its text."""
    return str(getattr(unit, "name", unit))


def run_pool(
    units: Sequence[Any] | Feed,
    build_worker: Callable[[], Worker],
    *,
    n_workers: int,
    resources: Mapping[str, float],
    progress: Shown | None = None,
    max_attempts: int = 3,
    label: str = "unit",
    on_receipt: Callable[[Any, Receipt], None] | None = None,
) -> list[Receipt]:
    """Run every unit on a pool of workers; call it inside `ensure_ray()`.

    Args:
        units: small and picklable; each is named by its `name`, else by its text. Or a feed of such.
        build_worker: makes the worker inside the actor, once; picklable.
        n_workers: actors at most (never more than units).
        resources: of one actor: `num_cpus`, `num_gpus`.
        progress: counts finished units and failed attempts; the caller closes it.
        max_attempts: attempts per unit before it counts as poison.
        label: what a unit is called: "shard", "part".
        on_receipt: called in the driver with unit and receipt as each unit finishes.

    Returns:
        The receipts in the order of `units`, whatever order they finished in.

    Raises:
        PoisonShard: a unit failed on every attempt; all others of a sequence are done.
        DFlashError: a unit raised it; same type, with the unit named; all others of a sequence are done.
        PipelineError: a worker could not be built, or the cluster has no room for even one.
    """
    if isinstance(units, Sequence):
        if not units:
            return []
        feed: Feed = _Listed(units)
        n_workers = min(n_workers, len(units))
    else:
        feed = units
    _check_room(resources)
    hasty = not isinstance(units, Sequence)
    pool = _Pool(feed, hasty, build_worker, n_workers, resources, progress, max_attempts, label, on_receipt)
    return pool.run()


class _Host:
    """The actor: builds the worker, runs units, turns what they raise into plain outcomes."""

    def build(self, factory: Callable[[], Worker]) -> dict[str, Any]:
        def call() -> str:
            self._worker = factory()
            return f"pid {os.getpid()} on {socket.gethostname()}"

        return self._guarded(call)

    def run(self, unit: Any, attempt: int) -> dict[str, Any]:
        return self._guarded(lambda: self._worker.run(unit, attempt))

    def _guarded(self, call: Callable[[], Any]) -> dict[str, Any]:
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


@dataclass
class _Attempt:
    number: int
    worker: str
    text: str


@dataclass
class _Task:
    """A unit on its way: how often it was tried and what went wrong."""

    index: int
    unit: Any
    story: list[_Attempt] = field(default_factory=list)
    error: DFlashError | None = None
    traceback: str = ""  # of the last attempt, where it raised

    @property
    def attempt(self) -> int:
        return len(self.story) + 1


@dataclass
class _Seat:
    """A place in the pool. The actor in it may die and be replaced; `task` is None while it is being built or idle."""

    name: str
    actor: Any
    task: _Task | None = None


class _Pool:
    def __init__(
        self,
        feed: Feed,
        hasty: bool,
        build_worker: Callable[[], Worker],
        n_workers: int,
        resources: Mapping[str, float],
        progress: Shown | None,
        max_attempts: int,
        label: str,
        on_receipt: Callable[[Any, Receipt], None] | None,
    ) -> None:
        self._feed = feed
        self._hasty = hasty  # a unit that failed for good ends it all
        self._build_worker = build_worker
        self._n_workers = n_workers
        self._resources = dict(resources)
        self._progress = progress
        self._max_attempts = max_attempts
        self._label = label
        self._on_receipt = on_receipt
        self._again: deque[_Task] = deque()  # failed units; those of a sequence wait until all others are on their way
        self._n_drawn = 0
        self._exhausted = False
        self._receipts: dict[int, Receipt] = {}
        self._failed: list[_Task] = []
        self._waiting: dict[Any, _Seat] = {}  # reference -> the seat it will come from
        self._idle: list[_Seat] = []
        self._n_hired = 0
        self._build_deaths = 0

    def run(self) -> list[Receipt]:
        import ray

        try:
            for _ in range(self._n_workers):
                self._hire()
            while self._goes_on():
                self._wait()
                self._employ()
                self._count(0)
        finally:
            # Also on Ctrl-C: whatever is still running is unwanted, and what it had not committed is not there.
            for seat in [*self._waiting.values(), *self._idle]:
                ray.kill(seat.actor)
        if self._failed:
            self._raise_failures()
        return [self._receipts[i] for i in sorted(self._receipts)]

    def _goes_on(self) -> bool:
        if (self._hasty and self._failed) or self._feed.given_up():
            return False
        return bool(self._again or not self._exhausted or any(s.task for s in self._waiting.values()))

    def _wait(self) -> None:
        """Take what comes back within a moment."""
        import ray

        patience_s = ASK_S if self._idle else WAIT_S
        if not self._waiting:
            time.sleep(patience_s)
            return
        ready, _ = ray.wait(list(self._waiting), num_returns=1, timeout=patience_s)
        for reference in ready:
            self._settle(self._waiting.pop(reference), reference)

    def _employ(self) -> None:
        """Give idle workers something to do; once there is nothing left, let them go."""
        import ray

        while self._idle:
            task = self._next_task()
            if task is None:
                break
            seat = self._idle.pop(0)
            seat.task = task
            self._waiting[seat.actor.run.remote(task.unit, task.attempt)] = seat
        if self._exhausted and not self._again:
            for seat in self._idle:
                ray.kill(seat.actor)
            self._idle.clear()

    def _next_task(self) -> _Task | None:
        if self._hasty and self._again:
            return self._again.popleft()
        if not self._exhausted:
            try:
                unit = self._feed.next_unit()
            except StopIteration:
                self._exhausted = True
            else:
                if unit is not None:
                    self._n_drawn += 1
                    return _Task(self._n_drawn - 1, unit)
        return self._again.popleft() if self._again else None

    def _hire(self) -> None:
        """Start an actor and let it build its worker."""
        import ray

        name = f"worker-{self._n_hired}"
        self._n_hired += 1
        actor: Any = ray.remote(_Host).options(max_restarts=0, max_concurrency=1, **self._resources).remote()
        self._waiting[actor.build.remote(self._build_worker)] = _Seat(name, actor)

    def _settle(self, seat: _Seat, reference: Any) -> None:
        """Take what came back from a seat; a worker that failed is replaced."""
        import ray

        try:
            outcome = ray.get(reference)
        except ray.exceptions.RayError as error:
            outcome = {"failure": _death_text(error)}
        if seat.task is None:
            self._check_built(seat, outcome)
            seat.name += f" ({outcome.get('receipt', 'died')})"
        else:
            self._settle_task(seat, seat.task, outcome)
        seat.task = None
        if "failure" not in outcome:
            self._idle.append(seat)
            return
        ray.kill(seat.actor)
        if self._again or not self._exhausted:
            self._hire()

    def _check_built(self, seat: _Seat, outcome: dict[str, Any]) -> None:
        if "error" in outcome:
            raise outcome["error"]
        if "traceback" in outcome:
            raise PipelineError(f"{seat.name} could not be built: {outcome['failure']}\n{outcome['traceback']}")
        if "failure" in outcome:
            self._build_deaths += 1
            if self._build_deaths >= self._max_attempts:
                times = f"{self._build_deaths} workers died while they were being built"
                raise PipelineError(f"{times}, the last: {outcome['failure']}. Is there memory for the model?")

    def _settle_task(self, seat: _Seat, task: _Task, outcome: dict[str, Any]) -> None:
        if "receipt" in outcome:
            self._receipts[task.index] = outcome["receipt"]
            if self._on_receipt is not None:
                self._on_receipt(task.unit, outcome["receipt"])
            self._count(1)
            return
        task.error = outcome.get("error")
        if isinstance(task.error, StorageError):
            raise StorageError(f"{self._named(task)}: {task.error}")  # every other unit would end the same way
        task.traceback = outcome.get("traceback", "").rstrip()
        task.story.append(_Attempt(task.attempt, seat.name, outcome.get("failure") or str(task.error)))
        self._count(0, failures=1)
        final = task.error is not None or len(task.story) >= self._max_attempts
        if final:
            self._failed.append(task)
        else:
            self._again.append(task)
        if self._progress is not None:
            shown = outcome.get("failure") or str(task.error)
            then = "giving up on it, the rest goes on" if final else "trying again"
            self._progress.note(f"{self._named(task)} failed on {seat.name}: {shown}; {then}")

    def _count(self, n: int, failures: int = 0) -> None:
        if self._progress is not None:
            self._progress.update(n, failures)

    def _named(self, task: _Task) -> str:
        name = unit_name(task.unit)
        return name if name.startswith(self._label) else f"{self._label} {name}"

    def _raise_failures(self) -> None:
        """Raise for the first failed unit, naming the others; everything else is done by now."""
        first, *others = sorted(self._failed, key=lambda t: t.index)
        also = f"\nAlso failed: {', '.join(self._named(t) for t in others)}" if others else ""
        stories = "".join(f"\n{self._story(t, t is first)}" for t in [first, *others] if t.error is None)
        if first.error is not None:
            error = first.error
            message = str(error)
            named = message if unit_name(first.unit) in message else f"{self._named(first)}: {message}"
            # The same object, so that its type survives whatever its constructor takes.
            error.args = (named + also + stories, *error.args[1:])
            raise error
        raise PoisonShard(
            f"{self._named(first)} failed on every attempt; {len(self._receipts)} of {self._n_drawn} are done and "
            "committed, "
            f"so running again tries only what is missing.{also}{stories}"
        )

    def _story(self, task: _Task, in_full: bool) -> str:
        lines = [f"{self._named(task)}:", *(f"  attempt {a.number} on {a.worker}: {a.text}" for a in task.story)]
        if task.traceback and in_full:
            lines.append("    " + task.traceback.replace("\n", "\n    "))
        return "\n".join(lines)


def _death_text(error: BaseException) -> str:
    """A dead actor's error in one line: Ray's own text is a page long."""
    text = " ".join(str(error).split())
    start = max(text.find("Worker exit type"), 0)
    told = text[start:].partition(" Some common causes")[0][:300].rstrip(".")
    return f"the worker died ({type(error).__name__}: {told}); killed, out of memory, or crashed"


def _check_room(resources: Mapping[str, float]) -> None:
    """Refuse what would wait for ever: on one machine nothing is ever added.

    Raises:
        PipelineError: not even one worker fits.
    """
    import ray

    if os.environ.get("RAY_ADDRESS"):
        return  # a cluster may still grow
    have = ray.cluster_resources()
    for option, name in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
        if resources.get(option, 0) > have.get(name, 0):
            raise PipelineError(
                f"a worker needs {resources[option]:g} {name}, but this machine offers Ray {have.get(name, 0):g}: "
                f"lower the recipe's threads, or set RAY_ADDRESS to a cluster that has them"
            )


@contextmanager
def ensure_ray(
    *, num_cpus: int | None = None, num_gpus: int | None = None, log_to_driver: bool = False
) -> Iterator[None]:
    """A Ray to work in: the one that is there, the cluster that RAY_ADDRESS names, or one of our own.

    Only what is started here is shut down on leaving, on errors and Ctrl-C too.

    Args:
        num_cpus: CPUs that an own Ray offers; None takes all.
        num_gpus: GPUs likewise.
        log_to_driver: show what workers print. Off, because the driver tells every failure itself.
    """
    # Both are read when Ray is imported or started: no usage report to Ray's makers, and a worker without
    # GPUs keeps its environment (Ray's coming default, whose announcement is a warning).
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"namespace": "dflash", "log_to_driver": log_to_driver, "logging_level": "WARNING"}
    if os.environ.get("RAY_ADDRESS"):
        options["address"] = os.environ["RAY_ADDRESS"]
    else:
        # Receipts are small, so Ray's usual third of the memory is not set aside for objects.
        options |= {"address": "local", "include_dashboard": False, "num_cpus": num_cpus, "num_gpus": num_gpus}
        options["object_store_memory"] = 256 << 20
        # Ray protects an own instance with a token; that is as it should be, and no news to anybody.
        logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    try:
        _start_ray(options)
        yield
    finally:
        ray.shutdown()


def _start_ray(options: dict[str, Any]) -> None:
    """Start or join Ray; one that a busy machine did not start in time is started again.

    Raises:
        PipelineError: it did not start in time, three times.
    """
    import ray

    for attempt in range(1, _STARTS + 1):
        try:
            ray.init(**options)
            return
        except Exception as error:  # Ray raises a bare Exception here
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
            if attempt == _STARTS:
                raise PipelineError(
                    f"Ray did not start in time, {_STARTS} times: this machine is too busy, or out of memory. Nothing "
                    "is lost; run the same command again when it is less so"
                ) from error
