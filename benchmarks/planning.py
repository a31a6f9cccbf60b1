"""What a large run costs its driver: planning, resuming, and handing out units to workers that do nothing.

    python -m benchmarks.planning                                # 1,000,000 samples, 20,000 shards
    python -m benchmarks.planning --samples 20000 --shards 400   # a try

Each part runs in a process of its own, one thread, and tells wall and CPU seconds and the peak of its memory. The
responses are made up and short: what longer ones add (reading and hashing their bytes) a run with another `--tokens`
tells.
"""

from __future__ import annotations

import benchmarks.one_thread  # noqa: F401  # isort: skip  # before numpy and torch
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

PART_ROWS = 512
LIMITS = {"plan": ("seconds", 60.0), "scan": ("seconds", 10.0)}
PEAK_BYTES = 1e9
TOKEN_BYTES = 40_960


def make_responses(folder: Path, n_samples: int, tokens: int) -> None:
    """A responses table of so many rows of the same length, written part by part without the worker's checks."""
    from cache_schema import names
    from cache_schema.identity import canonical_json, sha256_bytes
    from cache_schema.responses import SCHEMA, create_responses
    from cache_schema.storage import open_storage
    from tests.tiny import RESPONSES_IDENTITY

    n_parts, storage = -(-n_samples // PART_ROWS), open_storage(folder)
    create_responses(folder, RESPONSES_IDENTITY, n_parts, n_samples)
    prompt = tokens // 4
    ids = np.arange(tokens, dtype=np.int32)
    mask = np.arange(tokens) >= prompt
    for part in range(n_parts):
        rows = range(part * PART_ROWS, min((part + 1) * PART_ROWS, n_samples))
        columns: dict[str, Any] = {
            "sample_id": [f"sample-{i:08d}" for i in rows], "messages": ["[]"] * len(rows),
            "prompt_ids": _lists(ids[:prompt], len(rows), pa.int32()),
            "response_ids": _lists(ids[prompt:], len(rows), pa.int32()),
            "loss_mask": _lists(mask.astype(np.uint8), len(rows), pa.uint8()),
            "finish_reason": ["stop"] * len(rows), "category": [None] * len(rows), "sampling": ["{}"] * len(rows),
        }  # fmt: skip
        table = pa.table({f.name: pa.array(columns[f.name], f.type) if isinstance(columns[f.name], list)
                          else columns[f.name] for f in SCHEMA}, schema=SCHEMA)  # fmt: skip
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        data = sink.getvalue().to_pybytes()
        name = names.part_name(part)
        file = f"{name}.made.parquet"
        storage.create(names.part_key(file), data)
        marker = {"part": name, "file": file, "rows": len(rows), "bytes": len(data),
                  "sha256": sha256_bytes(data), "attempt": 1, "ledger": [], "planned": len(rows),
                  "seconds": 0.0}  # fmt: skip
        storage.create(names.commit_key(name), canonical_json(marker).encode())


def _lists(row: Any, n: int, kind: Any) -> Any:
    offsets = pa.array(np.arange(n + 1) * len(row), pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(np.tile(row, n), kind))


# --- the parts, each in a process of its own ----------------------------------------------------------


def plan(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """What the extract stage does before its first worker starts: hash and lengths of the responses, plan, units."""
    from benchmarks.cache_data import identity
    from cache_schema.manifest import create_cache
    from cache_schema.plan import plan_shards
    from cache_schema.responses import ResponsesTable
    from stages.extract import ShardUnit

    steps = {"imports": time.process_time()}
    content = ResponsesTable.open(folder / "responses").content()
    steps["read and hashed"] = time.process_time()
    size = int(content.lengths.sum()) * TOKEN_BYTES // given.shards
    plan = plan_shards(content.sample_ids, content.lengths, TOKEN_BYTES, size)
    made = create_cache(folder / "cache", identity(), plan)
    steps["plan"] = time.process_time()
    units = [ShardUnit(shard, tuple(made.samples(shard))) for shard in made.shards()]
    steps["units"] = time.process_time()
    return {"samples": len(made), "units": len(units), "cpu_s_until": steps}


def scan(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """What a resumed run does to find out what is missing: names of all commits, then every marker."""
    from cache_schema.marker import committed_shards
    from cache_schema.reader import FeatureCache
    from cache_schema.storage import open_storage

    began = time.perf_counter()
    found = committed_shards(open_storage(folder / "large"))
    listed_s = time.perf_counter() - began
    cache = FeatureCache.open(folder / "large", require_complete=True)
    return {"commits": len(found), "listed_s": listed_s, "markers": len(cache.markers)}


def train(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """What training works out before its first step: who is held out, and the order of the first epoch."""
    from cache_schema.plan import ShardPlan
    from cache_schema.storage import open_storage
    from stages.config import TrainConfig
    from stages.order import StepPlan

    steps = StepPlan(ShardPlan.read(open_storage(folder / "large")), TrainConfig(batch_samples=64), 0)
    return {"steps": steps.n_steps, "first": len(steps.step(0).sample_ids)}


def units(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Units that do nothing, through the real pool: CPU per unit, and memory after a tenth and after all of them."""
    from benchmarks.runner import NoWork
    from pipeline.runner import ensure_ray, run_pool

    sizes: list[float] = []

    def take(unit: int, receipt: dict[str, Any]) -> None:
        if unit in (given.shards // 10, given.shards - 1):
            sizes.append(_rss_bytes())

    with ensure_ray(num_cpus=2):
        began = time.process_time()
        receipts = run_pool(range(given.shards), NoWork, n_workers=2, resources={"num_cpus": 1}, in_flight=2,
                            on_receipt=take)  # fmt: skip
        cpu_s = time.process_time() - began
    return {"units": len(receipts), "cpu_ms_per_unit": cpu_s * 1e3 / len(receipts), "grown_bytes": sizes[-1] - sizes[0]}


PARTS: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {
    "plan": plan, "scan": scan, "train": train, "units": units,
}  # fmt: skip


def _rss_bytes() -> float:
    return float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak_bytes() -> int:
    """Of this program alone: `ru_maxrss` would begin with what the process that started it had."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measured(name: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """A part's own figures, with wall and CPU seconds of it and the process's peak of memory."""
    began, cpu = time.perf_counter(), time.process_time()
    found = PARTS[name](folder, given)
    return found | {
        "seconds": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu,
        "peak_bytes": _peak_bytes(),
    }


def verdict(name: str, found: dict[str, Any]) -> bool:
    """Print a part's figures; whether they are in the limits.

    The limit of a time is held against CPU seconds: wall time on a machine that others use says nothing.
    """
    limit_s = LIMITS.get(name, ("", float("inf")))[1]
    good = found["cpu_s"] <= limit_s and found["peak_bytes"] <= PEAK_BYTES
    rest = {k: v for k, v in found.items() if k not in ("seconds", "cpu_s", "peak_bytes")}
    times = f"{found['seconds']:8.1f} s, {found['cpu_s']:7.1f} s of CPU, peak {found['peak_bytes'] / 1e6:6.0f} MB"
    print(f"{name:6s} {times} ({'met' if good else 'MISSED'})  {rest}", flush=True)
    return good


def run(folder: Path, given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Make what is read, then measure every part in a new process."""
    from benchmarks.cache_opening import make_large_cache

    wanted = given.only or list(PARTS)
    if "plan" in wanted:
        make_responses(folder / "responses", given.samples, given.tokens)
    if {"scan", "train"} & set(wanted):
        make_large_cache(folder / "large", given.samples, given.shards)
    results = {}
    for name in wanted:
        command = [sys.executable, "-m", "benchmarks.planning", "--part", name, "--dir", str(folder),
                   "--samples", str(given.samples), "--shards", str(given.shards)]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results[name] = json.loads(done.stdout.splitlines()[-1])
    return results


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=40, help="of a made-up response")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="this part (may be given again)")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--dir", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    """Measure; 1 if a limit is passed."""
    given = options()
    if given.part:
        print(json.dumps(measured(given.part, given.dir, given)))
        return 0
    folder = Path(tempfile.mkdtemp(prefix="dflash-planning-"))
    try:
        results = run(folder, given)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    good = [verdict(name, found) for name, found in results.items()]
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
