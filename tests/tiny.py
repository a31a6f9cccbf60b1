"""Tiny seeded models, tokenizers, tables and caches that the tests of the stages build."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PretrainedConfig, PreTrainedTokenizerFast, Qwen3Config

from cache_schema.identity import CacheIdentity, ResponsesIdentity
from cache_schema.plan import plan_shards
from cache_schema.reader import FeatureCache, create_cache
from cache_schema.responses import Response, ResponsesTable, create_responses, write_part
from stages.config import CacheConfig, ExtractConfig, TargetConfig
from stages.drafter import Drafter, DrafterSpec
from stages.extract import ExtractJob, ExtractWorker, ShardUnit
from stages.target import Target, model_loader

VOCAB, HIDDEN, LAYERS, MASK_ID = 97, 32, 6, 96
FEATURE_LAYERS = (1, 3, 4)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def model_of(config: PretrainedConfig, seed: int = 0) -> Any:
    """A random model whose layers do something (the usual 0.02 leaves the residual stream near the embedding)."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model_loader(config).from_config(config, dtype=torch.float32)


def make_target(seed: int = 0, tokenizer: Any = None, **changes: Any) -> Target:
    """A Qwen3 target in float32."""
    return Target(model_of(Qwen3Config(**(SIZES | {"tie_word_embeddings": True} | changes)), seed), tokenizer, "tiny")


def make_tokenizer(*, template: str = CHATML, extra_specials: Sequence[str] = (), **named: str) -> Any:
    """Byte-level, without merges: 256 bytes behind the special tokens. Pad is eos (case 19)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [*SPECIALS, *extra_specials]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(specials), special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([], trainer)
    names = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"} | named
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **names)


def save_target(folder: Path, target: Target) -> Path:
    """The target as a checkpoint folder, its tokenizer (if any) included."""
    target.model.save_pretrained(folder)  # type: ignore[operator]
    if target.tokenizer is not None:
        target.tokenizer.save_pretrained(folder)
    return folder


def make_spec(**changes: Any) -> DrafterSpec:
    """A drafter for `make_target`."""
    values: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "block_size": 4,
        "n_target_layers": LAYERS,
        "feature_layer_ids": FEATURE_LAYERS,
        "mask_token_id": MASK_ID,
        "rope_theta": 10000.0,
        "initializer_range": 0.2,
    }
    return DrafterSpec(**(values | changes))


def make_drafter(seed: int = 0, **changes: Any) -> Drafter:
    return Drafter(make_spec(**changes), seed=seed).eval()


def response(sample_id: str, n_prompt: int, n_response: int, vocab: int = VOCAB - 1) -> Response:
    """A sample of random ids, the same for the same id and lengths."""
    rng = np.random.default_rng(list(sample_id.encode()))
    ids = rng.integers(3, vocab, n_prompt + n_response).astype(np.int32)
    mask = (np.arange(len(ids)) >= n_prompt).astype(np.uint8)
    return Response(
        sample_id, [{"role": "user", "content": sample_id}], ids[:n_prompt], ids[n_prompt:], mask, "stop", None, {}
    )


RESPONSES_IDENTITY = ResponsesIdentity(
    target_name="tiny",
    target_revision=None,
    target_weights_sha256="w" * 64,
    tokenizer_sha256="t" * 64,
    chat_template_sha256="c" * 64,
    chat_template_kwargs={},
    prompts_sha256="p" * 64,
    settings={},
)


def write_responses(folder: Path, responses: Sequence[Response]) -> ResponsesTable:
    """A responses table in one part."""
    create_responses(folder, RESPONSES_IDENTITY, 1, len(responses))
    write_part(folder, 0, responses)
    return ResponsesTable.open(folder)


@dataclass
class Extraction:
    """A cache being made of a responses table, all in one process."""

    job: ExtractJob
    worker: ExtractWorker
    units: list[ShardUnit]

    def run(self) -> FeatureCache:
        for unit in self.units:
            self.worker.run(unit, 1)
        return FeatureCache.open(self.job.cache_dir, self.job.identity, require_complete=True)


def start_extraction(
    folder: Path,
    target: Target,
    responses: Sequence[Response],
    *,
    layer_ids: tuple[int, ...] = FEATURE_LAYERS,
    shard_bytes: int = 1 << 20,
    batch_tokens: int = 256,
    max_length: int = 512,
    batching: str = "auto",
    **identity: Any,
) -> Extraction:
    """A cache with its plan, its responses and a worker, nothing captured yet."""
    table = write_responses(folder / "responses", responses)
    made_of = CacheIdentity(
        target_name="tiny",
        target_revision=None,
        target_weights_sha256="w" * 64,
        target_dtype="float32",
        tokenizer_sha256="t" * 64,
        chat_template_sha256="c" * 64,
        layer_ids=layer_ids,
        layer_convention="residual stream after decoder layer i",
        feature_dtype="bfloat16",
        last_hidden=False,
        max_length=max_length,
        responses_sha256=table.responses_hash(),
    )
    made_of = dataclasses.replace(made_of, **identity)
    ids, lengths = table.lengths()
    bytes_per_token = len(layer_ids) * target.shape.hidden_size * 2
    plan = plan_shards(ids, np.minimum(lengths, max_length), bytes_per_token, shard_bytes)
    create_cache(folder / "cache", made_of, plan)
    job = ExtractJob(
        TargetConfig(model="tiny", dtype="float32"),
        CacheConfig(
            layer_ids=layer_ids,
            max_length=max_length,
            dtype=made_of.feature_dtype,  # type: ignore[arg-type]
            bits=made_of.feature_bits,
            group=made_of.feature_group,
        ),
        ExtractConfig(batch_tokens=batch_tokens, batching=batching),  # type: ignore[arg-type]
        made_of,
        folder / "responses",
        folder / "cache",
    )
    units = [ShardUnit(name, tuple(plan.samples(name))) for name in plan.shards()]
    return Extraction(job, ExtractWorker(job, target), units)
