"""Peak memory of each way over that of a process which has only loaded the target: one process per way."""

from __future__ import annotations

import benchmarks.one_thread  # noqa: F401  # isort: skip  # before numpy and torch
import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.extract_data import work
from benchmarks.extract_ways import OURS, PADDED, RIVALS, SINGLE, Ways, warm

WAYS = (OURS, PADDED, RIVALS, SINGLE)


def peak_memory(folder: Path, target: str, n_samples: int, batch_tokens: int) -> dict[str, float]:
    """MB that each way takes at most beside the loaded target, by way."""
    found = {}
    for way in WAYS:
        command = [sys.executable, "-m", "benchmarks.extract_memory", way, str(folder), target, str(n_samples),
                   str(batch_tokens)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[way] = round(float(json.loads(done.stdout.splitlines()[-1])["extra_mb"]), 1)
    return found


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("target")
    parser.add_argument("n_samples", type=int)
    parser.add_argument("batch_tokens", type=int)
    options = parser.parse_args()
    given = work(options.target, options.n_samples)
    warm(given.target)
    folder = options.folder / f"memory-{options.way}"
    ways = Ways(folder, given, options.batch_tokens)
    before = _forget_peak()
    way = ways.all(with_head=False)[options.way]
    for ids in ways.shards:
        way(ids)
    print(json.dumps({"extra_mb": _status_mb("VmHWM") - before}))
    shutil.rmtree(folder)


def _forget_peak() -> float:
    """Set the peak to what is resident now, and say how much that is."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_mb("VmRSS")


def _status_mb(name: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(f"{name}:"))) / 1024


if __name__ == "__main__":
    _main()
