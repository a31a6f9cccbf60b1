"""Pictures of decoding beyond τ: where the time goes, and which block size is best at which batch size."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pipeline.report_text import percent_text
from pipeline.report_values import as_dict, dict_rows
from pipeline.svg import AXIS, CARD, INK, RAMP, THIRD, TRAINED, UNTRAINED, label_ends, new_figure, widen_right

Drawn = tuple[Figure, str, str]
"""Figure, title and caption."""

_COLOURS = {"draft": TRAINED, "verify": THIRD, "sampling": UNTRAINED, "cache": AXIS, "rest": RAMP[0]}
MAX_ROWS = 8
MAX_LINES = 4


def split_chart(report: dict[str, Any]) -> Drawn | None:
    """Where the time of each setting goes, one bar each."""
    runs = dict_rows(as_dict(report.get("evaluate")).get("runs"))
    rows = [r for r in runs if r.get("drafter") == "trained" and r.get("time_split")][:MAX_ROWS]
    if not rows:
        return None
    figure = new_figure(height=1.35 + 0.3 * len(rows))
    axes = figure.add_subplot()
    left = np.zeros(len(rows))
    for part, colour in _COLOURS.items():
        values = np.array([r["time_split"].get(part, 0.0) for r in rows])
        axes.barh(range(len(rows)), values, 0.62, left=left, color=colour, edgecolor=CARD, linewidth=0.6, label=part)
        left += values
    axes.set_yticks(range(len(rows)), [setting_name(r) for r in rows], color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol="\u00a0%"))
    axes.grid(visible=False)
    figure.legend(loc="outside upper left", ncols=5, frameon=False, fontsize=9, handlelength=0.9, columnspacing=1.0)
    first = rows[0]["time_split"]
    others = sum(first.get(p, 0.0) for p in ("sampling", "cache", "rest"))
    caption = (
        f"Of the decoding time ({setting_name(rows[0])}), drafting takes {percent_text(first.get('draft', 0.0))}, "
        f"verifying {percent_text(first.get('verify', 0.0))}, and everything else {percent_text(others)}"
    )
    return figure, "Where the time goes", caption + "."


def setting_name(run: dict[str, Any]) -> str:
    """A setting in a few letters."""
    size, temperature, batch = run.get("block_size"), run.get("temperature"), run.get("batch_size")
    block = size if isinstance(size, str) else f"B {size:g}" if size is not None else "B ?"
    return block + (f", T {temperature:g}" if temperature else "") + (f", ×{batch:g}" if batch and batch > 1 else "")


def sizes_chart(report: dict[str, Any]) -> Drawn | None:
    """What equation 1 promises of each block size, a line per batch size."""
    schedule = dict_rows(as_dict(report.get("evaluate")).get("schedule"))[:MAX_LINES]
    if not schedule:
        return None
    figure = new_figure()
    axes = figure.add_subplot()
    ends, said = [], []
    for entry, colour in zip(schedule, (TRAINED, THIRD, UNTRAINED, AXIS), strict=False):
        candidates = entry["candidates"]
        x, y = [c["block_size"] for c in candidates], [c["speedup"] for c in candidates]
        axes.plot(x, y, color=colour)
        known = [(c["block_size"], c["speedup"]) for c in candidates if c["measured"]]
        axes.plot([k[0] for k in known], [k[1] for k in known], color=colour, marker="o", markersize=5, linestyle="")
        ends.append((x[-1], y[-1], f"batch {entry['batch_size']:g}", colour))
        said.append(f"at batch {entry['batch_size']:g} a block of {entry['block_size']:g} ({entry['speedup']:.2f}×)"
                    if entry["block_size"] > 1 else f"at batch {entry['batch_size']:g} no drafting")  # fmt: skip
    axes.axhline(1, color=AXIS, linewidth=0.9, linestyle=(0, (3, 2)))
    axes.set(xlabel="block size (1: plain decoding)", ylabel="speed-up by equation 1")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.03)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    widen_right(axes, 0.22)
    label_ends(axes, ends)
    caption = f"Best is {'; '.join(said)}. Dots were measured, lines between them are interpolated; dashed is plain"
    return figure, "Block size by batch size", caption + "."


def served_chart(report: dict[str, Any]) -> Drawn | None:
    """Acceptance by position in a server beside ours, as `dflash check-serve` found it."""
    served = as_dict(report.get("served"))
    rows = dict_rows(served.get("positions"))
    if not rows:
        return None
    figure = new_figure()
    axes = figure.add_subplot()
    x = [row["position"] for row in rows]
    low, high = [row["low"] for row in rows], [row["high"] for row in rows]
    axes.fill_between(x, low, high, color=TRAINED, alpha=0.2, linewidth=0)
    axes.plot(x, [row["ours"] for row in rows], color=TRAINED)
    for within, colour in ((True, INK), (False, UNTRAINED)):
        some = [row for row in rows if row["within"] == within]
        axes.plot([r["position"] for r in some], [r["server"] for r in some], linestyle="", marker="o", markersize=4.5,
                  color=colour)  # fmt: skip
    for height, text, colour in ((0.97, "ours, 95 % interval", TRAINED), (0.87, "the server", INK)):
        axes.text(0.99, height, text, transform=axes.transAxes, ha="right", va="top", color=colour, fontweight="bold")
    axes.set(xlabel="position in the block", ylabel="cycles that accepted it", ylim=(0, max(0.05, 1.1 * max(high))))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol="\u00a0%"))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    return figure, "In a real server", _served_caption(served, rows)


def _served_caption(served: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    name = f"vLLM {served['server_version']}" if served["server_version"] else "The server"
    same, ties, n = (int(served.get(key) or 0) for key in ("identical", "ties", "prompts"))
    within = sum(row["within"] for row in rows)
    texts = f"{name} ({served['dtype']}) gives the same text with the drafter as without it for {same} of {n} prompts"
    if ties:
        texts += f", {ties} part at a tie within rounding"
    if unexplained := n - same - ties:
        texts += f", {unexplained} differ unexplained"
    tau = served["tau"]
    both = "" if None in tau.values() else f", with τ {tau['server']:.2f} over cycles there and {tau['ours']:.2f} here"
    return f"{texts}; its acceptance is within our interval at {within} of {len(rows)} positions{both}."
