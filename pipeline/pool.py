"""Units of a stage on a pool of Ray workers: what each worker is given, and the progress line."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from pipeline.progress import Progress
from pipeline.run import Run
from pipeline.runner import ensure_ray, run_pool
from stages.worker_config import WorkerConfig


def worker_resources(config: WorkerConfig, threads: int | None, gpu: bool = True) -> dict[str, Any]:
    """Options of Ray for one actor; call it inside `ensure_ray()`.

    Args:
        config: of the stage.
        threads: CPUs of a process that has no GPU.
        gpu: whether it computes on a GPU if there is any.
    """
    gpus = gpus_of(config) if gpu else 0.0
    options: dict[str, Any] = {"num_cpus": 1, "num_gpus": gpus} if gpus else {"num_cpus": float(threads or 1)}
    if config.memory_bytes is not None:
        options["memory"] = config.memory_bytes
    if config.resources:
        options["resources"] = dict(config.resources)
    if config.label_selector:
        options["label_selector"] = dict(config.label_selector)
    return options


def gpus_of(config: WorkerConfig) -> float:
    """GPUs of one process: the recipe's number, or one if there is any, here or in the cluster."""
    if config.gpus is not None:
        return config.gpus
    return 1.0 if n_gpus() else 0.0


def n_gpus() -> int:
    """GPUs of the Ray that is joined, or of this machine: the driver of a cluster often has none itself."""
    import ray
    import torch

    if ray.is_initialized():
        return int(ray.cluster_resources().get("GPU", 0))
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


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
        config: of the stage: `workers`, `threads`, and what each process needs.
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
            resources=worker_resources(config, config.threads, gpu=gpu),
            progress=progress,
            label=unit,
            on_receipt=on_receipt,
            in_flight=in_flight,
            group_size=group_size,
            stage=stage,
            run_name=run.recipe.name,
        )
