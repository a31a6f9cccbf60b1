"""Share of the time in which the device waits, in the real worker with two shards in flight, as the pool runs it."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.extract_data import SHARD_TOKENS, extraction, work
from benchmarks.extract_ways import warm

SHARDS = 6


def idle_share(folder: Path, target: str, n_samples: int, batch_tokens: int) -> dict[str, Any]:
    """Waiting over busy and waiting time, for one and for two shards in flight."""
    given = work(target, n_samples)
    warm(given.target)
    total = sum(len(s) for s in given.sequences.values())
    found: dict[str, Any] = {}
    for in_flight in (1, 2):
        place = folder / f"idle-{in_flight}"
        made = extraction(place, given, batch_tokens, min(SHARD_TOKENS, total // SHARDS))
        started = time.perf_counter()
        with ThreadPoolExecutor(in_flight) as threads:
            receipts = list(threads.map(lambda unit: made.worker.run(unit, 1), made.units))  # noqa: B023
        wall = time.perf_counter() - started
        busy, waited = (sum(r[k] for r in receipts) for k in ("device_busy_s", "device_wait_s"))
        found[f"in_flight_{in_flight}"] = {
            "shards": len(receipts), "busy_s": round(busy, 3), "wait_s": round(waited, 4), "wall_s": round(wall, 3),
            "idle_share": round(waited / (busy + waited), 4),
        }  # fmt: skip
        shutil.rmtree(place)
    return found
