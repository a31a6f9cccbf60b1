"""The generate stage from recipe to table, its pool played by a loop: mixes, turns, several answers, what is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cache_schema.errors import FingerprintMismatch
from cache_schema.rejects import read_rejects
from cache_schema.responses import ResponsesTable, conversation_id
from pipeline import steps
from pipeline.errors import PipelineError
from pipeline.generate_step import generate
from pipeline.recipe import load_recipe
from stages.chat import render_prompt
from tests.templates import talk
from tests.tiny import make_target, make_tokenizer, save_target

RECIPE = """
name: mix
target: {model: HOME/target, dtype: float32}
prompts:
  sources: [{path: talk.jsonl, weight: 2}, {path: single.jsonl, weight: 1}]
  duplicates: drop
generate: {max_new_tokens: 6, part_samples: 4, batch_size: 4, answers_per_prompt: 2, temperature: 1.0}
evaluate: {sources: [{path: single.jsonl}]}
"""


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    save_target(folder / "target", make_target(tokenizer=make_tokenizer(), vocab_size=259))
    (folder / "r.yaml").write_text(RECIPE.replace("HOME", str(folder)))
    rows = [{"id": f"t{i}", "messages": talk(f"one {i}", "x", f"two {i}", "y")} for i in range(8)]
    again = {"id": "again", "messages": rows[3]["messages"]}
    write(folder / "talk.jsonl", [*rows, again, {"id": "t0", "prompt": "id of another"}, {"id": "bad", "prompt": ""}])
    write(folder / "single.jsonl", [{"id": f"s{i}", "prompt": f"say {i}"} for i in range(3)])
    return folder


class Stopped(Exception):
    """The pool was stopped."""


def run(home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str, parts: int = 99) -> list[str]:
    """Run the stage; the pool stops after so many parts, the last ones first. Gives what was said."""

    def pool(_run: Any, _stage: str, _unit: str, todo: list[Any], build: Any, *_: Any, **__: Any) -> None:
        worker = build()
        for number, unit in enumerate(reversed(todo)):
            if number == parts:
                raise Stopped
            worker.run(unit, 1)

    said: list[str] = []
    monkeypatch.setattr(steps, "drive_pool", pool)
    generate(steps.Run(load_recipe(home / "r.yaml", [f"run={folder}", *overrides]), said.append))
    return said


def test_a_mix_with_turns_and_several_answers_survives_a_stop(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = run(home, tmp_path / "whole", monkeypatch)
    whole = ResponsesTable.open(tmp_path / "whole" / "responses")
    assert "generate: 9 prompts from 14 rows, 3 rejected" in said[0]
    assert "1 rows repeat the messages of an earlier one under another id (prompts.duplicates: drop)" in said[1]
    assert said[2] == "generate: the mix takes 6 of 8 of talk.jsonl, 3 of 3 of single.jsonl"
    rejects = read_rejects(tmp_path / "whole" / "responses" / "rejects.parquet")
    assert [(r.line, r.reason) for r in rejects] == [
        (9, "duplicate_content"), (10, "duplicate_id"), (11, "empty_content"),
    ]  # fmt: skip
    asked = {conversation_id(r.sample_id) for r in whole}
    assert len(asked) == whole.n_planned == 18
    assert {f"s{i}~{k}" for i in range(3) for k in (1, 2)} < asked
    with pytest.raises(Stopped):
        run(home, tmp_path / "halted", monkeypatch, parts=2)
    said = run(home, tmp_path / "halted", monkeypatch)
    assert "generate: resuming, 2 of 5 parts are committed, 3 to do" in said
    halted = ResponsesTable.open(tmp_path / "halted" / "responses")
    assert halted.responses_hash() == whole.responses_hash()
    assert "nothing to do" in run(home, tmp_path / "halted", monkeypatch)[0]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed=1", "settings.seed: found 0, expected 1"),
        ("prompts.too_long=shorten", "settings.too_long: found 'drop', expected 'shorten'"),
        ("prompts.sources.0.cap=2", "prompts_sha256"),
        ("generate.answers_per_prompt=3", "settings.answers_per_prompt: found 2, expected 3"),
    ],
)
def test_another_mix_is_another_table(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, words: str
) -> None:
    with pytest.raises(Stopped):
        run(home, tmp_path / "run", monkeypatch, parts=0)
    with pytest.raises(FingerprintMismatch, match=words):
        run(home, tmp_path / "run", monkeypatch, override)


def test_a_run_that_loses_most_of_its_conversations_fails(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 11: never a run that goes on with nothing to learn."""
    one_turn = len(render_prompt(make_tokenizer(), talk("one 0")))
    settings = [f"prompts.max_prompt_tokens={one_turn}", "generate.answers_per_prompt=1"]
    with pytest.raises(PipelineError, match=r"dropped turns of 6 of 9 prompts.*#turn-2: prompt_too_long"):
        run(home, tmp_path / "lost", monkeypatch, *settings)
    said = run(home, tmp_path / "short", monkeypatch, *settings, "prompts.too_long=shorten")
    assert "dropped 0, shortened 6" in said[-1]
    write(home / "given.jsonl", [{"prompt": f"no answer {i}"} for i in range(4)])
    keep = ["prompts.sources=[{path: given.jsonl}]", "generate.mode=keep", "generate.answers_per_prompt=1"]
    with pytest.raises(PipelineError, match=r"no usable response .*empty_loss_mask"):
        run(home, tmp_path / "none", monkeypatch, *keep)
