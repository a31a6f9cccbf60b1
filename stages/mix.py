"""Which conversations of several sources are taken: caps, weights and a total, chosen by hash and never by order.

A conversation's place in the choice is a hash of (seed, its id), so neither the order of the rows nor the number of
sources decides who is taken, and a larger cap only adds to what a smaller one took.

With weights n_i = w_i · t, where t is as large as the sources and `max_samples` allow: no row is ever taken twice,
so the source that is scarcest for its weight is used up, and the others give in proportion.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from stages.anchors import stable_key
from stages.config import PromptsConfig
from stages.conversation import Conversation


def quotas(available: Sequence[int], weights: Sequence[float], max_samples: int | None = None) -> list[int]:
    """How many conversations each source gives.

    Args:
        available: conversations of each source, its cap applied.
        weights: of the sources, each above 0.
        max_samples: of all sources together; None sets no limit.
    """
    shares = [Fraction(str(w)) for w in weights]
    t = min(Fraction(n) / share for n, share in zip(available, shares, strict=True))
    total = t * sum(shares)
    if max_samples is not None and total > max_samples:
        t, total = t * max_samples / total, Fraction(max_samples)
    exact = [t * share for share in shares]
    counts = [int(n) for n in exact]
    # What rounding down has left over goes to the largest remainders; none of these sources is used up.
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: int(total) - sum(counts)]:
        counts[i] += 1
    return counts


def choose(by_source: Sequence[Sequence[Conversation]], config: PromptsConfig, seed: int) -> list[list[Conversation]]:
    """What is taken of each source, in the order in which it stands there.

    Args:
        by_source: the conversations that are fit, source by source as in the config; ids are unique.
        config: caps, weights and total.
        seed: of the run.
    """
    caps = [source.cap for source in config.sources]
    weights = [source.weight for source in config.sources if source.weight is not None]
    capped = [_first(rows, cap, seed) for rows, cap in zip(by_source, caps, strict=True)]
    if not weights:
        everything = [c for rows in capped for c in rows]
        taken = {c.sample_id for c in _first(everything, config.max_samples, seed)}
        return [[c for c in rows if c.sample_id in taken] for rows in capped]
    counts = quotas([len(rows) for rows in capped], weights, config.max_samples)
    return [_first(rows, n, seed) for rows, n in zip(capped, counts, strict=True)]


def _first(rows: Sequence[Conversation], n: int | None, seed: int) -> list[Conversation]:
    """The n conversations of the smallest hashes, in their own order."""
    if n is None or n >= len(rows):
        return list(rows)
    ranked = sorted(rows, key=lambda c: stable_key("mix", seed, c.sample_id))
    taken = {c.sample_id for c in ranked[:n]}
    return [c for c in rows if c.sample_id in taken]
