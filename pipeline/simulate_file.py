"""What `dflash simulate` is told: one YAML file of measured or assumed rates.

Every stage may be left out. Sizes are bytes, rates are per second and per GPU.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checked_yaml import checked, read_mapping
from pipeline.errors import RecipeError
from stages.fields import ConfigError, require

_MOST = 1e18
_MOST_UNITS = 5_000_000
_MOST_NODES = 100_000
_MOST_SPREAD = 10.0
RESPONSE_TOKEN_BYTES = 9
"""Of a token in the responses table: two int32 ids' worth and a mask byte, before compression."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterRates:
    """Nodes, and what happens to them."""

    nodes: int
    gpus_per_node: int = 8
    node_mtbf_h: float | None = None
    """Mean hours between losses of one node; None: none is lost."""
    announced_share: float = 0.0
    """Of the lost nodes, those whose loss is announced (drained, spot notice): a training then saves first."""
    detect_s: float = 30.0
    """Until the driver knows of a node that went without a word."""
    replace_s: float = 600.0
    """Until another node is there."""
    worker_mtbf_h: float | None = None
    """Mean hours between deaths of one worker alone (out of memory, a CUDA fault); None: none dies."""

    def __post_init__(self) -> None:
        _positive(self, "cluster", ("nodes", "gpus_per_node", "node_mtbf_h", "worker_mtbf_h"))
        _not_negative(self, "cluster", ("detect_s", "replace_s"))
        rule = f"it must be at most {_MOST_NODES:,}"
        require(self.nodes <= _MOST_NODES, "cluster.nodes", self.nodes, rule)
        require(0 <= self.announced_share <= 1, "cluster.announced_share", self.announced_share, "it must be in [0, 1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreRates:
    """Bytes per second of the shared storage, all together and of one node; None: no limit."""

    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    node_write_bytes_per_s: float | None = None
    node_read_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        _positive(self, "store", [f.name for f in dataclasses.fields(self)])


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRates:
    """A stage on a pool of workers: generate or extract."""

    workers: int
    tokens_per_s: float
    """Per GPU: answer tokens for generate, all tokens for extract."""
    unit_tokens: float
    """Tokens of a unit, as in `tokens_per_s`: answer tokens of a part, or all tokens of a shard."""
    gpus_per_worker: int = 1
    """GPUs that hold one target together, all on one node."""
    token_bytes: float = float(RESPONSE_TOKEN_BYTES)
    """Bytes written for each of those tokens, after compression."""
    read_token_bytes: float = 0.0
    """Bytes read for each, before it is computed."""
    in_flight: int = 1
    """Units that a worker has at once: one is read or written while another has the GPU (extract: 2)."""
    start_s: float = 0.0
    """From the moment that a worker has its GPU to its first unit: imports, weights, warm-up."""
    unit_spread: float = 0.0
    """Standard deviation of a unit's time over its mean."""
    dispatch_s: float = 0.0015
    """Of the driver per unit, which serves one after another: it ends one unit and begins the next."""
    max_attempts: int = 3
    """Attempts of a unit that count against it, as in `run_pool`."""

    def require_sound(self, stage: str) -> None:
        _positive(self, stage, ("workers", "tokens_per_s", "unit_tokens", "gpus_per_worker", "in_flight",
                                "max_attempts"))  # fmt: skip
        _not_negative(self, stage, ("token_bytes", "read_token_bytes", "start_s", "unit_spread", "dispatch_s"))
        require(self.unit_tokens >= 1, f"{stage}.unit_tokens", self.unit_tokens, "it must be at least 1")
        rule = f"it must be at most {_MOST_SPREAD:g}"
        require(self.unit_spread <= _MOST_SPREAD, f"{stage}.unit_spread", self.unit_spread, rule)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRates:
    """Training on ranks that take every step together."""

    ranks: int
    tokens_per_s: float
    """Per GPU: context tokens of samples that were trained on."""
    gpus_per_rank: int = 1
    min_ranks: int | None = None
    """Elastic: goes on with as few as this while a node is replaced."""
    epochs: int = 6
    batch_samples: int = 64
    read_share: float = 1.0
    """Of the stored bytes of a sample, those that are read (rows behind the last anchor are not)."""
    start_s: float = 0.0
    """From the moment that all ranks have their GPUs to the first step: imports, weights, groups, checkpoint."""
    checkpoint_every: int = 500
    checkpoint_s: float = 0.0
    """Seconds that the ranks wait for a checkpoint."""
    checkpoint_bytes: float = 0.0
    keep_checkpoints: int = 2
    window_shards: int = 32
    passes_per_window: int = 1

    def require_sound(self) -> None:
        names = ("ranks", "tokens_per_s", "gpus_per_rank", "epochs", "batch_samples", "checkpoint_every",
                 "keep_checkpoints", "window_shards", "passes_per_window")  # fmt: skip
        _positive(self, "train", names)
        _not_negative(self, "train", ("start_s", "checkpoint_s", "checkpoint_bytes"))
        require(0 <= self.read_share <= 1, "train.read_share", self.read_share, "it must be in [0, 1]")
        low = self.min_ranks
        ok = low is None or 0 < low <= self.ranks
        require(ok, "train.min_ranks", low, f"it must be in 1 … train.ranks ({self.ranks}), or absent")
        ok = self.epochs % self.passes_per_window == 0
        require(ok, "train.epochs", self.epochs, f"it must be a multiple of passes_per_window {self.passes_per_window}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """A run to be played; `load_simulation` makes one."""

    name: str
    samples: int
    tokens_per_sample: float
    """Prompt and answer, mean."""
    cluster: ClusterRates
    seed: int = 0
    answer_tokens: float | None = None
    """Of `tokens_per_sample`; None: all of them."""
    store: StoreRates = dataclasses.field(default_factory=StoreRates)
    generate: PoolRates | None = None
    extract: PoolRates | None = None
    train: TrainRates | None = None
    max_bytes: float | None = None
    """`cache.max_bytes`: where the cache is larger, training and extraction run at the same time under this limit."""

    def __post_init__(self) -> None:
        for name in ("samples", "tokens_per_sample", "answer_tokens", "max_bytes"):
            value = getattr(self, name)
            ok = value is None or 0 < value <= _MOST
            require(ok, name, value, f"it must be above 0, and at most {_MOST:g}")
        rule = f"it is part of tokens_per_sample ({self.tokens_per_sample:g})"
        require(self.answers <= self.tokens_per_sample, "answer_tokens", self.answer_tokens, rule)
        some = any(stage is not None for stage in (self.generate, self.extract, self.train))
        require(some, "generate, extract, train", None, "at least one stage is needed")
        self._require_stages()

    def _require_stages(self) -> None:
        if self.generate is not None:
            self.generate.require_sound("generate")
            self._require_units("generate", self.answers, self.generate.unit_tokens)
            self._require_gpus("generate.workers", self.generate.workers, self.generate.gpus_per_worker)
        if self.extract is not None:
            self.extract.require_sound("extract")
            self._require_units("extract", self.tokens_per_sample, self.extract.unit_tokens)
            self._require_gpus("extract.workers", self.extract.workers, self.extract.gpus_per_worker)
        if self.train is not None:
            self.train.require_sound()
            self._require_gpus("train.ranks", self.train.ranks, self.train.gpus_per_rank)
            require(self.extract is not None, "extract", None, "train reads what extract makes: its sizes are needed")
        if self.rolling and self.extract is not None and self.train is not None:
            per_node = self.cluster.gpus_per_node // self.extract.gpus_per_worker
            need = self.train_nodes + math.ceil(self.extract.workers / per_node)
            rule = f"under max_bytes ranks and extract workers are there at the same time, which takes {need} nodes"
            require(need <= self.cluster.nodes, "cluster.nodes", self.cluster.nodes, rule)

    def _require_units(self, stage: str, tokens: float, unit_tokens: float) -> None:
        n_units = self.samples * tokens / unit_tokens
        rule = f"{n_units:,.0f} units would be played, and at most {_MOST_UNITS:,} can be"
        require(n_units <= _MOST_UNITS, f"{stage}.unit_tokens", unit_tokens, rule)

    def _require_gpus(self, name: str, count: int, gpus: int) -> None:
        per_node = self.cluster.gpus_per_node // gpus
        have = self.cluster.nodes * per_node
        nodes = f"{self.cluster.nodes} nodes of {self.cluster.gpus_per_node} GPUs"
        rule = f"{nodes} have room for {have} of {gpus} GPUs each"
        require(count <= have, name, count, rule)

    @property
    def answers(self) -> float:
        """Answer tokens of a sample."""
        return self.answer_tokens or self.tokens_per_sample

    @property
    def n_shards(self) -> int:
        """Shards of the cache."""
        assert self.extract is not None
        return math.ceil(self.samples * self.tokens_per_sample / self.extract.unit_tokens)

    @property
    def cache_bytes(self) -> float:
        """Bytes of the whole cache."""
        return self.samples * self.tokens_per_sample * self.extract.token_bytes if self.extract else 0.0

    @property
    def rolling(self) -> bool:
        """Whether training and extraction run at the same time."""
        both = self.extract is not None and self.train is not None
        return both and self.max_bytes is not None and self.cache_bytes > self.max_bytes

    @property
    def train_nodes(self) -> int:
        """Nodes that the ranks fill."""
        assert self.train is not None
        return math.ceil(self.train.ranks / (self.cluster.gpus_per_node // self.train.gpus_per_rank))


def _positive(config: Any, section: str, names: tuple[str, ...] | list[str]) -> None:
    for name in names:
        value = getattr(config, name)
        ok = value is None or 0 < value <= _MOST
        require(ok, f"{section}.{name}", value, f"it must be above 0, and at most {_MOST:g}")


def _not_negative(config: Any, section: str, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(config, name)
        rule = f"it must be 0 or above, and at most {_MOST:g}"
        require(0 <= value <= _MOST, f"{section}.{name}", value, rule)


def load_simulation(path: Path) -> Simulation:
    """Read and check a file of rates.

    Raises:
        RecipeError: it cannot be read, or a key or value does not fit; one line per fault.
    """
    raw = read_mapping(path, "file of rates", Simulation)
    values = checked(raw, Simulation, where=str(path))
    try:
        return Simulation(**values)
    except ConfigError as error:
        raise RecipeError(f"{path}: {error}") from error
