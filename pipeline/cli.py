"""The `dflash` command. Heavy imports are inside commands, so that `dflash --help` is instant.

Data goes to stdout, progress and words to stderr. What the exit codes mean: `pipeline.exits`.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import click

from cache_schema.durable import is_storage_fault, storage_text
from cache_schema.errors import DFlashError
from pipeline import cache_work_cli, exits, serve_cli
from pipeline.cache_cli import JsonOption, say
from pipeline.credentials import redacted
from pipeline.exits import Exit

RecipeArgument = click.argument("recipe", type=click.Path(dir_okay=False, path_type=Path))
SetOption = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting: train.lr=3e-4."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=exits.HELP)
@click.version_option(package_name="dflash")
def dflash() -> None:
    """Train a DFlash drafter for your model: generate, extract, train, evaluate, export."""


GOES_ON = "Goes on where it stopped; does nothing when it is done."
AgainstOption = click.option(
    "--against", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="RESULTS.JSON",
    help="Set another run's results beside this run's in the report.",
)  # fmt: skip


def _stage_command(name: str, text: str) -> None:
    @dflash.command(name, help=f"{text}\n\n{GOES_ON}")
    @RecipeArgument
    @SetOption
    def command(recipe: Path, overrides: tuple[str, ...]) -> None:
        from pipeline.jobs import run_stages

        run_stages(recipe, overrides, [name], say)


for _name, _text in (
    ("generate", "Let the target answer the prompts of RECIPE."),
    ("extract", "Store the target's hidden states of all answers in the feature cache."),
    ("train", "Train the drafter from the feature cache."),
):
    _stage_command(_name, _text)


@dflash.command(
    "evaluate", help=f"Decode held-out prompts speculatively and compare with plain decoding.\n\n{GOES_ON}"
)
@RecipeArgument
@SetOption
@AgainstOption
def evaluate_command(recipe: Path, overrides: tuple[str, ...], against: Path | None) -> None:
    from pipeline.jobs import run_stages

    _write_report(run_stages(recipe, overrides, ["evaluate"], say).recipe, against)


@dflash.command("export", help=f"Write the checkpoint that SGLang and vLLM load.\n\n{GOES_ON}")
@RecipeArgument
@SetOption
@click.option("--check", "only_check", is_flag=True, help="Write nothing; check what was exported, rule by rule.")
@click.option(
    "--folder", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="With --check: another drafter's folder.",
)  # fmt: skip
@JsonOption
def export_command(
    recipe: Path, overrides: tuple[str, ...], only_check: bool, folder: Path | None, as_json: bool
) -> None:
    from pipeline.jobs import run_stages

    if not only_check and (folder is not None or as_json):
        raise click.UsageError("--folder and --json go with --check")
    if only_check:
        _check_exported(recipe, overrides, folder, as_json)
    else:
        run_stages(recipe, overrides, ["export"], say)


def _check_exported(recipe: Path, overrides: tuple[str, ...], folder: Path | None, as_json: bool) -> None:
    from dataclasses import asdict

    from pipeline.export_step import check_exported
    from pipeline.recipe import load_recipe
    from pipeline.run import Run

    checks = check_exported(Run(load_recipe(recipe, overrides), say), folder)
    if as_json:
        click.echo(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        click.echo("\n".join(f"{'ok  ' if c.ok else 'BAD '} {c.name}: {c.detail}" for c in checks))
    if not all(check.ok for check in checks):
        sys.exit(1)


@dflash.command("run")
@RecipeArgument
@SetOption
def run_command(recipe: Path, overrides: tuple[str, ...]) -> None:
    """All stages of RECIPE, one after the other, then the report.

    Goes on where it stopped.
    """
    from pipeline.jobs import run_stages
    from pipeline.recipe import STAGES

    run = run_stages(recipe, overrides, list(STAGES), say)
    _write_report(run.recipe)


@dflash.command("report")
@RecipeArgument
@SetOption
@AgainstOption
def report_command(recipe: Path, overrides: tuple[str, ...], against: Path | None) -> None:
    """Draw the report of a run, whatever of it is done."""
    from pipeline.recipe import load_recipe

    _write_report(load_recipe(recipe, overrides), against)


def _write_report(recipe: Any, against: Path | None = None) -> None:
    from pipeline.report import collect_report, write_report
    from pipeline.report_summary import summary_lines

    write_report(recipe.run, recipe.to_json(), against)
    click.echo("\n".join(summary_lines(collect_report(recipe.run, recipe.to_json(), against))))


@dflash.command("status")
@click.argument("run")
@JsonOption
@click.option("--watch", "every_s", type=click.FloatRange(1, 86400), metavar="SECONDS", help="Again and again.")
def status_command(run: str, as_json: bool, every_s: float | None) -> None:
    """How far the run in the folder or at the URL RUN is; reads nothing but its storage.

    Per stage: done, running (by whom), killed, failed (why) or begun; rate and time left from the times of the
    commits; what was dropped; the newest checkpoint. Works while the run goes on, from any machine.
    """
    from pipeline.recipe import run_location
    from pipeline.status import collect_status
    from pipeline.status_text import status_lines

    if every_s is not None and every_s != every_s:
        raise click.BadParameter("nan is no number of seconds", param_hint="--watch")
    place = run_location(run)
    while True:
        found = collect_status(place)
        click.echo(json.dumps(found, indent=1) if as_json else "\n".join(status_lines(found)))
        if every_s is None:
            return
        time.sleep(every_s)
        click.echo()


@dflash.command("plan")
@RecipeArgument
@SetOption
@click.option(
    "--samples", "n_samples", type=click.IntRange(1, 10**12), help="Samples to plan for, when they cannot be counted."
)
@click.option("--mean-tokens", type=click.FloatRange(1, 1e9), help="Mean tokens of a sample, prompt and response.")
@click.option("--rate", "rates", multiple=True, metavar="NAME=NUMBER",
              help="A speed instead of the assumed one: peak_tflops, generate_share, extract_share, train_share (of "
              "the peak), store_bytes_per_s.")  # fmt: skip
@JsonOption
def plan_command(
    recipe: Path, overrides: tuple[str, ...], n_samples: int | None, mean_tokens: float | None, rates: tuple[str, ...],
    as_json: bool,
) -> None:  # fmt: skip
    """What RECIPE will cost, before any GPU is used: layers, MASK id, bytes, shards, parameters, FLOPs, GPU hours."""
    from pipeline.recipe import load_recipe
    from pipeline.sizing import plan_run, render_plan
    from pipeline.sizing_rates import read_rates

    if mean_tokens is not None and mean_tokens != mean_tokens:
        raise click.BadParameter("nan is no number of tokens", param_hint="--mean-tokens")
    plan = plan_run(load_recipe(recipe, overrides), n_samples, mean_tokens, read_rates(rates))
    click.echo(json.dumps(plan, indent=1) if as_json else render_plan(plan))


@dflash.command("simulate")
@click.argument("rates", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--seed", type=int, help="Of the failures and the spread of times; the file's unless given.")
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.HTML", help="Also draw it.")
@JsonOption
def simulate_command(rates: Path, seed: int | None, page: Path | None, as_json: bool) -> None:
    """Play a run at a size that is not here from the measured rates in RATES (recipes/simulate-64.yaml).

    Wall time, throughput, idle GPUs, bytes stored, and work lost to failures, for every stage.
    """
    from dataclasses import replace

    from pipeline.simulate import play
    from pipeline.simulate_file import load_simulation
    from pipeline.simulate_page import render_simulation, write_simulation_page

    if page is not None and not page.parent.is_dir():
        raise click.BadParameter(f"{page.parent} is no folder", param_hint="--page")
    sim = load_simulation(rates)
    result = play(sim if seed is None else replace(sim, seed=seed))
    if page is not None:
        write_simulation_page(result, page)
    click.echo(json.dumps(result, indent=1) if as_json else render_simulation(result).rstrip())


@dflash.command("sweep")
@click.argument("sweep", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder; runs/<name> unless given.")
@click.option("--workers", type=click.IntRange(1, 64), default=1, show_default=True, help="Trainings at a time.")
@click.option("--only", multiple=True, metavar="SETTING", help="Only this setting (may be given again).")
@click.option("--page-only", is_flag=True, help="Draw the page from what is done; train nothing.")
def sweep_command(sweep: Path, out: Path | None, workers: int, only: tuple[str, ...], page_only: bool) -> None:
    """Train every setting of SWEEP on one cache, with every seed, and compare them on one page.

    Goes on where it stopped.
    """
    from pipeline.folder import RunFolder
    from pipeline.sweep import planned_sweep, run_sweep
    from pipeline.sweep_file import load_sweep
    from pipeline.sweep_page import write_sweep_page

    loaded = load_sweep(sweep, only)
    folder = out or Path("runs") / loaded.name
    trainings = planned_sweep(loaded, folder, say)
    if not page_only:
        try:
            with RunFolder(folder).locked():
                run_sweep(trainings, say, workers=workers)
        finally:
            write_sweep_page(loaded, trainings, folder)
    click.echo(str(write_sweep_page(loaded, trainings, folder)))


dflash.add_command(cache_work_cli.cache_group)
dflash.add_command(serve_cli.check_serve)


def main(args: list[str] | None = None) -> None:
    """Entry point: errors that a user can do something about are one message and an exit code."""
    sys.exit(guarded(lambda: dflash.main(args=args, prog_name="dflash", standalone_mode=False)))


INTERRUPTED = "interrupted; run the same command again to go on"


def entry() -> None:
    """The `dflash` command."""
    end_in_order()
    leave(guarded(lambda: dflash.main(prog_name="dflash", standalone_mode=False)))


def end_in_order() -> None:
    """Have SIGTERM (`ray job stop`, a node that is taken away) end the process as Ctrl-C does, as Ray does too."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(number))


def leave(code: int) -> NoReturn:
    """End the process with an exit code, past the destructors of native libraries.

    Everything is written and every child has ended by now. On a busy machine one run in some hundreds aborted in those
    destructors ("terminate called without an active exception": a thread of a library's pool that was still starting),
    after its work was done, and its exit code said failure.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # whoever read it may have gone
            stream.flush()
    os._exit(code)


def guarded(call: Callable[[], Any]) -> int:
    """Run a command and turn what it raises into a message on stderr and an exit code."""
    try:
        call()
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        error.show()
        return Exit.USAGE
    except (click.Abort, KeyboardInterrupt):
        say(INTERRUPTED)
        return Exit.INTERRUPTED
    except SystemExit as left:
        if left.code != signal.SIGTERM:
            raise
        say(INTERRUPTED)
        return Exit.INTERRUPTED
    except DFlashError as error:
        say(f"error: {redacted(error)}")
        return exits.exit_code(error)
    except OSError as error:
        if is_storage_fault(error):
            say(f"error: {storage_text(error)}")
        elif error.filename and "://" in str(error.filename):
            say(f"error: {error.strerror}: {error.filename}; run the same command again to go on")
        elif error.errno == errno.ENOENT and error.filename:
            say(f"error: {error.strerror}: {error.filename}")
        elif error.filename:
            say(f"error: {error.strerror}: {error.filename}; something else lies where a file or folder belongs")
        else:
            raise
        return exits.exit_code(error)
    return Exit.DONE


if __name__ == "__main__":
    entry()
