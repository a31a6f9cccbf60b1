"""Which block size is best at which batch size, from measured passes and the acceptance curve.

Equation 1 of the paper: a token takes `(T_draft + T_verify) / τ`, against one plain step. At a small batch the passes
wait for weights and a large block is almost free; at a large batch they compute, and each drafted token costs. Times at
sizes between measured ones are interpolated (passes are affine in B to a good approximation), τ from the acceptance
curve of the next larger measured size; every candidate says whether it was measured. Source: arXiv 2602.06036, eq. 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from stages.passes import PassTimes

SCHEDULE_VERSION = 1


def expected_tau(accept_by_slot: Sequence[float], block_size: int) -> float:
    """Mean tokens of a cycle, from the share of cycles in which each slot's draft was accepted."""
    return 1 + sum(accept_by_slot[: block_size - 1])


def make_schedule(times: Sequence[PassTimes], curves: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """The best block size per batch size, JSON-able (`schedule.json`).

    Args:
        times: of passes, for every batch size at B = 1 and at every block size of `curves`.
        curves: share of cycles that accepted slot 1, 2, …, by the block size it was measured with.

    Returns:
        `by_batch`: per batch size `block_size` (1: do not draft), `num_speculative_tokens` as vLLM counts them,
        `speedup` as equation 1 predicts it, and all candidates.
    """
    by_batch = []
    for rows in sorted({t.rows for t in times}):
        measured = {t.block_size: t for t in times if t.rows == rows}
        candidates = _candidates(measured, curves)
        best = max(candidates, key=lambda c: (c["speedup"], -c["block_size"]))
        by_batch.append({
            "batch_size": rows, "block_size": best["block_size"], "num_speculative_tokens": best["block_size"] - 1,
            "speedup": best["speedup"], "candidates": candidates,
        })  # fmt: skip
    return {"version": SCHEDULE_VERSION, "by_batch": by_batch}


def _candidates(measured: Mapping[int, PassTimes], curves: Mapping[int, Sequence[float]]) -> list[dict[str, Any]]:
    step_s = measured[1].verify_s
    out = [_candidate(1, 1.0, 0.0, step_s, step_s, True)]
    sizes = sorted(b for b in measured if b > 1 and b in curves)
    for size in range(sizes[0], sizes[-1] + 1) if sizes else ():
        above = next(b for b in sizes if b >= size)
        draft_s, verify_s = _at(size, sizes, measured)
        tau = expected_tau(curves[above], size)
        out.append(_candidate(size, tau, draft_s, verify_s, step_s, size in measured))
    return out


def _at(size: int, sizes: Sequence[int], measured: Mapping[int, PassTimes]) -> tuple[float, float]:
    """Seconds of a draft and of a verification at a size, interpolated between the measured ones around it."""
    if size in measured:
        return measured[size].draft_s, measured[size].verify_s
    low, high = next((a, b) for a, b in pairwise(sizes) if a < size < b)
    share = (size - low) / (high - low)
    a, b = measured[low], measured[high]
    return a.draft_s + share * (b.draft_s - a.draft_s), a.verify_s + share * (b.verify_s - a.verify_s)


def _candidate(
    size: int, tau: float, draft_s: float, verify_s: float, step_s: float, measured: bool
) -> dict[str, Any]:
    return {
        "block_size": size, "tau": tau, "draft_s": draft_s, "verify_s": verify_s,
        "speedup": tau * step_s / (draft_s + verify_s), "measured": measured,
    }  # fmt: skip


def size_by_rows(schedule: Mapping[str, Any]) -> Callable[[int], int]:
    """The schedule as the engine takes it: B for the number of rows at work, from the next larger batch size that was
    measured, or the largest."""
    entries = sorted((entry["batch_size"], entry["block_size"]) for entry in schedule["by_batch"])

    def size(rows: int) -> int:
        return int(next((b for n, b in entries if n >= rows), entries[-1][1]))

    return size
