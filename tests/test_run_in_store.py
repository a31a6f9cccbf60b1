"""All stages with the run folder at a URL: the same responses, cache, weights and export as in a local folder.

The stages are driven as by the command line, but their units are done in this process, where the store in memory is.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache_schema.carried import SCRATCH
from cache_schema.responses import ResponsesTable
from cache_schema.storage import Location, Storage, join, open_storage
from cache_schema.verify import equal_caches
from pipeline import extract_step, generate_step, train_step
from pipeline.jobs import run_stages
from pipeline.recipe import STAGES
from pipeline.report import write_report
from pipeline.status import collect_status
from stages import train_ray
from stages.train import TrainJob, train_rank
from stages.world import World
from tests.tiny_run import make_home


def pool_here(
    _run: Any, _stage: str, _unit: str, todo: list[Any], build: Any, _have: int, _config: Any,
    on_receipt: Callable[[Any, dict[str, Any]], None] | None = None, **_: Any,
) -> None:  # fmt: skip
    """Stands for `drive_pool`: one worker in this process."""
    worker = build() if todo else None
    for unit in todo:
        receipt = worker.run(unit, 1)
        if on_receipt is not None:
            on_receipt(unit, receipt)


def train_here(job: TrainJob, **_: Any) -> None:
    train_rank(job, World())


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(generate_step, "drive_pool", pool_here)
    monkeypatch.setattr(extract_step, "drive_pool", pool_here)
    monkeypatch.setattr(train_step, "ensure_ray", lambda **_: contextlib.nullcontext())
    monkeypatch.setattr(train_ray, "train_with_ray", train_here)
    return make_home(
        tmp_path, 8, 1, generate={"max_new_tokens": 8}, cache={"n_layers": 2}, drafter={"n_layers": 1},
        train={"epochs": 1, "heldout_share": 0.0, "checkpoint_every": 1, "trackers": []},
        evaluate={"max_new_tokens": 6, "untrained": False},
    )  # fmt: skip


def objects(storage: Storage, prefix: str) -> dict[str, bytes]:
    return {key: storage.read(key) for key, _ in storage.list(prefix)}


def test_a_run_in_a_store_is_the_run_in_a_folder(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two stages scratch is lost, as on another machine."""
    monkeypatch.setattr("pipeline.recipe.ONE_PROCESS", ())  # all units are done in this process
    url = f"memory://{secrets.token_hex(6)}/runs/tiny"
    places: list[Location] = [tmp_path / "run", url]
    scratch = tmp_path / "scratch"
    monkeypatch.setenv(SCRATCH, str(scratch))
    for stage in STAGES:
        for place in places:
            run_stages(recipe, [f"run={place}"], [stage], lambda _: None)
        shutil.rmtree(scratch, ignore_errors=True)
    ours, theirs = (ResponsesTable.open(join(place, "responses")).responses_hash() for place in places)
    assert ours == theirs
    assert equal_caches(*(join(place, "cache") for place in places)) == []
    local, remote = map(open_storage, places)
    for prefix in ("train/checkpoints", "export"):
        assert objects(local, prefix) == objects(remote, prefix) != {}
    lines: list[str] = []
    run_stages(recipe, [f"run={url}"], STAGES, lines.append)
    assert [line.split(":")[0] for line in lines if "already done" in line] == list(STAGES)
    write_report(url)
    report = json.loads(remote.read("report.json"))
    assert report["problems"] == []
    assert report["responses"]["samples"] == 8
    assert [row["state"] for row in report["stages"]] == ["finished"] * len(STAGES)
    assert [stage["state"] for stage in collect_status(url)["stages"]] == ["done"] * len(STAGES)
