"""Small caches and responses tables that the tests of this folder build."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_schema.identity import CacheIdentity, ResponsesIdentity
from cache_schema.marker import CommitMarker
from cache_schema.plan import ShardPlan, plan_shards
from cache_schema.reader import create_cache
from cache_schema.responses import Response
from cache_schema.writer import ShardWriter

HIDDEN = 8
LAYERS = (1, 4, 7)
IDENTITY = CacheIdentity(
    target_name="tiny",
    target_revision=None,
    target_weights_sha256="w" * 64,
    target_dtype="bfloat16",
    tokenizer_sha256="t" * 64,
    chat_template_sha256="c" * 64,
    layer_ids=LAYERS,
    layer_convention="residual stream after decoder layer i",
    feature_dtype="bfloat16",
    last_hidden=False,
    max_length=512,
    responses_sha256="r" * 64,
)
WITH_HIDDEN = dataclasses.replace(IDENTITY, last_hidden=True)
RESPONSES_IDENTITY = ResponsesIdentity(
    target_name="tiny",
    target_revision="main",
    target_weights_sha256="w" * 64,
    tokenizer_sha256="t" * 64,
    chat_template_sha256="c" * 64,
    chat_template_kwargs={"enable_thinking": False},
    prompts_sha256="p" * 64,
    settings={"max_new_tokens": 16, "temperature": 0.0},
)
LENGTHS = {"a": 70, "b": 3, "späte-✓": 129, "d": 64, "e": 200}
"""Samples of the usual test cache: shorter, equal and longer than a chunk of 64 rows."""


def features(sample_id: str, n_tokens: int, n_layers: int = len(LAYERS)) -> NDArray[np.uint16]:
    """Finite bfloat16 bit patterns, the same for the same id."""
    rng = np.random.default_rng(list(sample_id.encode()))
    return rng.integers(1, 0x7F00, (n_tokens, n_layers, HIDDEN)).astype(np.uint16)


def token_ids(sample_id: str, n_tokens: int) -> NDArray[np.int32]:
    return np.random.default_rng([1, *sample_id.encode()]).integers(0, 1000, n_tokens).astype(np.int32)


def mask(n_tokens: int) -> NDArray[np.uint8]:
    return (np.arange(n_tokens) >= n_tokens // 2).astype(np.uint8)


def make_plan(lengths: dict[str, int] = LENGTHS, shard_bytes: int = 150 * len(LAYERS) * HIDDEN * 2) -> ShardPlan:
    return plan_shards(list(lengths), list(lengths.values()), len(LAYERS) * HIDDEN * 2, shard_bytes)


def append(writer: ShardWriter, sample_id: str, n_tokens: int, **changes: Any) -> bool:
    values: dict[str, Any] = {
        "features_TLD": features(sample_id, n_tokens),
        "input_ids": token_ids(sample_id, n_tokens),
        "loss_mask": mask(n_tokens),
    }
    return writer.append(sample_id, **(values | changes))


def write_shard(
    cache: Path, plan: ShardPlan, shard: str, identity: CacheIdentity = IDENTITY, attempt: int = 1
) -> CommitMarker:
    with ShardWriter(cache, shard, identity, HIDDEN, attempt=attempt) as writer:
        for sample_id in plan.samples(shard):
            n = plan.n_tokens(sample_id)
            hidden = {"last_hidden": features(sample_id, n)[:, 0].copy()} if identity.last_hidden else {}
            append(writer, sample_id, n, **hidden)
        return writer.commit()


def make_cache(path: Path, identity: CacheIdentity = IDENTITY, lengths: dict[str, int] = LENGTHS) -> ShardPlan:
    plan = create_cache(path, identity, make_plan(lengths))
    for shard in plan.shards():
        write_shard(path, plan, shard, identity)
    return plan


def response(sample_id: str, n_prompt: int = 4, n_response: int = 6) -> Response:
    ids = token_ids(sample_id, n_prompt + n_response)
    return Response(
        sample_id=sample_id,
        messages=[{"role": "user", "content": f"Grüße {sample_id} ✓"}, {"role": "assistant", "content": "ja"}],
        prompt_ids=ids[:n_prompt],
        response_ids=ids[n_prompt:],
        loss_mask=(np.arange(len(ids)) >= n_prompt).astype(np.uint8),
        finish_reason="stop",
        category=None,
        sampling={"temperature": 0.0},
    )


def flip_byte(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x40
    path.write_bytes(raw)
