"""Acceptance by position, counted in two places and compared: a server's beside ours on the same prompts.

Shapes: P prompts, K positions (block size − 1).

A share is `accepted drafts at a position / cycles`, over all prompts. Its interval is the wider of two: the prompts
drawn again with replacement (cycles of one response resemble each other), and Wilson's for that many cycles (prompts
drawn again say nothing where every cycle accepted, or none).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from stages.decode import Decoded

LEVEL = 0.95
_Z = 1.959964
"""Of the normal distribution at `LEVEL`."""
DRAWS = 4000


@dataclass(frozen=True, slots=True)
class Accepted:
    """Cycles of one or more responses, and in how many of them the draft at position 1…K was accepted."""

    cycles: int
    by_position: tuple[int, ...]

    def since(self, before: Accepted) -> Accepted:
        """What was counted after an earlier look at the same counters."""
        pairs = zip(self.by_position, before.by_position, strict=True)
        return Accepted(self.cycles - before.cycles, tuple(a - b for a, b in pairs))

    @property
    def tau(self) -> float:
        """Mean acceptance length over cycles."""
        return 1 + sum(self.by_position) / self.cycles if self.cycles else 0.0


def total(counts: Sequence[Accepted]) -> Accepted:
    """The sum over prompts (at least one)."""
    return Accepted(sum(c.cycles for c in counts), tuple(map(sum, zip(*(c.by_position for c in counts), strict=True))))


def accepted_of(row: Decoded, n_positions: int, max_new_tokens: int) -> Accepted:
    """The cycles of a response that a server would run: it has no use for one behind the last allowed token."""
    done, lengths = 1, []
    for length in row.cycles:
        if done >= max_new_tokens:
            break
        lengths.append(length)
        done += length
    return Accepted(len(lengths), tuple(sum(n > k for n in lengths) for k in range(1, n_positions + 1)))


def compare(theirs: Sequence[Accepted], ours: Sequence[Accepted]) -> dict[str, Any]:
    """Per position the server's share and ours with its interval, and how many prompts were counted alike.

    Args:
        theirs, ours: one per prompt, in the same order.

    Returns:
        JSON-able: `tau`, `cycles`, `same_counts` (prompts with equal counts), `level`, and `positions`, each with
        `position`, `server`, `ours`, `low`, `high` and `within`.
    """
    there, here = total(theirs), total(ours)
    lows, highs = intervals(ours)
    positions = []
    for k, (a, b) in enumerate(zip(there.by_position, here.by_position, strict=True)):
        share = a / there.cycles if there.cycles else 0.0
        positions.append({
            "position": k + 1, "server": share, "ours": b / here.cycles if here.cycles else 0.0,
            "low": lows[k], "high": highs[k], "within": lows[k] <= share <= highs[k],
        })  # fmt: skip
    return {
        "tau": {"server": there.tau, "ours": here.tau},
        "cycles": {"server": there.cycles, "ours": here.cycles},
        "same_counts": sum(a == b for a, b in zip(theirs, ours, strict=True)),
        "level": LEVEL,
        "positions": positions,
    }


def intervals(counts: Sequence[Accepted], seed: int = 0) -> tuple[list[float], list[float]]:
    """Lower and upper end of each position's share, at `LEVEL`."""
    counts = [c for c in counts if c.cycles]
    if not counts:
        return [], []
    accepted_PK = np.array([c.by_position for c in counts], np.float64)
    cycles_P = np.array([c.cycles for c in counts], np.float64)
    drawn = np.random.default_rng(seed).integers(len(counts), size=(DRAWS, len(counts)))
    shares = accepted_PK[drawn].sum(1) / cycles_P[drawn].sum(1)[:, None]
    low_K, high_K = np.quantile(shares, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    wilson = [wilson_interval(int(a), int(cycles_P.sum())) for a in accepted_PK.sum(0)]
    return (
        [min(float(x), w[0]) for x, w in zip(low_K, wilson, strict=True)],
        [max(float(x), w[1]) for x, w in zip(high_K, wilson, strict=True)],
    )


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """Interval of a share at `LEVEL` (E. B. Wilson, 1927)."""
    p, z2 = successes / n, _Z * _Z
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z / (1 + z2 / n) * sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)
