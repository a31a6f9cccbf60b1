"""The plot of the storage frontier: bytes against error, and bytes against τ where trainings were run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FAMILIES = (("bfloat16", "0.2"), ("float16", "0.5"), ("float8", "tab:green"), ("int8", "tab:blue"), ("norm", "tab:red"))
LABELS = {"norm": "int8, static scale per channel", "int8": "int8", "float8": "float8_e4m3fn"}


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw both panels into a PNG; bytes are those with zstd level 1."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5.5), constrained_layout=True)
    for family, colour in FAMILIES:
        own = [r for r in rows if r["scheme"].split("-")[0] == family]
        _errors(left, [r for r in own if r["errors"]["token_mean"] > 0], LABELS.get(family, family), colour)
        _taus(right, [r for r in own if "tau" in r], LABELS.get(family, family), colour)
    for axes in (left, right):
        axes.axvline(0.33, color="0.8", zorder=0)
        axes.axvline(0.25, color="0.8", zorder=0)
        axes.set_xlabel("bytes, share of bfloat16 (zstd level 1, scales included)")
        axes.legend(frameon=False, fontsize=8)
    left.set_yscale("log")
    left.set_ylabel("relative error of a token without the outlier channels, mean")
    right.set_ylabel("held-out simulated τ after the same training\n(mean and range of three seeds)")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _ratio(row: dict[str, Any]) -> float:
    return next(float(p["ratio"]) for p in row["points"] if p["compression"] == "zstd-1" and p["order"] == "TLD")


def _errors(axes: Any, rows: list[dict[str, Any]], label: str, colour: str) -> None:
    if not rows:
        return
    axes.scatter([_ratio(r) for r in rows], [r["errors"]["token_mean"] for r in rows], color=colour, s=18, label=label)
    for row in rows:
        _name(axes, row, row["errors"]["token_mean"])


def _taus(axes: Any, rows: list[dict[str, Any]], label: str, colour: str) -> None:
    if not rows:
        return
    means = [r["tau"]["mean"] for r in rows]
    below = [m - min(r["tau"]["values"]) for m, r in zip(means, rows, strict=True)]
    above = [max(r["tau"]["values"]) - m for m, r in zip(means, rows, strict=True)]
    axes.errorbar([_ratio(r) for r in rows], means, yerr=[below, above], fmt="o", ms=4, lw=1, color=colour, label=label)
    for row, mean in zip(rows, means, strict=True):
        _name(axes, row, mean)


def _name(axes: Any, row: dict[str, Any], height: float) -> None:
    name = row["scheme"].split("-", 1)[-1]
    axes.annotate(name, (_ratio(row), height), fontsize=6.5, xytext=(4, 2), textcoords="offset points")
