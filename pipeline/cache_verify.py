"""`dflash cache verify`: every byte of every shard, several processes at a time, and ids against the responses."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from cache_schema.checks import require_same_ids
from cache_schema.errors import CacheError
from cache_schema.reader import FeatureCache
from cache_schema.storage import FolderStorage, Location
from cache_schema.survey import Survey, survey
from cache_schema.verify import ShardReport, cache_problems, verify_shard
from pipeline.cache_progress import byte_progress
from pipeline.cache_samples import shard_names
from pipeline.errors import PipelineError

_ONE_PROCESS_BYTES = 256_000_000
"""What one process has done before others have started."""


def verify(
    cache: Location, shards: Sequence[str] = (), workers: int | None = None, responses: Path | None = None
) -> dict[str, Any]:
    """Check a cache, or some of its shards, completely.

    Args:
        cache: folder or URL.
        shards: as `cache_samples.shard_names` reads them; none means all.
        workers: processes; None takes one for each core, and one for a small cache.
        responses: responses table to compare ids and masks with; None takes the one beside a local cache.

    Returns:
        What was found, ready for JSON. A cache whose cache.json or plan is damaged is a finding too; a shard that
        was evicted to make room is none.

    Raises:
        CacheError: a shard that the plan does not know was asked for.
        PipelineError: a process was killed.
        OSError: as the storage gave it.
    """
    began = time.monotonic()
    try:
        found = survey(cache)
    except CacheError as error:
        return _nothing_to_read(cache, str(error))
    evicted = set(found.evicted)
    chosen = shard_names(found.plan.shards(), shards) or [s for s in found.plan.shards() if s not in evicted]
    reports = verify_shards(found, chosen, workers)
    elapsed_s = time.monotonic() - began
    problems = [f"{r.shard}: {r.status}: {p}" for r in reports for p in r.problems]
    problems += [] if shards else cache_problems(found.storage, found.plan)
    table = responses or _beside(found)
    if table is not None and not problems:
        problems += _compare_ids(found, chosen, table)
    size = sum(found.markers[r.shard].bytes for r in reports if r.shard in found.markers)
    return {
        "ok": not problems,
        "path": found.storage.url,
        "shards": {status: sum(r.status == status for r in reports) for status in ("ok", "missing", "corrupt")},
        "corrupt": [r.shard for r in reports if r.status == "corrupt"],
        "missing": [r.shard for r in reports if r.status == "missing"],
        "evicted": found.evicted,
        "bytes": size,
        "seconds": round(elapsed_s, 3),
        "mb_per_s": round(size / elapsed_s / 1e6, 1) if elapsed_s > 0 else None,
        "compared_with": str(table) if table is not None else None,
        "problems": problems,
    }


def _nothing_to_read(cache: Location, problem: str) -> dict[str, Any]:
    return {
        "ok": False, "path": str(cache), "shards": {"ok": 0, "missing": 0, "corrupt": 0}, "corrupt": [], "missing": [],
        "evicted": [], "bytes": 0, "seconds": 0.0, "mb_per_s": None, "compared_with": None, "problems": [problem],
    }  # fmt: skip


def verify_shards(found: Survey, shards: Sequence[str], workers: int | None = None) -> list[ShardReport]:
    """Check shards of a cache, in their order.

    Raises:
        PipelineError: a process was killed.
        OSError: as the storage gave it.
    """
    size = {shard: found.markers[shard].bytes if shard in found.markers else 0 for shard in shards}
    total = sum(size.values())
    n = workers if workers is not None else (_cores() if total > _ONE_PROCESS_BYTES else 1)
    # The memory of one process is no other's.
    n = 1 if found.storage.url.startswith("memory://") else min(n, max(1, len(shards)))
    reports: dict[str, ShardReport] = {}
    with byte_progress(total, "verify") as add:
        check = _in_processes if n > 1 else _in_this_process
        for report in check(found, shards, n):
            reports[report.shard] = report
            add(size[report.shard])
    return [reports[shard] for shard in shards]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_this_process(found: Survey, shards: Sequence[str], _n: int) -> Iterator[ShardReport]:
    for shard in shards:
        yield verify_shard(found.storage, found.identity, found.plan.samples(shard), shard)


def _in_processes(found: Survey, shards: Sequence[str], n: int) -> Iterator[ShardReport]:
    # Spawned, not forked: a fork copies whatever state torch's, Arrow's and obstore's threads were in.
    with ProcessPoolExecutor(n, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = [
            pool.submit(verify_shard, found.storage, found.identity, found.plan.samples(shard), shard)
            for shard in shards
        ]
        try:
            for future in as_completed(running):
                yield future.result()
        except BrokenProcessPool as error:
            raise PipelineError(
                "a process that checks shards was killed (out of memory?); use fewer with --workers"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _beside(found: Survey) -> Path | None:
    """The responses table of the run that a local cache belongs to, if there is one."""
    if not isinstance(found.storage, FolderStorage):
        return None
    table = found.storage.root.resolve().parent / "responses"
    return table if (table / "responses.json").exists() else None


def _compare_ids(found: Survey, shards: Sequence[str], responses: Path) -> list[str]:
    """Ids and masks that are not those of the responses table."""
    from cache_schema.responses import ResponsesTable

    cache = FeatureCache(found.storage, found.identity, found.plan, found.markers)
    table, problems = ResponsesTable.open(responses), list[str]()
    try:
        for shard in (s for s in shards if s in found.markers):
            problems += _compare_shard(cache, shard, table)
    except CacheError as error:
        problems.append(str(error))
    return problems


def _compare_shard(cache: FeatureCache, shard: str, table: Any) -> list[str]:
    problems: list[str] = []
    opened, where = cache.shard(shard), cache.storage.where()
    for sample_id, response in zip(opened.sample_ids, table.select(opened.sample_ids), strict=True):
        ids, mask = opened.tokens(sample_id)
        try:
            require_same_ids(sample_id, ids, response.input_ids[: len(ids)], where)
            require_same_ids(sample_id, mask, response.loss_mask[: len(ids)], f"{where} (loss mask)")
        except CacheError as error:
            problems.append(str(error))
    return problems


def _state(report: dict[str, Any]) -> str:
    if report["ok"]:
        return "ok"
    if not report["problems"]:
        return "WRONG"
    return "INCOMPLETE" if len(report["problems"]) == len(report["missing"]) else "DAMAGED"


def verify_lines(report: dict[str, Any]) -> str:
    """What `dflash cache verify` prints."""
    counts = ", ".join(f"{n} {state}" for state, n in report["shards"].items())
    counts += f", {len(report['evicted'])} evicted" if report["evicted"] else ""
    where = f"; ids and masks compared with {report['compared_with']}" if report["compared_with"] else ""
    speed = f", {report['mb_per_s']} MB/s" if report["bytes"] and report["mb_per_s"] else ""
    lines = [f"{_state(report)}: {counts}{speed}{where}"]
    if "recompute" in report:
        from pipeline.cache_recompute import recompute_lines

        lines += recompute_lines(report["recompute"])
    return "\n".join([*lines, *(f"  {p}" for p in report["problems"])])
