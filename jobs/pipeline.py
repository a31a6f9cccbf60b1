"""All stages of a recipe, for `ray job submit … -- python -m jobs.pipeline --recipe recipes/x.yaml`."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.cli import guarded, leave, say
from pipeline.jobs import run_stages
from pipeline.recipe import STAGES


@click.command()
@click.option("--recipe", required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE")
def main(recipe: Path, overrides: tuple[str, ...]) -> None:
    """Safe to submit again at any time; goes on where it stopped."""
    run_stages(recipe, overrides, list(STAGES), say)


if __name__ == "__main__":
    leave(guarded(lambda: main(standalone_mode=False)))
