"""Shards of a tiny target made on a simulated Ray cluster whose nodes are killed and added at random meanwhile."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.interruption_check import differences
from cache_schema.manifest import create_cache
from cache_schema.plan import plan_shards
from pipeline.runner import ensure_ray, run_pool
from stages.extract import ExtractJob, ExtractWorker, ShardUnit

N_NODES, MAX_NODES = 3, 4
PAUSE_S = (0.1, 0.7)
"""A shard of the tiny target takes some 30 ms; with this a run lasts long enough for nodes to come and go."""
BETWEEN, HASTE = (2, 10), 0.2
"""Shards between two things that happen to the cluster; the share of things that do not wait for any."""
_STORE_BYTES = 80 << 20
LENGTHS = (24, 40, 56, 72)


@dataclass(frozen=True)
class PacedWorker:
    """The real extract worker, after a pause; built in the actor."""

    worker: ExtractWorker

    def run(self, unit: ShardUnit, attempt: int) -> dict[str, Any]:
        """The real receipt."""
        time.sleep(random.Random(f"{unit.name} {attempt}").uniform(*PAUSE_S))
        return self.worker.run(unit, attempt)


def build_paced(job: ExtractJob) -> PacedWorker:
    """For the actor."""
    return PacedWorker(ExtractWorker(job))


class Work:
    """Responses of a tiny target, the plan of their shards, and the cache that nothing disturbs."""

    def __init__(self, folder: Path, n_shards: int) -> None:
        from tests.tiny import FEATURE_LAYERS, HIDDEN, make_target, response, save_target, start_extraction

        chance = random.Random(7)
        lengths = [n for _ in range(n_shards) for n in chance.sample(LENGTHS, len(LENGTHS))]
        responses = [response(f"sample-{i:04d}", 8, n - 8) for i, n in enumerate(lengths)]
        token_bytes = len(FEATURE_LAYERS) * HIDDEN * 2
        made = start_extraction(folder, make_target(), responses, shard_bytes=sum(LENGTHS) * token_bytes)
        job = made.job
        target = dataclasses.replace(job.target, model=str(save_target(folder / "target", make_target())))
        extract = dataclasses.replace(job.extract, threads=1)
        self.job, self.folder = dataclasses.replace(job, target=target, extract=extract), folder
        self.units = made.units
        assert len(self.units) == n_shards, f"{len(self.units)} shards planned, {n_shards} wanted"
        self._lengths = {r.sample_id: len(r.loss_mask) for r in responses}
        self._plan = functools.partial(plan_shards, bytes_per_token=token_bytes, shard_bytes=sum(LENGTHS) * token_bytes)
        worker = ExtractWorker(self.job)
        for unit in self.units:
            worker.run(unit, 1)

    def fresh_job(self, name: str) -> ExtractJob:
        """An empty cache of the same plan."""
        ids = list(self._lengths)
        cache = self.folder / name
        create_cache(cache, self.job.identity, self._plan(ids, np.array([self._lengths[i] for i in ids])))
        return dataclasses.replace(self.job, cache_dir=cache)

    def problems(self, job: ExtractJob) -> list[str]:
        """How that cache differs from the undisturbed one."""
        return differences(job.cache_dir, self.job.cache_dir)[0]


@dataclass
class Notes:
    """What the pool tells, kept."""

    lines: list[str] = field(default_factory=list)
    done: int = 0
    failures: int = 0

    def update(self, n: int = 1, failures: int = 0, tokens: int = 0) -> None:
        """Counted."""
        self.done += n
        self.failures += failures

    def note(self, text: str) -> None:
        """Kept."""
        self.lines.append(text)


class Nodes:
    """A cluster of nodes of one CPU each; the driver is on a head node without any."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address
        self.alive: list[Any] = []

    def add(self, **options: Any) -> str:
        """One node more, of one CPU unless `options` of `ray start` say otherwise; returns its id."""
        self.alive.append(self._cluster.add_node(**{"num_cpus": 1, "object_store_memory": _STORE_BYTES, **options}))
        return str(self.alive[-1].node_id)

    def kill(self, node: Any, hard: bool) -> None:
        """End a node's processes: `hard` by SIGKILL, so that the others must find out; else it says goodbye."""
        self.alive.remove(node)
        self._cluster.remove_node(node, allow_graceful=not hard)

    def close(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()


class Chaos:
    """Kills and adds nodes at random, a kill first, until a run is over. The cluster may be empty for a while.

    What comes next mostly waits for a few more shards, so that on a busy machine too, where a worker may need half a
    minute to start, the run gets on; now and then only for a moment, so that nodes also go while workers are built.
    """

    def __init__(self, nodes: Nodes, seed: int) -> None:
        self.nodes, self._chance = nodes, random.Random(seed)
        self.hard = self.gentle = self.adds = 0

    def reign(self, over: Callable[[], Any], notes: Notes) -> None:
        """Let things happen while `over` runs in a thread: Ray starts nodes only in the main one."""
        with ThreadPoolExecutor(1) as pool:
            work = pool.submit(over)
            while not work.done():
                self._wait(work, notes)
                if not wait([work], timeout=self._chance.uniform(*PAUSE_S)).done:
                    self._happen()
            work.result()

    def _wait(self, work: Future[Any], notes: Notes) -> None:
        if not self.nodes.alive:
            return
        if self._chance.random() < HASTE:
            wait([work], timeout=self._chance.uniform(0, 8))
            return
        enough = notes.done + self._chance.randint(*BETWEEN)
        while notes.done < enough and not wait([work], timeout=0.05).done:
            pass

    def _happen(self) -> None:
        n, kills = len(self.nodes.alive), self.hard + self.gentle
        if n == 0 or (kills and n < MAX_NODES and self._chance.random() < 0.5):
            self.nodes.add()
            self.adds += 1
            return
        hard = self._chance.random() < 0.5
        self.nodes.kill(self._chance.choice(self.nodes.alive), hard)
        self.hard, self.gentle = self.hard + hard, self.gentle + (not hard)


@contextmanager
def cluster() -> Iterator[Nodes]:
    """A simulated cluster that this process is the driver of."""
    before = os.environ.get("RAY_ADDRESS")
    nodes = Nodes()
    try:
        os.environ["RAY_ADDRESS"] = nodes.address
        with ensure_ray():
            yield nodes
    finally:
        nodes.close()
        os.environ.pop("RAY_ADDRESS")
        if before is not None:
            os.environ["RAY_ADDRESS"] = before


def disturbed_run(nodes: Nodes, work: Work, seed: int, in_flight: int = 1) -> tuple[list[str], Notes, Chaos]:
    """One run on a cluster of three nodes that come and go; how its cache differs, what was told, what happened."""
    while len(nodes.alive) < N_NODES:
        nodes.add()
    while len(nodes.alive) > N_NODES:
        nodes.kill(nodes.alive[0], hard=False)
    job, notes, chaos = work.fresh_job(f"cache-{seed}"), Notes(), Chaos(nodes, seed)
    run = functools.partial(
        run_pool, work.units, functools.partial(build_paced, job), n_workers=N_NODES, resources={"num_cpus": 1},
        progress=notes, label="shard", stage="extract", in_flight=in_flight,
    )  # fmt: skip
    chaos.reign(run, notes)
    problems = work.problems(job)
    shutil.rmtree(job.cache_dir)
    return problems, notes, chaos


def run_all(n_runs: int, n_shards: int, seed: int) -> bool:
    """Print a line per run, by turns with one and two shards in flight; True if every cache is the undisturbed one."""
    folder, good = Path(tempfile.mkdtemp(prefix="dflash-cluster-")), 0
    try:
        work = Work(folder, n_shards)
        print(f"{n_shards} shards, {N_NODES} nodes at first", flush=True)
        print("seed  in flight  killed hard/gently  added  seconds  attempts again  of them charged  cache", flush=True)
        with cluster() as nodes:
            for number in range(seed, seed + n_runs):
                began, in_flight = time.monotonic(), 1 + number % 2
                problems, notes, chaos = disturbed_run(nodes, work, number, in_flight)
                good += not problems
                charged = sum(" failed on " in line and "not counted" not in line for line in notes.lines)
                print(f"{number:4d}  {in_flight:9d}  {chaos.hard:11d}/{chaos.gentle:<6d}  {chaos.adds:5d}  "
                      f"{time.monotonic() - began:7.1f}  {notes.failures:14d}  {charged:15d}  "
                      f"{'the same, byte for byte' if not problems else problems[:3]}", flush=True)  # fmt: skip
                for line in notes.lines if problems else []:
                    print(f"      {line}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{good} of {n_runs} runs ended with the undisturbed cache")
    return good == n_runs
