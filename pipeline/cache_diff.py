"""`dflash cache diff`: how two caches differ, by what their markers say and, if asked, by their values.

Shapes: T tokens, L feature layers, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache_schema.errors import CacheError
from cache_schema.marker import CommitMarker
from cache_schema.reader import FeatureCache
from cache_schema.shard import CachedSample
from cache_schema.storage import Location
from cache_schema.survey import Survey, survey
from pipeline.cache_samples import Floats, choose, values_of

_SHOWN = 20
"""Differences of shards that are printed."""


def cache_diff(a: Location, b: Location) -> dict[str, Any]:
    """Compare identities, plans, shards and ledgers, without reading any values; tags, attempts and times aside.

    Raises:
        CacheError: one of the two is no cache, or its cache.json or plan is damaged.
        OSError: as the storages gave it.
    """
    one, two = survey(a), survey(b)
    left, right = one.identity.to_json(), two.identity.to_json()
    shards = _shards(one, two) if one.plan == two.plan else []
    found = {
        "a": one.storage.url,
        "b": two.storage.url,
        "identity": {k: [left[k], right[k]] for k in left if left[k] != right[k]},
        "plan": None if one.plan == two.plan else [_plan(one), _plan(two)],
        "only_in_a": _only(one, two),
        "only_in_b": _only(two, one),
        "damaged": one.damaged | two.damaged,
        "equal_shards": sum(not s["differs"] for s in shards),
        "shards": [s for s in shards if s["differs"]],
    }
    differs = ("identity", "plan", "only_in_a", "only_in_b", "damaged", "shards")
    return found | {"equal": not any(found[key] for key in differs)}


def _plan(found: Survey) -> dict[str, Any]:
    return {"shards": found.plan.n_shards, "samples": len(found.plan), "sha256": found.plan.sha,
            "samples_sha256": found.plan.samples_sha}  # fmt: skip


def _only(one: Survey, two: Survey) -> list[str]:
    """Shards that are committed only in the first; nothing if the plans differ: names then mean other things."""
    gone = two.markers.keys() | two.damaged.keys()
    return [s for s in one.markers if s not in gone] if one.plan == two.plan else []


def _shards(one: Survey, two: Survey) -> list[dict[str, Any]]:
    both = [s for s in one.markers if s in two.markers]
    return [{"shard": s, "differs": _shard(one.markers[s], two.markers[s])} for s in both]


def _shard(a: CommitMarker, b: CommitMarker) -> list[str]:
    """What differs between two shards, in words."""
    if a.content_sha256 == b.content_sha256:
        return []
    lines = [f"{name} is only in one" for name in sorted(a.arrays.keys() ^ b.arrays.keys())]
    for name in sorted(a.arrays.keys() & b.arrays.keys()):
        one, two = a.arrays[name], b.arrays[name]
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            lines.append(f"{name} is {one.dtype}{list(one.shape)} and {two.dtype}{list(two.shape)}")
        elif one.content_xxh128 != two.content_xxh128:
            lines.append(f"the values of {name} differ")
    if a.ledger != b.ledger:
        rows = [{(r["sample_id"], r["reason"], r["detail"], r["kept"]) for r in m.ledger} for m in (a, b)]
        changed = sorted({row[0] for row in rows[0] ^ rows[1]})
        lines.append(f"the ledgers differ ({len(a.ledger)} and {len(b.ledger)} rows) about {_few(changed)}")
    return lines


def _few(names: list[str], n: int = 3) -> str:
    return ", ".join(map(repr, names[:n])) + (f" and {len(names) - n} more" if len(names) > n else "")


@dataclass(slots=True)
class _Layer:
    """Differences of one layer over all tokens that were compared."""

    largest: float = 0.0
    apart: float = 0.0
    size: float = 0.0
    worst: float = 0.0

    def add(self, a_TD: Floats, b_TD: Floats) -> None:
        apart_T = np.square(a_TD - b_TD, dtype=np.float64).sum(-1)
        size_T = np.square(a_TD, dtype=np.float64).sum(-1)
        self.largest = max(self.largest, float(np.abs(a_TD - b_TD).max(initial=0.0)))
        self.apart += float(apart_T.sum())
        self.size += float(size_T.sum())
        ratio_T = np.divide(apart_T, size_T, out=np.where(apart_T > 0, 1.0, 0.0), where=size_T > 0)
        self.worst = max(self.worst, float(np.sqrt(ratio_T.max(initial=0.0))))

    def result(self, layer: int) -> dict[str, Any]:
        relative = np.sqrt(self.apart / self.size) if self.size > 0 else float(self.apart > 0)
        numbers = {"max_abs": self.largest, "relative": float(relative), "worst_token": self.worst}
        return {"layer": layer} | {name: float(f"{value:.4g}") for name, value in numbers.items()}


def data_diff(
    a: Location, b: Location, n_samples: int | None = None, seed: int = 0, progress: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Compare the values of the samples that both caches hold, whatever their shards and feature types.

    Args:
        a, b: folders or URLs; differences are relative to a.
        n_samples: how many samples; None takes all that both have.
        seed: which ones.
        progress: called with 1 for each sample.

    Raises:
        CacheError: one is no cache, a sample is damaged, or the two have no layer in common or other hidden sizes.
        OSError: as the storages gave it.
    """
    one, two = FeatureCache.open(a), FeatureCache.open(b)
    places = _layers_in_common(one, two)
    stored = set(two.sample_ids)
    chosen = choose([s for s in one.sample_ids if s in stored], n_samples, seed)
    found = {layer: _Layer() for layer, _, _ in places}
    tokens_differ: list[str] = []
    for sample_id in chosen:
        x, y = one.read(sample_id), two.read(sample_id)
        if not _same_tokens(x, y):
            tokens_differ.append(sample_id)
        n = min(len(x.features), len(y.features))
        values, others = values_of(x, one.identity)[:n], values_of(y, two.identity)[:n]
        if values.shape[-1] != others.shape[-1]:
            raise CacheError(f"the hidden sizes are {values.shape[-1]} and {others.shape[-1]}: other targets made them")
        for layer, i, j in places:
            found[layer].add(values[:, i], others[:, j])
        if progress is not None:
            progress(1)
    layers = [tally.result(layer) for layer, tally in found.items()]
    return {
        "samples": len(chosen),
        "only_in_one": len(set(one.sample_ids) ^ stored),
        "tokens_differ": tokens_differ,
        "layers": layers,
        "equal": not tokens_differ and all(row["max_abs"] == 0 for row in layers),
    }


def _layers_in_common(one: FeatureCache, two: FeatureCache) -> list[tuple[int, int, int]]:
    """(layer, place in the first, place in the second)."""
    a, b = one.identity.layer_ids, two.identity.layer_ids
    places = [(layer, a.index(layer), b.index(layer)) for layer in a if layer in b]
    if not places:
        raise CacheError(f"the caches hold layers {list(a)} and {list(b)}: none in common, so no values to compare")
    return places


def _same_tokens(a: CachedSample, b: CachedSample) -> bool:
    return np.array_equal(a.input_ids, b.input_ids) and np.array_equal(a.loss_mask, b.loss_mask)


def diff_lines(found: dict[str, Any]) -> str:
    """What `dflash cache diff` prints."""
    lines = [f"A: {found['a']}", f"B: {found['b']}"]
    lines += [f"identity: {k} is {x!r} in A and {y!r} in B" for k, (x, y) in found["identity"].items()]
    if found["plan"]:
        x, y = found["plan"]
        same = "the same samples, divided otherwise" if x["samples_sha256"] == y["samples_sha256"] else "other samples"
        sizes = [f"{p['samples']} samples in {p['shards']} shards" for p in (x, y)]
        lines.append(f"plan: {sizes[0]} and {sizes[1]}: {same}")
    for name, shards in (("A", found["only_in_a"]), ("B", found["only_in_b"])):
        lines += [f"{shard}: committed only in {name}" for shard in shards]
    lines += [f"{shard}: {problem}" for shard, problem in found["damaged"].items()]
    differing = [f"{s['shard']}: {line}" for s in found["shards"] for line in s["differs"]]
    lines += differing[:_SHOWN]
    if len(differing) > _SHOWN:
        lines.append(f"and {len(differing) - _SHOWN} more differences of shards (--json lists all)")
    lines += _data_lines(found["data"]) if "data" in found else []
    equal = f"{found['equal_shards']} shards have equal content"
    by = "" if "data" in found else " by their markers"
    return "\n".join([*lines, f"equal{by}: {equal}" if found["equal"] else f"DIFFERENT; {equal}"])


def _data_lines(data: dict[str, Any]) -> list[str]:
    lines = [f"values of {data['samples']} samples that both hold ({data['only_in_one']} are in one only):"]
    lines += [
        f"  layer {r['layer']:3}: largest difference {r['max_abs']:.4g}, relative {r['relative']:.3e}, worst token "
        f"{r['worst_token']:.3e}"
        for r in data["layers"]
    ]
    if data["tokens_differ"]:
        lines.append(f"  token ids or loss masks differ in {_few(data['tokens_differ'])}")
    return lines
