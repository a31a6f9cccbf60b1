"""Benchmarks by name: asked as the reference asks, from rows as the hub has them (faked: no hub here)."""

from __future__ import annotations

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


def test_faults_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PromptError, match=r"no benchmark 'gsm-8k'; did you mean gsm8k\?"):
        load_benchmark("gsm-8k", 1)
    fake(monkeypatch, {"openai/gsm8k": [{"text": "x"}], "tatsu-lab/alpaca": []})
    with pytest.raises(PromptError, match=r"gsm8k: row 0 has the fields \['text'\] and lacks 'question'"):
        load_benchmark("gsm8k", 1)
    with pytest.raises(PromptError, match="alpaca has no rows"):
        load_benchmark("alpaca", 1)

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(PromptError, match=r"cannot be loaded here: Couldn't reach .* needs the hub.*evaluate\.sources"):
        load_benchmark("gsm8k", 1)
