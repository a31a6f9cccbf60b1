"""What a simulation found, as a table for a terminal and as a page with its two pictures."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from cache_schema.durable import write_atomic
from pipeline.charts import Chart, Drawn
from pipeline.page import render_page
from pipeline.report_text import bytes_text, count_text, percent_text, seconds_text
from pipeline.svg import INK, THIRD, TRAINED, UNTRAINED, inline_svg, label_ends, new_figure, style, widen_right

_COLOURS = {"generate": THIRD, "extract": TRAINED, "train": UNTRAINED}
_FIGURES = ("wall time", "GPUs", "GPU hours", "units", "tokens/s", "busy", "lost", "starting", "waiting",
            "GPU hours lost", "begun again", "nodes lost", "workers died", "network")  # fmt: skip


def stage_rows(result: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """A row of texts for each figure, one of them per stage."""
    columns = [_stage_texts(stage) for stage in result["stages"]]
    return [(name, [column[i] for column in columns]) for i, name in enumerate(_FIGURES)]


def _stage_texts(stage: dict[str, Any]) -> list[str]:
    failed = f", {count_text(stage['failed_units'])} given up" if stage["failed_units"] else ""
    return [
        seconds_text(stage["wall_s"]),
        count_text(stage["gpus"]),
        count_text(stage["gpu_hours"]),
        count_text(stage["units"]) + failed,
        count_text(stage["tokens_per_s"]),
        *(percent_text(stage[f"{kind}_share"], 1) for kind in ("busy", "lost", "starting", "waiting")),
        f"{stage['lost_gpu_s'] / 3600:,.1f}",
        count_text(stage["again"]),
        count_text(stage["node_losses"]),
        count_text(stage["worker_deaths"]),
        f"{bytes_text(stage['network_bytes_per_s'])}/s",
    ]


def summary(result: dict[str, Any]) -> str:
    """One sentence for the whole run."""
    limit = f" under a limit of {bytes_text(result['max_bytes'])}" if result["rolling"] else ""
    again = f", {count_text(result['shards_made_again'])} shards made again" if result["rolling"] else ""
    what = f"{count_text(result['samples'])} samples, {count_text(result['shards'])} shards"
    took = f"{seconds_text(result['wall_s'])} and {count_text(result['gpu_hours'])} GPU hours"
    return (
        f"{result['name']}: {what} on {count_text(result['gpus'])} GPUs take {took}, "
        f"{result['lost_gpu_hours']:,.1f} of them lost to failures; at most {bytes_text(result['peak_bytes'])} are "
        f"stored{limit}{again}"
    )


def render_simulation(result: dict[str, Any], width: int = 110) -> str:
    """The result as a table for people."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    text = io.StringIO()
    console = Console(file=text, width=width, highlight=False)
    console.print(Text(summary(result)))
    table = Table("", *(stage["name"] for stage in result["stages"]))
    for column in table.columns[1:]:
        column.justify = "right"
    for name, values in stage_rows(result):
        table.add_row(name, *values)
    console.print(table)
    console.print(Text("Shares are of the time of a stage's GPUs. Idle are those that start or wait."))
    return text.getvalue()


def write_simulation_page(result: dict[str, Any], file: Path) -> None:
    """Write the page, atomically."""
    rows = stage_rows(result)
    page = render_page("simulate.html.j2", s=result, rows=rows, summary=summary(result), charts=draw(result))
    write_atomic(file, page.encode("utf-8", "replace"))


def draw(result: dict[str, Any]) -> list[Chart]:
    """Workers at work, and bytes stored, over the time of the run."""
    charts = []
    for name, make in (("working", _working), ("stored", _stored)):
        with style():
            figure, title, caption = make(result)
            svg = inline_svg(figure, name, f"{title}. {caption}")
        charts.append(Chart(name=name, title=title, caption=caption, svg=Markup(svg)))
    return charts


def _times(result: dict[str, Any]) -> tuple[Any, str]:
    """The middle of each span of the timeline, and the unit that suits it."""
    edges = np.asarray(result["timeline"]["edges_s"])
    units = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
    unit, seconds = next((u for u in units if edges[-1] > 2 * u[1]), units[-1])
    return (edges[:-1] + edges[1:]) / 2 / seconds, unit


def _working(result: dict[str, Any]) -> Drawn:
    figure = new_figure(width=7.2)
    axes = figure.add_subplot()
    times, unit = _times(result)
    working = result["timeline"]["working"]
    for i, (name, shares) in enumerate(working.items()):
        percent = 100 * np.asarray(shares)
        axes.plot(times, percent, color=_COLOURS[name])
        middle = int(np.median(np.flatnonzero(percent > 0))) if (percent > 0).any() else 0
        place = times[middle], 103 + 10 * i  # one above the other: stages may run at the same time
        axes.annotate(name, place, color=_COLOURS[name], fontweight="bold", ha="center", va="bottom")
    axes.set(xlabel=f"{unit} since the begin", ylabel="workers at work, %", ylim=(0, 106 + 10 * len(working)))
    axes.set_yticks([0, 25, 50, 75, 100])
    told = (f"{s['name']} has its GPUs at work {percent_text(s['busy_share'])} of the time" for s in result["stages"])
    return figure, "Workers at work", "; ".join(told) + "."


def _stored(result: dict[str, Any]) -> Drawn:
    figure = new_figure(width=7.2)
    axes = figure.add_subplot()
    times, unit = _times(result)
    size, unit_bytes = next((s, u) for s, u in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1.0, "B"))
                            if result["peak_bytes"] >= s or s == 1.0)  # fmt: skip
    stored = np.asarray(result["timeline"]["stored_bytes"]) / size
    axes.plot(times, stored, color=TRAINED)
    ends = [(times[-1], stored[-1], "stored", TRAINED)]
    if result["rolling"]:
        axes.axhline(result["max_bytes"] / size, color=INK, linewidth=1.2, linestyle="--")
        ends.append((times[-1], result["max_bytes"] / size, "max_bytes", INK))
    axes.set(xlabel=f"{unit} since the begin", ylabel=unit_bytes, ylim=(0, 1.12 * max(e[1] for e in ends) or 1))
    widen_right(axes, 0.16)
    label_ends(axes, ends)
    whole = f" of a cache of {bytes_text(result['cache_bytes'])}" if result["rolling"] else ""
    return figure, "Bytes stored", f"At most {bytes_text(result['peak_bytes'])} are stored at a time{whole}."
