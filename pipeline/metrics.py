"""What a pool of workers tells Ray's metrics, from where Prometheus reads it.

Each name gets `ray_` in front, counters `_total` behind; all have the labels `run` and `stage`:

| name | kind | meaning |
|---|---|---|
| `dflash_units_done` | counter | shards or parts that were committed |
| `dflash_failed_attempts` | counter | attempts that came to nothing; label `cause`: raised, refused, died, node_lost |
| `dflash_tokens` | counter | tokens in them, where a receipt tells |
| `dflash_bytes` | counter | bytes in them, likewise |
| `dflash_unit_seconds` | histogram | how long a unit took in its worker |
| `dflash_device_wait_share` | gauge | share of the workers' time in which the device waited for anything else, so far |
| `dflash_workers` | gauge | workers that are ready |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TAGS = ("run", "stage")
SECONDS = [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0]


class RunMetrics:
    """The metrics of one pool; made inside `ensure_ray()`.

    Args:
        run: name of the run.
        stage: that is running.
    """

    def __init__(self, run: str, stage: str) -> None:
        from ray.util.metrics import Counter, Gauge, Histogram

        tags = {"run": run, "stage": stage}
        self._done = Counter("dflash_units_done", "Units committed", TAGS).set_default_tags(tags)
        self._failed = Counter("dflash_failed_attempts", "Attempts that came to nothing", (*TAGS, "cause"))
        self._failed.set_default_tags(tags)
        self._amounts = {
            key: Counter(f"dflash_{key}", f"{key} of the units committed", TAGS).set_default_tags(tags)
            for key in ("tokens", "bytes")
        }
        self._seconds = Histogram("dflash_unit_seconds", "Seconds of one unit in its worker", SECONDS, TAGS)
        self._seconds.set_default_tags(tags)
        self._share = Gauge("dflash_device_wait_share", "Share of time that the device waits", TAGS)
        self._share.set_default_tags(tags)
        self._workers = Gauge("dflash_workers", "Workers that are ready", TAGS).set_default_tags(tags)
        self._wait_s = self._time_s = 0.0

    def done(self, receipt: Mapping[str, Any]) -> None:
        """Count a finished unit by what its receipt tells."""
        self._done.inc()
        for key, counter in self._amounts.items():
            if receipt.get(key, 0) > 0:
                counter.inc(receipt[key])
        seconds = receipt.get("seconds")
        if seconds is None:
            return
        self._seconds.observe(seconds)
        if "device_wait_s" in receipt:
            wait_s = receipt["device_wait_s"]
            self._wait_s += wait_s
            # Of two units in flight each one's seconds hold the other's: the device's own time is the measure then.
            self._time_s += wait_s + receipt["device_busy_s"] if "device_busy_s" in receipt else seconds
            self._share.set(self._wait_s / self._time_s if self._time_s > 0 else 0.0)

    def failed(self, cause: str) -> None:
        """Count an attempt that came to nothing."""
        self._failed.inc(tags={"cause": cause})

    def workers(self, n: int) -> None:
        """Workers that are ready now."""
        self._workers.set(n)
