"""Configuration of the drafter and of its training. Imported through `stages.config`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from stages.fields import ConfigError, execution, identity, require, require_threads
from stages.worker_config import WorkerConfig

AttentionForm = Literal["auto", "dense", "grouped", "flex"]
"""What a training may choose (`stages.attention`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """Shape of the drafter; everything else is taken from the target."""

    n_layers: int = identity(5)
    """Decoder layers N."""
    block_size: int = identity(16)
    """Block size B: the anchor and B−1 drafted tokens."""
    intermediate_size: int | None = identity(None)
    """Width of the MLP; None takes the target's."""
    n_heads: int | None = identity(None)
    n_kv_heads: int | None = identity(None)
    head_dim: int | None = identity(None)
    features: Literal["inject", "first_layer", "input", "none"] = identity("inject")
    """Where the target's features enter. `inject`: keys and values of every layer (DFlash; what engines run).
    `first_layer`: keys and values of the first layer only; with one layer the same as `inject`. `input`: nowhere but
    the blocks' input, to which the context feature at a−1 is added. `none`: as `inject`, with the target's embedding
    of each context token in place of its hidden states (paper, Table 8)."""
    feature_layers: tuple[int, ...] | None = identity(None)
    """The cached layers that the drafter uses, of those in the cache; None uses all (paper, Table 6)."""

    def __post_init__(self) -> None:
        require(self.n_layers > 0, "drafter.n_layers", self.n_layers, "it must be above 0")
        for name in ("intermediate_size", "n_heads", "n_kv_heads", "head_dim"):
            value = getattr(self, name)
            rule = "it must be above 0; leave it out for the target's"
            require(value is None or value > 0, f"drafter.{name}", value, rule)
        rule = "a block is an anchor and at least one draft"
        require(self.block_size >= 2, "drafter.block_size", self.block_size, rule)
        ids = self.feature_layers
        ok = ids is None or (len(ids) > 0 and all(a < b for a, b in pairwise(ids)))
        require(ok, "drafter.feature_layers", ids, "the ids must be strictly increasing, at least one")


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig:
    """Learning from the target's whole distribution, beside its tokens; the cache must hold `last_hidden`."""

    loss: Literal["l1", "kl", "reverse_kl"] = identity("kl")
    """Between the target's distribution q and the drafter's p: Σ|p − q|, KL(q‖p) or KL(p‖q)."""
    share: float = identity(0.5)
    """Share of this loss; the rest is cross-entropy. 0 is cross-entropy alone, 1 distillation alone."""

    def __post_init__(self) -> None:
        require(0 < self.share <= 1, "train.distill.share", self.share, "it must be in (0, 1]; leave distill out for 0")




@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(WorkerConfig):
    """Training as in the specification, section 3."""

    anchors: int = identity(512)
    """Anchors per sample and epoch, at most."""
    gamma: float | None = identity(None)
    """Decay of the position weights; None takes 7, 5, 4 for B = 16, 10, 8 (B/2 − 1 otherwise, at least 1)."""
    lr: float = identity(6e-4)
    anchor_choice: Literal["random", "partition"] = identity("random")
    """`random`: anchors anywhere in the response, new in every epoch. `partition`: the response divided into blocks
    of B from its first token on, the same in every epoch (paper, Table 9)."""
    slot_weights: Literal["decay", "uniform", "dpace"] = identity("decay")
    """Weight of slot k in the loss. `decay`: exp(−(k−1)/γ). `uniform`: 1 (paper, Figure 5). `dpace`: from the
    drafter's own confidence in the slots before and behind (D-PACE, arXiv 2605.18810)."""
    dpace_alpha: float = identity(0.5)
    """Smoothing of the confidence in D-PACE."""
    normalise: Literal["mean", "sum"] | None = identity(None)
    """`mean`: the weighted losses of the global batch over the sum of their weights. `sum`: over the number of blocks,
    so that a block counts with the sum of its weights. None takes `sum` for dpace, whose weights mean something by
    their size, and `mean` otherwise."""
    distill: DistillConfig | None = identity(None)
    """Mix in a loss towards the target's distribution; None learns from tokens alone."""
    init_from: str | None = execution(None)
    """Folder of an exported drafter (z-lab's published layout too) whose weights training starts from, relative to the
    recipe's. Which of its layers look back over a sliding window only is taken from it too. The hash of both is part of
    what the training is made of, the path is not."""
    weight_decay: float = identity(0.0)
    beta1: float = identity(0.9)
    beta2: float = identity(0.95)
    warmup_share: float = identity(0.04)
    """Share of all steps over which the learning rate rises."""
    clip: float = identity(1.0)
    """Largest gradient norm."""
    epochs: int = identity(6)
    batch_samples: int = identity(8)
    """Samples in one optimizer step, over all ranks and accumulation steps."""
    window_shards: int = identity(32)
    """Shards whose samples are shuffled together; about as many are open at a time."""
    passes_per_window: int = identity(1)
    """Times that a window of shards is gone through before the next one comes. Above 1 a rolling cache
    (`cache.max_bytes`) makes every shard once per so many epochs; 1 goes through all samples in every epoch."""
    micro_samples: int = execution(1)
    """Samples in one forward and backward pass of a rank."""
    micro_tokens: int | None = execution(None)
    """Rows (context tokens and block slots) of one forward and backward pass, at most; a larger sample goes alone.
    Takes the place of `micro_samples`; None divides by that."""
    attention: AttentionForm = execution("auto")
    """How attention is computed; the numbers are the same. `auto` takes `flex` on a GPU and `grouped` elsewhere. `flex`
    needs a GPU."""
    compile: bool = execution(False)
    """`torch.compile` the drafter's forward pass."""
    activation_checkpointing: bool = execution(False)
    """Compute each layer a second time in the backward pass instead of keeping what it computed in the first."""
    shard: bool = execution(False)
    """Divide weights, gradients and moments over the ranks (`fully_shard`); for drafters that do not fit otherwise."""
    heldout_share: float = identity(0.02)
    """Share of samples (by hash of the id) kept out of training for the simulated τ."""
    heldout_max: int = identity(64)
    """At most this many held-out samples are looked at."""
    heldout_every: int = execution(200)
    """Steps between looks at the held-out samples; there is always one at the end."""
    checkpoint_every: int = execution(100)
    """Steps between checkpoints."""
    keep_checkpoints: int = execution(2)
    """Newest checkpoints that are kept."""
    keep_best: bool = execution(True)
    """Also write and keep the checkpoint with the best simulated τ on the held-out samples."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = execution(("tensorboard",))
    """Where the signals go beside `metrics.jsonl`. All but tensorboard are extras (`pip install 'dflash[wandb]'`) and
    take their server and credentials from their own environment variables, never from a recipe."""
    peak_tflops: float | None = execution(None)
    """Peak of a rank's hardware in bfloat16 (float32 without bf16), for the share of it that is used. None takes what
    is known of the GPU; of others the share is not told."""
    bf16: bool = identity(True)
    """Compute in bfloat16; weights, gradients and moments stay float32."""
    workers: int = execution(1)
    min_workers: int | None = execution(None)
    """Elastic: go on with as few ranks as this when nodes leave, and with up to `workers` when they come back."""
    threads: int | None = execution(None)
    loader_workers: int = execution(0)
    """Processes per rank that read and pad; 0 reads the next step in a thread."""
    shard_wait_s: float = execution(3600.0)
    """Rolling mode: how long no shard may be finished while training waits for one."""
    max_restarts: int = execution(2)
    """Restarts of a failed worker group before the run fails."""
    log_every: int = execution(10)

    def __post_init__(self) -> None:
        require_threads("train", self.threads)
        self.require_worker("train")
        for name in ("anchors", "lr", "epochs", "batch_samples", "micro_samples", "workers", "checkpoint_every",
                     "heldout_every", "keep_checkpoints", "log_every", "clip", "window_shards", "passes_per_window",
                     "shard_wait_s"):
            require(getattr(self, name) > 0, f"train.{name}", getattr(self, name), "it must be above 0")
        for name in ("loader_workers", "heldout_max", "max_restarts", "weight_decay"):
            require(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "it must be 0 or above")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"train.{name}", getattr(self, name), "it must be in [0, 1)")
        rule = f"the epochs must be a multiple of train.passes_per_window ({self.passes_per_window})"
        require(self.epochs % self.passes_per_window == 0, "train.epochs", self.epochs, rule)
        require(0 <= self.warmup_share < 1, "train.warmup_share", self.warmup_share, "it must be in [0, 1)")
        require(0 <= self.heldout_share < 1, "train.heldout_share", self.heldout_share, "it must be in [0, 1)")
        self._require_variants()

    def _require_variants(self) -> None:
        for name in ("gamma", "micro_tokens", "peak_tflops"):
            value = getattr(self, name)
            require(value is None or value > 0, f"train.{name}", value, "it must be above 0, or absent")
        low = self.min_workers
        ok = low is None or 0 < low <= self.workers
        require(ok, "train.min_workers", low, f"it must be in 1 … train.workers ({self.workers}), or absent")
        require(0 < self.dpace_alpha <= 1, "train.dpace_alpha", self.dpace_alpha, "it must be in (0, 1]")
        rule = "D-PACE's weights mean something by their size, which a mean would cancel; take sum, or leave it out"
        ok = self.slot_weights != "dpace" or self.normalise != "mean"
        require(ok, "train.normalise", self.normalise, rule)
        require(len(set(self.trackers)) == len(self.trackers), "train.trackers", self.trackers, "each may stand once")
        if self.distill is not None and self.slot_weights == "dpace":
            raise ConfigError("train.distill goes with slot_weights decay or uniform; D-PACE is a weighting of "
                              "cross-entropy alone")

    @property
    def normalised_by(self) -> Literal["mean", "sum"]:
        """`normalise`, its default filled in."""
        return self.normalise or ("sum" if self.slot_weights == "dpace" else "mean")
