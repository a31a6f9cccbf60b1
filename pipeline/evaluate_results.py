"""From the records of evaluation to `results.json` and `schedule.json`."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.evaluate_units import Bench, Key

MAIN = "trained"


def main_column(columns: Mapping[Key, Any], drafter: str, block_size: int) -> Key | None:
    """The column that the headline speaks of: the drafter's own block size, greedy, batch 1, where they were measured;
    else the first that there is."""
    own = [k for k in columns if k[0] == drafter]
    chosen = sorted(own, key=lambda k: (k[1] != block_size, k[2] != 0, k[3] != 1))
    return chosen[0] if chosen else None


def results_of(
    bench: Bench, columns: Mapping[Key, list[dict[str, Any]]], block_size: int, n_prompts: int,
    passes: Sequence[Any], schedule: dict[str, Any] | None,
) -> dict[str, Any]:
    """The whole of `results.json`.

    Args:
        bench: what decoded.
        columns: records by drafter, block size, temperature and batch size.
        block_size: the trained drafter's own B.
        n_prompts: prompts of each column.
        passes: `PassTimes` that were measured.
        schedule: made from them, or None.
    """
    runs = {key: _numbers(bench, key, units) for key, units in columns.items()}
    chosen = {name: key for name in bench.drafters if (key := main_column(columns, name, block_size)) is not None}
    config = bench.run.recipe.evaluate
    shown = ("block_sizes", "temperatures", "top_k", "top_p", "drafts", "batch_sizes", "benchmarks", "drafter",
             "checkpoint")  # fmt: skip
    main = chosen[MAIN]
    return {
        "block_size": main[1],
        "temperature": main[2],
        "batch_size": main[3],
        "max_new_tokens": bench.max_new_tokens,
        "dtype": config.dtype,
        "heldout_prompts": n_prompts,
        "settings": {name: getattr(config, name) for name in shown},
        "drafters": {name: runs[key] for name, key in chosen.items()},
        "runs": [
            {"drafter": k[0], "block_size": k[1], "temperature": k[2], "batch_size": k[3], **_without(r, "examples")}
            for k, r in runs.items()
        ],
        "passes": [dataclasses.asdict(p) for p in passes],
        "schedule": schedule,
        "peak_device_bytes": _peak(bench.target.device),
    }


def _numbers(bench: Bench, key: Key, units: list[dict[str, Any]]) -> dict[str, Any]:
    from stages.tally import Tally, memory

    drafter, size = bench.drafters[key[0]], key[1]
    used = [b for u in units for r in u["responses"] for b in r["blocks"]]
    largest = size if isinstance(size, int) else max(used, default=1)
    return {**Tally(largest, units).results(), "memory": memory(bench.target, drafter, units)}


def _without(numbers: dict[str, Any], name: str) -> dict[str, Any]:
    return {k: v for k, v in numbers.items() if k != name}


def _peak(device: Any) -> int | None:
    """The largest amount of an accelerator's memory that was in use, or None on a CPU."""
    import torch

    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None


def middle_of(prompts: Sequence[Any], columns: Mapping[Key, list[dict[str, Any]]]) -> int:
    """Tokens in the caches in the middle of a typical response, for timing passes."""
    tokens = [r["plain_tokens"] for units in columns.values() for unit in units for r in unit["responses"]]
    return max(2, int(statistics.median(len(p.ids) for p in prompts) + statistics.median(tokens) / 2))


def measure_passes(bench: Bench, sizes: Sequence[int], batch_sizes: Sequence[int], n_context: int) -> list[Any]:
    """Times of single passes at every batch size, plain and at every block size."""
    from stages.passes import time_passes

    drafter = bench.drafters[MAIN]
    return [time_passes(bench.target, drafter, rows=rows, block_size=size, n_context=n_context)
            for rows in batch_sizes for size in (1, *sizes)]  # fmt: skip


def schedule_of(
    columns: Mapping[Key, list[dict[str, Any]]], passes: Sequence[Any], temperature: float, batch_size: int
) -> dict[str, Any]:
    """The block-size schedule, from the acceptance curves of one temperature and batch size."""
    from stages.schedule import make_schedule
    from stages.tally import acceptance

    curves = {}
    for (name, size, t, n), units in columns.items():
        if name == MAIN and isinstance(size, int) and (t, n) == (temperature, batch_size):
            rows = [r for unit in units for r in unit["responses"]]
            curves[size] = acceptance(rows, size)["accept_by_slot"]
    made = make_schedule(passes, curves)
    return made | {"temperature": temperature, "n_context": passes[0].n_context}
