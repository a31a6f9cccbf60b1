"""Training the drafter: one plain function per process, the same with one rank or many.

Per step: this rank's samples with their anchors, the global sum of position weights, forward and backward
over micro-batches, one optimizer step. The loss is `Σ w·CE / Σ w` over the *global* batch, whatever the
number of ranks and micro-batches. Weights, gradients and moments are float32; compute is bfloat16 under
autocast when asked for. Source: specification, section 3.

Shapes: A anchors, B block size, V vocabulary, D hidden.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cache_schema.identity import CacheIdentity
from cache_schema.reader import FeatureCache
from stages import checkpoint
from stages.anchors import default_gamma, slot_weights
from stages.batch import Batch, make_batch
from stages.config import DrafterConfig, TargetConfig, TrainConfig
from stages.dataset import SampleReader, StepData, StepDataset, TrainingStream
from stages.device import use_threads
from stages.drafter import Drafter, DrafterSpec, spec_for_target
from stages.errors import TrainingError
from stages.objective import Outcome, batch_weight, heldout_tau, run_objective
from stages.order import Step, StepPlan
from stages.rolling import Rolling, WaitingReader, Watch
from stages.step_window import StepWindow, shares
from stages.target import choose_mask_token, load_config, load_target, load_tokenizer, shape_of
from stages.world import World

HELDOUT_BATCH = 8
HELDOUT_ANCHORS = 64
"""Anchors per held-out sample, however few the training takes: the simulated τ should not be noisy."""


@dataclass(frozen=True, slots=True)
class FrozenEnds:
    """The target's embedding and head."""

    embed: nn.Module
    head_VD: torch.Tensor


@dataclass(frozen=True, slots=True)
class TrainJob:
    """Everything a rank needs; picklable."""

    target: TargetConfig
    drafter: DrafterConfig
    train: TrainConfig
    identity: CacheIdentity
    seed: int
    cache_dir: str | Path
    """Folder or URL."""
    folder: Path
    fingerprint: str
    rolling: Rolling | None = None
    """Set when the cache is made while training."""


def make_spec(target: TargetConfig, drafter: DrafterConfig, layer_ids: tuple[int, ...]) -> DrafterSpec:
    """The spec of a drafter for a target, from the target's config and tokenizer alone."""
    config = load_config(target)
    mask = choose_mask_token(load_tokenizer(target), shape_of(config).vocab_size, target.mask_token_id)
    return spec_for_target(drafter, config, feature_layer_ids=layer_ids, mask_token_id=mask.id)


def load_ends(target: TargetConfig, device: torch.device, *, bf16: bool) -> FrozenEnds:
    """The target's embedding and head in the dtype of the computation; the rest of it is freed."""
    loaded = load_target(target, device="cpu", dtype="bfloat16" if bf16 else "float32", tokenizer=False)
    return FrozenEnds(loaded.embed.to(device), loaded.head.to(device))


def train_rank(job: TrainJob, world: World, on_step: Callable[[dict[str, Any]], None] | None = None) -> Path:
    """Everything one rank does, from opening the cache to the final checkpoint.

    Raises:
        CacheError: the cache is incomplete, damaged, or of another identity than the job's.
        TrainingError, FingerprintMismatch: as `Trainer.run`.
    """
    use_threads(job.train.threads)
    rolling = job.rolling
    cache = FeatureCache.open(job.cache_dir, job.identity, require_complete=rolling is None)
    plan = StepPlan(cache.plan, job.train, job.seed)
    spec = make_spec(job.target, job.drafter, job.identity.layer_ids)
    drafter = Drafter(spec, seed=job.seed).to(world.device)
    ends = load_ends(job.target, world.device, bf16=job.train.bf16)
    trainer = functools.partial(
        Trainer, drafter, ends, plan, config=job.train, folder=job.folder, fingerprint=job.fingerprint, world=world,
        on_step=on_step,
    )  # fmt: skip
    if rolling is None:
        return trainer(SampleReader(cache, job.train, job.seed)).run()
    reader, heldout = WaitingReader(cache, job.train, job.seed, rolling), None
    if rolling.heldout_dir is not None:
        heldout = SampleReader(
            FeatureCache.open(rolling.heldout_dir, job.identity, require_complete=True), job.train, job.seed
        )
    with Watch(rolling, job.folder, chief=world.rank == 0) as watch:
        return trainer(reader, heldout=heldout, watch=watch).run()


def learning_rate(step: int, n_steps: int, config: TrainConfig) -> float:
    """Of the step with this 0-based index: linear warm-up over `warmup_share` of all steps, then a cosine to 0."""
    warm = max(1, round(config.warmup_share * n_steps))
    if step < warm:
        return config.lr * (step + 1) / warm
    return config.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, n_steps - warm)))


class Trainer:
    """One rank of a training run.

    Args:
        drafter: float32, on the world's device; already holds the initial weights, the same on every rank.
        ends: the target's embedding and head, on the same device.
        plan, reader: the data.
        config: settings.
        folder: of the run's training files (`metrics.jsonl`, `checkpoints/`).
        fingerprint: of cache, drafter and training settings.
        world: this process.
        on_step: called after each logged step with its metrics (rank 0).
        heldout: reads the held-out samples; None takes `reader`.
        watch: called with the steps done at the start and after each step; may raise to stop the training.
    """

    def __init__(
        self,
        drafter: Drafter,
        ends: FrozenEnds,
        plan: StepPlan,
        reader: SampleReader,
        config: TrainConfig,
        folder: Path,
        fingerprint: str,
        world: World | None = None,
        on_step: Callable[[dict[str, Any]], None] | None = None,
        heldout: SampleReader | None = None,
        watch: Callable[[int], None] | None = None,
    ) -> None:
        self.drafter, self.ends, self.plan, self.reader = drafter, ends, plan, reader
        self.heldout, self.watch = heldout or reader, watch or (lambda _: None)
        self.config, self.folder, self.fingerprint = config, folder, fingerprint
        self.world = world or World()
        self.on_step = on_step
        size = drafter.spec.block_size
        dataset = StepDataset(plan, reader, size, drafter.spec.mask_token_id, self.world.rank, self.world.size)
        on_gpu = self.world.device.type == "cuda"
        self.stream = TrainingStream(dataset, workers=config.loader_workers, pin=on_gpu)
        self.weights_B = torch.from_numpy(slot_weights(size, config.gamma or default_gamma(size))).to(self.world.device)
        betas, decay = (config.beta1, config.beta2), config.weight_decay
        parameters = drafter.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=config.lr, betas=betas, weight_decay=decay, fused=True)
        self.window = StepWindow(size)
        self.started = time.perf_counter()

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / "checkpoints"

    def run(self) -> Path:
        """Train from the newest checkpoint (or from the start) to the end; returns the final checkpoint.

        Raises:
            TrainingError: a gradient is not finite; names the step and its samples.
            FingerprintMismatch: the checkpoints belong to another training.
        """
        self._resume()
        self.watch(self.stream.position)
        if self.stream.position == 0 and self._is_chief():
            self._look_at_heldout(0)
        with closing(iter(self.stream)) as steps:
            for data, waited_s in _timed(steps):
                self.reader.skipped.update(data.skipped)
                self._train_step(data, waited_s)
                self._after_step(data.step)
                self.watch(self.stream.position)
        return checkpoint.step_folder(self.checkpoints, self.plan.n_steps)

    def _resume(self) -> None:
        found = checkpoint.newest_checkpoint(self.checkpoints, self.fingerprint)
        if found is None:
            return
        folder, progress = found
        try:
            self.stream.load_state_dict({"position": progress.step, "order": progress.order})
        except TrainingError as error:
            remedy = "use the cache that it was trained on, or another run folder"
            raise TrainingError(f"{folder}: {error}\nTo go on, {remedy}") from error
        checkpoint.load_weights(folder, self.drafter)
        checkpoint.load_optimizer(folder, self.drafter, self.optimizer)
        self.reader.skipped.update(progress.skipped)

    def _train_step(self, data: StepData, waited_s: float) -> None:
        step = data.step
        batches = [batch.to(self.world.device) for batch in data.batches]
        weight = torch.stack([batch_weight(b, self.weights_B) for b in batches]).sum() if batches else torch.zeros(())
        total_weight = float(self.world.total(weight.to(self.world.device).double()))
        rate = learning_rate(step.index, self.plan.n_steps, self.config)
        if total_weight == 0:
            return
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for batch in batches:
            outcome = self._forward(batch)
            (outcome.loss_sum / total_weight).backward()
            loss_sum += outcome.loss_sum.detach().double()
            self.window.add(outcome)
        self._sum_gradients()
        norm = self._apply(step, rate)
        loss = float(self.world.total(loss_sum)) / total_weight
        self.window.close_step(loss, rate, norm, waited_s, data.n_tokens)

    def _forward(self, batch: Batch) -> Outcome:
        ends = self.ends
        return run_objective(self.drafter, ends.embed, ends.head_VD, batch, self.weights_B, bf16=self.config.bf16)

    def _sum_gradients(self) -> None:
        # Once per step and not per backward pass, as DistributedDataParallel does it: ranks may have different
        # numbers of micro-batches, or none in the last, smaller step of an epoch.
        if self.world.size > 1:
            for parameter in self.drafter.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self.world.total(parameter.grad)

    def _apply(self, step: Step, rate: float) -> float:
        norm = float(nn.utils.clip_grad_norm_(self.drafter.parameters(), self.config.clip))
        if not math.isfinite(norm):
            raise TrainingError(
                f"step {step.index + 1} (epoch {step.epoch}): the gradient norm is {norm}; the samples of this step "
                f"are {', '.join(step.sample_ids)}. Nothing was updated; look at them with `dflash cache show`, or "
                "lower train.lr"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _after_step(self, step: Step) -> None:
        done, last = step.index + 1, step.index + 1 == self.plan.n_steps
        if done % self.config.log_every == 0 or last:
            self._log(self.window.summary(self.world, done, step.epoch, self.reader.skipped))
        if (done % self.config.heldout_every == 0 or last) and self._is_chief():
            self._look_at_heldout(done)
        if (done % self.config.checkpoint_every == 0 or last) and self._is_chief():
            progress = checkpoint.Progress(done, self.fingerprint, dict(self.reader.skipped), self.plan.identity())
            checkpoint.save_checkpoint(self.checkpoints, progress, self.drafter, self.optimizer)
            checkpoint.rotate(self.checkpoints, self.config.keep_checkpoints)

    def _is_chief(self) -> bool:
        return self.world.rank == 0

    @torch.no_grad()
    def _look_at_heldout(self, done: int) -> None:
        spec = self.drafter.spec
        samples = [s for s in (self.heldout.read(i, 0, HELDOUT_ANCHORS) for i in self.plan.heldout) if s is not None]
        batches = [
            make_batch(samples[i : i + HELDOUT_BATCH], spec.block_size, spec.mask_token_id).to(self.world.device)
            for i in range(0, len(samples), HELDOUT_BATCH)
        ]
        outcomes = [self._forward(b) for b in batches]
        if not outcomes:
            return
        tau, n = heldout_tau(outcomes, batches)
        counts = [o.slot_counts() for o in outcomes]
        right, seen = sum(c[0] for c in counts), sum(c[1] for c in counts)
        loss = sum(float(o.loss_sum) for o in outcomes) / sum(float(o.weight_sum) for o in outcomes)
        self._log(
            {
                "kind": "heldout",
                "step": done,
                "loss": loss,
                "tau": tau,
                "samples": n,
                "accuracy": shares(torch.as_tensor(right), torch.as_tensor(seen)),
            }
        )

    def _log(self, row: dict[str, Any]) -> None:
        if not self._is_chief():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        row["seconds"] = round(time.perf_counter() - self.started, 3)
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        if self.on_step:
            self.on_step({**row, "n_steps": self.plan.n_steps})


def _timed(steps: Iterator[StepData]) -> Iterator[tuple[StepData, float]]:
    while True:
        mark = time.perf_counter()
        data = next(steps, None)
        if data is None:
            return
        yield data, time.perf_counter() - mark
