"""`dflash cache verify --recompute`: runs the target on some samples again and compares the states.

Shapes: T tokens, L feature layers, D hidden.

Checksums show that a cache holds what was written; this shows that the right thing was written (the right weights,
layers and order). States are compared as ‖stored − recomputed‖ / ‖recomputed‖ per token and layer.

What to expect: extraction runs samples in batches, this runs each alone, and matrix products of another shape
(or on another device) round otherwise. With the same device and shape the states are equal bit for bit; otherwise
they differ by the target's rounding, which grows over the layers. Storing adds an error of its own
(quantisation): it is measured here on the recomputed states and allowed for. A wrong layer, other weights or shifted
tokens give differences near 1, far above every limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_schema.errors import FingerprintMismatch
from cache_schema.identity import CacheIdentity
from cache_schema.layout import feature_format
from cache_schema.quantized import dequantize
from cache_schema.reader import FeatureCache
from cache_schema.storage import Location
from pipeline.cache_samples import Floats, choose, values_of

LIMITS = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest mean difference per layer that rounding explains, by the type that the target computes in."""
_STORING = 1.5
"""Factor on the measured error of storing."""
_WORST = 10.0
"""Factor on the limit for the worst single token."""


def recompute(
    cache: Location,
    n_samples: int,
    target: str | None = None,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
    threads: int | None = None,
) -> dict[str, Any]:
    """Compare the states of some samples with the target's, and say whether they are within the limit.

    Args:
        cache: folder or URL.
        n_samples: how many samples.
        target: folder or name of the target; None takes the identity's.
        seed: which samples.
        progress: called with 1 for each sample.
        threads: CPU threads of the target.

    Raises:
        FingerprintMismatch: the target's weights are others than the cache's; names both hashes.
        TargetError: the target cannot be loaded.
        CacheError: a sample is damaged, or there is none.
    """
    from stages.device import use_threads, worker_device

    opened = FeatureCache.open(cache)
    use_threads(threads)
    model = _load_target(opened.identity, target)
    rows: list[dict[str, NDArray[Any]]] = []
    chosen = choose(opened.sample_ids, n_samples, seed)
    for sample_id in chosen:
        sample = opened.read(sample_id)
        rows.append(_compare(model, opened.identity, sample.input_ids.tolist(), values_of(sample, opened.identity)))
        if progress is not None:
            progress(1)
    limit = LIMITS[opened.identity.target_dtype]
    layers = [_layer(layer, [{k: v[:, i] for k, v in r.items()} for r in rows], limit)
              for i, layer in enumerate(opened.identity.layer_ids)] if rows else []  # fmt: skip
    return {
        "ok": bool(layers) and all(layer["ok"] for layer in layers),
        "samples": chosen,
        "seed": seed,
        "tokens": sum(len(r["difference"]) for r in rows),
        "device": str(worker_device()),
        "target_dtype": opened.identity.target_dtype,
        "feature_dtype": opened.identity.feature_dtype,
        "limit_of_rounding": limit,
        "layers": layers,
    }


def _load_target(identity: CacheIdentity, name: str | None) -> Any:
    """The target, proved to be the one that made the cache.

    Raises:
        FingerprintMismatch, TargetError: as `recompute`.
    """
    from transformers.utils import logging

    from stages.config import TargetConfig
    from stages.device import worker_device
    from stages.target import hash_target, load_target, load_tokenizer

    logging.disable_progress_bar()
    config = TargetConfig(
        model=name or identity.target_name,
        revision=identity.target_revision if name is None else None,
        dtype=identity.target_dtype,  # type: ignore[arg-type]  # checked when the cache was made
    )
    found = hash_target(config, load_tokenizer(config)).weights
    if found != identity.target_weights_sha256:
        raise FingerprintMismatch(
            f"the weights of target {config.model!r} have SHA-256 {found}, the cache was made with "
            f"{identity.target_weights_sha256} ({identity.target_name!r}); give the folder of that target with --target"
        )
    return load_target(config, device=worker_device(), tokenizer=False)


def _compare(target: Any, identity: CacheIdentity, ids: list[int], stored_TLD: Floats) -> dict[str, NDArray[Any]]:
    """Per token and layer, [T, L]: the difference, the error of storing alone, and the share of equal values."""
    from stages.features import capture_features
    from stages.quantize import to_stored

    states_TLD = capture_features(target, identity.layer_ids, [ids])[0][0]
    form = feature_format(identity)
    again_TLD = dequantize(*to_stored(states_TLD, form), form)
    exact_TLD = states_TLD.float().cpu().numpy()
    return {
        "difference": _relative(stored_TLD, exact_TLD),
        "storing": _relative(again_TLD, exact_TLD),
        "equal": (stored_TLD == again_TLD).mean(-1),
    }


def _relative(found_TLD: Floats, expected_TLD: Floats) -> NDArray[np.float64]:
    """‖found − expected‖ / ‖expected‖ over channels, [T, L]; where the expected state is zero 0 if both are, else 1."""
    apart = np.linalg.norm((found_TLD - expected_TLD).astype(np.float64), axis=-1)
    size = np.linalg.norm(expected_TLD.astype(np.float64), axis=-1)
    return np.divide(apart, size, out=np.where(apart > 0, 1.0, 0.0), where=size > 0)


def _layer(layer: int, rows: list[dict[str, NDArray[Any]]], limit: float) -> dict[str, Any]:
    difference, storing, equal = (np.concatenate([r[k] for r in rows]) for k in ("difference", "storing", "equal"))
    allowed = limit + _STORING * float(storing.mean())
    unexplained = float((difference - _STORING * storing).max())
    return {
        "layer": layer,
        "mean": float(f"{difference.mean():.4g}"),
        "largest": float(f"{difference.max():.4g}"),
        "storing_mean": float(f"{storing.mean():.4g}"),
        "allowed_mean": float(f"{allowed:.4g}"),
        "equal_share": round(float(equal.mean()), 4),
        "ok": bool(difference.mean() <= allowed and unexplained <= _WORST * limit),
    }


def recompute_lines(report: dict[str, Any]) -> list[str]:
    """The comparison as lines of text."""
    lines = [
        f"recomputed {len(report['samples'])} samples ({report['tokens']} tokens, seed {report['seed']}) on "
        f"{report['device']} in {report['target_dtype']}; ‖stored − recomputed‖ / ‖recomputed‖ per token:"
    ]
    for row in report["layers"]:
        lines.append(
            f"  layer {row['layer']:3}: mean {row['mean']:.2e}, largest {row['largest']:.2e}, equal values "
            f"{row['equal_share']:.1%}; of storing alone {row['storing_mean']:.2e}, allowed mean "
            f"{row['allowed_mean']:.2e}{'' if row['ok'] else '  BEYOND THE LIMIT'}"
        )
    limit = report["limit_of_rounding"]
    lines.append(
        f"  expected: all values equal for the same device and batch shape; else the rounding of "
        f"{report['target_dtype']} (mean to {limit:g}, worst token to {_WORST * limit:g}), and {_STORING} × the error "
        f"of storing {report['feature_dtype']}"
    )
    if not report["ok"]:
        lines.append("  the states are not this target's: wrong layers, weights or ids, or another arithmetic")
    return lines
