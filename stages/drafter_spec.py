"""What fixes a drafter's shape and meaning, and how it follows from a target."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from stages.config import ConfigError, DrafterConfig

LAYER_TYPES = ("full_attention", "sliding_attention")
ENTRIES = ("inject", "first_layer", "input", "none")
"""Where the target's features enter; all but the first are for comparison only, no engine runs them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterSpec:
    """Everything that fixes a drafter's shape and meaning; section 5's `config.json` carries it."""

    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    n_target_layers: int
    feature_layer_ids: tuple[int, ...]
    mask_token_id: int
    rope_theta: float
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 40960
    attention_bias: bool = False
    layer_types: tuple[str, ...] = ()
    """Per layer `full_attention` or `sliding_attention`; empty means all full."""
    sliding_window: int | None = None
    is_causal: bool = True
    """Whether sliding-window layers are causal inside the block; full layers never are."""
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    initializer_range: float = 0.02
    features: str = "inject"
    """`inject`: keys and values of every layer. `first_layer`: of the first layer only. `input`: the context feature at
    a−1 is added to every slot of the block's input, and no layer sees any context. `none`: as `inject`, with the
    target's embedding of each context token in place of its hidden states."""

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"drafter: {self.n_heads} heads cannot share {self.n_kv_heads} key/value heads; make n_heads a multiple"
            )
        if self.head_dim % 2:
            raise ConfigError(f"drafter: head_dim is {self.head_dim}, but rotary embeddings need an even width")
        if self.layer_types and len(self.layer_types) != self.n_layers:
            raise ConfigError(f"drafter: {len(self.layer_types)} layer_types for {self.n_layers} layers")
        unknown = set(self.layer_types) - set(LAYER_TYPES)
        if unknown:
            raise ConfigError(f"drafter: layer_types has {sorted(unknown)}; known are {list(LAYER_TYPES)}")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ConfigError("drafter: a sliding_attention layer needs sliding_window")

        if self.features not in ENTRIES:
            raise ConfigError(f"drafter: features is {self.features!r}; known are {list(ENTRIES)}")

    def sees_context(self, layer: int) -> bool:
        """Whether a layer has keys and values of the context."""
        return self.features in ("inject", "none") or (self.features == "first_layer" and layer == 0)

    def window(self, layer: int) -> int | None:
        """The window of a layer in positions, or None for full attention."""
        return self.sliding_window if self.layer_types and self.layer_types[layer] == "sliding_attention" else None

    def with_block_size(self, block_size: int) -> DrafterSpec:
        """The same drafter used with another block size (cross-size inference)."""
        return replace(self, block_size=block_size)


def spec_for_target(
    config: DrafterConfig, target_config: Any, *, feature_layer_ids: tuple[int, ...], mask_token_id: int
) -> DrafterSpec:
    """A drafter's spec built *for the drafter*: of the target's config only plain sizes are taken.

    Rotary settings other than the base frequency are not copied: a partial or scaled rotation in the
    drafter's config is applied by one engine and not by another, and then ~1.2 tokens are accepted.
    """
    text = target_config.get_text_config()
    heads = config.n_heads or text.num_attention_heads
    shared = heads if config.n_heads else getattr(text, "num_key_value_heads", None) or heads
    return DrafterSpec(
        hidden_size=text.hidden_size,
        intermediate_size=config.intermediate_size or text.intermediate_size,
        n_layers=config.n_layers,
        n_heads=heads,
        n_kv_heads=config.n_kv_heads or shared,
        head_dim=config.head_dim or getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        vocab_size=text.vocab_size,
        block_size=config.block_size,
        n_target_layers=text.num_hidden_layers,
        feature_layer_ids=feature_layer_ids,
        mask_token_id=mask_token_id,
        rope_theta=rope_theta_of(text),
        max_position_embeddings=text.max_position_embeddings,
        tie_word_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        features=config.features,
    )


def rope_theta_of(text_config: Any) -> float:
    """The base frequency, wherever this version of transformers keeps it (per layer type: full attention's)."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    if "full_attention" in parameters:
        parameters = parameters["full_attention"]
    return float(parameters.get("rope_theta") or getattr(text_config, "rope_theta", None) or 10000.0)
