"""The writer that gets interrupted: one process that adds the missing shards to a small cache, as extract does."""

from __future__ import annotations

import benchmarks.one_thread  # noqa: F401  # isort: skip  # before numpy
import errno
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet  # noqa: F401  # once, and not in each process

from benchmarks.flips import HIDDEN, KINDS, LAYERS
from cache_schema.marker import committed_shards
from cache_schema.plan import ShardPlan, plan_shards
from cache_schema.reader import create_cache
from cache_schema.storage import open_storage
from cache_schema.writer import ShardWriter

IDENTITY = KINDS["bfloat16"][0]
N_SAMPLES, MAX_ROWS, PER_SHARD = 24, 900, 4
FULL, UNPLUGGED = 28, 29
"""Exit codes: the disk is full; the storage failed in another way."""
Side = Literal["before", "after"]
STEPS = ("fsync", "link", "rename", "unlink", "mkdir")
"""System calls at which a process can be killed: each changes what a later reader finds."""


def planned() -> ShardPlan:
    """24 samples of 1 to 900 tokens in about six shards."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(1, MAX_ROWS, N_SAMPLES)
    row_bytes = LAYERS * HIDDEN * 2
    ids = [f"sample-{i:03d}" for i in range(N_SAMPLES)]
    return plan_shards(ids, tokens, row_bytes, PER_SHARD * MAX_ROWS // 2 * row_bytes)


def write_missing(location: str | Path) -> None:
    """Make what the cache lacks, shard after shard."""
    plan = create_cache(location, IDENTITY, planned())
    storage = open_storage(location)
    done = set(committed_shards(storage))
    for shard in plan.shards():
        if shard not in done:
            write_shard(storage, plan, shard)


def write_shard(storage: Any, plan: ShardPlan, shard: str) -> None:
    """One shard; its third sample is dropped and its first noted, so that the ledger is at stake too."""
    with ShardWriter(storage, shard, IDENTITY, HIDDEN) as writer:
        samples = plan.samples(shard)
        for i, sample_id in enumerate(samples):
            if i == 2:
                writer.drop(sample_id, "non_finite", "made so")
                continue
            n = plan.n_tokens(sample_id)
            rng = np.random.default_rng(list(sample_id.encode()))
            writer.append(
                sample_id,
                rng.integers(1, 0x7F00, (n, LAYERS, HIDDEN)).astype(np.uint16),
                rng.integers(0, 1000, n).astype(np.int32),
                (np.arange(n) >= n // 2).astype(np.uint8),
                rng.integers(1, 0x7F00, (n, HIDDEN)).astype(np.uint16),
            )
        writer.note(samples[0], "shortened", "made so")
        writer.commit()


def run(
    location: str | Path, kill: tuple[int, Side] | None = None, environment: Mapping[str, str] | None = None
) -> None:
    """The body of a process: write what is missing; faults of the storage become exit codes.

    Args:
        location: of the cache.
        kill: end by SIGKILL right before or after the so-manieth system call of `STEPS`.
        environment: what is added to the process's own.
    """
    os.environ.update(environment or {})
    if kill is not None:
        _arm(*kill)
    try:
        write_missing(location)
    except OSError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(FULL if error.errno == errno.ENOSPC else UNPLUGGED)


def count_steps(location: str | Path, answer: Any) -> None:
    """Write undisturbed, and put the number of system calls of `STEPS` into a queue."""
    seen = [0]

    def count(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            seen[0] += 1
            return call(*args, **kwargs)

        return counted

    _wrap(count)
    write_missing(location)
    answer.put(seen[0])


def _arm(at: int, side: Side) -> None:
    left = [at]

    def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0 and side == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args, **kwargs)
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return counted

    _wrap(deadly)


def _wrap(wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    for name in STEPS:
        setattr(os, name, wrapper(getattr(os, name)))
