"""The export stage of a recipe, for `ray job submit … -- python -m jobs.export --recipe recipes/x.yaml`."""

from __future__ import annotations

from pipeline.jobs import make_job, run_job

main = make_job("export", ["export"])

if __name__ == "__main__":
    run_job(main)
