"""One rank of a training run, step by step.

Per step: this rank's samples with their anchors, the divisor of the global batch, forward and backward over
micro-batches, one optimizer step. The loss is that of the *global* batch (`stages.weighting`), whatever the number of
ranks and micro-batches. Weights, gradients and moments are float32; compute is bfloat16 under autocast when asked for.
Source: specification, section 3.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from cache_schema.carried import Carried
from cache_schema.storage import Location
from stages import checkpoint
from stages.attention_flex import require_gpu
from stages.batch import Batch
from stages.checkpoint_places import Checkpoints
from stages.config import TrainConfig, identity_fields
from stages.dataset import SampleReader, StepData, StepDataset, TrainingStream
from stages.drafter import Drafter
from stages.ends import FrozenEnds
from stages.errors import TrainingError, TrainingStopped
from stages.hardware import batch_flops, peak_tflops
from stages.heldout import look_at_heldout
from stages.memory import require_memory
from stages.objective import Outcome, run_objective
from stages.order import Step, StepPlan
from stages.preemption import Asked, noting_sigterm
from stages.replicas import Replicas
from stages.shards import Shards
from stages.step_window import StepFigures, StepWindow
from stages.train_log import TrainLog
from stages.weighting import make_slot_weights
from stages.world import World


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
        folder: of the run's training files (`metrics.jsonl`, `checkpoints/`, `tensorboard/`); may be a URL.
        fingerprint: of cache, drafter and training settings.
        world: this process.
        on_step: called after each logged step with its metrics (rank 0).
        heldout: reads the held-out samples; None takes `reader`.
        watch: called with the steps done at the start and after each step; may raise to stop the training.
        leaving: tells whether this machine is about to be taken away; a checkpoint is written then, and training goes
            on until it is.

    Raises:
        TrainingError: `train.attention: flex` without a GPU.
    """

    def __init__(
        self,
        drafter: Drafter,
        ends: FrozenEnds,
        plan: StepPlan,
        reader: SampleReader,
        config: TrainConfig,
        folder: Location,
        fingerprint: str,
        world: World | None = None,
        on_step: Callable[[dict[str, Any]], None] | None = None,
        heldout: SampleReader | None = None,
        watch: Callable[[int], None] | None = None,
        leaving: Asked | None = None,
    ) -> None:
        self.drafter, self.ends, self.plan, self.reader = drafter, ends, plan, reader
        self.heldout, self.watch = heldout or reader, watch or (lambda _: None)
        self.config, self.fingerprint = config, fingerprint
        self.place = Carried(folder)
        self.checkpoints = Checkpoints(self.place)
        self.world = world or World()
        self.leaving = leaving or (lambda: False)
        if config.attention == "flex":
            require_gpu(self.world.device)
        device, size = self.world.device, drafter.spec.block_size
        dataset = StepDataset(plan, reader, size, drafter.spec.mask_token_id, self.world.rank, self.world.size)
        self.stream = TrainingStream(dataset, workers=config.loader_workers, pin=device.type == "cuda")
        self.weights = make_slot_weights(config, size, device)
        divided = config.shard and self.world.size > 1
        self.replicas = Shards(drafter, self.world) if divided else Replicas(drafter, self.world)
        drafter.recompute = config.activation_checkpointing
        if config.compile:
            drafter.compile(dynamic=True)
        betas, decay = (config.beta1, config.beta2), config.weight_decay
        parameters = drafter.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=config.lr, betas=betas, weight_decay=decay, fused=True)
        self.window = StepWindow(size, peak_tflops(device, config.peak_tflops, bf16=config.bf16))
        chief = self.world.rank == 0
        settings = identity_fields(config)  # no path and no name of a machine is among them
        self.log = TrainLog(
            self.place, plan.n_steps, chief=chief, trackers=config.trackers, settings=settings, on_row=on_step
        )
        self.best: checkpoint.Best | None = None

    def run(self) -> Path:
        """Train from the newest checkpoint (or from the start) to the end; returns the final checkpoint.

        Raises:
            TrainingError: the loss or a gradient is not finite; names the step and its samples.
            TrainingStopped: SIGTERM came; a checkpoint of the last whole step was written.
            FingerprintMismatch: the checkpoints belong to another training.
        """
        with ExitStack() as open_things:
            asked = open_things.enter_context(noting_sigterm())
            open_things.enter_context(self.log)
            self._resume()
            require_memory(self.drafter, self.plan, self.config, self.world.device)
            self.watch(self.stream.position)
            if self.stream.position == 0:
                self._look_at_heldout(0)
            left = False
            for data, waited_s in _timed(open_things.enter_context(closing(iter(self.stream)))):
                stop, leaving = self._train_step(data, waited_s, asked(), not left and self.leaving())
                self._after_step(data.step, save=stop or leaving)
                left = left or leaving
                self.watch(self.stream.position)
                if stop and self.stream.position < self.plan.n_steps:
                    raise TrainingStopped(
                        f"training was told to stop (SIGTERM) and did after step {self.stream.position} of "
                        f"{self.plan.n_steps}, with a checkpoint; the same command goes on from there"
                    )
        self.log.carry()
        return checkpoint.step_folder(self.checkpoints.folder, self.plan.n_steps)

    def _resume(self) -> None:
        found = self.checkpoints.newest(self.fingerprint)
        self.log.go_on_from(found[1].step if found else None)
        if found is None:
            return
        folder, progress = found
        try:
            self.stream.load_state_dict({"position": progress.step, "order": progress.order})
        except TrainingError as error:
            remedy = "use the cache that it was trained on, or another run folder"
            raise TrainingError(f"{folder}: {error}\nTo go on, {remedy}") from error
        checkpoint.load_weights(folder, self.replicas)
        checkpoint.load_optimizer(folder, self.replicas, self.optimizer)
        self.reader.skipped.update(progress.skipped)
        self.best = progress.best

    def _train_step(self, data: StepData, waited_s: float, stop: bool, leaving: bool) -> tuple[bool, bool]:
        """One optimizer step. Returns whether any rank was asked to stop, and whether one's machine is leaving."""
        step, batches = data.step, [batch.to(self.world.device) for batch in data.batches]
        own = sum((self.weights.divide_by(b).double() for b in batches), torch.zeros(()))
        divisor, stops, leaves, new = self.world.totals([float(own), stop, leaving, len(data.skipped)])
        if new:
            for skipped in self.world.gather(dict(data.skipped)):
                self.reader.skipped.update(skipped)
        if divisor > 0:
            rate = learning_rate(step.index, self.plan.n_steps, self.config)
            loss = self._backward(batches, divisor)
            norm = self._apply(step, rate, loss)
            flops = sum(batch_flops(self.drafter.spec, b) for b in data.batches)
            self.window.close_step(StepFigures(loss, norm, rate, waited_s, data.n_tokens, flops))
        return stops > 0, leaves > 0

    def _backward(self, batches: list[Batch], divisor: float) -> float:
        """Gradients and loss of the global batch, from all ranks' micro-batches."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.world.device)
        passes = self.replicas.passes(len(batches))
        for i in range(passes):
            with self.replicas.passing(i, passes):
                if i >= len(batches):
                    (self._forward(self.replicas.stand_in()).loss_sum * 0).backward()
                    continue
                outcome = self._forward(batches[i])
                (outcome.loss_sum / divisor).backward()
            loss_sum += outcome.loss_sum.detach().double()
            self.window.add(outcome)
        self.replicas.sum_gradients()
        return float(self.world.total(loss_sum)) / divisor

    def _forward(self, batch: Batch) -> Outcome:
        ends, config = self.ends, self.config
        return run_objective(
            self.drafter, ends.embed, ends.head_VD, batch, self.weights, bf16=config.bf16, attention=config.attention,
            distill=config.distill,
        )

    def _apply(self, step: Step, rate: float, loss: float) -> float:
        norm = self.replicas.clip(self.config.clip)
        for what, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                raise TrainingError(
                    f"step {step.index + 1} (epoch {step.epoch}): the {what} is {value}; the samples of this step "
                    f"are {', '.join(step.sample_ids)}. Nothing was updated; look at them with `dflash cache show`, or "
                    "lower train.lr"
                )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _after_step(self, step: Step, *, save: bool) -> None:
        done, last = step.index + 1, step.index + 1 == self.plan.n_steps
        config = self.config
        if done % config.log_every == 0 or last:
            norm = self.replicas.weight_norm()
            self.log.write(self.window.summary(self.world, done, step.epoch, self.reader.skipped, norm))
        if done % config.heldout_every == 0 or last:
            save |= self._look_at_heldout(done)
        if done % config.checkpoint_every == 0 or last or save:
            self._save(done)

    def _save(self, done: int) -> None:
        skipped = dict(sorted(self.reader.skipped.items()))
        progress = checkpoint.Progress(done, self.fingerprint, skipped, self.plan.identity(), self.best)
        final = checkpoint.save_checkpoint(self.checkpoints.folder, progress, self.replicas, self.optimizer)
        if self.world.rank == 0:
            self.log.carry()
            kept = self.best.step if self.best is not None else None
            self.checkpoints.carry(final, self.config.keep_checkpoints, kept)

    def _look_at_heldout(self, done: int) -> bool:
        """Log a look at the held-out samples; returns whether it is the best so far and worth a checkpoint."""
        row = None
        if self.world.rank == 0 or isinstance(self.replicas, Shards):
            spec, device = self.drafter.spec, self.world.device
            row = look_at_heldout(self._forward, self.heldout, self.plan.heldout, spec, device)
        if row is not None:
            self.log.write({"step": done, **row})
        if not self.config.keep_best or not self.plan.heldout:
            return False
        # The chief's number, on every rank: all have to agree whether to save.
        tau = self.world.totals([row["tau"] if row is not None and self.world.rank == 0 else 0.0])[0]
        if done == 0 or tau <= (self.best.tau if self.best is not None else 0.0):
            return False
        self.best = checkpoint.Best(done, tau)
        return True


def _timed(steps: Iterator[StepData]) -> Iterator[tuple[StepData, float]]:
    while True:
        mark = time.perf_counter()
        data = next(steps, None)
        if data is None:
            return
        yield data, time.perf_counter() - mark
