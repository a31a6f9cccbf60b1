"""The chaos bench's own arithmetic; what it does to runs is `make bench-chaos`."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from benchmarks.chaos import table
from benchmarks.chaos_faults import DRIVER, KINDS, NODE, POOLED, STORE, WORKER, WORKERS, draw_faults
from pipeline.recipe import STAGES

STAGE_S = dict.fromkeys(STAGES, 5.0)


def test_faults_are_those_asked_for_in_the_order_of_their_stages() -> None:
    chance, seen = random.Random(1), Counter[str]()
    for _ in range(300):
        faults = draw_faults(chance, True, STAGE_S, list(KINDS))
        seen.update(f.kind for f in faults)
        assert 1 <= len(faults) <= 3
        order = [STAGES.index(f.stage) for f in faults]
        assert order == sorted(order)
        assert all(f.stage in POOLED for f in faults if f.kind in (WORKER, WORKERS))
    assert seen.keys() == KINDS.keys()
    away_from_the_store = [draw_faults(chance, False, STAGE_S, list(KINDS)) for _ in range(100)]
    assert STORE not in {f.kind for faults in away_from_the_store for f in faults}


def row(seconds: float, kinds: list[str], **more: Any) -> dict[str, Any]:
    faults = [{"kind": kind, "stage": "train", "met": True, "told": ""} for kind in kinds]
    return {"seconds": seconds, "cpu_s": seconds / 2, "exits": [0], "problems": [], "faults": faults} | more


def test_the_table_tells_what_a_fault_of_each_kind_costs() -> None:
    runs = [row(30, [NODE], run=0), row(25, [DRIVER], run=1, exits=[-9, 0]), row(40, [NODE, DRIVER, DRIVER], run=2),
            row(30, [NODE], run=3, problems=["weights: other"])]  # fmt: skip
    lines = table([row(20, []), *runs]).splitlines()
    node, driver = (next(line.split() for line in lines if line.startswith(kind)) for kind in (NODE, DRIVER))
    assert node[-5:] == ["3", "3", "2", "10.0", "5.0"]
    assert driver[-5:] == ["3", "2", "2", "5.0", "2.5"]
    assert "3 of 4 runs ended like the undisturbed one" in lines[-1]
    assert "1 resubmissions" in lines[-1]
