"""The whole tiny pipeline, killed at random and submitted again until done, must end as if nothing had happened.

    python -m benchmarks.chaos [--runs 50] [--seed 7] [--log chaos.jsonl] [--kinds …]

Each run is `python -m jobs.pipeline --recipe …` in new processes on a local Ray cluster: a head without CPUs and two
nodes, which stay up between runs unless they are killed. One to three faults come at random moments of random stages.
Where Ceph's gateway is installed, every other run folder is on that S3 server, which is killed too; half of such a
run's later submissions find nothing in their scratch folder, as on another machine. In the end
responses, cache (object for object), weights (all files of the last checkpoint), exported files and evaluation results
are compared with those of a run that nothing disturbed.

The log has a line per run, written when the run is over, so a bench that is stopped keeps what it has; the table is
drawn from such a file by `--table chaos.jsonl` too. What a fault costs is fitted: a run's time beyond an undisturbed
one's is the sum of what its faults cost (least squares, none below 0).
"""

from __future__ import annotations

import benchmarks.one_thread  # noqa: F401  # isort: skip  # before numpy
import argparse
import json
import os
import random
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.chaos_faults import KINDS, STORE, Fault, Scene, adopt_orphans, cpu_s, draw_faults, patiently, workers
from benchmarks.chaos_home import Place, make_home, run_differences
from benchmarks.runner_cluster import Nodes
from cache_schema.carried import SCRATCH
from pipeline.exits import TRY_AGAIN
from pipeline.recipe import STAGES
from tests.servers.s3 import S3Server, missing_programs, start_s3

Row = dict[str, Any]
PATIENCE_S = 1800.0
"""Longest time from one fault, or submission, to the next or the end: beyond it, the command hangs."""
PAUSE_S = 2.0
"""Before a command that could not have the run, or the storage, is submitted again."""
MOST = 10
"""Submissions of one run, at most."""
BUCKET = "chaos"


class Bench:
    """Runs in one folder, on one cluster and one store."""

    def __init__(self, folder: Path, scene: Scene) -> None:
        self.folder, self.scene, self.recipe = folder, scene, make_home(folder)
        self.reference = self.place("undisturbed", on_store=False)
        self.stage_s: dict[str, float] = {}

    def place(self, name: str, on_store: bool) -> Place:
        """Where a run of that name keeps its things."""
        output = self.folder / f"{name}.txt"
        if on_store and self.scene.server is not None:
            return Place(f"s3://{BUCKET}/{secrets.token_hex(4)}-{name}", output)
        return Place(str(self.folder / name), output)

    def undisturbed(self) -> Row:
        """The run to compare with, and what its stages take."""
        row = self._run(self.reference, [])
        if row["exits"] != [0]:
            raise SystemExit(f"the undisturbed run ended with {row['exits']}: {self.reference.output.read_text()}")
        for stage in STAGES:
            self.scene.whole[stage] = self.reference.work(stage)
            status = json.loads(Path(self.reference.run, "status", f"{stage}.json").read_text())
            self.stage_s[stage] = max(1.0, status["seconds"])
        self.stage_s["generate"] += 5  # the command's start, up to where its clock begins
        return row

    def again(self, number: int) -> Row:
        """An undisturbed run like any other, for the time that it takes; compared as well."""
        return self._compared(self.place(f"again-{number:03d}", on_store=False), [])

    def disturbed(self, number: int, seed: int, kinds: list[str]) -> Row:
        """One run with faults of these kinds."""
        chance = self.scene.chance = random.Random(f"{seed} {number}")
        on_store = self.scene.server is not None and number % 2 == 1
        faults: list[Fault] = []
        while not faults:
            faults = draw_faults(chance, on_store, self.stage_s, kinds)
        return {"run": number} | self._compared(self.place(f"run-{number:03d}", on_store), faults)

    def _compared(self, place: Place, faults: list[Fault]) -> Row:
        row = self._run(place, faults)
        if row["exits"][-1] == 0:
            row["problems"] += run_differences(place, self.reference)
        if row["problems"]:
            row["output"] = place.output.read_text(errors="replace")[-20_000:]
        else:
            place.remove()
        return row

    def _run(self, place: Place, faults: list[Fault]) -> Row:
        """Submit until done, with the faults on the way."""
        self.scene.fill()
        began, cpu_began, todo = time.monotonic(), cpu_s(), list(faults)
        exits: list[int] = []
        problems: list[str] = []
        while not exits or exits[-1] != 0:
            if len(exits) == MOST:
                problems.append(f"not done after {MOST} submissions")
                break
            if exits and self.scene.chance.random() < 0.5:
                place.forget_scratch()
            process = place.submit(self.recipe, self.scene.nodes.address)
            exits.append(self._through(place, process, todo, problems))
            if exits[-1] in TRY_AGAIN:
                time.sleep(PAUSE_S)
        return {
            "on_store": place.on_store, "faults": [fault.to_json() for fault in faults], "exits": exits,
            "seconds": round(time.monotonic() - began, 1), "cpu_s": round(cpu_s() - cpu_began, 1),
            "problems": problems,
        }  # fmt: skip

    def _through(self, place: Place, process: subprocess.Popen[Any], todo: list[Fault], problems: list[str]) -> int:
        """One submission, with the faults that fall into it; its exit code."""
        while todo and process.poll() is None:
            if self.scene.await_moment(todo[0], place, process):
                self.scene.inflict(todo.pop(0), process)
            elif process.poll() is None or process.returncode == 0:
                todo.pop(0)  # too late: that stage is done
        try:
            return process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            at_work = [title for _, title in workers()]
            problems.append(f"the command hung for {PATIENCE_S:.0f} s, with these workers: {at_work}")
            process.kill()
            return process.wait()


@contextmanager
def stage_set(folder: Path, seed: int, on_store: bool) -> Iterator[Scene]:
    """Cluster and store, both up until the end."""
    with ExitStack() as stack:
        server: S3Server | None = None
        if on_store and not missing_programs():
            server = start_s3(folder / "server")
            stack.callback(server.stop)
            server.make_bucket(BUCKET)
            os.environ.update(server.environment())  # of the nodes, and so of their workers
        os.environ[SCRATCH] = str(folder / "scratch")
        nodes = patiently(Nodes)
        stack.callback(nodes.close)
        yield Scene(nodes, server, random.Random(seed))


def run_all(folder: Path, options: argparse.Namespace) -> list[Row]:
    """All runs; a line each, in the log too."""
    rows: list[Row] = []
    adopt_orphans()
    os.environ.setdefault("RAY_worker_niceness", "0")
    with stage_set(folder, options.seed, STORE in options.kinds) as scene, options.log.open("a") as log:
        bench = Bench(folder, scene)

        def note(row: Row) -> None:
            rows.append(row)
            print(line_of(row), flush=True)
            log.write(json.dumps(row) + "\n")
            log.flush()

        note(bench.undisturbed())
        for number in range(options.first, options.first + options.runs):
            if number > options.first and (number - options.first) % options.undisturbed_every == 0:
                note(bench.again(number))
            note(bench.disturbed(number, options.seed, options.kinds))
    return rows


def line_of(row: Row) -> str:
    """A run on one line."""
    faults = "; ".join(
        f"{fault['kind']} in {fault['stage']}{'' if fault['met'] else ' (too late)'}"
        + (f" [{fault['told'].strip()}]" if fault["told"] else "")
        for fault in row["faults"]
    )
    end = "the same" if not row["problems"] else f"PROBLEMS: {row['problems'][:4]}"
    name = f"run {row['run']:3d}" if "run" in row else "undisturbed"
    place = "store" if row["on_store"] else "local"
    return (f"{name} {place} {row['seconds']:6.1f} s, {row['cpu_s']:5.1f} CPU-s, exits {row['exits']}: {end}"
            + (f": {faults}" if faults else ""))  # fmt: skip


def table(rows: list[Row]) -> str:
    """Runs that ended the same, and the faults by kind with what one costs."""
    runs = [row for row in rows if "run" in row]
    calm = [row for row in rows if "run" not in row and not row["problems"]]
    if not runs or not calm:
        return "no runs"
    base = {key: statistics.median(row[key] for row in calm) for key in ("seconds", "cpu_s")}
    met = [[fault["kind"] for fault in row["faults"] if fault["met"]] for row in runs]
    kinds = [kind for kind in KINDS if any(kind in own for own in met)]
    lost = {key: _fitted(runs, met, kinds, key, base[key]) for key in base}
    lines = [f"{'':<30}{'faults':>8}{'runs':>6}{'same':>6}{'lost s':>8}{'lost CPU-s':>12}"]
    for i, kind in enumerate(kinds):
        own = [row for row, faults in zip(runs, met, strict=True) if kind in faults]
        same = sum(not row["problems"] for row in own)
        lines.append(f"{kind:<30}{sum(faults.count(kind) for faults in met):>8}{len(own):>6}{same:>6}"
                     f"{lost['seconds'][i]:>8.1f}{lost['cpu_s'][i]:>12.1f}")  # fmt: skip
    same = sum(not row["problems"] for row in runs)
    again = sum(len(row["exits"]) - 1 for row in runs)
    late = sum(not fault["met"] for row in runs for fault in row["faults"])
    lines.append(
        f"{same} of {len(runs)} runs ended like the undisturbed one; {sum(map(len, met))} faults ({late} more came too "
        f"late), {again} resubmissions; undisturbed {base['seconds']:.1f} s and {base['cpu_s']:.1f} CPU-s (median of "
        f"{len(calm)}), disturbed {statistics.mean(row['seconds'] for row in runs):.1f} s and "
        f"{statistics.mean(row['cpu_s'] for row in runs):.1f} CPU-s (mean)"
    )
    return "\n".join(lines)


def _fitted(runs: list[Row], met: list[list[str]], kinds: list[str], key: str, base: float) -> list[float]:
    """What a fault of each kind costs, by least squares over all runs; kinds that come out below 0 are set to it."""
    import numpy as np

    counts = np.array([[faults.count(kind) for kind in kinds] for faults in met], float)
    beyond = np.array([row[key] - base for row in runs])
    found, positive = np.zeros(len(kinds)), np.full(len(kinds), True)
    while positive.any():
        found[positive] = np.linalg.lstsq(counts[:, positive], beyond, rcond=None)[0]
        if (found >= 0).all():
            break
        positive &= found > 0
        found[~positive] = 0
    return [float(x) for x in found]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="number of the first run: to go on with the same seed")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="only these")
    parser.add_argument("--undisturbed-every", type=int, default=10, help="runs between two undisturbed ones")
    parser.add_argument("--log", type=Path, default=Path("chaos.jsonl"), help="lines are appended")
    parser.add_argument("--table", type=Path, help="run nothing; the table of this log")
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(line) for line in options.table.read_text().splitlines()]))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends too
    folder = Path(tempfile.mkdtemp(prefix="bench-chaos-"))
    try:
        rows = run_all(folder, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table(rows))
    return int(any(row["problems"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
