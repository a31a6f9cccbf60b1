"""Rolling mode (figure 5): a run whose cache is ten times `cache.max_bytes`, beside the same run without a limit.

Both go through the real command line on a tiny random target; so does a third run that is killed with `kill -9` in
the middle of training and started again. While they run, the bytes on disk are summed up every 20 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cache_schema.marker import read_marker
from cache_schema.storage import FolderStorage
from tests.tiny_run import make_home

Row = dict[str, Any]
WATCH_S = 0.02
TIMES = 10
"""The whole cache over the limit, at least."""
_VOLATILE = ("seconds", "tokens_per_s", "data_wait_s", "data_wait_share", "tflops", "peak_share")


def main() -> None:
    options = _options()
    result = run(options.dir, samples=options.samples, workers=options.workers)
    _print(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(0 if result["ok"] else 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rolling", description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "bench-rolling", help="made anew")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--samples", type=int, default=480, help="prompts (default 480)")
    parser.add_argument("--workers", type=int, default=2, help="extract workers of the limited runs (default 2)")
    return parser.parse_args()


def run(folder: Path, *, samples: int = 480, workers: int = 2) -> Row:
    """All three runs, as one JSON-able dict; `ok` says whether they hold what figure 5 asks."""
    shutil.rmtree(folder, ignore_errors=True)
    recipe = make_home(
        folder, samples, 2, name="rolling", generate={"max_new_tokens": 16, "part_samples": 64, "batch_size": 32},
        cache={"shard_bytes": 50_000}, drafter={"n_layers": 1},
        train={"epochs": 4, "passes_per_window": 2, "window_shards": 4, "micro_samples": 4, "anchors": 8,
               "heldout_share": 0.02, "heldout_every": 100, "checkpoint_every": 50},
    )  # fmt: skip
    _stage(recipe, folder / "unlimited", "generate")
    for other in ("rolling", "killed"):
        shutil.copytree(folder / "unlimited", folder / other)
    unlimited = _go(recipe, folder / "unlimited", [])
    storage = FolderStorage(folder / "unlimited" / "cache")
    sizes = [read_marker(storage, p.stem).bytes for p in sorted((storage.root / "commits").glob("shard-*.json"))]
    total, largest = sum(sizes), max(sizes)
    limit = total // TIMES
    settings = [f"cache.max_bytes={limit}", f"extract.workers={workers}"]
    rows = {"unlimited": unlimited, "rolling": _go(recipe, folder / "rolling", settings)}
    rows["killed"] = _go(recipe, folder / "killed", settings, kill_at=0.4)
    for row in rows.values():
        row["over_by_shards"] = max(0, row["peak_bytes"] - limit) / largest
        row["equal_metrics"] = row["metrics"] == unlimited["metrics"]
    for row in rows.values():
        del row["metrics"]
    limited = [rows["rolling"], rows["killed"]]
    ok = all(r["over_by_shards"] <= workers and abs(r["loss"] / unlimited["loss"] - 1) < 0.01 for r in limited)
    return {
        "samples": samples, "shards": len(sizes), "cache_bytes": total, "largest_shard_bytes": largest,
        "max_bytes": limit, "times": total / limit, "workers": workers, "runs": rows, "ok": ok,
    }  # fmt: skip


def _go(recipe: Path, run: Path, settings: list[str], kill_at: float | None = None) -> Row:
    """Extract and train, watched; if `kill_at` is given, the driver is killed after that share of all steps."""
    began = time.monotonic()
    with _watched(run) as peak:
        _stage(recipe, run, "extract", settings)
        if kill_at is not None:
            _kill(_command(recipe, run, "train", settings), lambda: _steps_done(run) > kill_at * _steps_of(run))
        _stage(recipe, run, "train", settings)
    summary = json.loads((run / "status" / "train.json").read_text())["summary"]
    keys = ("loss", "simulated_tau", "shards_made", "shards_made_again", "shards_evicted")
    return {key: summary.get(key) for key in keys} | {
        "seconds": time.monotonic() - began,
        "peak_bytes": peak[0],
        "looks": peak[1],
        "metrics": _metrics(run),
    }


def _command(recipe: Path, run: Path, stage: str, settings: list[str]) -> list[str]:
    sets = [part for setting in [f"run={run}", *settings] for part in ("--set", setting)]
    return [sys.executable, "-m", "pipeline.cli", stage, str(recipe), *sets]


def _stage(recipe: Path, run: Path, stage: str, settings: list[str] | None = None) -> None:
    done = subprocess.run(_command(recipe, run, stage, settings or []), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{stage} of {run} ended with {done.returncode}:\n{done.stderr}")
    print(f"{run.name}: {done.stderr.splitlines()[-1]}", file=sys.stderr)


def _kill(command: list[str], now: Callable[[], bool]) -> None:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not now():
            if process.poll() is not None:
                raise SystemExit("training ended before it could be killed")
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    print("killed: kill -9", file=sys.stderr)


def _steps_done(run: Path) -> int:
    return len(_metrics(run)) if (run / "train" / "metrics.jsonl").exists() else 0


def _steps_of(run: Path) -> int:
    summary = json.loads((run.parent / "unlimited" / "status" / "train.json").read_text())["summary"]
    return int(summary["steps"])


def _metrics(run: Path) -> dict[str, Row]:
    """The last row of each step and kind, without times: a resumed run repeats the steps behind its checkpoint."""
    rows: dict[str, Row] = {}
    for line in (run / "train" / "metrics.jsonl").read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut off by a kill
        rows[f"{row['kind']} {row['step']}"] = {k: v for k, v in row.items() if k not in _VOLATILE}
    return rows


@contextmanager
def _watched(run: Path) -> Iterator[list[int]]:
    """Most bytes of the run's caches seen at once, and how often was looked."""
    peak, stop = [0, 0], threading.Event()

    def watch() -> None:
        while not stop.wait(WATCH_S):
            peak[0] = max(peak[0], _bytes(run / "cache" / "shards") + _bytes(run / "cache-heldout" / "shards"))
            peak[1] += 1

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def _bytes(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(place, name)).st_size  # noqa: PTH116, PTH118  called thousands of times
            except FileNotFoundError:
                continue
    return total


def _print(result: Row) -> None:
    print(
        f"{result['samples']} samples, {result['shards']} shards, {result['cache_bytes']:,} bytes: "
        f"{result['times']:.1f} × cache.max_bytes {result['max_bytes']:,} (largest shard "
        f"{result['largest_shard_bytes']:,} bytes); {result['workers']} extract workers"
    )
    print(f"{'run':<12}{'peak bytes':>12}{'over, shards':>14}{'made':>7}{'again':>7}{'evicted':>9}{'loss':>10}"
          f"{'sim. τ':>8}{'metrics equal':>15}{'s':>6}")
    for name, row in result["runs"].items():
        over = f"{row['over_by_shards']:.2f}" if name != "unlimited" else "–"
        counts = [row[k] if row[k] is not None else "–" for k in ("shards_made", "shards_made_again", "shards_evicted")]
        print(f"{name:<12}{row['peak_bytes']:>12,}{over:>14}{counts[0]:>7}{counts[1]:>7}{counts[2]:>9}"
              f"{row['loss']:>10.4f}{row['simulated_tau']:>8.3f}{row['equal_metrics']!s:>15}{row['seconds']:>6.0f}")
    print("ok" if result["ok"] else "NOT OK")


if __name__ == "__main__":
    main()
