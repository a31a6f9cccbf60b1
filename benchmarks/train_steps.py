"""The training steps that are compared, each as a function that leaves gradients, and how they are timed.

Shapes: R rows, D hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.train_cases import Case, Setup, make_setup
from benchmarks.train_naive import NaiveStep
from stages.loss import head_losses
from stages.objective import run_objective
from stages.weighting import SlotWeights

Step = Callable[[], torch.Tensor]


def our_step(setup: Setup, *, bf16: bool = False) -> Step:
    """What training does with a micro-batch: packs nothing anew, masks are made in it."""
    batch, weights = setup.batch(), SlotWeights(setup.weights_B)

    def step() -> torch.Tensor:
        outcome = run_objective(setup.drafter, setup.embed, setup.head_VD, batch, weights, bf16=bf16)
        loss = outcome.loss_sum / outcome.weight_sum
        loss.backward()
        return loss.detach()

    return step


def with_optimizer(setup: Setup, step: Step) -> Step:
    """The step, and an update of the weights (rate 0: the next call computes the same)."""
    optimizer = torch.optim.AdamW(setup.drafter.parameters(), lr=0.0, fused=True)

    def whole() -> torch.Tensor:
        loss = step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return whole


def least_cpu(steps: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Least process time of each; each round goes through all, so that they share the noise."""
    found: dict[str, float] = {}
    for _ in range(rounds):
        for name, step in steps.items():
            started = time.process_time()
            step()
            taken = time.process_time() - started
            found[name] = min(taken, found.get(name, taken))
    return found


def compare(case: Case, rounds: int) -> dict[str, Any]:
    """Ours against the naive step: seconds, and the largest distance of a gradient relative to its size."""
    setup = make_setup(case)
    ours, naive = our_step(setup), NaiveStep(setup)
    gradients = []
    losses = []
    for step in (ours, naive):
        losses.append(float(step()))
        gradients.append([p.grad.clone() for p in setup.drafter.parameters() if p.grad is not None])
        setup.drafter.zero_grad(set_to_none=True)
    seconds = least_cpu({"ours": ours, "naive": naive}, rounds)
    distance = max(float((a - b).norm() / b.norm()) for a, b in zip(*gradients, strict=True))
    return {"case": str(case), **seconds, "ratio": seconds["naive"] / seconds["ours"], "gradient_distance": distance,
            "losses": losses}  # fmt: skip


def compare_losses(hidden: int, vocab: int, rows: int, rounds: int) -> dict[str, Any]:
    """Our head loss against chunks of 2,048 rows under torch.utils.checkpoint, forward and backward pass."""
    generator = torch.Generator().manual_seed(0)
    hidden_RD = torch.randn(rows, hidden, generator=generator).requires_grad_()
    head_VD = torch.randn(vocab, hidden, generator=generator) * hidden**-0.5
    labels_R = torch.randint(vocab, (rows,), generator=generator)

    def chunk(part_CD: torch.Tensor, labels_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits_CV = part_CD @ head_VD.T
        return F.cross_entropy(logits_CV, labels_C, reduction="none"), logits_CV.detach().argmax(dim=-1)

    def checkpointed() -> torch.Tensor:
        parts = zip(hidden_RD.split(2048), labels_R.split(2048), strict=True)
        each = [checkpoint(chunk, part, labels, use_reentrant=False) for part, labels in parts]
        losses_R = torch.cat([loss for loss, _ in each])
        return torch.autograd.grad(losses_R.sum(), hidden_RD)[0]

    def ours() -> torch.Tensor:
        return torch.autograd.grad(head_losses(hidden_RD, head_VD, labels_R).loss_R.sum(), hidden_RD)[0]

    distance = float((ours() - checkpointed()).norm() / ours().norm())
    seconds = least_cpu({"ours": ours, "checkpointed": checkpointed}, rounds)
    return {"case": f"H={hidden} V={vocab:,} rows={rows:,}", **seconds,
            "ratio": seconds["checkpointed"] / seconds["ours"], "gradient_distance": distance}  # fmt: skip
