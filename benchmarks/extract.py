"""How fast the extract stage is beside bare passes of the target and beside the usual way: `make bench-extract`.

One thread. Every round goes through all shards, and through all ways for each shard, so that they share the noise of
the machine; the least times of each shard are added up. Lengths are log-normal around 270 tokens, up to 1,024.
"""

from __future__ import annotations

import benchmarks.one_thread  # noqa: F401  # isort: skip  # before numpy and torch
import argparse
import json
import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.extract_data import TARGETS, work
from benchmarks.extract_idle import idle_share
from benchmarks.extract_memory import peak_memory
from benchmarks.extract_sharing import sharing
from benchmarks.extract_ways import OURS, PADDED, RIVALS, SINGLE, WITH_HEAD, Ways, warm
from benchmarks.extract_workers import two_workers
from benchmarks.timing import Cost, cost_of

LIMITS = {PADDED: 1.9, RIVALS: 2.3, SINGLE: 1.0, "idle_share": 0.05, "two_workers": 1.8}
PARTS = ("speed", "memory", "idle", "sharing", "workers")
Row = dict[str, Any]


def main() -> None:
    options = _options()
    sizes = [int(n) for n in options.batch_tokens]
    result = run(options.dir, quick=options.quick, rounds=options.rounds, targets=options.target, only=options.only,
                 batch_tokens=sizes, samples=options.samples)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    _print(result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.extract", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few samples and one round: shows that it runs")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "bench-extract", help="on which disk")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--samples", type=int, help="of SmolLM2; of the tiny model four times as many (default 128)")
    parser.add_argument("--rounds", type=int, default=3, help="of each measurement (default 3)")
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--batch-tokens", nargs="+", default=["2048"], help="the first is measured against the others")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS[:4]),
                        help="parts of it; `workers` (two against one) needs both cores and is run when asked for")
    return parser.parse_args()


def run(
    folder: Path, *, quick: bool = False, rounds: int = 3, targets: list[str] | None = None,
    only: list[str] | None = None, batch_tokens: list[int] | None = None,
    samples: int | None = None,
) -> Row:
    """All measurements, as one JSON-able dict.

    Args:
        folder: made, and its subfolder `run` is removed at the end.
        quick: few samples, one round.
        rounds: of each measurement.
        targets: `smollm2`, `tiny`.
        only: parts of it.
        batch_tokens: of our batches; each is measured.
        samples: of SmolLM2; of the tiny model four times as many.
    """
    place, only, sizes = folder / "run", only or list(PARTS[:4]), batch_tokens or [2048]
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    result: Row = {"load_before": os.getloadavg(), "limits": LIMITS}
    try:
        for name in targets or TARGETS:
            n = (samples or (16 if quick else 128)) * (1 if name == "smollm2" else 4)
            found: Row = {}
            if "speed" in only:
                found["speed"] = speed(place, name, n, 1 if quick else rounds, sizes)
            if "memory" in only:
                found["memory_mb"] = peak_memory(place, name, n, sizes[0])
            if "idle" in only:
                found["idle"] = idle_share(place, name, n, sizes[0])
            if "sharing" in only:
                found["sharing"] = sharing(name, n, sizes[0], 1 if quick else rounds)
            if "workers" in only:
                found["workers"] = two_workers(place, name, n * 2, sizes[0], 1 if quick else rounds)
            result[name] = found
    finally:
        shutil.rmtree(place)
    return result | {"load_after": os.getloadavg()}


def speed(folder: Path, target: str, n_samples: int, rounds: int, sizes: list[int]) -> Row:
    """Tokens per second of every way, and ours over each."""
    given = work(target, n_samples)
    warm(given.target)
    ours = {f"{OURS} {n}": Ways(folder / str(n), given, n) for n in sizes}
    first = next(iter(ours.values()))
    ways = {name: way.ours for name, way in ours.items()} | {k: w for k, w in first.all().items() if k != OURS}
    least: dict[tuple[str, int], Cost] = {}
    for _ in range(rounds):
        for way in ours.values():
            way.begin()
        for i, ids in enumerate(first.shards):
            tokens = sum(len(first.sequences[s]) for s in ids)
            for name, go in ways.items():
                least[name, i] = cost_of(partial(_go, go, ids, tokens)).least(least.get((name, i)))
    costs = {name: [cost for (other, _), cost in least.items() if other == name] for name in ways}
    rows = {name: {"tokens": sum(c.n_bytes for c in found), "wall_s": round(sum(c.wall_s for c in found), 3),
                   "cpu_s": round(sum(c.cpu_s for c in found), 3)} for name, found in costs.items()}
    return {"samples": n_samples, "shards": len(first.shards), "batching": first.batching, "ways": rows,
            "times": _times(rows, f"{OURS} {sizes[0]}")}


def _go(way: Any, ids: Any, tokens: int) -> int:
    way(ids)
    return tokens


def _times(rows: dict[str, Row], ours: str) -> dict[str, Row]:
    """How many times faster ours is than each other way."""
    return {name: {kind: round(row[f"{kind}_s"] / rows[ours][f"{kind}_s"], 3) for kind in ("wall", "cpu")}
            for name, row in rows.items() if name != ours}


def _print(result: Row) -> None:
    for target in TARGETS:
        for part, found in result.get(target, {}).items():
            print(f"\n{target}, {part}")
            if part == "speed":
                _print_speed(found)
            else:
                print("  " + json.dumps(found))
    print(f"load before and after: {result['load_before'][0]:.1f}, {result['load_after'][0]:.1f}", file=sys.stderr)


def _print_speed(found: Row) -> None:
    print(f"  {found['samples']} samples in {found['shards']} shards, batches {found['batching']}")
    print(f"  {'':<20} {'tokens/s':>9} {'CPU-s':>8} {'wall-s':>8}   ours is faster by (CPU, wall), asked for")
    for name, row in found["ways"].items():
        numbers = f"{row['tokens'] / row['cpu_s']:>9.0f} {row['cpu_s']:>8.2f} {row['wall_s']:>8.2f}"
        times = found["times"].get(name)
        asked = LIMITS.get(name.removesuffix(WITH_HEAD))
        beside = f"   {times['cpu']:.2f}, {times['wall']:.2f}{f'  >= {asked}' if asked else ''}" if times else ""
        print(f"  {name:<20} {numbers}{beside}")


if __name__ == "__main__":
    main()
