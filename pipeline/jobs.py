"""What the CLI and the submitted jobs share: load a recipe, hold its folder, run stages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from cache_schema.durable import write_atomic
from pipeline.recipe import load_recipe
from pipeline.run import Run, Say
from pipeline.steps import STEPS


def run_stages(recipe: Path, overrides: Sequence[str], stages: Sequence[str], say: Say) -> Run:
    """Run stages of a recipe, in order, holding the run folder.

    Raises:
        DFlashError: whatever stopped a stage.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    run = Run(load_recipe(recipe, overrides), say)
    with run.folder.locked():
        write_atomic(run.folder.path / "recipe.json", (json.dumps(run.recipe.to_json(), indent=1) + "\n").encode())
        for stage in stages:
            STEPS[stage](run)
    return run
