"""What the CLI and the submitted jobs share: load a recipe, hold its folder, run stages. And what such a job is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from cache_schema.errors import DFlashError
from pipeline.credentials import redacted
from pipeline.exits import HELP, exit_code
from pipeline.folder import RECIPE
from pipeline.recipe import load_recipe
from pipeline.run import Run, Say
from pipeline.steps import STEPS


def run_stages(recipe: Path, overrides: Sequence[str], stages: Sequence[str], say: Say) -> Run:
    """Run stages of a recipe, in order, holding the run folder. What stops one is recorded there.

    Raises:
        DFlashError: whatever stopped a stage.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    run = Run(load_recipe(recipe, overrides), say)
    with run.folder.locked():
        run.folder.storage.replace(RECIPE, (json.dumps(run.recipe.to_json(), indent=1) + "\n").encode())
        for stage in stages:
            _run_stage(run, stage)
    return run


def _run_stage(run: Run, stage: str) -> None:
    try:
        STEPS[stage](run)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        known = isinstance(error, DFlashError | OSError)
        text = redacted(error) if known else f"{type(error).__name__}: {redacted(error)}"
        try:
            run.folder.require_held()
            run.folder.fail(stage, text, type(error).__name__, int(exit_code(error)))
        except (OSError, DFlashError) as second:  # what happened first is what is told
            run.say(f"{stage}: that it failed could not be recorded: {redacted(second)}")
        raise


def make_job(name: str, stages: Sequence[str]) -> click.Command:
    """The command of `python -m jobs.<name> --recipe recipes/x.yaml`, for `ray job submit`."""

    @click.command(name, help=f"Safe to submit again at any time; goes on where it stopped.\n\n{HELP}")
    @click.option("--recipe", required=True, type=click.Path(dir_okay=False, path_type=Path))
    @click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE")
    def job(recipe: Path, overrides: tuple[str, ...]) -> None:
        from pipeline.cli import say

        run_stages(recipe, overrides, stages, say)

    return job


def run_job(job: click.Command) -> NoReturn:
    """Run a job's command and end the process with its exit code."""
    from pipeline.cli import end_in_order, guarded, leave

    end_in_order()
    leave(guarded(lambda: job.main(standalone_mode=False)))
