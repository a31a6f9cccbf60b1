"""Whether `dflash simulate` foretells what the real pool does, from the rates of one worker.

    python -m benchmarks.simulate

The real runner drives real workers of its own Ray. Their work is paced: a unit sleeps while it is read, holds the
worker's device while it is computed, and sleeps while it is written, so that a busy machine does not decide. First the
rates are measured: seconds of each part of a unit with one undisturbed worker, and of starts, of one worker and of two
at once. Then come the runs that are foretold: one and two workers, one and two units in flight, with and without
deaths.

A worker that is to die kills itself with SIGKILL in the middle of a unit. Which units, and how far into the worker's
time for them, is spread evenly (stratified), so that few deaths stand for many. The simulation is told the mean time
between deaths, not when they come; its figures are means over seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.runner import ensure_ray, run_pool
from pipeline.simulate import play
from pipeline.simulate_file import ClusterRates, PoolRates, Simulation, StoreRates

READ_S, COMPUTE_S, WRITE_S = 0.15, 2.4, 0.45
"""So long that the seconds of a start, which a busy machine decides, are few beside them."""
SPREAD = 0.2
TOKENS = 1000.0
"""Of a unit; every unit has as many."""
LIMIT = 0.15
SEEDS = 200


@dataclass(frozen=True)
class Kills:
    """Which units' first attempts end with their worker, and after which share of the worker's time for them."""

    at: dict[int, float]
    whole: bool
    """Of the whole unit; else of its computation, when the worker's time is that: the rest is hidden behind it."""

    @classmethod
    def spread(cls, n_units: int, n_kills: int, seed: int, in_flight: int) -> Kills:
        """So many kills, evenly over the units and over the worker's time for one."""
        chance = random.Random(seed)
        phases = [(i + 0.5) / n_kills for i in range(n_kills)]
        chance.shuffle(phases)
        stride = n_units / n_kills if n_kills else 0.0
        at = {int((i + chance.random()) * stride): phase for i, phase in enumerate(phases)}
        return cls(at, in_flight == 1)


class PacedWorker:
    """Takes the time of a worker and nothing else; writes down when it was ready and what it lost."""

    def __init__(self, folder: Path, kills: Kills) -> None:
        self.folder, self.kills, self.device = folder, kills, threading.Lock()
        self.began: dict[int, tuple[float, float]] = {}  # unit -> when its computation began, and its length
        (folder / f"ready-{os.getpid()}").write_text(repr(time.time()))

    def run(self, unit: int, attempt: int) -> dict[str, Any]:
        """Read, compute, write, each as long as its name's length says, the computation spread by the unit's number."""
        wanted_s = COMPUTE_S * (1 + SPREAD * random.Random(unit).uniform(-1.7, 1.7))
        phase = self.kills.at.get(unit) if attempt == 1 else None
        times = [time.perf_counter()]
        if phase is not None and self.kills.whole:
            threading.Timer(phase * (READ_S + wanted_s + WRITE_S), self._die).start()
        time.sleep(READ_S)
        times.append(time.perf_counter())
        with self.device:
            times.append(time.perf_counter())
            self.began[unit] = times[-1], wanted_s
            if phase is not None and not self.kills.whole:
                threading.Timer(phase * wanted_s, self._die).start()
            time.sleep(wanted_s)
        times.append(time.perf_counter())
        time.sleep(WRITE_S)
        times.append(time.perf_counter())
        del self.began[unit]
        parts = {"read_s": times[1] - times[0], "compute_s": times[3] - times[2], "write_s": times[4] - times[3]}
        return {"tokens": int(TOKENS)} | parts

    def _die(self) -> None:
        now_s = time.perf_counter()
        lost_s = sum(min(now_s - began_s, wanted_s) for began_s, wanted_s in list(self.began.values()))
        (self.folder / f"lost-{os.getpid()}").write_text(repr(lost_s))
        os.kill(os.getpid(), signal.SIGKILL)


def real_run(n_units: int, workers: int, in_flight: int, n_kills: int, seed: int) -> dict[str, Any]:
    """One run of the real pool: its wall time, the GPU seconds that deaths took, receipts, and seconds of starts."""
    folder = Path(tempfile.mkdtemp(prefix="dflash-simulate-"))
    try:
        kills = Kills.spread(n_units, n_kills, seed, in_flight)
        began, began_s = time.time(), time.perf_counter()
        receipts = run_pool(
            range(n_units), functools.partial(PacedWorker, folder, kills), n_workers=workers,
            resources={"num_cpus": 1}, in_flight=in_flight, label="unit", max_attempts=3,
        )  # fmt: skip
        wall_s = time.perf_counter() - began_s
        starts = sorted(float(f.read_text()) - began for f in folder.glob("ready-*"))
        lost = [float(f.read_text()) for f in folder.glob("lost-*")]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = {"wall_s": wall_s, "lost_s": sum(lost), "deaths": len(lost)}
    return found | {"starts_s": starts[:workers], "receipts": receipts}


@dataclass(frozen=True)
class Measured:
    """Rates of one worker; seconds of a start, by the number of workers that start at once."""

    rates: PoolRates
    start_s: dict[int, float]

    def start(self, workers: int, deaths: int) -> float:
        """Mean over the starts of a run: the first ones come at once, those that replace the dead alone."""
        return (workers * self.start_s[workers] + deaths * self.start_s[1]) / (workers + deaths)


def measure(n_units: int, n_starts: int) -> Measured:
    """The rates of one worker that nothing disturbs."""
    whole, starts = real_run(n_units, 1, 1, 0, 0), dict[int, list[float]]()
    starts[1] = whole["starts_s"]
    for _ in range(n_starts):
        for workers in (1, 2):
            found = real_run(workers, workers, 1, 0, 0)["starts_s"]
            starts[workers] = starts.get(workers, []) + found
    receipts = whole["receipts"]
    part = {name: statistics.fmean(r[name] for r in receipts) for name in ("read_s", "compute_s", "write_s")}
    rest_s = (whole["wall_s"] - whole["starts_s"][0]) / n_units - sum(part.values())
    spread = statistics.stdev(r["compute_s"] for r in receipts) / part["compute_s"]
    rates = PoolRates(
        workers=1, tokens_per_s=TOKENS / part["compute_s"], unit_tokens=TOKENS, token_bytes=part["write_s"],
        read_token_bytes=part["read_s"], unit_spread=spread, dispatch_s=max(rest_s, 0.0),
    )  # fmt: skip
    return Measured(rates, {workers: statistics.median(found) for workers, found in starts.items()})


def foretell(found: Measured, n_units: int, workers: int, in_flight: int, n_kills: int) -> dict[str, float]:
    """Means over seeds of what a simulation finds; a node is a worker, and its store gives it what was measured."""
    rates = found.rates
    compute_s = TOKENS / rates.tokens_per_s
    hidden = in_flight > 1
    unit_s = compute_s if hidden else compute_s + rates.read_token_bytes + rates.token_bytes + rates.dispatch_s
    # A death takes half a unit on average, which is done again, and may end in another.
    mtbf_h = (n_units / n_kills + 0.5) * unit_s / 3600 if n_kills else None
    sim = Simulation(
        name="small", samples=n_units, tokens_per_sample=TOKENS,
        cluster=ClusterRates(nodes=workers, gpus_per_node=1, worker_mtbf_h=mtbf_h),
        store=StoreRates(node_write_bytes_per_s=TOKENS, node_read_bytes_per_s=TOKENS),
        extract=dataclasses.replace(rates, workers=workers, in_flight=in_flight, start_s=found.start(workers, n_kills)),
    )  # fmt: skip
    played = [play(dataclasses.replace(sim, seed=seed)) for seed in range(SEEDS if n_kills else 10)]
    return {
        "wall_s": statistics.fmean(r["wall_s"] for r in played),
        "lost_s": statistics.fmean(r["stages"][0]["lost_gpu_s"] for r in played),
        "deaths": statistics.fmean(r["stages"][0]["worker_deaths"] for r in played),
    }


def off(found: float, expected: float) -> float:
    """Relative difference; 0 where nothing was expected or found."""
    return (found - expected) / expected if expected else float(found > 0)


def compare(found: Measured, n_units: int, n_kills: int) -> list[dict[str, Any]]:
    """A row for each run, printed as it ends."""
    rows = []
    print("workers  in flight  deaths    wall s real / foretold         lost s real / foretold", flush=True)
    for kills, (workers, in_flight) in itertools.product((0, n_kills), ((1, 1), (2, 1), (2, 2))):
        real = real_run(n_units, workers, in_flight, kills, seed=10 * workers + in_flight)
        told = foretell(found, n_units, workers, in_flight, kills)
        row = {"workers": workers, "in_flight": in_flight, "deaths": real["deaths"], "told_deaths": told["deaths"]}
        for name in ("wall_s", "lost_s"):
            row |= {name: real[name], f"told_{name}": told[name], f"{name}_off": off(told[name], real[name])}
        rows.append(row)
        both = [f"{row[n]:9.2f} / {row[f'told_{n}']:7.2f} ({row[f'{n}_off']:+6.1%})" for n in ("wall_s", "lost_s")]
        print(f"{workers:7d}  {in_flight:9d}  {real['deaths']:6d}  {'  '.join(both)}", flush=True)
    return rows


def main() -> int:
    """Measure, run, foretell; 1 if a figure is further off than the limit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--units", type=int, default=60)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--starts", type=int, default=4, help="starts of one and of two workers that are measured")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    given = parser.parse_args()
    with ensure_ray(num_cpus=2):
        found = measure(given.units // 2, given.starts)
        rates = found.rates
        parts = {"compute": TOKENS / rates.tokens_per_s, "read": rates.read_token_bytes, "write": rates.token_bytes,
                 "driver": rates.dispatch_s, "start": found.start_s[1], "start of two": found.start_s[2]}  # fmt: skip
        told = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in parts.items())
        print(f"one worker: {told}; spread of the computation {rates.unit_spread:.2f}", flush=True)
        rows = compare(found, given.units, given.kills)
    worst = max(abs(row[name]) for row in rows for name in ("wall_s_off", "lost_s_off"))
    print(f"furthest off: {worst:.1%} (limit {LIMIT:.0%}: {'met' if worst <= LIMIT else 'MISSED'})")
    if given.json:
        given.json.write_text(json.dumps({"measured": dataclasses.asdict(found), "rows": rows}, indent=1) + "\n")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
