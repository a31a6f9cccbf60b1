"""Where a step's time goes: its cost against anchors and context length, and the share outside matrix products."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.train_cases import Case, make_setup
from benchmarks.train_steps import least_cpu, our_step

aten = torch.ops.aten
MATRIX_PRODUCTS = (aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm, aten.baddbmm_)


def scaling(cases: Sequence[Case], along: str, rounds: int) -> list[dict[str, Any]]:
    """Seconds of each case, measured in turn, beside the straight line through them and what they multiply.

    Args:
        cases: that differ in one size.
        along: its name, `anchors` or `tokens`.
        rounds: of measurements; the least of each case counts.

    Returns:
        Per case: `seconds`; `line`, what the least-squares line through all cases gives, and `off`, the relative
        distance from it; 10⁹ multiply-adds of the `attention` (batched products) and of all `others`;
        `seconds_per_gmac`, which is the same for all where nothing but products costs time.
    """
    steps = {str(case): our_step(make_setup(case)) for case in cases}
    seconds = least_cpu(steps, rounds)
    sizes = [float(getattr(case, along)) for case in cases]
    slope, start = np.polyfit(sizes, list(seconds.values()), 1)
    rows = []
    for (name, step), size in zip(steps.items(), sizes, strict=True):
        others, attention = products(step)
        line = start + slope * size
        rows.append({"case": name, "along": along, "seconds": seconds[name], "line": line,
                     "off": abs(seconds[name] / line - 1), "attention_gmac": attention, "others_gmac": others,
                     "seconds_per_gmac": seconds[name] / (others + attention)})  # fmt: skip
    return rows


def products(step: Any) -> tuple[float, float]:
    """10⁹ multiply-adds in the matrix products of a step: linear layers and head, and attention (batched ones)."""
    in_place = (torch.ops.aten.addmm_, torch.ops.aten.baddbmm_)  # torch's counter leaves these out
    counter = FlopCounterMode(display=False, custom_mapping=dict.fromkeys(in_place, _product_flops))
    with counter:
        step()
    counts = {str(op): flops / 2e9 for op, flops in counter.get_flop_counts()["Global"].items()}
    attention = sum(gmac for op, gmac in counts.items() if "bmm" in op)
    return sum(counts.values()) - attention, attention


def _product_flops(_into: Any, rows: Sequence[int], columns: Sequence[int], **_: Any) -> int:
    return 2 * math.prod(rows) * columns[-1]


def share_outside(case: Case, rounds: int, *, bf16: bool = False) -> dict[str, Any]:
    """Share of a step's process time that is not spent in matrix products (attention's scores and sums are such).

    The least time of every product over several steps that are watched, against the least of as many that are not, in
    turns: an upper bound, because a whole step is never as undisturbed as each of its calls once was.
    """
    step = our_step(make_setup(case), bf16=bf16)
    step()
    seconds, least = math.inf, np.inf
    for _ in range(rounds):
        seconds = min(seconds, least_cpu({"step": step}, 1)["step"])
        with ProductTimes() as found:
            step()
        least = np.minimum(least, found.seconds)
    return {"case": str(case), "bf16": bf16, "seconds": seconds, "share": 1 - float(np.sum(least)) / seconds}


class ProductTimes(TorchDispatchMode):
    """Process time of each matrix product, in the order of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        started = time.process_time()
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in MATRIX_PRODUCTS:
            self.seconds.append(time.process_time() - started)
        return out
