"""What the benchmark of extraction works on: targets, and samples of lengths as they occur in chat data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cache_schema.response_format import Response
from stages.config import TargetConfig
from stages.smollm2 import PACKAGE
from stages.target import Target, load_target
from tests.tiny import Extraction, make_target, response, start_extraction

MEAN_TOKENS, MAX_TOKENS, SPREAD = 270, 1024, 0.7
SEED = 7
BATCH = 8
"""Samples of a batch, where batches are of samples."""
SHARD_TOKENS = 64 * MEAN_TOKENS
TARGETS = ("smollm2", "tiny")


@dataclass(frozen=True, slots=True)
class Work:
    """A target and the samples that go through it."""

    target: Target
    layer_ids: tuple[int, ...]
    responses: list[Response]

    @property
    def sequences(self) -> dict[str, NDArray[np.int32]]:
        return {r.sample_id: r.input_ids for r in self.responses}


def work(target: str, n_samples: int, answers: int = 1) -> Work:
    """A target by name, and samples.

    Args:
        target: `smollm2` (bfloat16) or `tiny` (float32, 6 layers of 64 channels).
        n_samples: how many.
        answers: samples that begin with the same prompt.
    """
    torch.set_num_threads(1)
    if target == "smollm2":
        model = load_target(TargetConfig(model=PACKAGE), tokenizer=False)
    else:
        model = make_target(hidden_size=64, intermediate_size=192, max_position_embeddings=MAX_TOKENS, vocab_size=1000)
    layer_ids = model.shape.layer_ids(5 if model.shape.n_layers >= 8 else 3, None)
    return Work(model, layer_ids, samples(n_samples, model.shape.vocab_size, answers))


def lengths(n: int, mean: float = MEAN_TOKENS, most: int = MAX_TOKENS) -> NDArray[np.int64]:
    """Log-normal around a mean, at most `most`."""
    rng = np.random.default_rng(SEED)
    drawn = np.exp(rng.normal(math.log(mean) - SPREAD**2 / 2, SPREAD, n))
    return np.clip(drawn, 8, most).astype(np.int64)


def samples(n: int, vocab: int, answers: int = 1) -> list[Response]:
    """Samples of random ids, a third of each the prompt; with several answers, prompts of the mean length instead."""
    if answers == 1:
        return [response(f"sample-{i:05d}", int(t) // 3, int(t) - int(t) // 3, vocab) for i, t in enumerate(lengths(n))]
    prompts = lengths(n // answers, most=MAX_TOKENS // 2)
    found = []
    for i, t in enumerate(lengths(n, most=MAX_TOKENS // 2)):
        prompt = response(f"prompt-{i // answers:05d}", int(prompts[i // answers]), 1, vocab)
        answer = response(f"sample-{i:05d}", 0, int(t), vocab)
        mask = np.concatenate([np.zeros(len(prompt.prompt_ids), np.uint8), answer.loss_mask])
        ids = prompt.prompt_ids, answer.response_ids
        found.append(Response(f"sample-{i:05d}", prompt.messages, *ids, mask, "stop", None, {}))
    return found


def extraction(folder: Path, given: Work, batch_tokens: int, shard_tokens: int = SHARD_TOKENS) -> Extraction:
    """An empty cache for these samples, and a worker that holds the target."""
    row_bytes = len(given.layer_ids) * given.target.shape.hidden_size * 2
    return start_extraction(
        folder, given.target, given.responses, layer_ids=given.layer_ids, shard_bytes=shard_tokens * row_bytes,
        batch_tokens=batch_tokens, max_length=MAX_TOKENS,
    )  # fmt: skip
