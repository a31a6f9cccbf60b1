"""Interruptions of the real thing: `dflash extract` of a tiny target through the pool of workers, on Ray."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.interruption_check import Outcome, differences

RUNNER, WORKERS, BOTH = "extract: runner killed", "extract: workers killed", "extract: runner and workers killed"
REPO = Path(__file__).parent.parent
N_PROMPTS = 24
PATIENCE_S = 240.0


class ExtractKills:
    """Kills processes of an extract run; each time in a run folder of its own, with the same responses."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self._chance, self._n = folder, random.Random(f"{seed} extract"), 0
        self.kinds = [RUNNER, WORKERS, BOTH]

    def close(self) -> None:
        """Every run has ended."""

    def interrupt(self, kind: str) -> Outcome:
        """One interruption, the run after it, and the comparison."""
        undisturbed = self.folder / "undisturbed"
        if not undisturbed.exists():
            self._prepare(undisturbed)
        self._n += 1
        run = self.folder / f"run-{self._n:03d}"
        shutil.copytree(undisturbed / "responses", run / "responses")
        outcome = self._kill(kind, run)
        if kind != WORKERS or "ended with 0" not in outcome.what:
            code, text = self._finish(self._dflash("extract", run))
            if code != 0:
                outcome.problems.append(f"the run after the interruption ended with {code}: {text[-500:]}")
        found, outcome.garbage_groups = differences(run / "cache", undisturbed / "cache")
        outcome.problems += found
        shutil.rmtree(run)
        return outcome

    def _kill(self, kind: str, run: Path) -> Outcome:
        """Start extract, wait for the first commit, and end the kind's processes by SIGKILL a moment later."""
        process = self._dflash("extract", run)
        deadline = time.monotonic() + PATIENCE_S
        while process.poll() is None and not _commits(run) and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(delay_s := self._chance.uniform(0, 1.0))
        workers = [pid for pid in _descendants(process.pid) if _is_worker(pid)]
        victims = {RUNNER: [process.pid], WORKERS: workers, BOTH: [process.pid, *workers]}[kind]
        committed, at_work = _commits(run), process.poll() is None
        for pid in victims if at_work else []:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        code, _ = self._finish(process)
        what = (
            f"{delay_s:.2f} s after the first commit, with {committed} shards committed; the runner ended with {code}"
        )
        return Outcome(kind=kind, what=what, interrupted=at_work and bool(victims))

    def _prepare(self, run: Path) -> None:
        """A tiny target, prompts, a recipe, responses, and the cache that nothing disturbs."""
        from tests.tiny import make_target, make_tokenizer, save_target

        self.folder.mkdir(parents=True)
        save_target(self.folder / "target", make_target(0, make_tokenizer(), vocab_size=300))
        prompts = [{"id": f"p-{i}", "prompt": f"Count from {i} up."} for i in range(N_PROMPTS)]
        (self.folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
        (self.folder / "held.jsonl").write_text(json.dumps({"id": "h", "prompt": "Count down."}) + "\n")
        recipe = {
            "name": "tiny",
            "target": {"model": str(self.folder / "target"), "dtype": "float32"},
            "prompts": {"sources": [{"path": "prompts.jsonl"}]},
            "generate": {"max_new_tokens": 12, "part_samples": 10, "batch_size": 10, "threads": 1},
            "cache": {"n_layers": 3, "shard_bytes": 12000},
            "extract": {"threads": 1, "workers": 2},
            "drafter": {"n_layers": 2, "block_size": 4},
            "evaluate": {"sources": [{"path": "held.jsonl"}]},
        }
        (self.folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        for stage in ("generate", "extract"):
            code, text = self._finish(self._dflash(stage, run))
            if code != 0:
                raise RuntimeError(f"undisturbed {stage} ended with {code}: {text}")

    def _dflash(self, stage: str, run: Path) -> subprocess.Popen[Any]:
        command = [sys.executable, "-m", "pipeline.cli", stage, str(self.folder / "recipe.yaml"), "--set", f"run={run}"]
        output = (self.folder / "output.txt").open("w")
        return subprocess.Popen(command, cwd=REPO, stdout=output, stderr=output)

    def _finish(self, process: subprocess.Popen[Any]) -> tuple[int, str]:
        try:
            code = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        return code, (self.folder / "output.txt").read_text()


def _commits(run: Path) -> int:
    return len(list((run / "cache" / "commits").glob("shard-*.json")))


def _descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that these have."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    todo = [pid]
    while todo:
        own = children.get(todo.pop(), [])
        found += own
        todo += own
    return found


def _is_worker(pid: int) -> bool:
    """Whether a process is an actor of the pool."""
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
        return title.startswith((b"ray::Host", b"ray::extract "))
    except OSError:
        return False
