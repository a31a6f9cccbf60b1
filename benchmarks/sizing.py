"""The sizing table of docs/operations.md, from `dflash plan` for the shapes in recipes/sizing.

    python -m benchmarks.sizing
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pipeline.recipe import load_recipe
from pipeline.report_text import bytes_text
from pipeline.sizing import plan_run

RECIPE = Path("recipes/qwen3-8b.yaml")
TARGETS = {"Qwen3-4B": "qwen3-4b", "Qwen3-8B": "qwen3-8b", "Qwen3-32B": "qwen3-32b", "Qwen3-30B-A3B": "qwen3-30b-a3b"}
SAMPLES, MEAN_TOKENS = 800_000, 1500.0
_FIGURES = ("drafter", "cache: exact", "cache: compact", "shards", "GPU hours: generate", "extract", "train",
            "written", "read by training")  # fmt: skip


def plan_of(root: Path, folder: str) -> dict[str, Any]:
    """The plan of the recipe for another target."""
    recipe = load_recipe(root / RECIPE, [f"target.model={root / 'recipes' / 'sizing' / folder}"])
    return plan_run(recipe, SAMPLES, MEAN_TOKENS)


def figures(plan: dict[str, Any]) -> list[str]:
    """A row of the table."""
    stages, cache = plan["costs"]["stages"], plan["cache"]
    written = sum(stage["network_bytes"]["written"] for stage in stages.values())
    return [
        f"{plan['drafter']['parameters'] / 1e9:.2f} B",
        bytes_text(cache["by_profile"]["exact"]),
        bytes_text(cache["by_profile"]["compact"]),
        f"{cache['n_shards']:,}",
        *(f"{stages[stage]['gpu_hours']:,.0f}" for stage in ("generate", "extract", "train")),
        bytes_text(written),
        bytes_text(stages["train"]["network_bytes"]["read"]),
    ]


def table(root: Path = Path()) -> str:
    """The table, in Markdown."""
    lines = ["| target | " + " | ".join(_FIGURES) + " |", "|---" * (len(_FIGURES) + 1) + "|"]
    for name, folder in TARGETS.items():
        lines.append(f"| {name} | " + " | ".join(figures(plan_of(root, folder))) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
    sys.exit(0)
