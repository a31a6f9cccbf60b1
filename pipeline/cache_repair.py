"""`dflash cache repair`: takes damaged shards out of a run's cache and makes them, and missing ones, again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache_schema import names
from cache_schema.errors import CacheError
from cache_schema.identity import require_same
from cache_schema.marker import decode_marker, discard
from cache_schema.storage import open_storage
from cache_schema.survey import Survey, survey
from cache_schema.verify import ShardReport, cache_problems
from pipeline.cache_verify import verify_shards
from pipeline.errors import PipelineError
from pipeline.folder import HELDOUT_CACHE

if TYPE_CHECKING:
    from pipeline.run import Run

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Checked:
    """One cache of a run, and what checking its shards has found."""

    found: Survey
    reports: list[ShardReport]
    label: str
    """Before the name of a shard, in lines for the user."""
    may_wait: bool
    """Whether a missing shard may stay so: a rolling run makes it when training comes to it."""

    @property
    def damaged(self) -> list[ShardReport]:
        return [r for r in self.reports if r.status == "corrupt"]

    @property
    def missing(self) -> list[str]:
        return [r.shard for r in self.reports if r.status == "missing"]

    @property
    def again(self) -> list[str]:
        """Shards to be made."""
        return [*(r.shard for r in self.damaged), *self.missing]

    def result(self) -> dict[str, Any]:
        return {
            "cache": self.found.storage.url,
            "ok_shards": sum(r.status == "ok" for r in self.reports),
            "damaged": {r.shard: r.problems for r in self.damaged},
            "missing": self.missing,
            "made": [],
        }


def repair(
    recipe: Path, overrides: Sequence[str], say: Say, *, dry_run: bool = False, workers: int | None = None
) -> dict[str, Any]:
    """Check every shard of a run's cache, and have the extract stage make again what is damaged or missing.

    Holds the run folder, so that no other driver is at work meanwhile. Shards that were evicted to make room are
    left to the rolling run; its cache of held-out samples is checked too. Killed at any moment, the same call goes
    on: a shard that was taken out is missing. Nothing is taken out that this recipe would not make again.

    Args:
        recipe: of the run.
        overrides: settings, as for every stage.
        say: where plain lines for the user go.
        dry_run: only say what would be done.
        workers: processes that check.

    Returns:
        What was found and done, ready for JSON; of the held-out cache under `heldout`, None without one.

    Raises:
        FingerprintMismatch: the cache is not what this recipe makes; names each field.
        CacheError: no cache, or cache.json or plan is damaged (no shard can be told from another without them); or
            the responses it was made of are gone.
        PipelineError: the run is in use, or what was made is damaged again.
        DFlashError: as the extract stage.
    """
    from pipeline.recipe import load_recipe
    from pipeline.run import Run
    from pipeline.steps import STEPS

    run = Run(load_recipe(recipe, overrides), say)
    with run.folder.locked():
        caches = _check(run, workers)
        main = caches[0].found
        _tell(say, caches, dry_run)
        results = [c.result() for c in caches]
        if not dry_run:
            for checked in caches:
                _take_out(say, checked)
            if any(c.again for c in caches):
                STEPS["extract"](run)
                for result, checked in zip(results, caches, strict=True):
                    result["made"] = _require_whole(checked, workers)
            _forget_damaged_records(say, main)
        problems = [p for c in caches for p in cache_problems(c.found.storage, c.found.plan)]
    for problem in problems:
        say(f"repair: not mended: {problem}")
    heldout = results[1] if len(results) > 1 else None
    return results[0] | {"evicted": main.evicted, "dry_run": dry_run, "heldout": heldout, "problems": problems}


def _check(run: Run, workers: int | None) -> list[_Checked]:
    """The run's cache, and that of its held-out samples if it is a rolling run which has one."""
    from pipeline import extract_step, rolling_train

    found = survey(run.cache)
    identity = extract_step.cache_identity(run)
    require_same(found.identity, identity, found.storage.where())
    caches = [_Checked(found, _reports(found, workers), "", run.recipe.cache.max_bytes is not None)]
    heldout = open_storage(run.folder.heldout_cache)
    if heldout.exists(names.PLAN) and rolling_train.is_rolling(run, found.plan, identity):
        own = survey(heldout)
        require_same(own.identity, identity, heldout.where())
        caches.append(_Checked(own, _reports(own, workers), f"{HELDOUT_CACHE}/", may_wait=False))
    return caches


def _reports(found: Survey, workers: int | None) -> list[ShardReport]:
    evicted = set(found.evicted)
    return verify_shards(found, [s for s in found.plan.shards() if s not in evicted], workers)


def _tell(say: Say, caches: list[_Checked], dry_run: bool) -> None:
    damaged = [(c.label + r.shard, r.problems[0]) for c in caches for r in c.damaged]
    missing = [c.label + shard for c in caches for shard in c.missing]
    for shard, problem in damaged:
        say(f"repair: {shard} is damaged: {problem}")
    if missing:
        say(f"repair: {len(missing)} shards are missing: {', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}")
    if not damaged and not missing:
        say("repair: every shard is there and whole, nothing to do")
    elif dry_run:
        say(f"repair: would take out {len(damaged)} shards and make {len(damaged) + len(missing)} (dry run)")


def _take_out(say: Say, checked: _Checked) -> None:
    for report in checked.damaged:
        group = discard(checked.found.storage, report.shard)
        rest = f"removed {group}" if group else "its marker does not tell its group; `dflash cache gc` finds that"
        say(f"repair: took {checked.label}{report.shard} out: {rest}")


def _forget_damaged_records(say: Say, found: Survey) -> None:
    """Remove what is kept of evicted shards where it is damaged; it is a record only, no shard hangs on it."""
    for key, _ in list(found.storage.list(names.EVICTED)):
        shard = key.removeprefix(f"{names.EVICTED}/").removesuffix(".json")
        try:
            decode_marker(found.storage.read(key), shard, key)
        except CacheError:
            found.storage.delete(key)
            say(f"repair: removed {key}, a damaged record of an evicted shard")


def _require_whole(checked: _Checked, workers: int | None) -> list[str]:
    """Check what was made.

    Returns:
        The shards that are there now.

    Raises:
        PipelineError: a shard is damaged or missing again.
    """
    where = checked.found.storage.url
    reports = verify_shards(survey(where), sorted(checked.again, key=names.shard_index), workers)
    bad = [r for r in reports if r.status == "corrupt" or (r.status == "missing" and not checked.may_wait)]
    if bad:
        raise PipelineError(
            f"{bad[0].shard} was made again and is {bad[0].status} again: {bad[0].problems[0]}; look at the disk of "
            f"{where} before you trust it with more"
        )
    return [r.shard for r in reports if r.status == "ok"]


def repair_lines(result: dict[str, Any]) -> str:
    """What `dflash cache repair` prints."""
    caches = [result, *([result["heldout"]] if result["heldout"] else [])]
    return "\n".join(_lines(cache, result["dry_run"]) for cache in caches)


def to_mend(result: dict[str, Any]) -> bool:
    """Whether anything was found damaged or missing."""
    return any(c["damaged"] or c["missing"] for c in (result, result["heldout"]) if c)


def _lines(cache: dict[str, Any], dry_run: bool) -> str:
    again = len(cache["damaged"]) + len(cache["missing"])
    if dry_run:
        return f"{cache['cache']}: {cache['ok_shards']} shards are whole, {again} would be made again"
    text = f"{cache['cache']}: {cache['ok_shards']} shards were whole, {len(cache['made'])} were made again"
    left = again - len(cache["made"])
    return text + (f"; {left} are left to the rolling run (cache.max_bytes)" if left else "")
