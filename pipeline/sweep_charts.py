"""The pictures of a sweep's page: one per comparison, dots or lines with error bars over seeds."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from pipeline.charts import Chart, Drawn
from pipeline.svg import INK, RAMP, THIRD, TRAINED, UNTRAINED, inline_svg, label_ends, new_figure, style, widen_right

LINE_COLOURS = (UNTRAINED, THIRD, TRAINED, RAMP[1])


def draw_comparisons(data: dict[str, Any]) -> list[Chart]:
    """A chart of every comparison that has figures, in order."""
    settings = {row["name"]: row for row in data["settings"]}
    charts = []
    for i, comparison in enumerate(data["comparisons"]):
        with style():
            drawn = _lines(comparison, settings) if comparison["lines"] else _dots(comparison, settings)
            if drawn is not None:
                figure, title, caption = drawn
                name = f"comparison{i}"
                svg = inline_svg(figure, name, f"{title}. {caption}")
                charts.append(Chart(name=name, title=title, caption=caption, svg=Markup(svg)))
    return charts


def _dots(comparison: dict[str, Any], settings: dict[str, Any]) -> Drawn | None:
    """Settings one above the other, each with its mean, its deviation and every seed."""
    rows = [settings[name] for name in comparison["order"] if name in settings]
    if not rows:
        return None
    figure = new_figure(height=0.9 + 0.38 * len(rows))
    axes = figure.add_subplot()
    for y, row in enumerate(rows):
        axes.plot(list(row["taus"].values()), [y] * row["n"], linestyle="", marker="o", markersize=3.5, color=RAMP[1])
        axes.errorbar(row["mean"], y, xerr=row["deviation"], color=TRAINED, marker="o", markersize=6.5, capsize=3)
        axes.annotate(f"{row['mean']:.2f}", (row["mean"], y), xytext=(0, 7), textcoords="offset points", ha="center",
                      color=INK, fontsize=9.5, fontweight="bold")
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], color=INK)
    axes.set_ylim(-0.6, len(rows) - 0.3)
    axes.margins(x=0.08)
    axes.set_xlabel("simulated τ on held-out samples")
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    return figure, comparison["title"], _caption(comparison, rows)


def _lines(comparison: dict[str, Any], settings: dict[str, Any]) -> Drawn | None:
    """One line per kind over `x`."""
    figure = new_figure()
    axes = figure.add_subplot()
    ends, used = [], []
    for (name, members), colour in zip(comparison["lines"].items(), LINE_COLOURS, strict=False):
        found = [(x, settings[m]) for x, m in zip(comparison["x"], members, strict=True) if m in settings]
        if not found:
            continue
        xs, means = [x for x, _ in found], [row["mean"] for _, row in found]
        errors = [row["deviation"] for _, row in found]
        axes.errorbar(xs, means, yerr=errors, color=colour, marker="o", markersize=5, capsize=3)
        ends.append((xs[-1], means[-1], name, colour))
        used += [row for _, row in found]
    if not used:
        return None
    axes.set_xticks(comparison["x"])
    axes.set(xlabel=comparison["x_label"], ylabel="simulated τ, held-out")
    widen_right(axes, 0.3)
    label_ends(axes, ends)
    return figure, comparison["title"], _caption(comparison, used)


def _caption(comparison: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    best, worst = max(rows, key=lambda r: r["mean"]), min(rows, key=lambda r: r["mean"])
    n = min(row["n"] for row in rows)
    return (
        f"Expected: {comparison['expected']} ({comparison['source']}). Highest is {best['name']} with τ "
        f"{best['mean']:.2f}, lowest {worst['name']} with {worst['mean']:.2f}; bars are one standard deviation over "
        f"{n} seed{'s' if n != 1 else ''}."
    )
