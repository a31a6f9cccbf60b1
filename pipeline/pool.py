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
) -> None:
    if not todo:
        return
    with (
        ensure_ray(num_cpus=cpus_of(config.workers, config.threads)),
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
        )
