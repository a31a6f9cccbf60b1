"""How much memory a training step needs, from its shapes, and whether it is there: asked before step 1, not in hour 7.

What counts is what autograd keeps between the passes of a micro-batch (named in `kept_bytes`), the largest transient of
the backward pass, gradients, moments and, in bfloat16, the cast weights. Weights, embedding and head are already in
place when the question is asked.

Shapes: C context rows, Q slots, R slots with a label, D hidden, I width of the MLP, H query heads, G key/value heads,
E head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from stages.config import TrainConfig
from stages.drafter import Drafter, DrafterSpec
from stages.errors import TrainingError
from stages.order import StepPlan

_HEADROOM = {"cpu": 1.0, "cuda": 1.5}
"""Factor on what is kept. On a GPU norms and rotations are plain operations, which keep more; not measured there."""


@dataclass(frozen=True, slots=True)
class MicroBatchSize:
    """Context rows and slots of a micro-batch; nearly every slot may have a label."""

    context: int
    slots: int


def kept_bytes(spec: DrafterSpec, size: MicroBatchSize, *, bf16: bool, recompute: bool) -> int:
    """What is kept from the forward pass for the backward pass.

    Per slot and layer: the states before both norms and behind them (4·D), queries and keys before their rotation,
    the attention's output for its projection, gate, up and their product (3·I); and in float32, as attention keeps
    them, queries, keys, values and output. Per context row and layer: keys before the rotation, and keys and values.
    Once: the features, the context before and behind its norm, the states before the last norm, before the head, and
    their gradients.
    """
    width = 2 if bf16 else 4
    d, q, kv = spec.hidden_size, spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    slot = width * (4 * d + 2 * q + kv + 3 * spec.intermediate_size) + 4 * (2 * q + 2 * kv)
    row = width * kv + 4 * 2 * kv
    layer = slot * size.slots + row * size.context
    layers = layer * spec.n_layers
    if recompute:
        # Measured: the layer that is gone through again takes up about twice what it keeps.
        layers = min(layers, 2 * layer + width * d * size.slots * spec.n_layers)
    once = width * d * (size.context * (len(spec.feature_layer_ids) + 2) + 4 * size.slots)
    return layers + once


def step_bytes(spec: DrafterSpec, n_weights: int, size: MicroBatchSize, *, bf16: bool, recompute: bool) -> int:
    """Peak of a step above what is in place before the first one. Measured peaks on a CPU (D = 128 and 256, 3,072 and
    4,096 slots) were 0.87 to 1.07 times this, and with `recompute` 1.06 to 1.35 times.

    Args:
        spec: of the drafter.
        n_weights: numbers that are trained, on this rank.
        size: of its largest micro-batch.
        bf16, recompute: as in the settings.
    """
    transient = (2 if bf16 else 4) * size.slots * (spec.hidden_size + 4 * spec.intermediate_size)
    weights = n_weights * (3 * 4 + (2 if bf16 else 0))
    return kept_bytes(spec, size, bf16=bf16, recompute=recompute) + transient + weights


def largest_micro_batch(plan: StepPlan, config: TrainConfig, block_size: int) -> MicroBatchSize:
    """The largest that a run can meet: as long as the plan's longest sample, with as many anchors as are allowed."""
    shards = plan.shard_plan.shards()
    longest = max((int(n) for shard in shards for n in plan.shard_plan.lengths(shard)), default=0)
    slots = block_size * min(config.anchors, max(0, longest - 1))
    if config.micro_tokens is None:
        return MicroBatchSize(config.micro_samples * longest, config.micro_samples * slots)
    # Short samples fill a budget with slots, which take more than context rows.
    short = MicroBatchSize(config.micro_tokens // (1 + block_size), config.micro_tokens)
    return MicroBatchSize(max(longest, short.context), max(slots, short.slots))


def require_memory(drafter: Drafter, plan: StepPlan, config: TrainConfig, device: torch.device) -> int:
    """Compare a step's needs with what is free on the device; returns the estimate in bytes.

    Raises:
        TrainingError: there is not enough; names the settings to lower.
    """
    size = largest_micro_batch(plan, config, drafter.spec.block_size)
    n_weights = sum(p.numel() for p in drafter.parameters())
    needed = step_bytes(drafter.spec, n_weights, size, bf16=config.bf16, recompute=config.activation_checkpointing)
    needed = int(needed * _HEADROOM.get(device.type, _HEADROOM["cuda"]))
    free = free_bytes(device)
    if free is not None and needed > free:
        budget = config.micro_tokens
        lower = "train.micro_samples" if budget is None else "train.micro_tokens"
        now = config.micro_samples if budget is None else budget
        more = "" if config.activation_checkpointing else ", or set train.activation_checkpointing"
        raise TrainingError(
            f"a training step needs about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free on {device}: its "
            f"largest micro-batch has {size.context:,} context tokens and {size.slots:,} block slots. Lower {lower} "
            f"(now {now:,}) or train.anchors (now {config.anchors}){more}"
        )
    return needed


def free_bytes(device: torch.device) -> int | None:
    """Memory that a process can still have; None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return int(found.split()[1]) * 1024 if found is not None else None
