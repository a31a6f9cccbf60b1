"""The short, drawn summary that the terminal shows at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.report_text import (
    bytes_text,
    count_text,
    fixed_text,
    label,
    number_text,
    percent_text,
    seconds_text,
    shares,
)
from pipeline.report_values import as_dict, dict_rows, number

NAME_WIDTH = 16
BAR_WIDTH = 36
MAX_ROWS = 12


def summary_lines(report: dict[str, Any]) -> list[str]:
    """What the terminal prints of a collected report: at most 79 columns, bars of Unicode blocks, no colours."""
    lines: list[str] = []
    block = number(as_dict(report.get("evaluate")).get("block_size"))
    for title, rows in (
        (f"τ: tokens per pass of the target{f', {block:g} at most' if block else ''}", _tau(report)),
        ("τ by category, trained", _categories(report)),
        ("Cycles by tokens gained, trained", _acceptance(report)),
        ("Speed, tokens/s", _speed(report)),
        ("Time by stage", _stages(report)),
    ):
        if rows:
            lines += [title, *rows, ""]
    return [*lines, *_facts(report)]


def bar(value: float, full: float, width: int = BAR_WIDTH) -> str:
    """A bar of `width` characters at `value == full`, in steps of an eighth of a character."""
    eighths = round(8 * width * min(1.0, max(0.0, value / full))) if full > 0 else 0
    if value > 0:
        eighths = max(1, eighths)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _row(name: str, words: str, value: float, full: float) -> str:
    return f"  {label(name, NAME_WIDTH):<{NAME_WIDTH}} {words:>12}  {bar(value, full)}".rstrip()


def _drafters(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {k: as_dict(v) for k, v in as_dict(as_dict(report.get("evaluate")).get("drafters")).items()}


def _tau(report: dict[str, Any]) -> list[str]:
    found = _drafters(report)
    full = number(as_dict(report.get("evaluate")).get("block_size"))
    taus = [(name, t) for name in ("untrained", "trained") if (t := number(found.get(name, {}).get("tau"))) is not None]
    return [_row(name, fixed_text(tau), tau, full or max(t for _, t in taus)) for name, tau in taus]


def _categories(report: dict[str, Any]) -> list[str]:
    rows = as_dict(_drafters(report).get("trained", {}).get("by_category"))
    taus = [(name, t) for name, row in rows.items() if (t := number(as_dict(row).get("tau"))) is not None]
    taus.sort(key=lambda item: (-item[1], item[0]))
    lines = [_row(name, fixed_text(tau), tau, taus[0][1]) for name, tau in taus[:MAX_ROWS]]
    return lines + ([f"  … and {len(taus) - MAX_ROWS} more in the report"] if len(taus) > MAX_ROWS else [])


def _acceptance(report: dict[str, Any]) -> list[str]:
    counts = _drafters(report).get("trained", {}).get("acceptance_histogram")
    if not isinstance(counts, list) or not counts:
        return []
    found = shares(counts)
    return [_row(str(i), percent_text(s), s, max(found)) for i, s in enumerate(found, start=1)]


def _speed(report: dict[str, Any]) -> list[str]:
    head = as_dict(report.get("headline"))
    plain, speculative = number(head.get("plain_tokens_per_s")), number(head.get("tokens_per_s"))
    if plain is None or speculative is None:
        return []
    full, speedup = max(plain, speculative), number(head.get("speedup"))
    times = f"{fixed_text(speedup)}×  " if speedup is not None else ""
    return [
        _row("plain", number_text(plain, 3), plain, full),
        _row("speculative", times + number_text(speculative, 3), speculative, full),
    ]


def _stages(report: dict[str, Any]) -> list[str]:
    rows = dict_rows(report.get("stages"))
    full = max([number(r.get("seconds")) or 0.0 for r in rows], default=0.0)
    lines = []
    for row in rows:
        seconds = number(row.get("seconds"))
        words = seconds_text(seconds) if seconds is not None else str(row.get("state"))
        lines.append(_row(str(row.get("stage")), words, seconds or 0.0, full))
    return lines


def _facts(report: dict[str, Any]) -> list[str]:
    """The lines without a bar: identity of outputs, cache, what was dropped, problems, where the report lies."""
    head, cache = as_dict(report.get("headline")), report.get("cache")
    lines = []
    if number(head.get("identical")) is not None:
        ties = number(head.get("ties")) or 0
        same = head["identical"] + ties == head.get("prompts")
        lines.append(
            f"Identical  {count_text(head['identical'])} of {count_text(number(head.get('prompts')))} outputs equal "
            f"plain decoding, token for token{'' if same else ' — NOT ALL'}"
        )
        if ties:
            lines.append(f"           {count_text(ties)} part at a tie within rounding")
    else:
        lines.append("Identical  evaluation not run yet")
    if cache:
        lines.append(
            f"Cache      {bytes_text(cache['bytes'])}, {count_text(cache['tokens'])} tokens of "
            f"{count_text(cache['samples'])} samples in {count_text(cache['shards'])} shards"
        )
    else:
        lines.append("Cache      not run yet")
    lines += _dropped_lines(report)
    if report.get("problems"):
        lines.append(f"Problems   {len(report['problems'])} files could not be read; the report names them")
    lines.append(f"Report     {label(Path(str(report.get('run'))) / 'report.html', 4096)}")
    return lines


def _dropped_lines(report: dict[str, Any]) -> list[str]:
    rows = dict_rows(report.get("dropped"))
    if not rows:
        return ["Dropped    nothing"]
    dropped, kept = (sum(r["count"] for r in rows if r["kept"] is k) for k in (False, True))
    lines = [f"Dropped    {count_text(dropped)}" + (f", and {count_text(kept)} kept but changed" if kept else "")]
    lines += [f"  {row['count']:>7,}  {label(row['stage'], 10)}: {label(row['reason'], 50)}" for row in rows[:MAX_ROWS]]
    return lines + ([f"  … and {len(rows) - MAX_ROWS} more reasons in the report"] if len(rows) > MAX_ROWS else [])
