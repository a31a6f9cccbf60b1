"""A tiny pipeline as `python -m jobs.pipeline` runs it, and whether two runs of it ended the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.interruption_check import differences
from cache_schema.carried import scratch_folder
from cache_schema.responses import ResponsesTable
from cache_schema.storage import Storage, open_storage
from pipeline.recipe import STAGES

REPO = Path(__file__).parent.parent
N_PROMPTS, N_HELD_OUT = 32, 3
MEASURED = ("README.md",)
"""Exported files that hold measured times."""
LASTING = ("drafter", "block_size", "tau", "identical", "prompts", "acceptance_histogram", "responses")
"""Of an evaluated setting: what does not depend on how fast the machine was."""


def make_home(folder: Path) -> Path:
    """A tiny target, prompts, and the recipe of all runs; returns the recipe."""
    from tests import tiny_run

    return tiny_run.make_home(
        folder, N_PROMPTS, N_HELD_OUT, name="chaos", generate={"max_new_tokens": 40, "workers": 2},
        cache={"shard_bytes": 40_000}, extract={"workers": 2}, train={"epochs": 8},
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run keeps its things.

    Attributes:
        run: its folder: a path, or a URL.
        output: what all submissions of the run printed.
    """

    run: str
    output: Path

    def submit(self, recipe: Path, address: str) -> subprocess.Popen[Any]:
        """`python -m jobs.pipeline`, a process that joins the Ray at that address."""
        command = [sys.executable, "-m", "jobs.pipeline", "--recipe", str(recipe), "--set", f"run={self.run}"]
        environment = {**os.environ, "RAY_ADDRESS": address, "OMP_NUM_THREADS": "1"}
        with self.output.open("ab") as output:
            return subprocess.Popen(command, cwd=REPO, stdout=output, stderr=output, env=environment)

    def begun(self, stage: str) -> bool:
        """Whether the stage before this one is done."""
        at = STAGES.index(stage)
        return at == 0 or self.done(STAGES[at - 1])

    def done(self, stage: str) -> bool:
        """Whether the run folder says so."""
        return open_storage(self.run).exists(f"status/{stage}.json")

    def work(self, stage: str) -> int:
        """How much of a stage is committed: parts, shards, steps behind the newest checkpoint, prompts."""
        if stage == "train":
            return max((_step(name) for name in open_storage(self.run).folders("train/checkpoints")), default=0)
        kept = {"generate": "responses/commits", "extract": "cache/commits", "evaluate": "evaluate/prompts"}
        return _count(self.run, kept.get(stage, stage))

    @property
    def on_store(self) -> bool:
        """Whether the run lies in an object store."""
        return "://" in self.run

    def forget_scratch(self) -> None:
        """What this machine keeps of a run in a store goes: the next submission is on another one."""
        if self.on_store:
            shutil.rmtree(scratch_folder(self.run), ignore_errors=True)
            shutil.rmtree(scratch_folder(f"{self.run}/train"), ignore_errors=True)

    def remove(self) -> None:
        """The folder and the output."""
        open_storage(self.run).delete_tree("")
        self.forget_scratch()
        self.output.unlink(missing_ok=True)


def _step(checkpoint: str) -> int:
    number = checkpoint.removeprefix("step-")
    return int(number) if number.isdecimal() else 0


def _count(location: str, prefix: str) -> int:
    return sum(key.endswith(".json") for key, _ in open_storage(location).list(prefix))


def run_differences(ours: Place, reference: Place) -> list[str]:
    """How a finished run differs from one that nothing disturbed, output by output."""
    problems = _responses(ours.run, reference.run)
    problems += differences(f"{ours.run}/cache", f"{reference.run}/cache")[0]
    folders = [open_storage(place.run) for place in (ours, reference)]
    newest = [max(f"train/checkpoints/{name}" for name in folder.folders("train/checkpoints")) for folder in folders]
    problems += _files("weights", [_objects(f, prefix) for f, prefix in zip(folders, newest, strict=True)])
    problems += _files("export", [_objects(folder, "export") for folder in folders])
    if _evaluated(folders[0]) != _evaluated(folders[1]):
        problems.append("evaluate: other results")
    return problems


def _responses(ours: str, theirs: str) -> list[str]:
    """Rows, and the bytes of the parts: whatever attempt wrote them."""
    folders = [open_storage(run) for run in (ours, theirs)]
    parts = [{key.split(".")[0]: folder.read(key) for key, _ in folder.list("responses/parts")
              if key.endswith(".parquet")} for folder in folders]  # fmt: skip
    tables = [ResponsesTable.open(f"{run}/responses") for run in (ours, theirs)]
    ids = [sorted(r.sample_id for r in table) for table in tables]
    problems = [] if ids[0] == ids[1] else ["responses: the samples are not the same ones, each once"]
    if tables[0].responses_hash() != tables[1].responses_hash():
        problems.append("responses: they have another hash")
    return problems + ([] if parts[0] == parts[1] else ["responses: parts have other bytes"])


def _objects(storage: Storage, prefix: str) -> dict[str, bytes]:
    found = {key.removeprefix(f"{prefix}/"): storage.read(key) for key, _ in storage.list(prefix)}
    return {name: b"" if name in MEASURED else data for name, data in found.items()}


def _files(what: str, found: list[dict[str, bytes]]) -> list[str]:
    """Files that are only on one side, or have other bytes there."""
    names = sorted(found[0].keys() | found[1].keys())
    return [f"{what}: {name} is not the same" for name in names if found[0].get(name) != found[1].get(name)]


def _evaluated(storage: Storage) -> list[dict[str, Any]]:
    runs = json.loads(storage.read("evaluate/results.json"))["runs"]
    return [{key: row.get(key) for key in LASTING} for row in runs]
