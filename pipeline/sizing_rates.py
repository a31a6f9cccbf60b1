"""From FLOPs and bytes to GPU hours and traffic: what `dflash plan` assumes about speed, and what follows.

The shares are of the accelerator's dense bfloat16 peak, counted with the formulas of `pipeline.costs`; they are
assumptions until they are measured. Decoding is bound by memory, so its share is small and depends on the engine.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stages.fields import ConfigError, require

STAGES = ("generate", "extract", "train")


@dataclass(frozen=True, kw_only=True, slots=True)
class SizingRates:
    """Speeds that a plan is made with."""

    peak_tflops: float = 989.0
    """Of one GPU, dense bfloat16: H100 SXM and H200 (NVIDIA's data sheets)."""
    generate_share: float = 0.08
    """Assumed: an engine with continuous batching, about 5,000 tokens/s for an 8B target."""
    extract_share: float = 0.4
    """Assumed from 30,000 tokens/s of an H200 with an 8B target (shared/spec/cache.md)."""
    train_share: float = 0.3
    """Assumed: flex attention, no recomputation."""
    store_bytes_per_s: float = 10e9
    """Of the shared storage, all nodes together."""

    def __post_init__(self) -> None:
        require(self.peak_tflops > 0, "peak_tflops", self.peak_tflops, "it must be above 0")
        require(self.store_bytes_per_s > 0, "store_bytes_per_s", self.store_bytes_per_s, "it must be above 0")
        for stage in STAGES:
            share = self.share(stage)
            require(0 < share <= 1, f"share of {stage}", share, "it must be above 0 and at most 1")

    def share(self, stage: str) -> float:
        """Of the peak that a stage reaches."""
        return float(getattr(self, f"{stage}_share"))

    def gpu_hours(self, stage: str, flops: float) -> float:
        """That so much arithmetic takes."""
        return flops / (self.peak_tflops * 1e12 * self.share(stage)) / 3600


def read_rates(given: Sequence[str]) -> SizingRates:
    """Rates as `name=number`, the others as assumed.

    Raises:
        ConfigError: there is no such rate, or it is no number that could be one.
    """
    values: dict[str, float] = {}
    known = [f.name for f in dataclasses.fields(SizingRates)]
    for text in given:
        name, _, number = text.partition("=")
        require(name in known, "--rate", text, f"it must be NAME=NUMBER with one of {', '.join(known)}")
        try:
            values[name] = float(number)
        except ValueError:
            raise ConfigError(f"--rate is {text!r}, but {number!r} is no number") from None
        require(math.isfinite(values[name]), "--rate", text, "the number must be finite")
    return SizingRates(**values)


def costs_of(plan: dict[str, Any], rates: SizingRates, *, epochs_per_making: int) -> dict[str, Any]:
    """GPU hours and bytes over the network of each stage.

    Training is counted as if every stored row were read; those behind a sample's last anchor are not.

    Args:
        plan: as `plan_run` makes it, with the FLOPs of each stage.
        rates: assumed or measured.
        epochs_per_making: epochs that a stored shard serves before it is made again (rolling mode); all of them
            otherwise.
    """
    cache, responses = plan["cache"]["bytes"], plan["disk"]["need_by_part"]["responses"]
    epochs, steps = plan["train"]["epochs"], plan["train"]["steps_per_epoch"]
    made = math.ceil(epochs / epochs_per_making)
    saved = steps * epochs // plan["train"]["checkpoint_every"] * plan["train"]["checkpoint_bytes"]
    flops = {
        "generate": plan["generate"]["flops"],
        "extract": plan["extract"]["prefill_flops"] * made,
        "train": plan["train"]["flops"],
    }
    moved = {
        "generate": {"read": 0, "written": responses},
        "extract": {"read": responses * made, "written": cache * made},
        "train": {"read": cache * epochs, "written": saved},
    }
    return {
        "peak_tflops": rates.peak_tflops,
        "store_bytes_per_s": rates.store_bytes_per_s,
        "cache_made": made,
        "stages": {
            stage: {
                "share_of_peak": rates.share(stage),
                "flops": flops[stage],
                "gpu_hours": rates.gpu_hours(stage, flops[stage]),
                "network_bytes": moved[stage],
                "store_s": sum(moved[stage].values()) / rates.store_bytes_per_s,
            }
            for stage in STAGES
        },
        "gpu_hours": sum(rates.gpu_hours(stage, flops[stage]) for stage in STAGES),
    }
