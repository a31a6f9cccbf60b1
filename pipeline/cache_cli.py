"""The commands of `dflash cache`. Heavy imports are inside commands, so that `--help` is instant.

Data goes to stdout, progress and words to stderr. Exit codes: 0 done, 1 bad data (or a difference), 2 a wrong call.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cache_schema.errors import UnknownName

JsonOption = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
CacheArgument = click.argument("cache")
SeedOption = click.option("--seed", type=int, default=0, show_default=True, help="Which samples: another seed, others.")
ShardsOption = click.option(
    "--shard", "--shards", "shards", multiple=True, metavar="S",
    help="Only these shards: shard-00042, 42, 10-19, or several with commas. May be repeated.",
)  # fmt: skip
Count = click.IntRange(min=1)
Folder = click.Path(file_okay=False, path_type=Path)


class Duration(click.ParamType):
    """Seconds from texts such as 90s, 30m, 1h or 2d."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", str(value))
        if match is None:
            self.fail(f"{value!r} is no duration; write 90s, 30m, 1h or 2d", param, ctx)
        return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def say(line: str) -> None:
    """A plain line for the user, on stderr."""
    click.echo(line, err=True)


def out(found: Any, as_json: bool, text: Callable[[Any], str], colour: bool = False) -> None:
    """Print what a command found; with `colour` the text has codes for a terminal."""
    click.echo(json.dumps(found, indent=1) if as_json else text(found), color=colour)


class _Group(click.Group):
    """A name that the cache does not have is a wrong call."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UnknownName as error:
            raise click.UsageError(str(error)) from error


@click.group("cache", cls=_Group)
def cache_group() -> None:
    """Look into a feature cache, check it, mend it, move it.

    CACHE is its folder, `<run>/cache`, or the URL of one in an object store, `s3://bucket/path` (credentials come from
    the environment).
    """


@cache_group.command("ls", short_help="The shards: state, samples, tokens, bytes.")
@CacheArgument
@JsonOption
def cache_ls(cache: str, as_json: bool) -> None:
    """The shards of CACHE: state, samples, tokens, bytes, ledger rows. Exit code 1 if a marker is damaged.

    \b
    Example: dflash cache ls runs/demo/cache
    """
    from pipeline.cache_info import cache_shards
    from pipeline.cache_view import shards_table

    found = cache_shards(cache)
    out(found, as_json, shards_table)
    if any(row["status"] == "corrupt" for row in found["shards"]):
        sys.exit(1)


@cache_group.command("info", short_help="Identity, totals, compression, lengths, ledger.")
@CacheArgument
@JsonOption
def cache_info_command(cache: str, as_json: bool) -> None:
    """What CACHE is made of and what it holds: identity, totals, bytes by array, compression, lengths, ledger.

    Reads markers only, no data. Exit code 1 if a marker is damaged.

    \b
    Example: dflash cache info s3://bucket/qwen3-8b
    """
    from pipeline.cache_info import cache_info
    from pipeline.cache_view import info_table

    found = cache_info(cache)
    out(found, as_json, info_table)
    if found["damaged"] or found["strays"]:
        sys.exit(1)


@cache_group.command("show", short_help="A shard, or a sample: text, mask, norms, values.")
@CacheArgument
@click.argument("shard")
@click.argument("sample", required=False)
@click.option(
    "--tokenizer", help="Folder or name of the target's tokenizer; default: that of the cache's target, if here."
)
@JsonOption
def cache_show(cache: str, shard: str, sample: str | None, tokenizer: str | None, as_json: bool) -> None:
    """One SHARD of CACHE, or one SAMPLE in it: text, loss mask, norms per layer, first channels.

    Supervised text is green on a terminal that shows colour, and in brackets elsewhere.

    \b
    Example: dflash cache show runs/demo/cache shard-00000 train-17
    """
    from cache_schema.verify import describe_shard
    from pipeline import cache_view

    if sample is None:
        out(describe_shard(cache, shard), as_json, cache_view.shard_table)
        return
    from pipeline.cache_show import sample_view

    colour = cache_view.wants_colour()
    text = lambda view: cache_view.sample_table(view, colour)  # noqa: E731  # one line, used once
    out(sample_view(cache, shard, sample, tokenizer), as_json, text, colour)


@cache_group.command("stats", short_help="Norms, outliers and lengths, per layer.")
@CacheArgument
@click.option("--samples", "n_samples", type=Count, default=64, show_default=True, help="Samples that are read.")
@SeedOption
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw them into this file (.png).")
@JsonOption
def cache_stats_command(cache: str, n_samples: int, seed: int, plot: Path | None, as_json: bool) -> None:
    """Lengths, and per layer of CACHE: norms, outlier channels, and how alike neighbouring layers are.

    \b
    Example: dflash cache stats runs/demo/cache --samples 200 --plot stats.png
    """
    from pipeline.cache_stats import cache_stats
    from pipeline.cache_view import stats_table
    from pipeline.progress import Progress

    if plot is not None and plot.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise click.BadParameter(f"{plot}: give a file that ends in .png, .pdf or .svg", param_hint="--plot")
    with Progress(n_samples, "samples", "stats") as progress:
        found = cache_stats(cache, n_samples, seed, progress.update)
        progress.total = progress.done
    if plot is not None:
        from pipeline.cache_plot import draw_stats

        draw_stats(found, plot)
        say(f"stats: drew {plot}")
    out(found, as_json, stats_table)


@cache_group.command("verify", short_help="Check every byte, in parallel.")
@CacheArgument
@ShardsOption
@click.option("--workers", type=Count, help="Processes; default: one per core, or one for a small cache.")
@click.option(
    "--responses", type=Folder,
    help="Responses table to compare ids and masks with; default: the one beside CACHE, if there is one.",
)  # fmt: skip
@click.option("--recompute", "n_samples", type=Count, metavar="N", help="Run the target on N samples and compare.")
@click.option("--target", help="The target's folder or name for --recompute; default: the cache's own.")
@SeedOption
@JsonOption
def cache_verify(
    cache: str, shards: tuple[str, ...], workers: int | None, responses: Path | None, n_samples: int | None,
    target: str | None, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Check every byte of CACHE: markers, hashes, CRCs, offsets, ids. Exit code 1 if anything is wrong.

    With --recompute also whether the states are the target's: equal to the bit on the same device and batch shape,
    within the rounding of its type otherwise, plus the error of quantisation. Exit code 1 beyond that.

    \b
    Examples:
      dflash cache verify runs/demo/cache
      dflash cache verify s3://bucket/qwen3-8b --shard 0-99 --workers 16
      dflash cache verify runs/demo/cache --recompute 8
    """
    from pipeline.cache_verify import verify, verify_lines

    report = verify(cache, shards, workers, responses)
    if n_samples is not None and report["ok"]:
        from pipeline.cache_recompute import recompute
        from pipeline.progress import Progress

        say(f"verify: recomputing {n_samples} samples, seed {seed}")
        with Progress(n_samples, "samples", "recompute") as progress:
            report["recompute"] = recompute(cache, n_samples, target, seed, progress.update)
            progress.total = progress.done
        report["ok"] = report["recompute"]["ok"]
    elif n_samples is not None:
        say("verify: the cache is damaged, so nothing is recomputed")
    out(report, as_json, verify_lines)
    if not report["ok"]:
        sys.exit(1)


@cache_group.command("diff", short_help="How two caches differ.")
@click.argument("a")
@click.argument("b")
@click.option("--data", is_flag=True, help="Compare the values too, dequantised, of the samples that both hold.")
@click.option("--samples", "n_samples", type=Count, help="With --data: only so many samples.")
@SeedOption
@JsonOption
def cache_diff_command(a: str, b: str, data: bool, n_samples: int | None, seed: int, as_json: bool) -> None:
    """How the caches A and B differ: identity, plan, shards by content, ledgers. Exit code 1 if they do.

    Tags, attempts and times do not count.

    \b
    Examples:
      dflash cache diff runs/a/cache runs/b/cache
      dflash cache diff runs/exact/cache runs/compact/cache --data --samples 50
    """
    from pipeline.cache_diff import cache_diff, data_diff, diff_lines
    from pipeline.progress import Progress

    found = cache_diff(a, b)
    if data:
        with Progress(n_samples or 0, "samples", "diff") as progress:
            found["data"] = data_diff(a, b, n_samples, seed, progress.update)
            progress.total = progress.done
        found["equal"] = found["equal"] and found["data"]["equal"]
    out(found, as_json, diff_lines)
    if not found["equal"]:
        sys.exit(1)
