"""Where a step's time goes: its cost against anchors and context length, and the share outside matrix products."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.train_cases import Case, make_setup
from benchmarks.train_steps import least_cpu, our_step

MATRIX_PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::baddbmm_")


def scaling(cases: Sequence[Case], rounds: int) -> list[dict[str, Any]]:
    """Seconds of each case, measured in turn, and the multiply-adds of its matrix products."""
    steps = {str(case): our_step(make_setup(case)) for case in cases}
    seconds = least_cpu(steps, rounds)
    return [{"case": name, "seconds": seconds[name], "gmac": products(step)} for name, step in steps.items()]


def products(step: Any) -> float:
    """10⁹ multiply-adds in the matrix products of a step."""
    in_place = (torch.ops.aten.addmm_, torch.ops.aten.baddbmm_)  # torch's counter leaves these out
    counter = FlopCounterMode(display=False, custom_mapping=dict.fromkeys(in_place, _product_flops))
    with counter:
        step()
    return counter.get_total_flops() / 2e9


def _product_flops(_into: Any, rows: Sequence[int], columns: Sequence[int], **_: Any) -> int:
    return 2 * math.prod(rows) * columns[-1]


def share_outside(case: Case, rounds: int, *, bf16: bool = False) -> dict[str, Any]:
    """Share of a step's time that is not spent in matrix products (attention's scores and sums are such).

    The profiler adds to the small calls, so that the share is an upper bound. The least of several passes is taken.
    """
    step = our_step(make_setup(case), bf16=bf16)
    step()
    shares = []
    for _ in range(rounds):
        started = time.process_time()
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
            step()
        taken = time.process_time() - started
        events = found.key_averages()
        total = sum(e.self_cpu_time_total for e in events)
        inside = sum(e.self_cpu_time_total for e in events if e.key in MATRIX_PRODUCTS)
        shares.append((1 - inside / total, taken))
    return {"case": str(case), "bf16": bf16, "share": min(share for share, _ in shares)}


