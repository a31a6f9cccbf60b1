"""How the report words things: sizes, times, counts, and text that came from elsewhere.

Prompts, categories and reasons are other people's text. Escaping for HTML is the template's work; here
control characters go, so that no such text can steer a terminal or turn the reading direction of a page.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MISSING = "–"


def clean(value: Any) -> Any:
    """Text without control, surrogate and direction-changing characters (newline and tab stay); None as a dash.

    Anything else, markup included, is returned as it is.
    """
    if value is None:
        return MISSING
    if type(value) is not str:
        return value
    return "".join("\ufffd" if _hidden(c) else c for c in value)


def _hidden(char: str) -> bool:
    return (unicodedata.category(char) in ("Cc", "Cs") and char not in "\n\t") or (
        "\u202a" <= char <= "\u202e" or "\u2066" <= char <= "\u2069"
    )


def label(value: Any, width: int = 22) -> str:
    """Text for a chart or a terminal column: one line, cleaned, at most `width` characters."""
    text = " ".join(str(clean(value)).split()) or MISSING
    return text if len(text) <= width else text[: width - 1] + "…"


def bytes_text(n: float | None) -> str:
    """A size in decimal units: 999 B, 1.2 kB, 38.1 TB."""
    if n is None:
        return MISSING
    size, units = float(n), ["B", "kB", "MB", "GB", "TB", "PB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}" if size >= 99.95 or units[0] == "B" else f"{size:.1f} {units[0]}"


def seconds_text(seconds: float | None) -> str:
    """A duration: 0.8 s, 42 s, 3 min 05 s, 2 h 07 min."""
    if seconds is None:
        return MISSING
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def count_text(n: float | None) -> str:
    """A whole number with thousands set apart by commas."""
    return MISSING if n is None else f"{n:,.0f}"


def number_text(value: Any, digits: int = 4) -> str:
    """A number with so many significant digits, whole numbers in full; lists item by item; other things as text."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return str(clean(value))
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value == round(value) and abs(value) < 1e15 else f"{value:.{digits}g}"
    if isinstance(value, list | tuple):
        return ", ".join(number_text(v, digits) for v in value)
    return str(clean(str(value)))


def fixed_text(value: float | None, digits: int = 2) -> str:
    """A number with so many decimals."""
    return MISSING if value is None else f"{value:,.{digits}f}"


def percent_text(share: float | None, digits: int = 0) -> str:
    """A share as per cent."""
    return MISSING if share is None else f"{100 * share:.{digits}f} %"


def shares(counts: Sequence[float | None]) -> list[float]:
    """Each count's share of their sum, a missing or negative one as 0; zeros when the sum is zero."""
    whole = [max(0.0, c or 0.0) for c in counts]
    total = sum(whole)
    return [c / total if total else 0.0 for c in whole]


def line_parts(text: Any) -> tuple[str, str, str]:
    """Text as the line breaks that open it, what stands between, and those that close it; blanks go with breaks."""
    whole = str(clean(text))
    stripped = whole.strip()
    start = whole.index(stripped)
    lead, tail = whole[:start], whole[start + len(stripped) :]
    if not stripped:
        return "", "↵" if "\n" in whole else whole, whole if "\n" in whole else ""
    cut = lead.rfind("\n") + 1
    end = tail.find("\n") if "\n" in tail else len(tail)
    return lead[:cut], lead[cut:] + stripped + tail[:end], tail[end:]


def item(values: Sequence[Any], index: int) -> Any:
    """An item of a list, None past its end."""
    return values[index] if index < len(values) else None


def flatten(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """A nested dict as rows of dotted name and value, in its own order."""
    if isinstance(value, dict):
        return [row for k, v in value.items() for row in flatten(v, f"{prefix}.{k}" if prefix else str(k))]
    if isinstance(value, list) and any(isinstance(v, dict) for v in value):
        return [row for i, v in enumerate(value) for row in flatten(v, f"{prefix}[{i}]")]
    return [(prefix, number_text(value))]


FILTERS: Mapping[str, Callable[..., Any]] = {
    "bytes": bytes_text,
    "seconds": seconds_text,
    "n": count_text,
    "num": number_text,
    "fixed": fixed_text,
    "percent": percent_text,
    "shares": shares,
    "line_parts": line_parts,
    "item": item,
    "flatten": flatten,
    "label": label,
}


def sentence(parts: list[str]) -> str:
    """Parts of a caption as one sentence."""
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "."
