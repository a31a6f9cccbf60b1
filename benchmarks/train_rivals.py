"""Our step against the DFlash steps of other trainers, each in an environment of its own, optimizer step included."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.train_cases import BLOCK, HEADS, KV_HEADS, N_LAYERS, Case, make_setup
from benchmarks.train_steps import least_cpu, our_step, with_optimizer

SCRIPT = Path(__file__).with_name("train_rival.py")
INSTALL = (
    "python3.11 -m venv /tmp/venv-X; /tmp/venv-X/bin/pip install torch==2.13.0 transformers==5.8.1; "
    "/tmp/venv-X/bin/pip install --no-deps X==VERSION; then what its import asks for"
)


def against_rivals(case: Case, pythons: Mapping[str, Path], rounds: int) -> dict[str, Any]:
    """Least process time of a step of each, in turns of one round.

    Args:
        case: its shape.
        pythons: by rival (`specforge`, `speculators`), of the environment that has it.
        rounds: of all; each is a process of its own for a rival, of two steps.
    """
    setup = make_setup(case)
    ours = with_optimizer(setup, our_step(setup))
    found: dict[str, dict[str, Any]] = {}
    seconds = least_cpu({"ours": ours}, 1)
    for _ in range(rounds):
        seconds["ours"] = min(seconds["ours"], least_cpu({"ours": ours}, 2)["ours"])
        for rival, python in pythons.items():
            result = rival_step(rival, python, case)
            if rival not in found or result["seconds"] < found[rival]["seconds"]:
                found[rival] = result
    fastest = min((r["seconds"] for r in found.values()), default=None)
    ratio = fastest / seconds["ours"] if fastest is not None else None
    return {"case": str(case), "ours": seconds["ours"], "rivals": found, "ratio": ratio}


def rival_step(rival: str, python: Path, case: Case) -> dict[str, Any]:
    """What `benchmarks/train_rival.py` says in a rival's environment."""
    sizes = {"hidden": case.hidden, "vocab": case.vocab, "tokens": case.tokens, "anchors": case.anchors, "block": BLOCK,
             "layers": N_LAYERS, "heads": HEADS, "kv_heads": KV_HEADS, "rounds": 2}  # fmt: skip
    done = subprocess.run([python, SCRIPT, rival, json.dumps(sizes)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{rival} ({python}) failed; it needs an environment made with\n  {INSTALL}\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
