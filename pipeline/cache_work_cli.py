"""The commands of `dflash cache` that write: repair, gc, copy, export. Imported by `pipeline.cli` beside the others."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cache_cli import (
    CacheArgument,
    Count,
    Duration,
    Folder,
    JsonOption,
    SeedOption,
    ShardsOption,
    cache_group,
    out,
    say,
)

if TYPE_CHECKING:
    from cache_schema.garbage import Garbage


@cache_group.command("repair", short_help="Make damaged and missing shards again.")
@click.argument("recipe", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting: run=/data/run7.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option("--workers", type=Count, help="Processes that check; default: one per core, or one for a small cache.")
@JsonOption
def cache_repair(recipe: Path, overrides: tuple[str, ...], dry_run: bool, workers: int | None, as_json: bool) -> None:
    """Check the cache of RECIPE's run, take damaged shards out, and extract them and missing ones again.

    Holds the run: no other stage may be at work. Whole shards stay as they are, and a cache that RECIPE would not make
    the same is refused. Exit code 1 if something could not be mended, or with --dry-run if there is something to mend.

    \b
    Examples:
      dflash cache repair recipes/demo.yaml --dry-run
      dflash cache repair recipes/demo.yaml --set run=/data/run7
    """
    from pipeline.cache_repair import repair, repair_lines, to_mend

    found = repair(recipe, overrides, say, dry_run=dry_run, workers=workers)
    out(found, as_json, repair_lines)
    if found["problems"] or (dry_run and to_mend(found)):
        sys.exit(1)


@cache_group.command("gc", short_help="What nothing names; delete it.")
@CacheArgument
@click.option("--delete", is_flag=True, help="Delete what is old enough; without it nothing is touched.")
@click.option(
    "--older-than", type=Duration(), default="1h", show_default=True,
    help="Age below which nothing is deleted, since a running job may own it: 90s, 30m, 1h, 2d.",
)  # fmt: skip
@JsonOption
def cache_gc(cache: str, delete: bool, older_than: float, as_json: bool) -> None:
    """List what nothing in CACHE names: groups of attempts that never committed, temporary files of killed jobs.

    Committed shards are never touched, nor groups of a shard whose marker is damaged.

    \b
    Examples:
      dflash cache gc runs/demo/cache
      dflash cache gc s3://bucket/qwen3-8b --delete --older-than 2d
    """
    from cache_schema.garbage import delete_garbage, find_garbage
    from cache_schema.manifest import read_identity
    from cache_schema.storage import open_storage
    from pipeline.cache_work_view import gc_table

    storage = open_storage(cache)
    read_identity(storage)  # a folder that is no cache is not one to delete from
    items = find_garbage(storage, older_than)
    items = delete_garbage(storage, items, older_than) if delete else items
    found = {"path": storage.url, "older_than_s": older_than, "items": [_plain(item) for item in items]}
    for state in ("old", "young", "kept", "deleted"):
        found[f"{state}_bytes"] = sum(item.bytes for item in items if item.state == state)
    out(found, as_json, gc_table)


def _plain(item: Garbage) -> dict[str, Any]:
    """An item for JSON, which has no infinity (the age of what has no time)."""
    return asdict(item) | {"age_s": round(item.age_s, 1) if math.isfinite(item.age_s) else None}


@cache_group.command("copy", short_help="Copy to another folder or URL, verified.")
@click.argument("source")
@click.argument("destination")
@ShardsOption
@click.option("--workers", type=Count, default=4, show_default=True, help="Shards that are copied at a time.")
@JsonOption
def cache_copy(source: str, destination: str, shards: tuple[str, ...], workers: int, as_json: bool) -> None:
    """Copy a cache from SOURCE to DESTINATION, folders or URLs; every shard is read back before it counts.

    Start it again to go on: what is committed at DESTINATION is not copied twice. A DESTINATION with another identity,
    or with other content in a shard, is refused. Exit code 1 if a shard is damaged.

    \b
    Examples:
      dflash cache copy runs/demo/cache s3://bucket/demo
      dflash cache copy s3://bucket/qwen3-8b /nvme/qwen3-8b --shards 0-99 --workers 8
    """
    from cache_schema.copying import plan_copy, run_copy
    from cache_schema.manifest import read_identity
    from cache_schema.plan import ShardPlan
    from cache_schema.storage import open_storage
    from pipeline.cache_progress import byte_progress
    from pipeline.cache_samples import shard_names
    from pipeline.cache_work_view import copy_lines

    storage = open_storage(source)
    read_identity(storage)
    plan = plan_copy(source, destination, shard_names(ShardPlan.read(storage).shards(), shards))
    if plan.present:
        say(f"copy: {len(plan.present)} shards are there already, {len(plan.todo)} to copy")
    with byte_progress(plan.bytes, "copy") as add:
        failed = run_copy(plan, workers, add)
    copied = [marker for marker in plan.todo if marker.shard not in failed]
    found = {
        "source": plan.source.storage.url,
        "destination": plan.destination.url,
        "copied": [marker.shard for marker in copied],
        "bytes": sum(marker.bytes for marker in copied),
        "present": plan.present,
        "not_in_source": plan.missing,
        "failed": failed,
    }
    out(found, as_json, copy_lines)
    if failed:
        sys.exit(1)


@cache_group.command("export", short_help="Write safetensors or Arrow files.")
@CacheArgument
@click.argument("folder", type=Folder, metavar="OUT")
@click.option("--format", "format", type=click.Choice(["safetensors", "arrow"]), required=True, help="Of the files.")
@ShardsOption
@click.option("--samples", "n_samples", type=Count, help="Only so many samples, in one file.")
@SeedOption
@click.option("--raw", is_flag=True, help="Features as they are stored, with their scales; default: bfloat16.")
@JsonOption
def cache_export(
    cache: str, folder: Path, format: str, shards: tuple[str, ...], n_samples: int | None, seed: int, raw: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Write CACHE as files for other programs into the folder OUT: one per shard.

    \b
    safetensors: tensors `<sample id>/features` [tokens, layers, hidden], `<sample id>/input_ids`,
                 `<sample id>/loss_mask`; the metadata has `sample_ids` in order and the identity.
    arrow:       an Arrow IPC file with one row per sample: sample_id, input_ids, loss_mask, features (a list with
                 one fixed-size list of layers × hidden values per token; bfloat16 as uint16 bit patterns).

    OUT/export.json says what was exported. Whole files that are there are left, so a killed export is gone on with; an
    OUT with files of another cache is refused.

    \b
    Examples:
      dflash cache export runs/demo/cache out --format safetensors
      dflash cache export s3://bucket/qwen3-8b out --format arrow --samples 100
    """
    from pipeline.cache_export import export_cache
    from pipeline.cache_work_view import export_lines
    from pipeline.progress import Progress

    with Progress(1, "files", "export") as progress:
        found = export_cache(cache, folder, format, shards=shards, n_samples=n_samples, seed=seed, raw=raw,
                             progress=progress)  # fmt: skip
    out(found, as_json, export_lines)
