"""The evaluate stage of a recipe, for `ray job submit … -- python -m jobs.evaluate --recipe recipes/x.yaml`."""

from __future__ import annotations

from pipeline.jobs import make_job, run_job

main = make_job("evaluate", ["evaluate"])

if __name__ == "__main__":
    run_job(main)
