"""Tiny random models of many families, from their transformers configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hf

from tests.tiny import SIZES

NO_HEAD_DIM: dict[str, Any] = {k: v for k, v in SIZES.items() if k != "head_dim"}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
SLIDING = ["sliding_attention", "full_attention"] * 3
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}
Config = Callable[[], hf.PretrainedConfig]

PACKED: dict[str, Config] = {
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "qwen2": lambda: hf.Qwen2Config(**NO_HEAD_DIM),
    "qwen3": lambda: hf.Qwen3Config(**SIZES),
    "mistral": lambda: hf.MistralConfig(**SIZES, sliding_window=5),
    "gemma2": lambda: hf.Gemma2Config(**SIZES, sliding_window=5, query_pre_attn_scalar=8),
    "gemma3": lambda: hf.Gemma3TextConfig(**SIZES, sliding_window=5, query_pre_attn_scalar=8),
    "phi3": lambda: hf.Phi3Config(**NO_HEAD_DIM),
    "olmo2": lambda: hf.Olmo2Config(**NO_HEAD_DIM),
    "cohere2": lambda: hf.Cohere2Config(**NO_HEAD_DIM, sliding_window=5, layer_types=SLIDING),
    "mixtral": lambda: hf.MixtralConfig(**NO_HEAD_DIM, **MOE, sliding_window=None),
    "qwen3-moe": lambda: hf.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1
    ),
    "gpt-oss": lambda: hf.GptOssConfig(**SIZES, **MOE, sliding_window=5, layer_types=SLIDING),
    "deepseek-v3": lambda: hf.DeepseekV3Config(
        **(NO_HEAD_DIM | {"num_key_value_heads": 4}), n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=1, moe_intermediate_size=24, q_lora_rank=16, kv_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, n_shared_experts=1,
    ),
    "gemma3 with images": lambda: hf.Gemma3Config(
        text_config=SIZES | {"sliding_window": 5, "query_pre_attn_scalar": 8}, vision_config=VISION
    ),
    "llava": lambda: hf.LlavaConfig(
        text_config=hf.LlamaConfig(**SIZES), vision_config=hf.CLIPVisionConfig(**VISION)
    ),
    "qwen2.5-vl": lambda: hf.Qwen2_5_VLConfig(
        text_config=NO_HEAD_DIM | {
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
        },
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32},
    ),
}
"""Attention only: these are packed."""

PADDED: dict[str, Config] = {
    "qwen3-next": lambda: hf.Qwen3NextConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24,
        linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
    ),
    "lfm2": lambda: hf.Lfm2Config(**NO_HEAD_DIM, layer_types=["conv", "conv", "full_attention"] * 2),
    "llama4": lambda: hf.Llama4TextConfig(
        **SIZES, num_local_experts=2, num_experts_per_tok=1, attention_chunk_size=8, intermediate_size_mlp=48
    ),
}
"""Layers that carry a state from token to token, or attention in chunks: these are padded."""

FAMILIES: dict[str, Config] = PACKED | PADDED
