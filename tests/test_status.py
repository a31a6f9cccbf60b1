"""`dflash status`: read from the storage of a run alone, in every state that it can be in."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

import pytest

from cache_schema.responses import create_responses, write_part
from cache_schema.storage import open_storage
from pipeline.cli import main
from pipeline.errors import PipelineError
from pipeline.exits import Exit
from pipeline.folder import RunFolder
from pipeline.status import collect_status
from pipeline.status_text import status_lines
from tests.cache.builders import RESPONSES_IDENTITY, response


@pytest.fixture(params=["folder", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RunFolder:
    """Two of four parts of the responses are there, and one sample was dropped."""
    folder = RunFolder(tmp_path / "run" if request.param == "folder" else f"memory://{secrets.token_hex(6)}/run")
    folder.storage.replace("recipe.json", b'{"name": "tiny", "cache": {"path": null}}')
    create_responses(folder.responses, RESPONSES_IDENTITY, n_parts=4, n_samples=4)
    write_part(folder.responses, 0, [response("s0")])
    write_part(folder.responses, 1, [], [{"sample_id": "s1", "reason": "no_stop", "detail": "x"}])
    return folder


def stage(run: RunFolder, name: str) -> dict[str, Any]:
    return next(s for s in collect_status(run.path)["stages"] if s["stage"] == name)


def test_a_run_that_is_at_work(run: RunFolder) -> None:
    with run.locked():
        run.begin("generate")
        found = collect_status(run.path)
    assert found["held_by"]["pid"] == os.getpid()
    generate = found["stages"][0]
    assert (generate["state"], generate["done"], generate["planned"], generate["dropped"]) == ("running", 2, 4, 1)
    text = "\n".join(status_lines(found))
    assert "2 of 4 parts" in text
    assert f"held by process {os.getpid()}" in text
    assert "extract   not begun" in text


def test_a_run_that_was_killed_failed_and_then_done(run: RunFolder) -> None:
    run.begin("generate")
    assert stage(run, "generate")["state"] == "killed"
    for _ in range(2):
        run.fail("generate", "the disk is full", "StorageError", 6)
    failed = stage(run, "generate")
    assert failed["state"] == "failed"
    assert (failed["failure"]["attempt"], failed["failure"]["exit_code"]) == (2, 6)
    assert "the disk is full" in "\n".join(status_lines(collect_status(run.path)))
    run.begin("generate")
    run.finish("generate", "f", 3.0, {"dropped": 1})
    done = stage(run, "generate")
    assert (done["state"], done["failure"], done["seconds"]) == ("done", None, 3.0)
    assert [key for key, _ in run.storage.list("status")] == ["status/generate.json"]


@pytest.mark.parametrize("run", ["folder"], indirect=True)  # the one whose times can be set
def test_rate_and_time_left_are_from_the_times_of_commits(run: RunFolder) -> None:
    path = Path(run.path)
    for part, at in ((0, 200), (1, 210)):
        os.utime(path / "responses" / "commits" / f"part-0000{part}.json", (at, at))
    with run.locked():
        run.begin("generate")
        os.utime(path / "status" / "generate.running.json", (100, 100))
        found = stage(run, "generate")
        os.utime(path / "responses" / "commits" / "part-00001.json", (200, 200))
        one = stage(run, "generate")
    assert found["per_s"] == pytest.approx(0.1)
    assert found["left_s"] == pytest.approx(20)
    assert one["left_s"] is None


def test_a_training_is_where_its_newest_whole_checkpoint_and_its_log_say(run: RunFolder) -> None:
    store = open_storage(run.train)
    for key in ("step-000002/state.json", "step-000010/state.json", "step-000012/model.safetensors"):
        store.replace(f"checkpoints/{key}", b"{}")
    rows = [{"kind": "step", "step": n, "loss": 4.0 / n, "seconds": s} for n, s in ((9, 50.0), (10, 1.0), (14, 3.0))]
    rows.append({"kind": "heldout", "step": 10, "tau": 1.5, "loss": 2.0})
    store.replace("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode() + b'{"kind"')
    with run.locked():
        run.begin("train", 20)
        found = stage(run, "train")
        text = "\n".join(status_lines(collect_status(run.path)))
    assert (found["done"], found["planned"], found["newest_checkpoint"]) == (14, 20, 10)
    assert found["per_s"] == pytest.approx(2.0)
    assert found["left_s"] == pytest.approx(3.0)
    assert found["heldout"] == {"step": 10, "loss": 2.0, "tau": 1.5}
    assert "newest checkpoint: step 10" in text


def test_no_run_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="holds no run"):
        collect_status(tmp_path)


def test_damaged_records_do_not_end_it(run: RunFolder) -> None:
    run.storage.replace("status/generate.json", b"[")
    run.storage.replace("recipe.json", b"5")
    run.storage.replace("responses/commits/part-00000.json", b"{")
    run.storage.replace("cache/plan.parquet", b"PAR1")
    rows = [b"\xff", b"[]", b'{"kind": "step", "step": 1, "seconds": "x"}',
            b'{"kind": "step", "step": 2, "seconds": 1}',
            b'{"kind": "step", "step": 1' + b"0" * 400 + b', "seconds": 2}']  # fmt: skip
    run.storage.replace("train/metrics.jsonl", b"\n".join(rows) + b"\n")
    run.storage.replace("status/extract.json", b"[" * 100_000)
    assert stage(run, "generate")["state"] == stage(run, "extract")["state"] == "damaged"
    text = "\n".join(status_lines(collect_status(run.path)))
    damaged = {line.partition("damaged: ")[2] for line in text.splitlines() if "damaged: " in line}
    places = ("recipe.json", "status/generate.json", "status/extract.json", "cache/plan.parquet", "train/metrics.jsonl")
    assert {run.storage.where(key) for key in places} < damaged
    assert any("part-00000.json is not JSON" in line for line in damaged)


def test_rows_that_are_cut_at_either_end_are_no_damage(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    row = b'{"kind": "step", "step": 1, "seconds": 1}\n'
    run.storage.replace("train/metrics.jsonl", row * 9 + row[:20])
    monkeypatch.setattr("pipeline.status.TAIL_BYTES", 3 * len(row))
    assert (stage(run, "train")["damaged"], stage(run, "train")["done"]) == ([], 1)


@pytest.mark.parametrize("place", ["nfs://x/run", "memory://x/run", "s3:/bucket/run", "s3://key:secret@bucket/run"])
def test_a_place_that_no_run_can_lie_in_is_a_wrong_call_of_any_command(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("{name: x, target: {model: m}, prompts: {sources: [{path: p}]}, "
                      "evaluate: {sources: [{path: p}]}}")  # fmt: skip
    commands = [[name, str(recipe), "--set", f"run={place}"] for name in ("plan", "generate")]
    for command in (["status", place], *commands):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == Exit.USAGE, command
        assert capsys.readouterr().err.startswith("error: ")
