"""Two workers against one, each with one thread, through the real runner: figure 3a. It needs two free cores."""

from __future__ import annotations

import functools
import os
import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks.extract_data import SHARD_TOKENS, extraction, work
from pipeline.ray_session import ensure_ray
from pipeline.runner import run_pool
from stages.extract import ExtractJob, ExtractWorker

SHARDS = 12


def two_workers(folder: Path, target: str, n_samples: int, batch_tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of all shards with one worker and with two, least of the rounds, and how many times faster two are.

    Counted from the first receipt on, so that starting workers and loading targets are left out.
    """
    given = work(target, n_samples)
    total = sum(len(s) for s in given.sequences.values())
    least: dict[int, float] = {}
    with ensure_ray(num_cpus=max(2, os.cpu_count() or 1)):
        for _ in range(rounds):
            for n_workers in (1, 2):
                made = extraction(folder / "workers", given, batch_tokens, min(SHARD_TOKENS, total // SHARDS))
                rate = _seconds_per_shard(made, target, n_workers)
                least[n_workers] = min(rate, least.get(n_workers, rate))
                shutil.rmtree(folder / "workers")
    return {"s_per_shard": {str(n): round(s, 3) for n, s in least.items()}, "times": round(least[1] / least[2], 3)}


def _seconds_per_shard(made: Any, target: str, n_workers: int) -> float:
    done: list[float] = []
    run_pool(
        made.units, functools.partial(_build, made.job, target), n_workers=n_workers, resources={"num_cpus": 1},
        label="shard", on_receipt=lambda unit, receipt: done.append(time.perf_counter()), in_flight=2,
    )  # fmt: skip
    # Receipts of the first shards wait for the workers to be there; both ends are left out.
    first, last = n_workers, len(done) - n_workers
    return (done[last] - done[first]) / (last - first)


def _build(job: ExtractJob, target: str) -> ExtractWorker:
    import torch

    torch.set_num_threads(1)
    return ExtractWorker(job, work(target, 1).target)
