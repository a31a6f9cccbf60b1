"""How long it takes from opening a large cache to the first batch.

Opening reads `cache.json`, the plan and the markers, and a marker's size depends on the number of its samples only.
So the states here are one number wide, and all shards share the objects of the first; the markers are real.
"""

from __future__ import annotations

import benchmarks.one_thread  # noqa: F401  # isort: skip  # before numpy and torch
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cache_data import MAX_TOKENS, MIN_TOKENS, SEED, Setting, identity, states
from benchmarks.timing import drop_cached
from cache_schema.marker import create_marker
from cache_schema.plan import ShardPlan
from cache_schema.reader import FeatureCache, create_cache
from cache_schema.storage import FolderStorage
from cache_schema.writer import ShardWriter

_ONE_WIDE = Setting(1, 0)


def opening_times(folder: Path, samples: int, shards: int, rounds: int = 3) -> dict[str, Any]:
    """Make a cache of so many samples and shards, and take the least times of several new processes.

    Returns:
        `open_s` and `first_batch_s` (opening included) of a new process, `first_batch_cpu_s` of it, `again_s` for the
        second time in the same process, `cold_s` with the files out of the page cache (None if the machine keeps
        them), and `imports_s`.
    """
    make_large_cache(folder, samples, shards)
    warm = [_first_batch(folder) for _ in range(rounds)]
    cold = [_first_batch(folder)["first_batch_s"] for _ in range(rounds) if drop_cached(folder)]
    shutil.rmtree(folder)
    least = {key: min(found[key] for found in warm) for key in warm[0]}
    return {"samples": samples, "shards": shards, **least, "cold_s": min(cold) if cold else None}


def make_large_cache(folder: Path, samples: int, shards: int) -> None:
    """A cache whose shards all have the same lengths and name the same group."""
    per_shard = samples // shards
    tokens = np.random.default_rng(SEED).integers(MIN_TOKENS, MAX_TOKENS + 1, per_shard)
    ids = [f"benchmark-{i:09d}" for i in range(per_shard * shards)]
    plan = ShardPlan(ids, np.tile(tokens, shards), range(0, len(ids), per_shard))
    create_cache(folder, identity(), plan)
    pool = states(_ONE_WIDE)
    with ShardWriter(folder, "shard-00000", identity(), 1) as writer:
        for sample_id, n in zip(ids[:per_shard], tokens.tolist(), strict=True):
            writer.append(sample_id, pool[:n], np.arange(n, dtype=np.int32), np.ones(n, np.uint8))
        first = writer.commit()
    storage, fsync = FolderStorage(folder), os.fsync
    os.fsync = lambda fd: None  # thousands of markers; none has to survive a power cut
    try:
        for shard in plan.shards()[1:]:
            create_marker(storage, dataclasses.replace(first, shard=shard))
    finally:
        os.fsync = fsync


def _first_batch(folder: Path) -> dict[str, float]:
    started = time.time()
    command = [sys.executable, "-m", "benchmarks.cache_opening", str(folder), str(started)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _main(folder: Path, started: float) -> None:
    import torch

    import stages.dataset  # noqa: F401  # its imports are not part of the opening

    torch.set_num_threads(1)
    times = {"imports_s": time.time() - started}
    begun, cpu = time.perf_counter(), time.process_time()
    times["open_s"] = _read_first_batch(folder)
    times["first_batch_s"] = time.perf_counter() - begun
    times["first_batch_cpu_s"] = time.process_time() - cpu
    begun = time.perf_counter()
    _read_first_batch(folder)
    times["again_s"] = time.perf_counter() - begun
    print(json.dumps({name: round(value, 3) for name, value in times.items()}))


def _read_first_batch(folder: Path) -> float:
    """Open the cache and get the first step; returns the seconds that the opening took."""
    from stages.config import TrainConfig
    from stages.dataset import SampleReader, StepDataset, TrainingStream
    from stages.order import StepPlan

    config, begun = TrainConfig(), time.perf_counter()
    cache = FeatureCache.open(folder, require_complete=True)
    open_s = time.perf_counter() - begun
    dataset = StepDataset(StepPlan(cache.plan, config, SEED), SampleReader(cache, config, SEED), 16, 0)
    data = next(iter(TrainingStream(dataset)))
    if not data.batches:
        raise ValueError("the first step has no batch")
    return open_s


if __name__ == "__main__":
    _main(Path(sys.argv[1]), float(sys.argv[2]))
