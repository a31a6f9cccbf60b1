"""`dflash cache stats`: lengths, and how the features of each layer are distributed.

Shapes: T tokens, L feature layers, D hidden.

Every measure of outliers is taken per token and then summed up over tokens. A few tokens (the first of a
sample, above all) have norms a hundred times the others', and sums over all values would show these tokens alone:

- `outlier_share`: of a token's energy (squared values), the part in the 2 % of channels that carry most of it on
  average over tokens. Channels without outliers give little more than 0.02.
- `peak`: largest magnitude over root mean square; what a scale per token has to span.
- `kurtosis`: mean fourth power over the squared mean square; 3 for normally distributed values.
- `cosine_next`: between the states of this layer and the next feature layer at the same token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_schema.errors import CacheError
from cache_schema.reader import FeatureCache
from cache_schema.storage import Location
from pipeline.cache_info import length_statistics
from pipeline.cache_samples import Floats, choose, values_of

OUTLIER_CHANNELS = 0.02
"""Share of the channels that count as outliers."""
DEFAULT_SAMPLES = 64
_TOP = 3
_BLOCK = 256
"""Tokens that are worked on at a time."""


def cache_stats(
    cache: Location,
    n_samples: int | None = DEFAULT_SAMPLES,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Statistics of all lengths, and of the values of some samples.

    Args:
        cache: folder or URL.
        n_samples: samples whose values are read; None reads all.
        seed: another one chooses other samples.
        progress: called with 1 for each sample that was read.

    Raises:
        CacheError: no cache here, nothing is committed, or a sample is damaged.
        OSError: as the storage gave it.
    """
    opened = FeatureCache.open(cache)
    chosen = choose(opened.sample_ids, n_samples, seed)
    if not chosen:
        raise CacheError(f"{opened.storage.where()} holds no sample yet, so there is nothing to measure; run extract")
    layers = opened.identity.layer_ids
    tally = _Tally(len(layers))
    for sample_id in chosen:
        tally.add(values_of(opened.read(sample_id), opened.identity))
        if progress is not None:
            progress(1)
    lengths = [n for shard in opened.markers.values() for n in shard.lengths]
    counts, edges = np.histogram(lengths, bins=min(30, max(1, len(set(lengths)))))
    return {
        "path": opened.storage.url,
        "target": opened.identity.target_name,
        "feature_dtype": opened.identity.feature_dtype,
        "lengths": length_statistics(lengths),
        "length_histogram": {"counts": counts.tolist(), "edges": edges.round(2).tolist()},
        "samples": len(opened),
        "measured_samples": len(chosen),
        "measured_tokens": tally.tokens,
        "zero_tokens": tally.zeros,
        "seed": seed,
        "hidden_size": len(tally.energy_LD[0]),
        "layers": tally.result(layers),
    }


@dataclass
class _Tally:
    """Measures per token, and energy per channel."""

    n_layers: int
    tokens: int = 0
    zeros: int = 0
    """Tokens that were left out because a layer's state is zero."""
    energy_LD: NDArray[np.float64] = field(default_factory=lambda: np.zeros((1, 1)))
    measured: dict[str, list[NDArray[Any]]] = field(
        default_factory=lambda: {"norm": [], "peak": [], "kurtosis": [], "cosine": []}
    )

    def add(self, values_TLD: Floats) -> None:
        if not self.tokens and not self.zeros:
            self.energy_LD = np.zeros(values_TLD.shape[1:])
        for start in range(0, len(values_TLD), _BLOCK):
            self._add_block(values_TLD[start : start + _BLOCK])

    def _add_block(self, values_TLD: Floats) -> None:
        whole = values_TLD.any(-1).all(-1)
        self.zeros += int((~whole).sum())
        values_TLD = values_TLD[whole]
        self.tokens += len(values_TLD)
        norm_TL = np.sqrt(np.square(values_TLD, dtype=np.float64).sum(-1))
        # Scaled to norm 1 the fourth powers cannot overflow, and every token has the same weight.
        unit_TLD = (values_TLD / norm_TL[..., None]).astype(np.float32)
        energy_TLD = np.square(unit_TLD)
        self.energy_LD += energy_TLD.sum(0, dtype=np.float64)
        hidden = values_TLD.shape[-1]
        self.measured["norm"].append(norm_TL)
        self.measured["peak"].append(np.abs(unit_TLD).max(-1, initial=0.0) * np.sqrt(hidden))
        self.measured["kurtosis"].append(np.square(energy_TLD).sum(-1) * hidden)
        self.measured["cosine"].append((unit_TLD[:, :-1] * unit_TLD[:, 1:]).sum(-1))

    def result(self, layer_ids: tuple[int, ...]) -> list[dict[str, Any]]:
        found = {name: np.concatenate(blocks) for name, blocks in self.measured.items()}
        if not self.tokens:
            return []
        return [self._layer(i, layer, found) for i, layer in enumerate(layer_ids)]

    def _layer(self, i: int, layer: int, found: dict[str, NDArray[Any]]) -> dict[str, Any]:
        energy_D = self.energy_LD[i] / self.tokens
        order = np.argsort(-energy_D, kind="stable")
        n_outliers = max(1, round(OUTLIER_CHANNELS * len(order)))
        return {
            "layer": layer,
            "norm": _spread(found["norm"][:, i]),
            "outlier_share": round(float(energy_D[order[:n_outliers]].sum()), 5),
            "outlier_channels": n_outliers,
            "largest_channels": [
                {"channel": int(c), "share": round(float(energy_D[c]), 5)} for c in order[: min(_TOP, len(order))]
            ],
            "peak": _spread(found["peak"][:, i]),
            "kurtosis": _spread(found["kurtosis"][:, i]),
            "cosine_next": _spread(found["cosine"][:, i]) if i < found["cosine"].shape[1] else None,
        }


def _spread(values: NDArray[Any]) -> dict[str, float]:
    """Mean, 5th, 50th and 95th percentile and largest, to six digits."""
    low, middle, high = np.percentile(values, [5, 50, 95])
    numbers = {"mean": values.mean(), "p5": low, "p50": middle, "p95": high, "max": values.max()}
    return {name: float(f"{float(v):.6g}") for name, v in numbers.items()}
