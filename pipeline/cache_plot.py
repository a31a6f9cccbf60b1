"""The picture of `dflash cache stats`: five panels, one below the other, to be read on a phone too."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from pipeline.report_text import label

_INK, _AXIS, _GRID, _BLUE, _ORANGE = "#1d2733", "#5b6875", "#e3e7ec", "#0072b2", "#d55e00"
_STYLE: Any = {
    "font.family": ["DejaVu Sans"],
    "font.size": 11,
    "text.color": _INK,
    "text.parse_math": False,
    "axes.labelcolor": _AXIS,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": _AXIS,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "xtick.color": _AXIS,
    "ytick.color": _AXIS,
}
_WIDTH, _PANEL, _DPI = 5.4, 2.5, 160


def draw_stats(stats: dict[str, Any], file: Path) -> None:
    """Draw what `cache_stats` found; the ending of the file's name decides its format.

    Raises:
        OSError: as the system gave it.
        ValueError: matplotlib knows no such format.
    """
    layers = stats["layers"]
    panels: list[Callable[[Axes, dict[str, Any]], None]] = [_lengths, _norms, _outliers, _peaks]
    if len(layers) > 1:
        panels.append(_cosines)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, 0.8 + _PANEL * len(panels)), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(_title(stats), fontsize=11, x=0.02, ha="left")
        for axes, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
            panel(axes, stats)
        figure.align_ylabels()
        figure.savefig(file, dpi=_DPI, facecolor="white")


def _title(stats: dict[str, Any]) -> str:
    return (
        f"{label(stats['target'], 44)}, {stats['feature_dtype']}, {stats['hidden_size']:,} channels\n"
        f"layers from {stats['measured_tokens']:,} tokens of {stats['measured_samples']:,} of "
        f"{stats['samples']:,} samples"
    )


def _lengths(axes: Axes, stats: dict[str, Any]) -> None:
    counts, edges = stats["length_histogram"]["counts"], stats["length_histogram"]["edges"]
    widths = [b - a for a, b in pairwise(edges)]
    axes.bar(edges[:-1], counts, width=widths, align="edge", color=_BLUE, edgecolor="white", linewidth=0.4)
    axes.set_ylim(0, max(counts) * 1.35)
    found, middle = stats["lengths"], (edges[0] + edges[-1]) / 2
    for i, (name, value) in enumerate((("median", found["p50"]), ("95 % below", found["p95"]))):
        top = 0.98 - 0.11 * i
        axes.axvline(value, ymax=top, color=_ORANGE, linewidth=1.5)
        axes.annotate(
            f" {name}: {value:,.0f} ", (value, top), color=_ORANGE, va="top", xycoords=("data", "axes fraction"),
            ha="left" if value < middle else "right", fontsize=10,
        )  # fmt: skip
    axes.set(title="Length of samples", xlabel="tokens in a sample", ylabel="samples")
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))


def _norms(axes: Axes, stats: dict[str, Any]) -> None:
    _spreads(axes, stats["layers"], "norm")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.25)
    axes.set(title="Norm of a token's state", ylabel="norm (log)")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    _layer_axis(axes, stats)


def _peaks(axes: Axes, stats: dict[str, Any]) -> None:
    _spreads(axes, stats["layers"], "peak")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.2)
    axes.set(title="Largest channel over the root mean square", ylabel="ratio")
    _layer_axis(axes, stats)


def _spreads(axes: Axes, rows: list[dict[str, Any]], name: str, *, largest: bool = True) -> None:
    """Per layer: a bar from the 5th to the 95th percentile, the median, and the largest."""
    for x, row in enumerate(rows):
        found = row[name]
        axes.plot([x, x], [found["p5"], found["p95"]], color=_BLUE, linewidth=9, alpha=0.35, solid_capstyle="butt")
        axes.plot(x, found["p50"], "o", color=_BLUE, markersize=7)
        if largest:
            axes.plot(x, found["max"], "_", color=_ORANGE, markersize=15, markeredgewidth=2.5)
    _note(axes, 0.01, "● median, bar 5–95 % of tokens", _BLUE)
    if largest:
        _note(axes, 0.74, "▬ largest", _ORANGE)


def _note(axes: Axes, at: float, text: str, colour: str) -> None:
    """What a mark means, at the top of a panel."""
    axes.text(at, 0.99, text, color=colour, transform=axes.transAxes, va="top", fontsize=10)


def _outliers(axes: Axes, stats: dict[str, Any]) -> None:
    rows = stats["layers"]
    shares = [r["outlier_share"] for r in rows]
    axes.bar(range(len(rows)), shares, width=0.6, color=_BLUE)
    for x, share in enumerate(shares):
        text = f"{share:.0%}".replace("%", "\u00a0%")
        axes.annotate(text, (x, share), ha="center", va="bottom", xytext=(0, 1), textcoords="offset points")
    n, hidden = rows[0]["outlier_channels"], stats["hidden_size"]
    axes.axhline(n / hidden, color=_ORANGE, linewidth=2)
    axes.set(title=f"Energy in the {n} largest of {hidden:,} channels", ylabel="share of energy")
    axes.set_ylim(0, max(shares) * 1.35)
    _note(axes, 0.01, f"▬ {100 * n / hidden:.1f} % if all channels were alike", _ORANGE)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol="\u00a0%"))
    _layer_axis(axes, stats)


def _cosines(axes: Axes, stats: dict[str, Any]) -> None:
    rows = stats["layers"][:-1]
    _spreads(axes, rows, "cosine_next", largest=False)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.2 * (high - low))
    axes.set_xticks(range(len(rows)), [f"{a['layer']}→{b['layer']}" for a, b in pairwise(stats["layers"])])
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set(title="Cosine of neighbouring feature layers", xlabel="layers of the target", ylabel="cosine")


def _layer_axis(axes: Axes, stats: dict[str, Any]) -> None:
    rows = stats["layers"]
    axes.set_xticks(range(len(rows)), [str(r["layer"]) for r in rows])
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("layer of the target")
