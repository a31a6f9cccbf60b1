"""The generate stage of a recipe, for `ray job submit … -- python -m jobs.generate --recipe recipes/x.yaml`."""

from __future__ import annotations

from pipeline.jobs import make_job, run_job

main = make_job("generate", ["generate"])

if __name__ == "__main__":
    run_job(main)
