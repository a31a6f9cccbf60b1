"""What `dflash cache gc`, `copy` and `export` print."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from pipeline.cache_view import render, table
from pipeline.report_text import bytes_text, seconds_text


def gc_table(found: dict[str, Any]) -> str:
    """`dflash cache gc`."""
    if not found["items"]:
        return f"{found['path']}: nothing lies about"
    rows = [
        [
            item["key"],
            item["kind"],
            item["state"],
            item["objects"],
            bytes_text(item["bytes"]),
            seconds_text(item["age_s"]),
            item["reason"],
        ]
        for item in found["items"]
    ]
    counts = {state: sum(item["state"] == state for item in found["items"]) for state in ("old", "young", "deleted")}
    foot = f"{found['path']}: "
    if counts["deleted"]:
        foot += f"deleted {counts['deleted']} items, {bytes_text(found['deleted_bytes'])}"
    else:
        foot += f"{counts['old']} items, {bytes_text(found['old_bytes'])} could go (--delete)"
    if counts["young"]:
        foot += f"; {counts['young']} younger than {seconds_text(found['older_than_s'])} left alone"
    columns = ["key", "kind", "state", "objects", "bytes", "age", "note"]
    return render(table(columns, rows), Text(""), Text(foot))


def copy_lines(found: dict[str, Any]) -> str:
    """`dflash cache copy`."""
    lines = [
        f"{found['destination']}: {len(found['copied'])} shards copied and verified ({bytes_text(found['bytes'])}), "
        f"{len(found['present'])} were there already"
    ]
    if found["not_in_source"]:
        lines.append(f"{len(found['not_in_source'])} shards are not in {found['source']} (yet); copy again later")
    lines += [f"NOT COPIED {shard}: {why}" for shard, why in found["failed"].items()]
    return "\n".join(lines)


def export_lines(found: dict[str, Any]) -> str:
    """`dflash cache export`."""
    line = f"{found['out']}: {len(found['written'])} files written, {bytes_text(found['bytes'])}"
    return line + (f"; {len(found['present'])} were there already" if found["present"] else "")
