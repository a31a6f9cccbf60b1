"""What it saves to compute a common beginning once, and what it costs where there is none.

Passes only (`PackedWay.capture`), on one thread: four answers to each prompt of about 270 tokens, and ordinary samples.
"""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

from benchmarks.extract_data import work
from benchmarks.extract_ways import warm
from stages import packing
from stages.capture import PackedWay

NEVER = 1 << 30
Least = dict[tuple[str, int], float]


def sharing(target: str, n_samples: int, batch_tokens: int, rounds: int) -> dict[str, Any]:
    """CPU seconds of all passes with sharing and without, and how many times faster it is with."""
    found: dict[str, Any] = {}
    for kind, answers in (("four answers", 4), ("ordinary", 1)):
        given = work(target, n_samples, answers)
        warm(given.target)
        way = PackedWay(given.target, given.layer_ids, False)
        sequences = list(given.sequences.values())
        least: Least = {}
        for _ in range(rounds):
            for name, shortest in (("with", packing.MIN_SHARED), ("without", NEVER)):
                with patch.object(packing, "MIN_SHARED", shortest):
                    _round(way, sequences, batch_tokens, name, least)
        sums = {name: sum(s for (other, _), s in least.items() if other == name) for name in ("with", "without")}
        found[kind] = {f"{name}_cpu_s": round(s, 3) for name, s in sums.items()}
        found[kind]["times"] = round(sums["without"] / sums["with"], 3)
    return found


def _round(way: PackedWay, sequences: list[Any], batch_tokens: int, name: str, least: Least) -> None:
    started = time.process_time()
    batches = list(way.batches(sequences, batch_tokens))
    _note(least, (name, -1), time.process_time() - started)
    for i, batch in enumerate(batches):
        started = time.process_time()
        way.capture([sequences[j] for j in batch])
        _note(least, (name, i), time.process_time() - started)


def _note(least: Least, key: tuple[str, int], seconds: float) -> None:
    least[key] = min(seconds, least.get(key, seconds))
