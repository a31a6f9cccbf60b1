"""`dflash cache repair`: takes damaged shards out of a run's cache and makes them, and missing ones, again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cache_schema import names
from cache_schema.errors import CacheError
from cache_schema.marker import decode_marker, discard
from cache_schema.survey import Survey, survey
from cache_schema.verify import ShardReport, cache_problems
from pipeline.cache_verify import verify_shards
from pipeline.errors import PipelineError

Say = Callable[[str], None]


def repair(
    recipe: Path, overrides: Sequence[str], say: Say, *, dry_run: bool = False, workers: int | None = None
) -> dict[str, Any]:
    """Check every shard of a run's cache, and have the extract stage make again what is damaged or missing.

    Holds the run folder, so that no other driver is at work meanwhile. Shards that were evicted to make room are
    left to the rolling run. Killed at any moment, the same call goes on: a shard that was taken out is missing.

    Args:
        recipe: of the run.
        overrides: settings, as for every stage.
        say: where plain lines for the user go.
        dry_run: only say what would be done.
        workers: processes that check.

    Returns:
        What was found and done, ready for JSON.

    Raises:
        CacheError: no cache, or cache.json or plan is damaged (no shard can be told from another without them).
        PipelineError: the run is in use, or what was made is damaged again.
        DFlashError: as the extract stage.
    """
    from pipeline.recipe import load_recipe
    from pipeline.run import Run
    from pipeline.steps import STEPS

    run = Run(load_recipe(recipe, overrides), say)
    with run.folder.locked():
        found = survey(run.cache)
        evicted = set(found.evicted)
        reports = verify_shards(found, [s for s in found.plan.shards() if s not in evicted], workers)
        damaged = [r for r in reports if r.status == "corrupt"]
        missing = [r.shard for r in reports if r.status == "missing"]
        _tell(say, damaged, missing, dry_run)
        result: dict[str, Any] = {
            "cache": found.storage.url,
            "ok_shards": sum(r.status == "ok" for r in reports),
            "damaged": {r.shard: r.problems for r in damaged},
            "missing": missing,
            "evicted": found.evicted,
            "dry_run": dry_run,
            "made": [],
            "problems": [],
        }
        if not dry_run:
            again = [*(r.shard for r in damaged), *missing]
            for report in damaged:
                _take_out(say, found, report.shard)
            if again:
                STEPS["extract"](run)
                result["made"] = _require_whole(run.cache, again, workers, run.recipe.cache.max_bytes is not None)
            _forget_damaged_records(say, found)
        result["problems"] = cache_problems(found.storage, found.plan)
    for problem in result["problems"]:
        say(f"repair: not mended: {problem}")
    return result


def _tell(say: Say, damaged: list[ShardReport], missing: list[str], dry_run: bool) -> None:
    for report in damaged:
        say(f"repair: {report.shard} is damaged: {report.problems[0]}")
    if missing:
        say(f"repair: {len(missing)} shards are missing: {', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}")
    if not damaged and not missing:
        say("repair: every shard is there and whole, nothing to do")
    elif dry_run:
        say(f"repair: would take out {len(damaged)} shards and make {len(damaged) + len(missing)} (dry run)")


def _take_out(say: Say, found: Survey, shard: str) -> None:
    group = discard(found.storage, shard)
    rest = f"removed {group}" if group else "its marker does not tell its group; `dflash cache gc` finds that"
    say(f"repair: took {shard} out: {rest}")


def _forget_damaged_records(say: Say, found: Survey) -> None:
    """Remove what is kept of evicted shards where it is damaged; it is a record only, no shard hangs on it."""
    for key, _ in list(found.storage.list(names.EVICTED)):
        shard = key.removeprefix(f"{names.EVICTED}/").removesuffix(".json")
        try:
            decode_marker(found.storage.read(key), shard, key)
        except CacheError:
            found.storage.delete(key)
            say(f"repair: removed {key}, a damaged record of an evicted shard")


def _require_whole(cache: str, shards: list[str], workers: int | None, rolling: bool) -> list[str]:
    """Check what was made; a rolling run makes some shards only when training comes to them.

    Returns:
        The shards that are there now.

    Raises:
        PipelineError: a shard is damaged or missing again.
    """
    reports = verify_shards(survey(cache), sorted(shards, key=names.shard_index), workers)
    bad = [r for r in reports if r.status == "corrupt" or (r.status == "missing" and not rolling)]
    if bad:
        raise PipelineError(
            f"{bad[0].shard} was made again and is {bad[0].status} again: {bad[0].problems[0]}; look at the disk of "
            f"{cache} before you trust it with more"
        )
    return [r.shard for r in reports if r.status == "ok"]


def repair_lines(result: dict[str, Any]) -> str:
    """What `dflash cache repair` prints."""
    again = len(result["damaged"]) + len(result["missing"])
    if result["dry_run"]:
        return f"{result['cache']}: {result['ok_shards']} shards are whole, {again} would be made again"
    text = f"{result['cache']}: {result['ok_shards']} shards were whole, {len(result['made'])} were made again"
    left = again - len(result["made"])
    return text + (f"; {left} are left to the rolling run (cache.max_bytes)" if left else "")
