"""Peak memory of a training step over that of its inputs and weights: processes that differ only in the step."""

from __future__ import annotations

import benchmarks.one_thread  # noqa: F401  # isort: skip  # before numpy and torch
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.train_cases import Case, make_setup
from benchmarks.train_naive import NaiveStep
from benchmarks.train_steps import our_step


def step_memory(case: Case) -> dict[str, Any]:
    """Most resident memory of one step above that before it, in MB, of ours and of the naive step."""
    extra = {}
    for way in ("ours", "naive"):
        command = [sys.executable, "-m", "benchmarks.train_memory", way, json.dumps(dataclasses.asdict(case))]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        extra[way] = json.loads(done.stdout)["extra_mb"]
    return {"case": str(case), **extra, "ratio": extra["naive"] / extra["ours"]}


def _main() -> None:
    torch.set_num_threads(1)
    way, sizes = sys.argv[1], json.loads(sys.argv[2])
    # The first use of every operator loads code and makes pools, which is no part of what grows with the step.
    _run(way, Case(hidden=64, vocab=512, tokens=64, anchors=8))
    setup = make_setup(Case(**sizes))
    step = our_step(setup) if way == "ours" else NaiveStep(setup)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _status("VmRSS:")
    step()
    print(json.dumps({"extra_mb": _status("VmHWM:") - before}))


def _run(way: str, case: Case) -> None:
    setup = make_setup(case)
    (our_step(setup) if way == "ours" else NaiveStep(setup))()


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) / 1024


if __name__ == "__main__":
    _main()
