"""Peak memory of the shard writer over that of its input: two processes that differ only in whether they write."""

from __future__ import annotations

import benchmarks.one_thread  # noqa: F401  # isort: skip  # before numpy and torch
import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cache_data import MAX_TOKENS, Setting, identity, lengths, states
from cache_schema.plan import plan_shards
from cache_schema.reader import create_cache
from cache_schema.writer import ShardWriter


def writer_memory(folder: Path, hidden: int, n_bytes: int) -> dict[str, Any]:
    """Most resident memory of a process that writes a shard, less that of one which only makes the samples.

    Args:
        folder: where the shard is written, and removed.
        hidden: D.
        n_bytes: of the shard's features.
    """
    peaks = {}
    for way in ("make", "write"):
        command = [sys.executable, "-m", "benchmarks.cache_memory", way, str(folder), str(hidden), str(n_bytes)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks[way] = json.loads(done.stdout)["peak_mb"]
    return {"hidden": hidden, "bytes": n_bytes, "extra_mb": round(peaks["write"] - peaks["make"], 1), "peak_mb": peaks}


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=["make", "write"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("hidden", type=int)
    parser.add_argument("n_bytes", type=int)
    options = parser.parse_args()
    setting = Setting(options.hidden, options.n_bytes)
    cache = options.folder / "memory"
    tokens = lengths(setting)
    ids = [f"sample-{i:06d}" for i in range(len(tokens))]
    plan = plan_shards(ids, tokens, setting.row_bytes, sum(tokens) * setting.row_bytes)
    pool = states(setting)
    create_cache(cache, identity(), plan)
    with ShardWriter(cache, "shard-00000", identity(), setting.hidden) as writer:
        for sample_id, n in zip(ids, tokens, strict=True):
            values = pool[MAX_TOKENS - n :]
            if options.way == "write":
                writer.append(sample_id, values, np.arange(n, dtype=np.int32), np.ones(n, np.uint8))
        if options.way == "write":
            writer.commit()
    shutil.rmtree(cache)
    print(json.dumps({"peak_mb": _peak_mb()}))


def _peak_mb() -> float:
    status = Path("/proc/self/status").read_text()
    kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(kilobytes) / 1024


if __name__ == "__main__":
    _main()
