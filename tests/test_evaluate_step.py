"""The evaluate stage in one process: sweeps, the schedule, an existing drafter, going on after a stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cache_schema.errors import FingerprintMismatch
from cache_schema.storage import open_storage
from pipeline.cli import main
from pipeline.errors import RecipeError
from pipeline.evaluate_step import run_evaluate
from pipeline.evaluate_units import Unit
from pipeline.recipe import load_recipe
from pipeline.run import Run
from stages.checkpoint_format import CheckpointError, save_drafter
from stages.drafter import Drafter
from stages.errors import TargetSettingError
from stages.evaluate import EvalPrompt, Variant
from stages.passes import PassTimes
from stages.schedule import expected_tau, make_schedule, size_by_rows
from tests.tiny import make_spec, make_target, make_tokenizer, save_target


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target, a drafter that was made elsewhere, prompts, and a recipe that trains nothing."""
    folder = tmp_path_factory.mktemp("home")
    save_target(folder / "target", make_target(0, make_tokenizer(), vocab_size=300))
    (folder / "drafter").mkdir()
    spec = make_spec(vocab_size=300, mask_token_id=299, block_size=8)
    save_drafter(Drafter(spec, seed=0), folder / "drafter")
    rows = [{"id": f"p{i}", "prompt": "go " * (i + 1), "category": "ab"[i % 2], "difficulty": i % 2} for i in range(4)]
    (folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "name": "tiny",
        "target": {"model": str(folder / "target"), "dtype": "float32"},
        "prompts": {"sources": [{"path": "held.jsonl"}]},
        "evaluate": {
            "sources": [{"path": "held.jsonl"}], "max_new_tokens": 5, "threads": 1, "drafter": "drafter",
            "block_sizes": [8, 4], "temperatures": [0.0, 1.0], "batch_sizes": [1, 3], "block_size": "schedule",
        },
    }  # fmt: skip
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def evaluate(home: Path, run: Path, *overrides: str) -> tuple[dict[str, Any], list[str]]:
    lines: list[str] = []
    run_evaluate(Run(load_recipe(home / "r.yaml", [f"run={run}", *overrides]), lines.append))
    return json.loads((run / "evaluate" / "results.json").read_text()), lines


@pytest.fixture(scope="module")
def swept(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "swept"
    evaluate(home, run)
    return run


def test_every_setting_is_a_run_of_the_results(swept: Path) -> None:
    results = json.loads((swept / "evaluate" / "results.json").read_text())
    found = {(r["drafter"], r["block_size"], r["temperature"], r["batch_size"]): r for r in results["runs"]}
    trained = {("trained", b, t, n) for b in (8, 4, "schedule") for t in (0.0, 1.0) for n in (1, 3)}
    assert set(found) == trained | {("untrained", 8, 0.0, 1)}
    for (_, _, temperature, _), run in found.items():
        assert run["prompts"] == 4
        assert run["identical"] == (None if temperature else 4)
        assert run["tau"] >= 1
        assert sum(run["time_split"].values()) == pytest.approx(1)
        assert set(run["by_category"]) == {"a", "b"}
        assert set(run["by_difficulty"]) == {"0", "1"}
    assert (results["block_size"], results["temperature"], results["batch_size"]) == (8, 0.0, 1)
    assert results["drafters"]["trained"]["tau"] == found["trained", 8, 0.0, 1]["tau"]
    assert results["drafters"]["trained"]["memory"]["drafter_kv"] > 0
    # A row draws the same numbers alone and in a batch.
    assert found["trained", 4, 1.0, 1]["responses"] == found["trained", 4, 1.0, 3]["responses"]


def test_the_schedule_is_a_file_of_its_own(swept: Path) -> None:
    schedule = json.loads((swept / "evaluate" / "schedule.json").read_text())
    assert [entry["batch_size"] for entry in schedule["by_batch"]] == [1, 3]
    for entry in schedule["by_batch"]:
        assert [c["block_size"] for c in entry["candidates"]] == [1, 4, 5, 6, 7, 8]
        assert [c["block_size"] for c in entry["candidates"] if c["measured"]] == [1, 4, 8]
        assert entry["speedup"] == max(c["speedup"] for c in entry["candidates"]) >= 1
        assert entry["num_speculative_tokens"] == entry["block_size"] - 1


def test_a_second_call_does_nothing_and_a_lost_record_is_made_again(home: Path, swept: Path) -> None:
    lines = evaluate(home, swept)[1]
    assert "already done" in lines[0]
    (swept / "evaluate" / "results.json").unlink()
    next((swept / "evaluate" / "prompts").iterdir()).write_text("{}")
    results, lines = evaluate(home, swept)
    assert any("resuming" in line for line in lines)
    assert results["drafters"]["trained"]["prompts"] == 4


def test_a_record_that_lacks_a_response_is_none(tmp_path: Path) -> None:
    prompts = tuple(EvalPrompt(f"p{i}", "a", "", [1]) for i in range(2))
    unit = Unit(0.0, 2, prompts, (Variant("trained", 8, 8),))
    rows = [{"sample_id": "p0"}, {"sample_id": "p1"}]
    storage = open_storage(tmp_path)
    for responses, whole in ((rows, True), (rows[:1], False), (rows[::-1], False), ([1, 2], False), (None, False)):
        storage.replace(unit.key, json.dumps({"trained@8": {"responses": responses}}).encode())
        assert (unit.finished(storage) is not None) == whole
    storage.replace(unit.key, b'{"trained@8": {}}')
    assert unit.finished(storage) is None


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("evaluate.temperatures=[0, 1e-4]", r"evaluate.temperatures is .*at least 0.001"),
        ("extract.max_quarantined_share=1.5", r"extract.max_quarantined_share is 1.5, but it must be in \[0, 1\]"),
        ("prompts.max_bad_share=-0.1", r"prompts.max_bad_share is -0.1, but it must be in \[0, 1\]"),
    ],
)
def test_a_setting_out_of_range_is_named(home: Path, setting: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe(home / "r.yaml", [setting])


def test_another_drafter_in_the_same_folder_is_refused(home: Path, swept: Path, tmp_path: Path) -> None:
    other = Drafter(make_spec(vocab_size=300, mask_token_id=299, block_size=8), seed=1)
    save_drafter(other, tmp_path)
    with pytest.raises(FingerprintMismatch, match="weights_sha256"):
        evaluate(home, swept, f"evaluate.drafter={tmp_path}")


def test_a_drafter_for_another_target_is_refused(home: Path, tmp_path: Path) -> None:
    save_drafter(Drafter(make_spec(hidden_size=16, n_heads=2, vocab_size=300), seed=0), tmp_path)
    with pytest.raises(CheckpointError, match=r"for another target: hidden_size is 16, the target's is 32"):
        evaluate(home, tmp_path / "run", f"evaluate.drafter={tmp_path}")


def test_prompts_too_long_for_the_targets_positions_are_not_decoded(home: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    target = make_target(0, make_tokenizer(), vocab_size=300, rope_parameters=rope, max_position_embeddings=24)
    save_target(tmp_path / "target", target)
    # <|im_start|>user⏎ go go go go <|im_end|>⏎ <|im_start|>assistant⏎, 5 new tokens, a block of 8
    longest = (1 + 5) + 12 + 2 + (1 + 10) + 5 + 8
    with pytest.raises(TargetSettingError, match=rf"sequences of up to {longest} tokens would be decoded.*at most 24"):
        evaluate(home, tmp_path / "run", f"target.model={tmp_path / 'target'}")


def test_the_schedule_by_hand() -> None:
    """At batch 1 passes cost the same whatever they hold, so the largest block wins; at batch 8 drafting never pays."""
    times = [PassTimes(1, b, 100, 0.0 if b == 1 else 0.2, 1.0) for b in (1, 4, 8)]
    times += [PassTimes(8, b, 100, 0.0 if b == 1 else 1.0, float(b)) for b in (1, 4, 8)]
    curves = {4: [0.5, 0.25, 0.125], 8: [0.5, 0.25, 0.125, 0.0625, 0.0, 0.0, 0.0]}
    assert expected_tau(curves[4], 4) == 1.875
    schedule = make_schedule(times, curves)
    one, eight = schedule["by_batch"]
    assert (one["block_size"], eight["block_size"]) == (5, 1)  # slots 5 to 7 are never accepted: the smallest of equals
    assert one["speedup"] == pytest.approx(1.9375 / 1.2)
    six = next(c for c in eight["candidates"] if c["block_size"] == 6)
    assert (six["verify_s"], six["measured"]) == (6.0, False)
    size = size_by_rows(schedule)
    assert [size(n) for n in (1, 2, 8, 30)] == [5, 1, 1, 1]


def test_a_given_drafter_is_checked_from_the_command_line(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["export", str(home / "r.yaml"), "--set", f"run={tmp_path / 'run'}", "--check"]
    with pytest.raises(SystemExit) as done:
        main([*call, "--folder", str(home / "drafter"), "--json"])
    assert done.value.code == 0
    assert all(check["ok"] for check in json.loads(capsys.readouterr().out))
    with pytest.raises(SystemExit) as done:
        main([*call, "--folder", str(home / "target")])
    assert done.value.code == 1
    assert "BAD  architecture" in capsys.readouterr().out


def test_results_are_set_beside_others_from_the_command_line(
    home: Path, swept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = swept / "evaluate" / "results.json"
    with pytest.raises(SystemExit) as done:
        main(["report", str(home / "r.yaml"), "--set", f"run={swept}", "--against", str(other)])
    assert done.value.code == 0
    report = json.loads((swept / "report.json").read_text())
    assert len(report["against"]["rows"]) == len(report["evaluate"]["runs"])
    assert all(row["here"] == row["there"] for row in report["against"]["rows"])
