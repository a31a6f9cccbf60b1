"""What chaos does to a running pipeline: kills of workers, nodes, the driver and the store, at random moments."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psutil

from benchmarks.chaos_home import Place
from benchmarks.runner_cluster import Nodes
from pipeline.recipe import STAGES
from tests.servers.s3 import S3Server

WORKER, WORKERS, NODE, NODES = "a worker killed", "all workers killed", "a node killed", "all nodes killed"
DRIVER, TERM, STORE = "driver killed (kill -9)", "driver terminated (SIGTERM)", "store killed, restarted"
KINDS = {WORKER: 4, WORKERS: 2, NODE: 4, NODES: 2, DRIVER: 4, TERM: 3, STORE: 8}
"""What may happen, and how often; the store only to runs that have things on it."""
WHERE = {"generate": 3, "extract": 3, "train": 4, "evaluate": 1, "export": 1}
"""Stages in which it happens, and how often; workers only exist in the first three."""
POOLED = ("generate", "extract", "train")
AT_WORK = 0.65
"""Share of the faults that wait until a random part of the stage's work is committed; the others come at any time."""
N_NODES = 2
AWAY_S = (0.3, 6.0)
"""How long a node or the store stays away."""
LOOK_S = 0.05
TITLES = tuple(f"ray::{name}" for name in ("Host", "generate ", "extract ", "RayTrainWorker", "TrainController"))
STARTS = 6
T = TypeVar("T")
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)


@dataclass(kw_only=True)
class Fault:
    """Something that happens once in a run.

    Attributes:
        kind: of `KINDS`.
        stage: in which.
        share: of the stage's work that is committed by then; None: at any time.
        delay_s: how long after that, or after the stage began.
        met: whether it met what it was for.
        told: what it met.
    """

    kind: str
    stage: str
    share: float | None
    delay_s: float
    met: bool = False
    told: str = ""

    def to_json(self) -> dict[str, Any]:
        """For the log."""
        return {"kind": self.kind, "stage": self.stage, "share": self.share, "delay_s": round(self.delay_s, 2),
                "met": self.met, "told": self.told}  # fmt: skip


def draw_faults(chance: random.Random, on_store: bool, stage_s: dict[str, float], kinds: list[str]) -> list[Fault]:
    """One to three faults of a run, in the order of their stages.

    Args:
        chance: decides.
        on_store: whether the store may be among them.
        stage_s: how long each stage takes undisturbed.
        kinds: of these only.
    """
    weights = {kind: KINDS[kind] for kind in kinds if kind != STORE or on_store}
    faults = []
    for _ in range(chance.choice((1, 1, 2, 3))):
        kind = chance.choices(list(weights), list(weights.values()))[0]
        stages = POOLED if kind in (WORKER, WORKERS) else STAGES
        stage = chance.choices(stages, [WHERE[name] for name in stages])[0]
        at_work = chance.random() < AT_WORK and stage != "export"
        share = chance.uniform(0, 0.95) if at_work else None
        delay_s = chance.uniform(0, 0.3) if at_work else chance.uniform(0, stage_s[stage])
        faults.append(Fault(kind=kind, stage=stage, share=share, delay_s=delay_s))
    return sorted(faults, key=lambda fault: (STAGES.index(fault.stage), fault.share or 0))


@dataclass
class Scene:
    """What can be killed.

    Attributes:
        nodes: of the cluster; the head has no CPU and stays.
        server: the store; None where there is none.
        chance: decides.
        whole: how much work each stage has in the end.
    """

    nodes: Nodes
    server: S3Server | None
    chance: random.Random
    whole: dict[str, int] = field(default_factory=dict)

    def await_moment(self, fault: Fault, place: Place, process: subprocess.Popen[Any]) -> bool:
        """Wait for a fault's moment; False if the command or the stage ended before."""
        over = lambda: process.poll() is not None or place.done(fault.stage)  # noqa: E731
        wanted = None if fault.share is None else max(1, round(fault.share * self.whole[fault.stage]))
        come: Callable[[], bool] = lambda: place.begun(fault.stage)  # noqa: E731
        if wanted is not None:
            come = lambda: place.work(fault.stage) >= wanted  # noqa: E731
        if not _wait(come, over):
            return False
        moment = time.monotonic() + fault.delay_s
        return _wait(lambda: time.monotonic() >= moment, lambda: process.poll() is not None)

    def inflict(self, fault: Fault, process: subprocess.Popen[Any]) -> None:
        """Let it happen; the cluster and the store are whole again afterwards."""
        if fault.kind in (WORKER, WORKERS):
            self._kill_workers(fault, process)
        elif fault.kind in (NODE, NODES):
            self._kill_nodes(fault)
        elif fault.kind == STORE:
            self._kill_store(fault)
        else:
            number = signal.SIGTERM if fault.kind == TERM else signal.SIGKILL
            fault.met = process.poll() is None
            process.send_signal(number)
            fault.told = number.name

    def _kill_workers(self, fault: Fault, process: subprocess.Popen[Any]) -> None:
        """SIGKILL for one process of an actor or rank, or for all that there are."""
        deadline = time.monotonic() + 20
        _wait(lambda: bool(workers()), lambda: process.poll() is not None or time.monotonic() > deadline)
        found = workers()
        victims = found if fault.kind == WORKERS else found and [self.chance.choice(found)]
        for worker, title in victims:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
                fault.met = True
                fault.told += f"{title} "

    def _kill_nodes(self, fault: Fault) -> None:
        victims = list(self.nodes.alive) if fault.kind == NODES else [self.chance.choice(self.nodes.alive)]
        hard = self.chance.random() < 0.5
        for node in victims:
            self.nodes.kill(node, hard)
        time.sleep(away_s := self.chance.uniform(*AWAY_S))
        self.fill()
        fault.met, fault.told = True, f"{len(victims)} {'hard' if hard else 'gently'}, away {away_s:.1f} s"

    def _kill_store(self, fault: Fault) -> None:
        assert self.server is not None
        self.server.kill_gateway()
        time.sleep(away_s := self.chance.uniform(*AWAY_S))
        self.server.start_gateway()
        fault.met, fault.told = True, f"away {away_s:.1f} s"

    def fill(self) -> None:
        """As many nodes as there were at first."""
        while len(self.nodes.alive) < N_NODES:
            patiently(self.nodes.add)


def patiently(start: Callable[[], T]) -> T:
    """Start a node; Ray gives its processes 30 s, which a busy machine may not keep to. What is left of them ends."""
    for number in range(1, STARTS + 1):
        before = set(psutil.Process().children(recursive=True))
        try:
            return start()
        except Exception:  # Ray raises all kinds here, bare ones too
            for process in set(psutil.Process().children(recursive=True)) - before:
                with suppress(psutil.Error):
                    process.kill()
            if number == STARTS:
                raise
    raise AssertionError("unreachable")


def _wait(come: Callable[[], bool], over: Callable[[], bool]) -> bool:
    """Look until the one is true (True) or the other (False)."""
    while not come():
        if over():
            return False
        time.sleep(LOOK_S)
    return True


def workers() -> list[tuple[psutil.Process, str]]:
    """Actors of the pool, ranks and controller of a training, below this process, with their titles."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            title = " ".join(process.cmdline())
            if title.startswith(TITLES):
                found.append((process, title.removeprefix("ray::")))
    return found


def adopt_orphans() -> None:
    """Processes whose parent is killed become this one's children: their processor time counts, and none is lost."""
    if os.name == "posix":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def cpu_s() -> float:
    """Processor time of this process and of all that it has started so far."""
    total, me = 0.0, psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total
