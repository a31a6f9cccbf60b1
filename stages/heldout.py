"""What a drafter would do on samples that it is not trained on: loss, accuracy per slot, simulated τ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stages.batch import Batch, make_batch
from stages.dataset import SampleReader
from stages.drafter import DrafterSpec
from stages.objective import Outcome, heldout_tau
from stages.step_window import shares, slot_counts

HELDOUT_BATCH = 8
HELDOUT_ANCHORS = 64
"""Anchors per held-out sample, however few the training takes: the simulated τ should not be noisy."""


@torch.no_grad()
def look_at_heldout(
    forward: Callable[[Batch], Outcome], reader: SampleReader, sample_ids: Sequence[str], spec: DrafterSpec,
    device: torch.device,
) -> dict[str, Any] | None:
    """One look, as a row of `metrics.jsonl` without its step; None when there is no sample to look at.

    Args:
        forward: the drafter's loss on a batch.
        reader: reads the samples, always with the same anchors.
        sample_ids: that are held out.
        spec: of the drafter.
        device: where `forward` computes.
    """
    samples = [s for s in (reader.read(i, 0, HELDOUT_ANCHORS) for i in sample_ids) if s is not None]
    batches = [
        make_batch(samples[i : i + HELDOUT_BATCH], spec.block_size, spec.mask_token_id).to(device)
        for i in range(0, len(samples), HELDOUT_BATCH)
    ]
    outcomes = [forward(batch) for batch in batches]
    if not outcomes:
        return None
    tau, n = heldout_tau(outcomes, batches)
    right, seen, reached, asked = torch.stack([slot_counts(o) for o in outcomes]).sum(dim=0)
    return {
        "kind": "heldout",
        "loss": sum(float(o.loss_sum) for o in outcomes) / sum(float(o.weight_sum) for o in outcomes),
        "tau": tau,
        "samples": n,
        "accuracy": shares(right, seen),
        "expected_acceptance": round(1 + sum(shares(reached, asked)), 5),
    }
