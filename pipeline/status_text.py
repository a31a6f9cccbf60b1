"""The plain lines that `dflash status` prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.report_text import clean, count_text, number_text, seconds_text


def status_lines(status: dict[str, Any]) -> list[str]:
    """One line on the run, one or more on each stage."""
    held = status["held_by"]
    who = f"held by {held['text']}" if held else "nobody is at work"
    lines = [f"{status['run']} ({status['name'] or 'no recipe yet'}): {who}"]
    lines += [f"damaged: {text}" for text in status["damaged"]]
    for stage in status["stages"]:
        first, *more = _stage_lines(stage)
        lines += [f"{stage['stage']:<9} {stage['state']:<10} {first}".rstrip(), *(f"{'':<21}{line}" for line in more)]
    return [str(clean(line)) for line in lines]


def _stage_lines(stage: dict[str, Any]) -> Iterator[str]:
    parts = [_count(stage)]
    if stage["state"] == "running" and stage["per_s"]:
        parts.append(f"{number_text(stage['per_s'], 3)} {stage['unit']}/s")
    if stage["left_s"] is not None:
        parts.append(f"{seconds_text(stage['left_s'])} left")
    if stage["state"] in ("running", "killed") and stage["idle_s"] is not None:
        parts.append(f"last commit {seconds_text(stage['idle_s'])} ago")
    if stage["state"] == "done":
        parts.append(f"in {seconds_text(stage['seconds'])}, finished at {stage['finished_at']}")
    parts += [f"{count_text(stage[name])} {name}" for name in ("quarantined", "dropped") if stage.get(name)]
    yield ", ".join(part for part in parts if part)
    if stage.get("newest_checkpoint") is not None:
        yield f"newest checkpoint: step {stage['newest_checkpoint']}"
    for name, what in (("metrics", "logged"), ("heldout", "held out")):
        if stage.get(name):
            found = {key.replace("_", " "): value for key, value in stage[name].items() if value is not None}
            yield f"{what}: " + ", ".join(f"{key} {number_text(value)}" for key, value in found.items())
    for text in stage["damaged"]:
        yield f"damaged: {text}"
    failure = stage["failure"]
    if failure:
        yield (
            f"attempt {failure.get('attempt')} failed at {failure.get('failed_at')} with exit code "
            f"{failure.get('exit_code')}: {failure.get('error')}"
        )


def _count(stage: dict[str, Any]) -> str:
    if stage["state"] == "not begun" or stage["unit"] == "exports":
        return ""
    planned = f" of {count_text(stage['planned'])}" if stage["planned"] is not None else ""
    return f"{count_text(stage['done'])}{planned} {stage['unit']}"
