"""`dflash status`: how far a run is, read from its folder or object store alone; whether it is at work or not.

Rates come from the times at which the storage says that commits were written, those of the present start of a stage
where there are two or more. Besides the small records only commit markers are read, for their ledgers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cache_schema import names
from cache_schema.errors import CacheError
from cache_schema.ledger import NON_FINITE
from cache_schema.storage import FolderStorage, Location, Storage, open_storage
from pipeline.errors import PipelineError
from pipeline.evaluate_units import PROMPTS
from pipeline.folder import CACHE, EVALUATE, RECIPE, RESPONSES, STATUS, TRAIN
from pipeline.lock import holder_of
from pipeline.recipe import STAGES
from pipeline.report_values import as_dict, number
from pipeline.run import object_of
from stages.checkpoint_names import CHECKPOINTS, STATE
from stages.train_log import METRICS

if TYPE_CHECKING:
    from pipeline.holder import Holder

RECENT = 200
"""Commits that a rate is taken from, at most."""
MAX_MARKERS = 5000
"""Markers that are read from an object store for their ledgers; of more, what was dropped is not counted."""
TAIL_BYTES = 64 << 10
"""Of `metrics.jsonl`, from its end."""


@dataclass(frozen=True, slots=True)
class _Work:
    """How far a stage is, by what it has committed.

    Attributes:
        unit: what is counted.
        done: units.
        planned: units of the whole stage; None if nothing tells.
        times: when they were committed.
        more: what else there is to say.
        damaged: records that cannot be read.
    """

    unit: str
    done: int
    planned: int | None
    times: Sequence[float]
    more: dict[str, Any]
    damaged: Sequence[str] = ()


def collect_status(location: Location) -> dict[str, Any]:
    """How far each stage of a run is, ready for JSON.

    Args:
        location: the run folder, or its URL.

    Returns:
        `run`, `name`, `held_by` (None when nobody is at work), `damaged` (the recipe, if it is), and `stages`: one
        dict each, with `stage`, `state` (`done`, `running`, `killed`, `failed`, `damaged`, `begun`, `not begun`),
        `unit`, `done`, `planned`, `per_s`, `left_s`, `idle_s` (since the last commit), `summary`, `failure`, `damaged`
        (records that cannot be read), and what is particular to the stage.

    Raises:
        PipelineError: there is no run.
        OSError: as the storage gave it.
    """
    storage = open_storage(location)
    damaged: list[str] = []
    recipe = _record(storage, RECIPE, damaged)
    times = dict(storage.written(STATUS))
    if not recipe and not times and not damaged:
        raise PipelineError(f"{storage.where()} holds no run: neither {RECIPE} nor {STATUS}/; check the path or URL")
    holder = holder_of(storage)
    return {
        "run": storage.where(),
        "name": recipe.get("name"),
        "held_by": holder.to_json() | {"text": str(holder)} if holder is not None else None,
        "damaged": damaged,
        "stages": [_stage(storage, stage, recipe, times, holder) for stage in STAGES],
    }


def _stage(
    storage: Storage, stage: str, recipe: dict[str, Any], times: dict[str, float], holder: Holder | None
) -> dict[str, Any]:
    kinds, damaged = ("", ".running", ".failed"), list[str]()
    done, running, failed = (_record(storage, f"{STATUS}/{stage}{kind}.json", damaged) for kind in kinds)
    began = times.get(f"{STATUS}/{stage}.running.json")
    work = _WORK[stage](storage, recipe, running, as_dict(done.get("summary")))
    if running:  # of an earlier driver, if it began before the present one took hold
        mine = holder is not None and str(running.get("started_at")) >= holder.since
        state = "running" if mine else "killed"
    else:
        untold = "damaged" if damaged else "begun" if work.done else "not begun"
        state = "done" if done else "failed" if failed else untold
    per_s = work.more.pop("per_s", None) or _rate(work.times, began)
    left = work.planned - work.done if work.planned is not None else None
    return {
        "stage": stage,
        "state": state,
        "unit": work.unit,
        "done": work.done,
        "planned": work.planned,
        "per_s": per_s,
        "left_s": left / per_s if state == "running" and left is not None and per_s else None,
        "idle_s": round(max(0.0, time.time() - max(work.times)), 1) if work.times else None,
        "seconds": number(done.get("seconds")),
        "finished_at": done.get("finished_at"),
        "summary": as_dict(done.get("summary")),
        "failure": failed or None,
        "damaged": [*damaged, *work.damaged],
        **work.more,
    }


def _record(storage: Storage, key: str, damaged: list[str]) -> dict[str, Any]:
    """A JSON object, empty if it is missing; one that is damaged is noted."""
    try:
        found = object_of(storage.read(key))
    except FileNotFoundError:
        return {}
    if found is None:
        damaged.append(storage.where(key))
    return found or {}


def _rate(times: Sequence[float], began: float | None) -> float | None:
    """Units per second: of the present start, else of the last stretch; None without two commits."""
    found = sorted(times)
    mine = [t for t in found if began is not None and t >= began]
    recent = (mine if len(mine) > 1 else found)[-RECENT:]
    if len(recent) < 2 or recent[-1] <= recent[0]:
        return None
    return (len(recent) - 1) / (recent[-1] - recent[0])


# --- each stage's own ---------------------------------------------------------------------------------


def _generate(storage: Storage, _recipe: Any, _running: Any, summary: dict[str, Any]) -> _Work:
    from cache_schema.responses import KEPT_REASONS, ResponsesTable

    table = storage.below(RESPONSES)
    times = _commits(table, "part-")
    damaged: list[str] = []
    plan = _record(table, names.RESPONSES_JSON, damaged)

    def ledger() -> list[str]:
        return [row["reason"] for row in ResponsesTable.open(table, require_complete=False).ledger]

    reasons = _ledger(table, len(times), ledger, damaged)
    dropped = sum(r not in KEPT_REASONS for r in reasons) if reasons is not None else summary.get("dropped")
    return _Work("parts", len(times), _whole(plan.get("n_parts")), times, {"dropped": dropped}, damaged)


def _extract(storage: Storage, recipe: dict[str, Any], _running: Any, _summary: Any) -> _Work:
    from cache_schema.marker import committed_shards, read_markers

    path = as_dict(recipe.get("cache")).get("path")
    cache = open_storage(path) if isinstance(path, str) else storage.below(CACHE)
    times, damaged = _commits(cache, "shard-"), list[str]()

    def ledger() -> list[str]:
        markers = read_markers(cache, committed_shards(cache))
        return [row["reason"] for m in markers.values() for row in m.ledger if not row["kept"]]

    reasons = _ledger(cache, len(times), ledger, damaged)
    more: dict[str, Any] = {"cache": cache.where(), "quarantined": None, "dropped": None}
    if reasons is not None:
        more["quarantined"] = reasons.count(NON_FINITE)
        more["dropped"] = len(reasons) - reasons.count(NON_FINITE)
    return _Work("shards", len(times), _n_shards(cache, damaged), times, more, damaged)


def _train(storage: Storage, _recipe: Any, running: dict[str, Any], summary: dict[str, Any]) -> _Work:
    folder = storage.below(TRAIN)
    # A checkpoint counts when its `state.json` is there, which comes last.
    written = {key.split("/")[1]: at for key, at in folder.written(CHECKPOINTS) if key.endswith(f"/{STATE}")}
    steps = sorted(int(name.removeprefix("step-")) for name in written if name.removeprefix("step-").isdecimal())
    damaged: list[str] = []
    rows = _last_rows(folder, damaged)
    logged = [row for row in rows if row.get("kind") == "step"]
    looks = [row for row in rows if row.get("kind") == "heldout"]
    done = max([*steps[-1:], *(int(row["step"]) for row in logged[-1:])], default=0)
    more = {
        "newest_checkpoint": steps[-1] if steps else None,
        "metrics": _brief(logged[-1], ("step", "loss", "expected_acceptance", "tokens_per_s")) if logged else None,
        "heldout": _brief(looks[-1], ("step", "loss", "tau")) if looks else None,
        "per_s": _steps_per_s(logged),
    }
    planned = _whole(running.get("planned") or summary.get("steps"))
    return _Work("steps", done, planned, list(written.values()), more, damaged)


def _evaluate(storage: Storage, _recipe: Any, running: dict[str, Any], _summary: Any) -> _Work:
    times = [at for _, at in storage.below(EVALUATE).written(PROMPTS)]
    return _Work("units", len(times), _whole(running.get("planned")), times, {})


def _export(_storage: Storage, _recipe: Any, _running: Any, summary: dict[str, Any]) -> _Work:
    return _Work("exports", int(bool(summary)), 1, [], {})


_WORK: dict[str, Callable[[Storage, dict[str, Any], dict[str, Any], dict[str, Any]], _Work]] = {
    "generate": _generate, "extract": _extract, "train": _train, "evaluate": _evaluate, "export": _export,
}  # fmt: skip


def _commits(storage: Storage, start: str) -> list[float]:
    prefix = f"{names.COMMITS}/{start}"
    return [at for key, at in storage.written(names.COMMITS) if key.startswith(prefix) and key.endswith(".json")]


def _ledger(
    storage: Storage, n_markers: int, read: Callable[[], list[str]], damaged: list[str]
) -> list[str] | None:
    """The reasons in all markers; None where they are too many to be read, or damaged."""
    if not n_markers:
        return []
    if n_markers > MAX_MARKERS and not isinstance(storage, FolderStorage):
        return None
    try:
        return read()
    except CacheError as error:
        if not damaged:  # of what this one would be told again
            damaged.append(str(error))
        return None


def _n_shards(cache: Storage, damaged: list[str]) -> int | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        shards = pq.read_table(pa.BufferReader(cache.read(names.PLAN)), columns=["shard"])["shard"]
        return int(shards[-1].as_py()) + 1 if len(shards) else 0
    except FileNotFoundError:
        return None
    except (pa.ArrowException, KeyError):
        damaged.append(cache.where(names.PLAN))
        return None


def _last_rows(folder: Storage, damaged: list[str]) -> list[dict[str, Any]]:
    """The last whole rows of `metrics.jsonl`; what is at either end may be cut."""
    try:
        reader = folder.open(METRICS)
        text = bytearray(min(TAIL_BYTES, reader.size))
        reader.read_into(reader.size - len(text), [text])
    except (FileNotFoundError, EOFError):
        return []
    lines = text.split(b"\n")[reader.size > len(text) :]
    rows = [_row(line) for line in lines]
    if any(line and row is None for line, row in zip(lines[:-1], rows[:-1], strict=True)):
        damaged.append(folder.where(METRICS))
    return [row for row in rows if row is not None]


def _row(line: bytearray) -> dict[str, Any] | None:
    try:
        row = as_dict(json.loads(line))
    except (ValueError, RecursionError):
        return None
    whole = number(row.get("step")) is not None and number(row.get("seconds", 0)) is not None
    return row if whole else None


def _steps_per_s(rows: list[dict[str, Any]]) -> float | None:
    """Of the last start: its clock begins at zero."""
    mine: list[dict[str, Any]] = []
    for row in reversed(rows):
        if mine and row.get("seconds", 0) >= mine[-1].get("seconds", 0):
            break
        mine.append(row)
    if len(mine) < 2:
        return None
    last, first = mine[0], mine[-1]
    seconds = last["seconds"] - first["seconds"]
    return float((last["step"] - first["step"]) / seconds) if seconds > 0 else None


def _brief(row: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    return {name: row.get(name) for name in fields}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
