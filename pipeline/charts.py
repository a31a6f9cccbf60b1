"""The report's pictures: each function reads the collected report and returns a chart, or None without data.

A chart carries one sentence that says what is seen, with its numbers: it is the caption and the text for
those who cannot see the picture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pipeline.charts_decoding import served_chart, sizes_chart, split_chart
from pipeline.charts_training import (
    accuracy_chart,
    loss_chart,
    schedule_chart,
    skipped_chart,
    slots_chart,
    speed_chart,
    tau_chart,
)
from pipeline.report_text import bytes_text, label, percent_text, seconds_text, sentence, shares
from pipeline.report_values import as_dict, dict_rows, number, numbers
from pipeline.svg import (
    AXIS,
    CARD,
    INK,
    THIRD,
    TRAINED,
    UNTRAINED,
    inline_svg,
    new_figure,
    style,
)

MAX_BARS = 14
"""Categories drawn at most; the tables hold all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One picture of the report."""

    name: str
    title: str
    caption: str
    svg: Markup
    """The `<svg>` element, safe to place in the page: every text inside is escaped."""


Drawn = tuple[Figure, str, str]
"""Figure, title and caption."""


def draw_charts(report: dict[str, Any]) -> list[Chart]:
    """Every chart that the report has data for."""
    makers: dict[str, Callable[[dict[str, Any]], Drawn | None]] = {
        "acceptance": acceptance_chart,
        "categories": category_chart,
        "split": split_chart,
        "sizes": sizes_chart,
        "served": served_chart,
        "loss": loss_chart,
        "accuracy": accuracy_chart,
        "slots": slots_chart,
        "tau": tau_chart,
        "schedule": schedule_chart,
        "speed": speed_chart,
        "skipped": skipped_chart,
        "lengths": lengths_chart,
        "stages": stages_chart,
    }
    charts = []
    for name, make in makers.items():
        with style():
            drawn = make(report)
            if drawn is not None:
                figure, title, caption = drawn
                svg = inline_svg(figure, name, f"{title}. {caption}")
                charts.append(Chart(name=name, title=title, caption=caption, svg=Markup(svg)))
    return charts


def drafters(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The evaluated drafters by name: `trained`, and `untrained` when it was measured."""
    return as_dict(as_dict(report.get("evaluate")).get("drafters"))


def acceptance_chart(report: dict[str, Any]) -> Drawn | None:
    """Share of cycles by tokens that they gave, trained beside untrained."""
    measured = {name: shares(numbers(d.get("acceptance_histogram"))) for name, d in drafters(report).items()}
    trained, untrained = measured.get("trained"), measured.get("untrained")
    if not trained or not any(trained):
        return None
    figure = new_figure()
    axes = figure.add_subplot()
    width = 0.4 if untrained else 0.75
    x = np.arange(1, len(trained) + 1)
    bars = [("trained", trained, TRAINED, width / 2 if untrained else 0.0)]
    if untrained:
        bars.append(("untrained", untrained, UNTRAINED, -width / 2))
    for i, (name, heights, colour, shift) in enumerate(bars):
        axes.bar(x[: len(heights)] + shift, heights[: len(x)], width * 0.94, color=colour)
        axes.text(
            0.99, 0.97 - 0.1 * i, name, transform=axes.transAxes, ha="right", va="top", color=colour, fontweight="bold"
        )
    axes.set(xlabel="tokens from one cycle (accepted drafts + 1)", ylabel="share of cycles", xlim=(0.4, len(x) + 0.6))
    axes.set_xticks(x if len(x) <= 16 else x[::2])
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol="\u00a0%"))
    caption = (
        f"The trained drafter gives more than one token in {percent_text(1 - trained[0])} of cycles and the full "
        f"{len(trained)} in {percent_text(trained[-1])}"
    )
    if untrained:
        caption += f"; the untrained one gives more than one in {percent_text(1 - untrained[0])}"
    return figure, "Tokens gained per cycle", caption + "."


def category_chart(report: dict[str, Any]) -> Drawn | None:
    """τ of each category, the untrained drafter's as a mark on the bar."""
    found = drafters(report)
    trained = {
        name: tau
        for name, row in as_dict(as_dict(found.get("trained")).get("by_category")).items()
        if (tau := number(as_dict(row).get("tau"))) is not None
    }
    if not trained:
        return None
    before = as_dict(as_dict(found.get("untrained")).get("by_category"))
    names = sorted(trained, key=lambda n: (-trained[n], n))
    shown = names[:MAX_BARS]
    figure = new_figure(height=0.9 + 0.32 * len(shown))
    axes = figure.add_subplot()
    y = np.arange(len(shown))
    axes.barh(y, [trained[n] for n in shown], 0.62, color=TRAINED)
    for i, name in enumerate(shown):
        axes.annotate(
            f"{trained[name]:.2f}",
            (trained[name], i),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontweight="bold",
        )
        old = number(as_dict(before.get(name)).get("tau"))
        if old is not None:
            axes.plot([old, old], [i - 0.31, i + 0.31], color=CARD, linewidth=4, solid_capstyle="butt")
            axes.plot([old, old], [i - 0.31, i + 0.31], color=UNTRAINED, linewidth=2.2, solid_capstyle="butt")
    axes.set_yticks(y, [label(n) for n in shown], color=INK)
    axes.invert_yaxis()
    axes.set(xlabel="τ, tokens per target pass", xlim=(0, 1.12 * max(1.0, *(trained[n] for n in shown))))
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    best, worst = names[0], names[-1]
    if best == worst:
        caption = f"τ is {trained[best]:.2f} in the only category, {label(best)}"
    else:
        caption = f"τ is highest in {label(best)} ({trained[best]:.2f})"
        caption += f" and lowest in {label(worst)} ({trained[worst]:.2f})"
    caption += "; the orange mark is the untrained drafter" if before else ""
    caption += f"; the first {MAX_BARS} of {len(names)} categories are drawn" if len(names) > MAX_BARS else ""
    return figure, "τ by category", caption + "."


def lengths_chart(report: dict[str, Any]) -> Drawn | None:
    """Histograms of prompt and response lengths, one above the other on one scale."""
    responses = as_dict(report.get("responses"))
    found = [(k, d) for k in ("prompt", "response") if (d := as_dict(responses.get(f"{k}_tokens")))]
    if not found:
        return None
    figure = new_figure()
    panels = np.atleast_1d(figure.subplots(len(found), 1, sharex=True))
    for axes, (name, data), colour in zip(panels, found, (THIRD, TRAINED), strict=False):
        edges, counts = np.array(data["histogram"]["edges"], float), np.array(data["histogram"]["counts"], float)
        axes.bar(edges[:-1], counts, np.diff(edges) * 0.94, align="edge", color=colour)
        axes.axvline(data["median"], color=INK, linewidth=1.1, linestyle=(0, (3, 2)))
        axes.set_title(f"{name}s, median {data['median']:,.0f}", loc="left", fontsize=10, color=INK, fontweight="bold")
        axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        axes.set_ylabel("samples")
    longest = max(data["max"] for _, data in found)
    panels[-1].set_xlim(0, 1.03 * (longest + 1))
    panels[-1].set_xlabel("length, tokens")
    panels[-1].xaxis.set_major_locator(MaxNLocator(6, integer=True))
    said = [
        f"{name}s have {data['min']:,} to {data['max']:,} tokens, {data['median']:,.0f} in the middle (dashed)"
        for name, data in found
    ]
    return figure, "Lengths of prompts and responses", sentence(said)


def stages_chart(report: dict[str, Any]) -> Drawn | None:
    """Time and bytes of each stage, side by side."""
    rows = [s for s in dict_rows(report.get("stages")) if s.get("state") != "not run yet"]
    if not rows:
        return None
    figure = new_figure(height=0.95 + 0.3 * len(rows))
    left, right = figure.subplots(1, 2, sharey=True)
    y = np.arange(len(rows))
    for axes, name, title, text, colour in (
        (left, "seconds", "time", seconds_text, TRAINED),
        (right, "bytes", "size on disk", bytes_text, THIRD),
    ):
        values = [number(row.get(name)) or 0.0 for row in rows]
        axes.barh(y, values, 0.6, color=colour)
        for i, row in enumerate(rows):
            words = text(number(row.get(name))) if row.get(name) is not None else "no end yet"
            axes.annotate(words, (values[i], i), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9.5)
        axes.set_title(title, loc="left", fontsize=10, color=AXIS)
        axes.set_xlim(0, 1.75 * max([*values, 1e-9]))
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.grid(visible=False)
    left.set_yticks(y, [row["stage"] for row in rows], color=INK)
    left.invert_yaxis()
    slowest = max(rows, key=lambda row: number(row.get("seconds")) or 0.0)
    largest = max(rows, key=lambda row: number(row.get("bytes")) or 0.0)
    caption = (
        f"{slowest['stage']} takes longest ({seconds_text(number(slowest.get('seconds')))}) and {largest['stage']} "
        f"takes most room ({bytes_text(number(largest.get('bytes')))})"
    )
    return figure, "Time and size of each stage", sentence([caption])
