"""What evaluation measured, read for the report: the drafters, every run of a sweep, and two results side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cache_schema.storage import Location, join
from pipeline.errors import PipelineError
from pipeline.folder import RESULTS
from pipeline.report_values import as_dict, dict_rows, finite, number, numbers, read_json

SETTING = ("drafter", "block_size", "temperature", "batch_size")
NUMBERS = ("tau", "tokens_per_s", "plain_tokens_per_s", "speedup", "identical", "ties", "prompts", "full_blocks")
PARTS = ("draft", "verify", "sampling", "cache", "rest")
MEMORY = ("target_weights", "target_kv", "drafter_weights", "drafter_kv")
OVERALL = "all prompts"


def read_evaluate(folder: Location, problems: list[str]) -> dict[str, Any] | None:
    """What `evaluate` left in its folder, field by field."""
    results = as_dict(read_json(join(folder, RESULTS), problems))
    return evaluate_numbers(results) if results else None


def evaluate_numbers(results: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `results.json` that the report knows, None or empty where the file lacks them."""
    drafters = {n: drafter_numbers(d) for n, d in as_dict(results.get("drafters")).items() if isinstance(d, dict)}
    block_size = number(results.get("block_size"))
    runs = [run_numbers(row) for row in dict_rows(results.get("runs"))]
    if not runs:  # results of before there were sweeps
        setting = {"block_size": block_size, "temperature": 0.0, "batch_size": 1}
        runs = [{"drafter": name, **setting, **_without_examples(d)} for name, d in drafters.items()]
    evaluate = {
        "block_size": block_size,
        "max_new_tokens": number(results.get("max_new_tokens")),
        "dtype": results.get("dtype"),
        "heldout_prompts": number(results.get("heldout_prompts")),
        "drafters": drafters,
        "runs": runs,
        "schedule": schedule_numbers(as_dict(results.get("schedule"))),
    }
    return evaluate | {"table": main_table(runs)}


def run_numbers(row: dict[str, Any]) -> dict[str, Any]:
    """One column of a sweep."""
    size = row.get("block_size")
    setting = {
        "drafter": str(row.get("drafter")),
        "block_size": size if isinstance(size, str) else number(size),
        "temperature": number(row.get("temperature")),
        "batch_size": number(row.get("batch_size")),
    }
    return setting | _without_examples(drafter_numbers(row))


def _without_examples(numbers_: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in numbers_.items() if k not in ("examples", "differences")}


def drafter_numbers(found: dict[str, Any]) -> dict[str, Any]:
    """The measurements of one drafter with every field there, None or empty where the file lacks it."""
    differences = ("sample_id", "position", "plain", "speculative", "gap", "bound", "tie")
    examples = [
        {
            **{name: e.get(name) for name in ("sample_id", "category", "prompt")},
            "pieces": [{n: p.get(n) for n in ("text", "accepted", "length")} for p in dict_rows(e.get("pieces"))],
        }
        for e in dict_rows(found.get("examples"))
    ]
    split, memory = as_dict(found.get("time_split")), as_dict(found.get("memory"))
    return {
        **{name: number(found.get(name)) for name in NUMBERS},
        "by_category": _groups(found.get("by_category")),
        "by_difficulty": _groups(found.get("by_difficulty")),
        "acceptance_histogram": numbers(found.get("acceptance_histogram")),
        "accept_by_slot": numbers(found.get("accept_by_slot")),
        "time_split": {p: v for p in PARTS if (v := number(split.get(p))) is not None},
        "memory": {m: v for m in MEMORY if (v := number(memory.get(m))) is not None},
        "differences": [{n: d.get(n) for n in differences} for d in dict_rows(found.get("differences"))],
        "examples": examples,
    }


def _groups(value: Any) -> dict[str, dict[str, float | None]]:
    names = ("tau", "responses", "speedup")
    return {name: {n: number(as_dict(row).get(n)) for n in names} for name, row in as_dict(value).items()}


def schedule_numbers(schedule: dict[str, Any]) -> list[dict[str, Any]]:
    """Per batch size the best block size, and what every candidate promises."""
    names = ("block_size", "tau", "draft_s", "verify_s", "speedup")
    rows = []
    for entry in dict_rows(schedule.get("by_batch")):
        candidates = [{**{n: number(c.get(n)) for n in names}, "measured": c.get("measured") is True}
                      for c in dict_rows(entry.get("candidates"))]  # fmt: skip
        known = [c for c in candidates if c["block_size"] is not None and c["speedup"] is not None]
        best = {n: number(entry.get(n)) for n in ("batch_size", "block_size", "speedup")}
        if best["batch_size"] is not None and known:
            rows.append({**best, "candidates": known})
    return rows


def main_table(runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The form of the paper's Table 1: a row per category, and per temperature and block size speed-up and τ.

    Of the trained drafter, at the smallest batch size.
    """
    own = [r for r in runs if r["drafter"] == "trained" and r["temperature"] is not None and r["tau"] is not None]
    if not own:
        return None
    batch = min(r["batch_size"] or 1 for r in own)
    columns = sorted(
        (r for r in own if (r["batch_size"] or 1) == batch),
        key=lambda r: (r["temperature"], isinstance(r["block_size"], str), -(number(r["block_size"]) or 0)),
    )
    names = list(dict.fromkeys(name for r in columns for name in r["by_category"]))
    rows = [{"name": name, "cells": [_cell(r["by_category"].get(name, {})) for r in columns]} for name in names]
    rows.append({"name": OVERALL, "cells": [_cell(r) for r in columns]})
    heads = [{"temperature": r["temperature"], "block_size": r["block_size"]} for r in columns]
    return {"batch_size": batch, "columns": heads, "rows": rows}


def _cell(row: dict[str, Any]) -> dict[str, Any]:
    return {"speedup": row.get("speedup"), "tau": row.get("tau")}


def read_against(path: Path) -> dict[str, Any]:
    """Another run's `results.json`, to set beside this one's.

    Raises:
        PipelineError: the file cannot be read, or holds no results.
    """
    try:
        results = finite(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        raise PipelineError(f"--against {path}: cannot be read as JSON ({error}); give a run's results.json") from error
    if not as_dict(as_dict(results).get("drafters")):
        raise PipelineError(f"--against {path}: it has no drafters; expected the results.json of an evaluation")
    return evaluate_numbers(results)


def side_by_side(here: dict[str, Any], there: dict[str, Any], name: str) -> dict[str, Any]:
    """Two evaluations, row by row: every setting that either has, and the categories of the first common one."""
    both = [{_key(r): r for r in side["runs"]} for side in (here, there)]
    rows = [
        {**dict(zip(SETTING, key, strict=True)), "here": _short(both[0].get(key)), "there": _short(both[1].get(key))}
        for key in dict.fromkeys([*both[0], *both[1]])
    ]
    common = next((k for k in both[0] if k in both[1] and k[0] == "trained"), None)
    categories = []
    if common is not None:
        ours, theirs = (side[common]["by_category"] for side in both)
        categories = [{"name": n, "here": _cell(ours.get(n, {})), "there": _cell(theirs.get(n, {}))}
                      for n in dict.fromkeys([*ours, *theirs])]  # fmt: skip
    return {"name": name, "rows": rows, "categories": categories}


def _key(run: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(run[name] for name in SETTING)


def _short(run: dict[str, Any] | None) -> dict[str, Any]:
    names = ("tau", "speedup", "tokens_per_s", "identical", "prompts")
    return {n: None if run is None else run[n] for n in names}
