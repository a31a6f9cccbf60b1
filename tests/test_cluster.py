"""The pool of workers on a simulated cluster: a node goes, and one comes (at random: `make bench-runner`)."""

from __future__ import annotations

import functools
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.runner_cluster import Nodes, cluster
from pipeline.runner import run_pool
from tests.test_runner import UNITS, Told, Unit, wait_until

PATIENCE_S = 120


@dataclass
class NodeWorker:
    """Unit 2 waits until unit 3 has begun, that one for its node's end, and unit 6 for a third worker."""

    out: Path

    def __post_init__(self) -> None:
        (self.out / f"worker-{os.getpid()}").touch()

    def run(self, unit: Unit, attempt: int) -> dict[str, Any]:
        import ray

        node = ray.get_runtime_context().get_node_id()
        if unit.index == 3 and attempt == 1:
            (self.out / "victim.new").write_text(node)
            (self.out / "victim.new").rename(self.out / "victim")
            time.sleep(PATIENCE_S)
        if unit.index == 2:
            wait_until((self.out / "victim").exists)
        if unit.index == 6:
            wait_until(lambda: len(list(self.out.glob("worker-*"))) == 3)
        return {"unit": unit.name, "attempt": attempt, "node": node}


@pytest.mark.ray
@pytest.mark.cluster
@pytest.mark.slow
def test_a_node_that_goes_costs_only_its_open_unit_and_one_that_comes_is_used(tmp_path: Path) -> None:
    told = Told()

    def disturb(nodes: Nodes, unit: Unit, _: dict[str, Any]) -> None:
        if unit.index == 2:
            victim = (tmp_path / "victim").read_text()
            nodes.kill(next(n for n in nodes.alive if n.node_id == victim), hard=False)
            nodes.add()

    with cluster() as nodes:
        nodes.add()
        nodes.add()
        first = {node.node_id for node in nodes.alive}
        receipts = run_pool(
            UNITS, functools.partial(NodeWorker, tmp_path), n_workers=2, resources={"num_cpus": 1}, label="shard",
            progress=told, max_attempts=1, on_receipt=functools.partial(disturb, nodes),
        )  # fmt: skip
    assert [r["attempt"] for r in receipts] == [1, 1, 1, 2, 1, 1, 1]
    assert told.failures == 1
    assert "shard-00003 failed on" in told.notes[0]
    assert "node lost (expectedly: received SIGTERM) (no fault of its own, not counted); trying again" in told.notes[0]
    assert len({r["node"] for r in receipts} - first) <= 1
    assert len(list(tmp_path.glob("worker-*"))) == 3
