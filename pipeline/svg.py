"""The drawing surface of the report's charts: matplotlib figures as inline SVG that follows the page's theme.

Matplotlib draws with stand-in colours; in the finished SVG each becomes a CSS variable of the page, so one
picture serves a light and a dark page. Text stays text: it is small, can be read out and searched.
Output is a pure function of the figure: no date, no random ids, ids unique within the page.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

INK, AXIS, GRID, CARD = "#010101", "#020202", "#030303", "#040404"
TRAINED, UNTRAINED, THIRD = "#050505", "#060606", "#070707"
RAMP = ("#080808", "#090909", "#0a0a0a", "#0b0b0b")
"""Stand-in colours; RAMP goes from faint to strong, for one thing over time."""

_VARIABLES = {
    INK: "var(--ink,#1d2733)",
    AXIS: "var(--axis,#5b6875)",
    GRID: "var(--grid,#e3e7ec)",
    CARD: "var(--card,#ffffff)",
    TRAINED: "var(--trained,#0072b2)",
    UNTRAINED: "var(--untrained,#d55e00)",
    THIRD: "var(--third,#009e73)",
    **{colour: f"var(--ramp{i})" for i, colour in enumerate(RAMP)},
}

_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": AXIS,
    "axes.labelsize": 10,
    "axes.edgecolor": AXIS,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": AXIS,
    "ytick.color": AXIS,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "lines.linewidth": 2,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "path.simplify": True,
    "text.parse_math": False,
}


def style() -> Any:
    """The context in which figures are made and saved; it leaves matplotlib's own settings as they were."""
    return matplotlib.rc_context(_STYLE)


def new_figure(width: float = 4.8, height: float = 2.9) -> Figure:
    """An empty figure, inches wide and high (72 units of the SVG each), laid out to fit its labels."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def inline_svg(figure: Figure, name: str, alt: str) -> str:
    """The figure as an `<svg>` element for an HTML page; call within `style()`.

    Args:
        figure: what to draw.
        name: prefix of every id inside, so that several pictures can share a page.
        alt: what the picture shows, for those who cannot see it.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}), warnings.catch_warnings():
        # The page's own fonts draw the text, so glyphs that matplotlib's font lacks are no fault.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style type=\"text/css\">.*?</style>", "", svg, flags=re.S)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\1{name}-", svg)
    svg = re.sub(r"'DejaVu Sans'(, [^;\"]+)?", "var(--font,sans-serif)", svg)
    svg = re.sub(r"#0[0-9a-f]0[0-9a-f]0[0-9a-f]\b", lambda m: _VARIABLES.get(m.group(), m.group()), svg)
    view = re.search(r'viewBox="([^"]+)"', svg)
    opening = f'<svg viewBox="{view.group(1) if view else "0 0 360 209"}" role="img" aria-label="{html.escape(alt)}" '
    opening += 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return opening + re.sub(r"\n\s*\n", "\n", svg[svg.index(">") + 1 :]).strip()


def label_ends(axes: Axes, labels: list[tuple[float, float, str, str]], gap: float = 0.09) -> None:
    """Write a label at the right of each line's end (x, y, text, colour), pushed apart where they would touch.

    `gap` is the least distance of two labels as a share of the axes' height. Call after the limits are set.
    """
    low, high = axes.get_ylim()
    least = gap * (high - low)
    placed = low - least
    for x, y, text, colour in sorted(labels, key=lambda item: item[1]):
        placed = max(y, placed + least)
        axes.annotate(
            text,
            (x, placed),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=10,
            fontweight="bold",
            annotation_clip=False,
        )


def widen_right(axes: Axes, share: float) -> None:
    """Make room of `share` of the width at the right, for labels."""
    low, high = axes.get_xlim()
    axes.set_xlim(low, low + (high - low) / (1 - share))
