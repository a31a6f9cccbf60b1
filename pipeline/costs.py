"""What a run costs, by formula: parameters, FLOPs, bytes.

A multiplication and an addition are 2 FLOPs. The drafter's step is counted by `stages.hardware.step_flops`.
Norms, embedding look-ups, the softmax and the optimizer are left out (below 1 %). A kernel that works on a
dense mask also pays for invisible pairs; recomputation would add one more forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stages.drafter import DrafterSpec

PROFILE_SHARE = {"exact": 1.0, "compact": 0.30, "tiny": 0.24}
"""Bytes of features under each profile, scales and compression included, over those of bfloat16: measured on
SmolLM2-135M (docs/cache.md). Other targets compress alike where their states are spread alike."""
CACHE_DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "int8")
_BYTES = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}


def drafter_parameters(spec: DrafterSpec) -> int:
    """Trained parameters: `fc`, `hidden_norm`, `norm` and N layers (11·N + 3 tensors, without biases)."""
    D, E = spec.hidden_size, spec.head_dim
    attention = 2 * D * spec.n_heads * E + 2 * D * spec.n_kv_heads * E + 2 * E
    layer = attention + 3 * D * spec.intermediate_size + 2 * D
    return len(spec.feature_layer_ids) * D * D + 2 * D + spec.n_layers * layer


def frozen_parameters(spec: DrafterSpec) -> int:
    """The target's embedding and head that training holds beside the drafter; a tied head counts once."""
    return spec.vocab_size * spec.hidden_size * (1 if spec.tie_word_embeddings else 2)


def sample_flops(spec: DrafterSpec, *, tokens: float, anchors: float, visible: float) -> dict[str, float]:
    """FLOPs of one sample in one training step, forward and backward, by part.

    Args:
        tokens: T, of the sample.
        anchors: A, of the sample.
        visible: C, context positions that a block sees, on average.
    """
    from stages.hardware import step_flops

    slots = anchors * spec.block_size
    return step_flops(
        spec, context_rows=tokens, slots=slots, labels=slots - anchors, visible=slots * (visible + spec.block_size)
    )


def prefill_flops(text_config: Any, *, n_layers: int, tokens: float) -> float:
    """FLOPs of the target's forward pass over one sequence up to layer `n_layers` (extraction stops there).

    Per layer `2·T·(2·D·H·E + 2·D·G·E + 3·D·I) + 2·T²·H·E` (causal attention: half of all pairs). No head, no
    embedding. A mixture of experts counts the experts that a token visits.

    Args:
        text_config: the target's transformers config (its text part).
        n_layers: layers that are run.
        tokens: T, of the sequence.
    """
    D, H = text_config.hidden_size, text_config.num_attention_heads
    E = getattr(text_config, "head_dim", None) or D // H
    G = getattr(text_config, "num_key_value_heads", None) or H
    linear = 2 * D * H * E + 2 * D * G * E + 3 * D * _mlp_width(text_config)
    return float(n_layers * (2 * tokens * linear + 2 * tokens**2 * H * E))


def _mlp_width(text_config: Any) -> int:
    experts = getattr(text_config, "num_experts_per_tok", None)
    if experts:
        return int(experts * (getattr(text_config, "moe_intermediate_size", None) or text_config.intermediate_size))
    return int(text_config.intermediate_size)


def token_bytes(hidden_size: int, n_layers: int, dtype: str, *, last_hidden: bool, groups: int = 1) -> dict[str, int]:
    """Bytes of a cached token by array, before compression.

    8-bit types have one float32 scale per token, layer and group of channels; `last_hidden` is stored with
    2 bytes per value whatever the features' type.
    """
    out = {"features": n_layers * hidden_size * _BYTES[dtype]}
    if _BYTES[dtype] == 1:
        out["feature_scale"] = 4 * n_layers * groups
    if last_hidden:
        out["last_hidden"] = 2 * hidden_size
    return out | {"input_ids": 4, "loss_mask": 1}
