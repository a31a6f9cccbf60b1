"""Units of a stage on a pool of Ray workers: what each worker is given, and the progress line."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from pipeline.progress import Progress
from pipeline.run import Run
from pipeline.runner import ensure_ray, run_pool


def worker_resources(threads: int | None, default: int = 1, gpu: bool = True) -> dict[str, float]:
    """What Ray sets aside for one worker; a GPU if there is any and the worker computes on it."""
    import torch

    if gpu and torch.cuda.is_available():
        return {"num_cpus": 1, "num_gpus": 1}
    return {"num_cpus": float(threads or default)}


def cpus_of(workers: int, threads: int | None) -> int:
    """CPUs that an own Ray must offer so that all workers fit, however many cores there are."""

    return max(os.cpu_count() or 1, workers * (threads or 1))


def drive_pool(
    run: Run,
    stage: str,
    unit: str,
    todo: list[Any],
    build: Any,
    have: int,
    config: Any,
    on_receipt: Callable[[Any, dict[str, Any]], None] | None = None,
    gpu: bool = True,
    in_flight: int = 1,
    group_size: int = 1,
) -> None:
    """Do a stage's units on workers of the run's Ray, with a progress line.

    Args:
        run, stage: which.
        unit: what a unit is called.
        todo: the units that are missing.
        build: makes a worker; given its `Member` in a group.
        have: units that are there already.
        config: of the stage: `workers`, `threads`.
        on_receipt: called with unit and receipt as each finishes.
        gpu: whether workers compute on a GPU if there is any.
        in_flight: units that a worker has at once.
        group_size: processes that make one worker.

    Raises:
        PoisonShard, PipelineError, DFlashError: see `run_pool`.
    """
    if not todo:
        return
    cpus = cpus_of(config.workers * group_size, config.threads)
    with (
        ensure_ray(num_cpus=cpus),
        Progress(have + len(todo), f"{unit}s", stage, done=have) as progress,
    ):
        run_pool(
            todo,
            build,
            n_workers=config.workers,
            resources=worker_resources(config.threads, gpu=gpu),
            progress=progress,
            label=unit,
            on_receipt=on_receipt,
            in_flight=in_flight,
            group_size=group_size,
            stage=stage,
            run_name=run.recipe.name,
        )
