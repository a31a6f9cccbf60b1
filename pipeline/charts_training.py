"""Pictures of a training: loss, accuracy, τ, schedule, speed, and the samples that gave it nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pipeline.report_text import count_text, label, percent_text, sentence
from pipeline.report_values import as_dict, dict_rows, number, numbers
from pipeline.svg import AXIS, INK, RAMP, THIRD, TRAINED, UNTRAINED, label_ends, new_figure, widen_right

Drawn = tuple[Figure, str, str]
"""Figure, title and caption."""

MAX_REASONS = 8


def points(values: Any) -> list[float]:
    """A list of numbers for drawing, gaps as NaN."""
    return [float("nan") if v is None else v for v in numbers(values)]


def series(rows: list[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of one curve, at the steps where there is a value."""
    found = [(row["step"], v) for row in rows if (v := number(row.get(name))) is not None]
    return [p[0] for p in found], [p[1] for p in found]


NOISY = 30
"""Points from which on a curve is drawn with its running median."""


def _curve(axes: Axes, x: list[float], y: list[float], colour: str) -> None:
    """A noisy curve: faint as it is, strong as its running median, once it has enough points for one."""
    if len(y) < NOISY:
        axes.plot(x, y, color=colour, marker="o" if len(y) < 8 else None, markersize=4)
        return
    half = max(2, len(y) // 40)
    smooth = [float(np.median(y[max(0, i - half) : i + half + 1])) for i in range(len(y))]
    axes.plot(x, y, color=colour, linewidth=0.9, alpha=0.35)
    axes.plot(x, smooth, color=colour)


def _end(y: list[float]) -> float:
    """Where a noisy curve ends: the median of its last five points, or its last point if it is short."""
    return float(np.median(y[-5:])) if len(y) >= NOISY else y[-1]


def _steps_axis(axes: Axes, right: float = 0.23) -> None:
    axes.set_xlabel("optimizer step")
    axes.margins(x=0.02)
    last = axes.get_xlim()[1]
    widen_right(axes, right)
    ticks = MaxNLocator(5, integer=True).tick_values(*axes.get_xlim())
    axes.set_xticks([t for t in ticks if axes.get_xlim()[0] <= t <= last])


def loss_chart(report: dict[str, Any]) -> Drawn | None:
    """Training loss over steps, with the held-out loss."""
    train = as_dict(report.get("train"))
    x, y = series(dict_rows(train.get("steps")), "loss")
    held_x, held_y = series(dict_rows(train.get("heldout")), "loss")
    if not x and not held_x:
        return None
    figure = new_figure()
    axes = figure.add_subplot()
    ends, said = [], []
    if x:
        _curve(axes, x, y, TRAINED)
        ends.append((x[-1], _end(y), "training", TRAINED))
        said.append(f"the training loss goes from {y[0]:.2f} to {_end(y):.2f} in {count_text(x[-1])} steps")
    if held_x:
        axes.plot(held_x, held_y, color=UNTRAINED, marker="o", markersize=4.5, linewidth=1.4)
        ends.append((held_x[-1], held_y[-1], "held-out", UNTRAINED))
        said.append(f"the held-out loss ends at {held_y[-1]:.2f}")
    axes.set_ylabel("loss, nats per token")
    _steps_axis(axes)
    label_ends(axes, ends)
    return figure, "Loss", sentence(said)


def accuracy_chart(report: dict[str, Any]) -> Drawn | None:
    """Accuracy by position in the block, at a few moments of training."""
    train = as_dict(report.get("train"))
    kind, rows = "held-out", [r for r in dict_rows(train.get("heldout")) if points(r.get("accuracy"))]
    if not rows:
        kind, rows = "training", [r for r in dict_rows(train.get("steps")) if points(r.get("accuracy"))]
    if not rows:
        return None
    picked = [rows[i] for i in sorted({round(i) for i in np.linspace(0, len(rows) - 1, len(RAMP))})]
    figure = new_figure()
    axes = figure.add_subplot()
    ends = []
    for row, colour in zip(picked, RAMP[-len(picked) :], strict=True):
        y = points(row["accuracy"])
        axes.plot(range(1, len(y) + 1), y, color=colour, marker="o", markersize=4)
        ends.append((len(y), y[-1], f"step {count_text(row['step'])}", INK if row is picked[-1] else AXIS))
    axes.set(xlabel="position in the block, 1 = first draft", ylabel=f"{kind} accuracy")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol="\u00a0%"))
    axes.margins(x=0.03)
    widen_right(axes, 0.24)
    last = points(picked[-1]["accuracy"])
    axes.set_xticks(range(1, len(last) + 1, 1 if len(last) <= 10 else 2))
    label_ends(axes, [end for end in ends if not np.isnan(end[1])])
    caption = (
        f"At step {count_text(picked[-1]['step'])}, {percent_text(last[0])} of first drafts are right and "
        f"{percent_text(last[-1])} of those at position {len(last)} ({kind} samples, true tokens before the block)."
    )
    return figure, "Accuracy by position", caption


def tau_chart(report: dict[str, Any]) -> Drawn | None:
    """Simulated τ on held-out samples over steps, with the measured one as a level."""
    train = as_dict(report.get("train"))
    x, y = series(dict_rows(train.get("heldout")), "tau")
    expected_x, expected_y = series(dict_rows(train.get("steps")), "expected_acceptance")
    if not x:
        return None
    figure = new_figure()
    axes = figure.add_subplot()
    if expected_x:
        _curve(axes, expected_x, expected_y, UNTRAINED)
    axes.plot(x, y, color=TRAINED, marker="o", markersize=4.5)
    measured = number(as_dict(as_dict(as_dict(report.get("evaluate")).get("drafters")).get("trained")).get("tau"))
    caption = f"The simulated τ on held-out samples is {y[0]:.2f} at step {count_text(x[0])}"
    if len(x) > 1:
        caption += f" and {y[-1]:.2f} at step {count_text(x[-1])}"
    ends = [(x[-1], y[-1], f"held-out {y[-1]:.2f}", TRAINED)]
    if expected_x:
        ends.append((expected_x[-1], _end(expected_y), f"training {_end(expected_y):.2f}", UNTRAINED))
        caption += f"; what training samples let expect ends at {_end(expected_y):.2f}"
    if measured is not None:
        axes.plot([0, x[-1]], [measured, measured], color=THIRD, linewidth=1.4, linestyle=(0, (4, 3)), marker="")
        ends.append((x[-1], measured, f"measured {measured:.2f}", THIRD))
        caption += f"; real decoding measures {measured:.2f} (dashed)"
    axes.set_ylabel("τ, tokens per target pass")
    top = max([*y, *expected_y, measured or 1.0])
    axes.set_ylim(min([1.0, *y, *expected_y]) - 0.05 * top, 1.08 * top)
    _steps_axis(axes, right=0.33)
    label_ends(axes, ends)
    return figure, "τ during training", caption + "."


def schedule_chart(report: dict[str, Any]) -> Drawn | None:
    """Learning rate and gradient norm over steps, one above the other."""
    rows = dict_rows(as_dict(report.get("train")).get("steps"))
    found = [(name, *series(rows, name)) for name in ("lr", "grad_norm")]
    found = [item for item in found if item[1]]
    if not found:
        return None
    figure = new_figure()
    panels = np.atleast_1d(figure.subplots(len(found), 1, sharex=True))
    titles = {"lr": "learning rate", "grad_norm": "gradient norm, before clipping"}
    said = []
    for axes, (name, x, y) in zip(panels, found, strict=True):
        if name == "lr":
            axes.plot(x, y, color=TRAINED)
        else:
            _curve(axes, x, y, THIRD)
        axes.set_title(titles[name], loc="left", fontsize=10, color=AXIS)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(3))
        if name == "lr":
            axes.ticklabel_format(axis="y", style="plain")
        said.append(f"the {titles[name].split(',')[0]} peaks at {max(y):.3g} and ends at {y[-1]:.3g}")
    _steps_axis(panels[-1], right=0.02)
    return figure, "Learning rate and gradient norm", sentence(said)


def slots_chart(report: dict[str, Any]) -> Drawn | None:
    """Accuracy of single positions of the block over steps, from the first draft to the last."""
    rows = [r for r in dict_rows(as_dict(report.get("train")).get("steps")) if points(r.get("accuracy"))]
    if len(rows) < 2:
        return None
    n = min(len(row["accuracy"]) for row in rows)
    slots = sorted({round(i) for i in np.linspace(0, n - 1, min(n, len(RAMP)))})
    x = [row["step"] for row in rows]
    figure = new_figure()
    axes = figure.add_subplot()
    ends = []
    for slot, colour in zip(slots, reversed(RAMP[-len(slots) :]), strict=True):
        y = points([row["accuracy"][slot] for row in rows])
        _curve(axes, x, y, colour)
        ends.append((x[-1], _end(y), f"position {slot + 1}", INK if slot == 0 else AXIS))
    axes.set_ylabel("training accuracy")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol="\u00a0%"))
    _steps_axis(axes, right=0.3)
    label_ends(axes, [end for end in ends if not np.isnan(end[1])])
    first, last = ends[0], ends[-1]
    caption = f"At the end {percent_text(first[1])} of drafts at {first[2]} are right"
    return figure, "Accuracy of each position over steps", f"{caption}, and {percent_text(last[1])} at {last[2]}."


_SPEED = {
    "tokens_per_s": ("training tokens/s", TRAINED),
    "data_wait_share": ("share of the time spent waiting for data", UNTRAINED),
    "peak_share": ("share of the hardware's peak", THIRD),
}


def speed_chart(report: dict[str, Any]) -> Drawn | None:
    """Tokens per second, and the shares of data wait and of the hardware's peak where they are known."""
    rows = dict_rows(as_dict(report.get("train")).get("steps"))
    found = [(name, *series(rows, name)) for name in _SPEED]
    found = [item for item in found if item[1]]
    if not found:
        return None
    figure = new_figure(height=0.9 + 1.15 * len(found))
    panels = np.atleast_1d(figure.subplots(len(found), 1, sharex=True))
    said = []
    for axes, (name, x, y) in zip(panels, found, strict=True):
        title, colour = _SPEED[name]
        _curve(axes, x, y, colour)
        axes.set_title(title, loc="left", fontsize=10, color=AXIS)
        axes.set_ylim(0, 1.1 * max([*y, 1e-3]))
        axes.yaxis.set_major_locator(MaxNLocator(3))
        middle = float(np.median(y))
        if name == "tokens_per_s":
            said.append(f"the {title} are {middle:,.0f} in the middle")
        else:
            axes.yaxis.set_major_formatter(PercentFormatter(1, symbol="\u00a0%"))
            said.append(f"the {title} is {percent_text(middle)} in the middle")
    _steps_axis(panels[-1], right=0.02)
    return figure, "Speed of the training", sentence(said)


def skipped_chart(report: dict[str, Any]) -> Drawn | None:
    """Samples that gave the training nothing, by reason."""
    counts = {k: n for k, v in as_dict(as_dict(report.get("train")).get("skipped")).items() if (n := number(v))}
    if not counts:
        return None
    names = sorted(counts, key=lambda name: (-counts[name], name))
    shown = names[:MAX_REASONS]
    figure = new_figure(height=1.1 + 0.55 * len(shown))
    axes = figure.add_subplot()
    y = np.arange(len(shown))
    axes.barh(y, [counts[name] for name in shown], 0.35, color=UNTRAINED)
    for i, name in enumerate(shown):  # above its bar: reasons are long, and a phone is narrow
        axes.annotate(f"{count_text(counts[name])}  {label(name, 48)}", (0, i - 0.22), xytext=(0, 2),
                      textcoords="offset points", va="bottom", color=INK, fontsize=10)  # fmt: skip
    axes.set_ylim(len(shown) - 0.6, -0.9)
    axes.set_yticks([])
    axes.set_xlabel("samples")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    caption = f"{count_text(sum(counts.values()))} samples gave the training nothing; most of them: "
    return figure, "Samples skipped in training", f"{caption}{label(names[0], 80)}."
