"""The page of a sweep: what each comparison shows, with error bars over seeds, beside what was expected."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cache_schema.durable import write_atomic
from pipeline.page import render_page
from pipeline.sweep import Training
from pipeline.sweep_file import Comparison, Sweep

Taus = Mapping[str, Mapping[int, float]]
"""Simulated τ by setting and seed."""


def collect_sweep(sweep: Sweep, trainings: Sequence[Training]) -> dict[str, Any]:
    """Everything the page says, as plain JSON values. Trainings without a result are left out and counted."""
    results = [(t, r) for t in trainings if (r := t.result()) is not None]
    taus: dict[str, dict[int, float]] = {}
    for training, result in results:
        taus.setdefault(training.setting, {})[training.seed] = result["tau"]
    return {
        "name": sweep.name,
        "recipe": str(sweep.recipe_file),
        "seeds": list(sweep.seeds),
        "trainings": len(trainings),
        "missing": len(trainings) - len(results),
        "seconds": sum(r["seconds"] for _, r in results),
        "settings": [
            {"name": name, "changes": list(sweep.settings[name]), "taus": by_seed, **spread(list(by_seed.values()))}
            for name, by_seed in taus.items()
        ],
        "comparisons": [_compared(c, taus) for c in sweep.comparisons],
    }


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """Mean, standard deviation over seeds (0 of a single one), and their number."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "deviation": deviation, "n": len(values)}


def _compared(comparison: Comparison, taus: Taus) -> dict[str, Any]:
    pairs = [row for a, b in comparison.pairs() if (row := judged(a, b, taus)) is not None]
    return {
        "title": comparison.title,
        "source": comparison.source,
        "expected": comparison.expected,
        "order": list(comparison.order),
        "lines": {k: list(v) for k, v in (comparison.lines or {}).items()},
        "x": list(comparison.x),
        "x_label": comparison.x_label,
        "pairs": pairs,
    }


def judged(worse: str, better: str, taus: Taus) -> dict[str, Any] | None:
    """Whether `better` does better than `worse`: by the difference of τ with the same seed, over seeds.

    `shows` when it is above 0 with every seed, `the other way` when below 0 with every seed, else `not clear`; with
    fewer than two seeds always `not clear`. None when no seed has both.
    """
    a, b = taus.get(worse, {}), taus.get(better, {})
    differences = [b[seed] - a[seed] for seed in sorted(a.keys() & b.keys())]
    if not differences:
        return None
    verdict = "not clear"
    if len(differences) > 1 and min(differences) > 0:
        verdict = "shows"
    elif len(differences) > 1 and max(differences) < 0:
        verdict = "the other way"
    found = spread(differences)
    error = float(found["deviation"]) / math.sqrt(len(differences))
    return {"worse": worse, "better": better, "difference": found["mean"], "error": error, "seeds": len(differences),
            "verdict": verdict}


def write_sweep_page(sweep: Sweep, trainings: Sequence[Training], out: Path) -> Path:
    """Write `sweep.html` and `sweep.json`, each atomically; returns the page's path."""
    from pipeline.sweep_charts import draw_comparisons

    data = collect_sweep(sweep, trainings)
    page = render_page("sweep.html.j2", s=data, charts=draw_comparisons(data))
    write_atomic(out / "sweep.json", (json.dumps(data, indent=1, allow_nan=False) + "\n").encode())
    write_atomic(out / "sweep.html", page.encode("utf-8", "replace"))
    return out / "sweep.html"
