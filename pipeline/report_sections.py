"""What each stage left in a run folder, read for the report: one reader per section, one plain dict each.

A reader returns None when its stage has written nothing yet. It never raises over what a run left
behind: a file that cannot be read becomes a line in `problems`, which the report shows at its top, so
that one damaged file costs one section and not the whole report.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_schema import names
from cache_schema.errors import CacheError
from cache_schema.storage import Location, Storage, is_remote, join, open_storage, read_at
from pipeline.folder import CACHE, EVALUATE, EXPORT, REJECTS, RESPONSES, STATUS, TRAIN
from pipeline.report_values import as_dict, dict_rows, finite, number, numbers, read_json
from stages.train_log import METRICS

STAGES = (
    ("generate", RESPONSES),
    ("extract", CACHE),
    ("train", TRAIN),
    ("evaluate", EVALUATE),
    ("export", EXPORT),
)
"""Stage name and the folder of the run that it fills, in the order in which they run."""

MAX_POINTS = 1000
"""Points of a training curve kept in the report; longer curves are thinned evenly, ends kept."""
HISTOGRAM_BINS = 24
DROPPED_EXAMPLES = 3


def lengths(values: npt.NDArray[np.int64]) -> dict[str, Any] | None:
    """Count, spread and histogram (whole-number bin edges, the last one exclusive) of lengths in tokens."""
    if values.size == 0:
        return None
    low, high = int(values.min()), int(values.max()) + 1
    edges = np.unique(np.linspace(low, high, min(HISTOGRAM_BINS, high - low) + 1).round().astype(np.int64))
    counts, _ = np.histogram(values, bins=edges)
    return {
        "min": low,
        "median": float(np.median(values)),
        "mean": round(float(values.mean()), 2),
        "max": high - 1,
        "total": int(values.sum()),
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
    }


Key = tuple[str, str, bool]
"""Stage, reason, and whether the samples were stored nevertheless."""


class Dropped:
    """Counts what was left out or changed, by stage and reason, with a few examples of each."""

    def __init__(self) -> None:
        self._counts: Counter[Key] = Counter()
        self._examples: dict[Key, list[dict[str, Any]]] = {}

    def add(self, stage: str, rows: Iterable[dict[str, Any]]) -> None:
        """Count rows with a `reason`; a row whose `kept` is true was stored nevertheless, e.g. shortened.

        Of the first few, `sample_id`, `source`, `line` and `detail` are kept.
        """
        for row in rows:
            key = (stage, str(row.get("reason") or "no reason given"), row.get("kept") is True)
            self._counts[key] += 1
            examples = self._examples.setdefault(key, [])
            if len(examples) < DROPPED_EXAMPLES:
                kept = {k: row[k] for k in ("source", "line", "sample_id", "detail") if row.get(k) is not None}
                examples.append(finite(kept))

    def rows(self, stage: str | None = None) -> list[dict[str, Any]]:
        """One row per stage and reason: stages in the order seen, the most frequent reason first."""
        order = {s: i for i, s in enumerate(dict.fromkeys(key[0] for key in self._counts))}
        keys = sorted(self._counts, key=lambda key: (order[key[0]], -self._counts[key], key))
        return [
            {"stage": k[0], "reason": k[1], "kept": k[2], "count": self._counts[k], "examples": self._examples[k]}
            for k in keys
            if stage in (None, k[0])
        ]

    def by_reason(self, stage: str) -> dict[str, int]:
        """Counts of one stage by reason."""
        counts: Counter[str] = Counter()
        for row in self.rows(stage):
            counts[row["reason"]] += row["count"]
        return dict(counts)


def read_responses(folder: Location, dropped: Dropped, problems: list[str]) -> dict[str, Any] | None:
    """Counts, lengths, finish reasons and categories of the committed parts; rejects by reason."""
    from cache_schema.response_format import KEPT_REASONS

    storage = open_storage(folder)
    keys = [key for key, _ in storage.list(names.COMMITS)]
    commits = [key for key in keys if key.startswith(f"{names.COMMITS}/part-") and key.endswith(".json")]
    has_rejects = storage.exists(REJECTS)
    plan = as_dict(read_json(join(folder, names.RESPONSES_JSON), problems))
    if not (commits or plan or has_rejects):
        return None
    prompt: list[npt.NDArray[np.int64]] = []
    response: list[npt.NDArray[np.int64]] = []
    finish: Counter[str] = Counter()
    categories: Counter[str] = Counter()
    if has_rejects:
        columns = ["source", "line", "sample_id", "reason", "detail"]
        dropped.add("import", _read_rows(storage, columns, problems))
    for key in commits:
        commit = as_dict(read_json(join(folder, key), problems))
        rows = dict_rows(commit.get("ledger"))
        dropped.add("generate", ({**row, "kept": row.get("reason") in KEPT_REASONS} for row in rows))
        if not commit.get("file"):
            continue
        part = _read_part(storage, names.part_key(Path(str(commit["file"])).name), problems)
        if part is None:
            continue
        prompt.append(part[0])
        response.append(part[1])
        finish.update(part[2])
        categories.update(part[3])
    return {
        "parts": len(commits),
        "parts_planned": plan.get("n_parts"),
        "samples": sum(len(p) for p in prompt),
        "samples_planned": plan.get("n_samples"),
        "prompt_tokens": lengths(np.concatenate(prompt)) if prompt else None,
        "response_tokens": lengths(np.concatenate(response)) if response else None,
        "finish_reasons": dict(finish.most_common()),
        "categories": dict(sorted(categories.items(), key=lambda item: (-item[1], item[0]))),
        "rejects": dropped.by_reason("import"),
        "ledger": dropped.by_reason("generate"),
    }


Part = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], list[str], list[str]]


def _read_part(storage: Storage, key: str, problems: list[str]) -> Part | None:
    """Prompt lengths, response lengths, finish reasons and categories of one part of the responses table."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        data = pa.BufferReader(storage.read(key))
        table = pq.read_table(data, columns=["prompt_ids", "response_ids", "finish_reason", "category"])
    except (OSError, pa.ArrowException) as error:
        where = storage.where(key)
        problems.append(f"{where}: a committed part that cannot be read ({error}); its samples are not counted")
        return None
    prompt, response = (
        np.asarray(pc.list_value_length(table[name]).fill_null(0).to_numpy(), np.int64)
        for name in ("prompt_ids", "response_ids")
    )
    finish = [str(v) for v in table["finish_reason"].to_pylist()]
    return prompt, response, finish, [v or "(none)" for v in table["category"].to_pylist()]


def _read_rows(storage: Storage, columns: list[str], problems: list[str]) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows: list[dict[str, Any]] = pq.read_table(pa.BufferReader(storage.read(REJECTS)), columns=columns).to_pylist()
    except (OSError, pa.ArrowException) as error:
        problems.append(f"{storage.where(REJECTS)}: cannot be read ({error}); the rows it holds are not counted")
        return []
    return rows


def read_cache(folder: Location, dropped: Dropped, problems: list[str]) -> dict[str, Any] | None:
    """Samples, tokens, bytes and shards of the committed part of the feature cache, and its ledger."""
    from cache_schema.marker import committed_shards, read_marker
    from cache_schema.names import CACHE_JSON
    from cache_schema.storage import open_storage
    from cache_schema.verify import describe_cache

    storage = open_storage(folder)
    if not storage.exists(CACHE_JSON):
        return None
    try:
        about = describe_cache(storage)
        absent = {*about["missing"], *about["corrupt"]}
        for shard in committed_shards(storage):
            if shard not in absent:
                dropped.add("extract", [dict(row) for row in read_marker(storage, shard).ledger])
    except (CacheError, OSError) as error:
        problems.append(f"{folder}: the cache cannot be described ({error}); its numbers are left out")
        return None
    problems += [f"{folder}: {shard} is damaged; `dflash cache verify` says how" for shard in about["corrupt"]]
    identity = about["identity"]
    return {
        "shards": about["committed_shards"],
        "shards_planned": about["planned_shards"],
        "samples": about["samples"],
        "samples_planned": about["planned_samples"],
        "tokens": about["tokens"],
        "bytes": about["bytes"],
        "bytes_per_token": round(about["bytes"] / about["tokens"], 1) if about["tokens"] else None,
        "layer_ids": identity["layer_ids"],
        "feature_dtype": identity["feature_dtype"],
        "target": identity["target_name"],
        "fingerprint": about["fingerprint"],
        "ledger": dropped.by_reason("extract"),
    }


def read_metrics(path: Location, problems: list[str]) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl, one per (kind, step), in order of step.

    A run that was killed leaves a torn last line, which is passed over; a step that was done again after
    a resume counts once, as it was done last.
    """
    try:
        lines = read_at(path).splitlines()
    except FileNotFoundError:
        return []
    rows: dict[tuple[str, float], dict[str, Any]] = {}
    for i, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = as_dict(finite(json.loads(line)))
        except (ValueError, RecursionError) as error:
            if i < len(lines):
                problems.append(f"{path}, line {i}: cannot be read as JSON ({error}); the line is left out")
            continue
        step = number(row.get("step"))
        if step is not None:
            rows[str(row.get("kind")), step] = row
    return sorted(rows.values(), key=lambda row: (row["step"], str(row.get("kind"))))


def read_train(folder: Location, problems: list[str]) -> dict[str, Any] | None:
    """The training curves, and the last value of each."""
    rows = read_metrics(join(folder, METRICS), problems)
    if not rows:
        return None
    steps = [row for row in rows if row.get("kind") == "step"]
    heldout = [row for row in rows if row.get("kind") == "heldout"]
    names = ("step", "epoch", "loss", "lr", "grad_norm", "accuracy", "tokens_per_s", "data_wait_s", "seconds")
    seconds = [s for row in steps if (s := number(row.get("seconds"))) is not None]
    waits = [s for row in steps if (s := number(row.get("data_wait_s"))) is not None]
    return {
        "last_step": rows[-1]["step"],
        "steps_logged": len(steps),
        "steps": [_metrics(row, names) for row in _thin(steps)],
        "heldout": [_metrics(row, ("step", "loss", "accuracy", "tau", "samples")) for row in _thin(heldout)],
        "logged_step_seconds": round(sum(seconds), 3),
        "logged_data_wait_seconds": round(sum(waits), 3),
    }


def _metrics(row: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {n: numbers(row.get(n)) if n == "accuracy" else number(row.get(n)) for n in names}


def _thin(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most MAX_POINTS rows, evenly spaced, the first and the last among them."""
    if len(rows) <= MAX_POINTS:
        return rows
    return [rows[i] for i in np.linspace(0, len(rows) - 1, MAX_POINTS).round().astype(int)]


def read_stages(run: Location, problems: list[str]) -> list[dict[str, Any]]:
    """Seconds, bytes on disk and summary of each stage; `state` is finished, unfinished or not run yet."""
    stages = []
    for name, folder in STAGES:
        status = as_dict(read_json(join(run, f"{STATUS}/{name}.json"), problems))
        size = folder_bytes(join(run, folder))
        stages.append(
            {
                "stage": name,
                "state": "finished" if status else "unfinished" if size else "not run yet",
                "seconds": number(status.get("seconds")),
                "bytes": size,
                "finished_at": status.get("finished_at"),
                "fingerprint": status.get("fingerprint"),
                "summary": as_dict(status.get("summary")),
            }
        )
    return stages


def folder_bytes(folder: Location) -> int:
    """Bytes of all files under a folder, links not followed; 0 when there is none.

    A running stage may remove files meanwhile: those count as 0.
    """
    if is_remote(folder):
        return sum(size for _, size in open_storage(folder).list())
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += Path(root, name).lstat().st_size
    return total
