"""What the pool of workers costs by itself, and whether it survives a cluster that comes and goes.

    python -m benchmarks.runner --own-cost             # 10,000 units that do nothing
    python -m benchmarks.runner --cluster --runs 20    # nodes killed and added at random while 60 shards are made

The second runs the real extract worker on a tiny target, on a Ray cluster simulated on this machine; afterwards the
cache must be that of an undisturbed run, byte for byte.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

from pipeline.runner import ensure_ray, run_pool

LIMIT_MS = 2.0


class NoWork:
    """Does nothing, so that only the runner is measured."""

    def run(self, unit: int, attempt: int) -> dict[str, Any]:
        """A receipt like that of a shard."""
        return {"shard": unit, "samples": 1, "tokens": 1, "bytes": 1, "seconds": 0.0}


def own_cost(n_units: int, workers: int, in_flight: int, rounds: int) -> bool:
    """Print milliseconds per unit, of wall time (starting the workers included) and of the driver's own CPU.

    Returns:
        Whether the best round is in the limit.
    """
    walls: list[float] = []
    with ensure_ray(num_cpus=workers):
        options: dict[str, Any] = {"n_workers": workers, "resources": {"num_cpus": 1}, "in_flight": in_flight}
        run_pool(range(100), NoWork, **options)
        for number in range(1, rounds + 1):
            cpu_s, began = time.process_time(), time.perf_counter()
            n_done = len(run_pool(range(n_units), NoWork, **options))
            assert n_done == n_units, f"{n_done} receipts"
            walls.append((time.perf_counter() - began) * 1e3 / n_units)
            cpu_ms = (time.process_time() - cpu_s) * 1e3 / n_units
            print(f"round {number}: {walls[-1]:.3f} ms of wall per unit, {cpu_ms:.3f} ms of driver CPU", flush=True)
    best, middle = min(walls), statistics.median(walls)
    met = "met" if best <= LIMIT_MS else "MISSED"
    print(f"{n_units:,} units, {workers} workers, {in_flight} in flight: best {best:.3f} ms, median {middle:.3f} ms "
          f"(limit {LIMIT_MS} ms: {met})")  # fmt: skip
    return best <= LIMIT_MS


def main() -> int:
    """Run what the command line asks for; 1 if a figure is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--own-cost", action="store_true", help="milliseconds per unit")
    parser.add_argument("--units", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--in-flight", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cluster", action="store_true", help="nodes that come and go")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--shards", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    good = True
    if given.own_cost or not given.cluster:
        good = own_cost(given.units, given.workers, given.in_flight, given.rounds)
    if given.cluster:
        from benchmarks.runner_cluster import run_all

        good &= run_all(given.runs, given.shards, given.seed)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
