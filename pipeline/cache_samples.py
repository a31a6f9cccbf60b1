"""Samples of a cache for the commands that look at values: which ones, and what their features stand for.

Shapes: T tokens, L feature layers, D hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cache_schema.errors import UnknownName
from cache_schema.identity import CacheIdentity
from cache_schema.layout import feature_format
from cache_schema.quantized import dequantize
from cache_schema.shard import CachedSample

Floats = NDArray[np.float32]


def values_of(sample: CachedSample, identity: CacheIdentity) -> Floats:
    """The features of a sample as float32, [T, L, D]; exact."""
    return dequantize(sample.features, sample.scale, feature_format(identity))


def choose(sample_ids: Sequence[str], n: int | None, seed: int = 0) -> list[str]:
    """Samples at random, in the given order: a pure function of ids, number and seed.

    The ids with the smallest hashes are taken, so that a larger number contains the smaller one's samples, and
    samples that are added later change the choice little.

    Args:
        sample_ids: to choose from.
        n: how many; None takes all.
        seed: another one gives another choice.
    """
    if n is None or n >= len(sample_ids):
        return list(sample_ids)
    chosen = set(sorted(sample_ids, key=lambda s: hashlib.sha256(f"{seed}/{s}".encode()).digest())[:n])
    return [s for s in sample_ids if s in chosen]


def shard_names(planned: Sequence[str], selection: Sequence[str]) -> list[str] | None:
    """Shards that were named on the command line; None if none were.

    Args:
        planned: all shards.
        selection: texts such as `shard-00042`, `42`, `10-19` or several of these with commas.

    Raises:
        UnknownName: there is no such shard.
    """
    if not selection:
        return None
    known = {int(name.partition("-")[2]): name for name in planned}
    found: list[str] = []
    for text in (t.strip() for one in selection for t in one.split(",")):
        first, dash, last = text.removeprefix("shard-").partition("-")
        if not first.isdecimal() or not (last.isdecimal() if dash else True):
            raise UnknownName(f"{text!r} names no shard; write shard-00042, 42, or 10-19 for a range")
        numbers = range(int(first), int(last if dash else first) + 1)
        absent = [n for n in numbers if n not in known] if len(numbers) <= len(known) + 1 else [int(last)]
        if absent or not numbers:
            raise UnknownName(f"{text!r}: the plan has {len(known)} shards, 0 to {len(known) - 1}")
        found += [known[n] for n in numbers]
    return list(dict.fromkeys(found))
