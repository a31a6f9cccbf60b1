"""The estimate of a step's memory against what a process really took, and the check before step 1."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stages import memory
from stages.config import TrainConfig
from stages.dataset import divided
from stages.errors import TrainingError
from stages.memory import MicroBatchSize, largest_micro_batch, require_memory, step_bytes
from stages.order import StepPlan
from tests.test_loss import multi_turn_sample
from tests.tiny import make_drafter, make_target, response, start_extraction

SCRIPT = """
import json, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from benchmarks.train_cases import Case, make_setup
from benchmarks.train_steps import our_step
bf16, recompute, sizes = json.loads(sys.argv[1])
def prepared(case):
    setup = make_setup(case)
    setup.drafter.recompute = recompute
    optimizer = torch.optim.AdamW(setup.drafter.parameters(), fused=True)
    return our_step(setup, bf16=bf16), optimizer, setup
def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) * 1024
step, optimizer, _ = prepared(Case(64, 512, tokens=64, anchors=8))
step(); optimizer.step()
step, optimizer, setup = prepared(Case(**sizes))
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS:")
step(); optimizer.step()
print(json.dumps([status("VmHWM:") - before, sum(p.numel() for p in setup.drafter.parameters())]))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.slow
@pytest.mark.parametrize(("bf16", "recompute"), [(False, False), (True, False), (False, True)])
def test_the_estimate_is_near_what_a_step_takes(bf16: bool, recompute: bool) -> None:
    """A quarter below at most, a half above: too little ends in an error in hour 7, far too much wastes the machine."""
    sizes = {"hidden": 128, "vocab": 4096, "tokens": 512, "anchors": 192}
    command = [sys.executable, "-c", SCRIPT, json.dumps([bf16, recompute, sizes])]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, timeout=200)
    measured, n_weights = json.loads(done.stdout)
    from benchmarks.train_cases import Case

    size = MicroBatchSize(512, 192 * 16)
    estimate = step_bytes(Case(**sizes).spec(), n_weights, size, bf16=bf16, recompute=recompute)
    assert 0.75 * measured < estimate < 1.5 * measured, (estimate / 1e6, measured / 1e6)


@pytest.fixture(scope="module")
def plan_inputs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("cache")
    return start_extraction(folder, make_target(), [response("a", 4, 9), response("b", 30, 70)]).run().plan


CONFIG = TrainConfig(anchors=20, batch_samples=4, heldout_share=0.0)


@pytest.mark.parametrize(
    ("changes", "context", "slots"),
    [
        ({}, 100, 20 * 4),
        ({"micro_samples": 3}, 300, 60 * 4),
        ({"anchors": 512}, 100, 99 * 4),
        ({"micro_tokens": 50}, 100, 20 * 4),
        ({"micro_tokens": 5000}, 1000, 5000),
    ],
)
def test_the_largest_micro_batch(plan_inputs: Any, changes: dict[str, Any], context: int, slots: int) -> None:
    config = dataclasses.replace(CONFIG, **changes)
    assert largest_micro_batch(StepPlan(plan_inputs, config, 0), config, 4) == MicroBatchSize(context, slots)


def test_a_step_that_does_not_fit_is_refused_with_the_setting_to_lower(
    plan_inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, drafter = torch.device("cpu"), make_drafter(n_layers=6)
    config = dataclasses.replace(CONFIG, micro_tokens=5000)
    plan = StepPlan(plan_inputs, config, 0)
    needed = require_memory(drafter, plan, config, device)
    assert needed > 5000 * 32 * 4
    monkeypatch.setattr(memory, "free_bytes", lambda _device: needed - 1)
    with pytest.raises(TrainingError, match=r"train.micro_tokens \(now 5,000\) or train.anchors \(now 20\), or"):
        require_memory(drafter, plan, config, device)
    checkpointing = dataclasses.replace(config, activation_checkpointing=True)
    assert require_memory(drafter, plan, checkpointing, device) < needed
    monkeypatch.setattr(memory, "free_bytes", lambda _device: None)
    assert require_memory(drafter, plan, config, device) == needed


def test_micro_batches_keep_to_the_budget_and_leave_nobody_out() -> None:
    samples = [multi_turn_sample(i, n_tokens=16 + 5 * i, n_anchors=1 + 2 * i) for i in range(7)]
    rows = [int(s.anchors.max()) + 4 * len(s.anchors) for s in samples]
    for budget in (1, 40, 77, 150, 10_000):
        parts = list(divided(samples, 4, dataclasses.replace(CONFIG, micro_tokens=budget, micro_samples=2)))
        assert [s.sample_id for part in parts for s in part] == [s.sample_id for s in samples]
        sums = [sum(rows[samples.index(s)] for s in part) for part in parts]
        assert all(total <= budget or len(part) == 1 for total, part in zip(sums, parts, strict=True))
        # Greedy: the first sample of the next part would not have fitted.
        heads = [rows[samples.index(part[0])] for part in parts[1:]]
        assert all(total + head > budget for total, head in zip(sums, heads, strict=False))
    by_number = divided(samples, 4, dataclasses.replace(CONFIG, micro_samples=3))
    assert [len(part) for part in by_number] == [3, 3, 1]
