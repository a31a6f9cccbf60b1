"""All stages of a recipe, for `ray job submit … -- python -m jobs.pipeline --recipe recipes/x.yaml`."""

from __future__ import annotations

from pipeline.jobs import make_job, run_job
from pipeline.recipe import STAGES

main = make_job("pipeline", STAGES)

if __name__ == "__main__":
    run_job(main)
