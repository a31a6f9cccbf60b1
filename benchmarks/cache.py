"""How fast the cache is beside a raw file and beside other formats, in one run: `make bench-cache`.

One thread; each number is the least of several rounds, and each round goes through all ways, so that they share the
noise of the machine. What is read is timed by sample, and the least times of all samples are added up. Shares are of a
raw write or read of the same bytes in the same run.
"""

from __future__ import annotations

import benchmarks.one_thread  # noqa: F401  # isort: skip  # before numpy and torch
import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.cache_data import Setting, samples
from benchmarks.cache_memory import writer_memory
from benchmarks.cache_opening import opening_times
from benchmarks.cache_readers import BESIDE, RAW, REMARKS, Reading, check_equal
from benchmarks.cache_writers import writers
from benchmarks.timing import Cost, drop_cached, least_by_item, least_costs

LIMITS = {"write": 0.5, "read": 0.75, "memory_mb": 256.0, "first_batch_s": 2.0}
TITLES = {"write": "write, with fsync", "read_cached": "read, page-cached", "read_cold": "read, cold"}
Row = dict[str, Any]


def main() -> None:
    torch.set_num_threads(1)
    options = _options()
    result = run(options.dir, quick=options.quick, rounds=options.rounds, hidden=options.hidden, only=options.only)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    _print(result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cache", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few MB and one round: shows that it runs")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "bench-cache", help="on which disk")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement (default 5)")
    parser.add_argument("--hidden", type=int, nargs="+", help="D (default 1024 4096; quick: 64 128)")
    parser.add_argument("--only", choices=["speed", "memory", "opening"], help="one part of it")
    return parser.parse_args()


def run(
    folder: Path, *, quick: bool = False, rounds: int = 5, hidden: list[int] | None = None, only: str | None = None
) -> Row:
    """All measurements, as one JSON-able dict.

    Args:
        folder: made, and its subfolder `run` is removed at the end.
        quick: small sizes, one round.
        rounds: of each measurement.
        hidden: values of D.
        only: `speed`, `memory` or `opening`; None does all.
    """
    hidden = hidden or ([64, 128] if quick else [1024, 4096])
    place = folder / "run"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    result: Row = {"load_before": os.getloadavg(), "limits": LIMITS}
    try:
        if only in (None, "speed"):
            settings = [Setting(d, 20_000_000 if quick else 1_200_000_000) for d in hidden]
            result["speed"] = [speed(place / f"d{s.hidden}", s, 1 if quick else rounds) for s in settings]
        if only in (None, "memory"):
            sizes = [100_000_000] if quick else [1_000_000_000, 3_000_000_000]
            result["memory"] = [writer_memory(place, d, n) for d in hidden for n in sizes]
        if only in (None, "opening"):
            counts = [(1_000, 20)] if quick else [(100_000, 400), (100_000, 6_250), (1_000_000, 15_625)]
            result["opening"] = [opening_times(place / "opening", *count) for count in counts]
    finally:
        shutil.rmtree(place)
    return result | {"load_after": os.getloadavg()}


def speed(folder: Path, setting: Setting, rounds: int) -> Row:
    """Writing, and reading whole samples from the page cache and from the disk."""
    folder.mkdir()
    data = samples(setting)
    ways = writers(setting, data)

    def anew(name: str) -> None:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).unlink(missing_ok=True)
        os.sync()

    written = least_costs({name: _at(way, folder / name) for name, way in ways.items()}, min(rounds, 4), anew)
    reading = Reading(folder, setting, {sample_id: len(values) for sample_id, values in data.items()})
    check_equal(reading, data, reading.order[:3])
    del data, ways
    readers = reading.readers()
    ways_to_read = {name: read for name, (_, read) in readers.items()}
    cached = least_by_item(ways_to_read, reading.order, 2 * rounds, lambda name: None)
    from_disk = None
    cold = [drop_cached(path) for path, _ in readers.values()]
    if all(cold):
        from_disk = least_by_item(ways_to_read, reading.order, min(rounds, 2), lambda name: _drop(readers[name][0]))
    reading.close()
    shutil.rmtree(folder)
    return {
        "hidden": setting.hidden,
        "samples": len(reading.tokens),
        "bytes": sum(reading.tokens.values()) * setting.row_bytes,
        "write": _rows(written),
        "read_cached": _rows(cached),
        "read_cold": _rows(from_disk) if from_disk else None,
    }


def _drop(path: Path) -> None:
    drop_cached(path)


def _at(way: Any, path: Path) -> Any:
    return lambda: way(path)


def _rows(costs: dict[str, Cost]) -> list[Row]:
    return [
        {
            "way": name,
            "mb_per_s": round(cost.mb_per_s),
            "cpu_s_per_gb": round(cost.cpu_s_per_gb, 2),
            "share_of_raw": round(cost.mb_per_s / costs[BESIDE.get(name, RAW)].mb_per_s, 2),
            "remark": REMARKS.get(name, ""),
        }
        for name, cost in costs.items()
    ]


def _print(result: Row) -> None:
    for found in result.get("speed", ()):
        print(f"\nD={found['hidden']}, n=5: {found['samples']} samples, {found['bytes'] / 1e9:.2f} GB of bfloat16")
        for part, title in TITLES.items():
            print(f"  {title:<24} {'MB/s':>7} {'CPU-s/GB':>9} {'of raw':>7}")
            for row in found[part] or ():
                numbers = f"{row['mb_per_s']:>7} {row['cpu_s_per_gb']:>9.2f} {row['share_of_raw']:>7.2f}"
                print(f"    {row['way']:<22} {numbers}  {row['remark']}")
            if found[part] is None:
                print("    not measured: this machine keeps the files in memory")
    for row in result.get("memory", ()):
        print(f"memory of the writer, D={row['hidden']}, {row['bytes'] / 1e9:.0f} GB shard: {row['extra_mb']:.0f} MB")
    for row in result.get("opening", ()):
        numbers = ", ".join(f"{k[:-2]} {v:.2f} s" for k, v in row.items() if k.endswith("_s") and v is not None)
        print(f"first batch of {row['samples']} samples in {row['shards']} shards: {numbers}")
    print(f"load before and after: {result['load_before'][0]:.1f}, {result['load_after'][0]:.1f}", file=sys.stderr)


if __name__ == "__main__":
    main()
