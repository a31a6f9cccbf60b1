"""What the benchmark of the cache writes and reads: samples of random length with states that look real."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache_schema.identity import CacheIdentity

N_LAYERS = 5
MIN_TOKENS, MAX_TOKENS = 64, 3072
SEED = 7


@dataclass(frozen=True, slots=True)
class Setting:
    """How wide the states are and how many bytes of them there are, about."""

    hidden: int
    n_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a token."""
        return N_LAYERS * self.hidden * 2

    @property
    def row_shape(self) -> tuple[int, int]:
        return N_LAYERS, self.hidden


def identity(max_length: int = MAX_TOKENS) -> CacheIdentity:
    """Of a cache that no model made."""
    return CacheIdentity(
        target_name="benchmark",
        target_revision=None,
        target_weights_sha256="w" * 64,
        target_dtype="bfloat16",
        tokenizer_sha256="t" * 64,
        chat_template_sha256="c" * 64,
        layer_ids=tuple(range(1, 1 + N_LAYERS)),
        layer_convention="residual stream after decoder layer i",
        feature_dtype="bfloat16",
        last_hidden=False,
        max_length=max_length,
        responses_sha256="r" * 64,
    )


def lengths(setting: Setting) -> list[int]:
    """Tokens of each sample, uniform between 64 and 3,072, until the bytes are reached."""
    rng = np.random.default_rng(SEED)
    found: list[int] = []
    while sum(found) * setting.row_bytes < setting.n_bytes:
        found.append(int(rng.integers(MIN_TOKENS, MAX_TOKENS + 1)))
    return found


def states(setting: Setting, rows: int = MAX_TOKENS) -> NDArray[np.uint16]:
    """Normal values as bfloat16 bit patterns, [rows, layers, hidden]."""
    rng = np.random.default_rng(SEED)
    bits = np.empty((rows, *setting.row_shape), np.uint16)
    for row in bits:  # one at a time, so that making them leaves no mark in the peak of memory
        row[:] = rng.standard_normal(setting.row_shape, np.float32).view(np.uint32) >> 16
    return bits


def samples(setting: Setting) -> dict[str, NDArray[np.uint16]]:
    """All samples by id, each in memory of its own."""
    pool = states(setting)
    shifts = np.random.default_rng(SEED).integers(0, MAX_TOKENS, len(lengths(setting)))
    return {
        f"sample-{i:06d}": np.ascontiguousarray(np.roll(pool, int(shift), axis=0)[:n])
        for i, (n, shift) in enumerate(zip(lengths(setting), shifts, strict=True))
    }


def read_order(ids: list[str]) -> list[str]:
    """The random order in which samples are read."""
    return [ids[i] for i in np.random.default_rng(SEED + 1).permutation(len(ids))]
