"""`dflash cache show SHARD SAMPLE`: one sample as text, with its loss mask and the states' norms."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np

from cache_schema.errors import UnknownName
from cache_schema.reader import FeatureCache
from cache_schema.storage import Location
from pipeline.cache_samples import Floats, values_of
from pipeline.cache_text import find_tokenizer, runs, token_texts

HEAD_CHANNELS = 6


def sample_view(cache: Location, shard: str, sample_id: str, tokenizer: str | None = None) -> dict[str, Any]:
    """One sample: text, ids, mask, norms per layer and the first channels of its first token.

    Args:
        cache: folder or URL.
        shard, sample_id: which sample.
        tokenizer: folder or name of the target's tokenizer; None looks for it on this machine.

    Raises:
        UnknownName: no such shard, or no such sample in it.
        CacheError: it is damaged, or the tokenizer is another one.
    """
    opened = FeatureCache.open(cache)
    planned = opened.plan.samples(shard)
    if sample_id not in planned:
        few = ", ".join(map(repr, planned[:4]))
        raise UnknownName(f"{shard} of {opened.storage.where()} has no sample {sample_id!r}; it has {few}, …")
    sample = opened.read(sample_id)
    values_TLD = values_of(sample, opened.identity)
    ids, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
    found, note = find_tokenizer(opened.identity, tokenizer)
    pieces = _id_runs(ids, mask) if found is None else runs(found, ids, mask)
    return {
        "sample_id": sample_id,
        "shard": shard,
        "tokens": len(ids),
        "supervised": sum(mask),
        "note": note,
        "runs": [{"text": text, "supervised": supervised} for text, supervised in pieces],
        "input_ids": ids,
        "loss_mask": mask,
        "token_texts": token_texts(found, ids) if found is not None else None,
        "layers": [_layer(layer, values_TLD[:, i]) for i, layer in enumerate(opened.identity.layer_ids)],
    }


def _id_runs(ids: list[int], mask: list[int]) -> list[tuple[str, bool]]:
    """Ids in runs that are supervised or are not."""
    pairs = groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1]))
    return [(" ".join(str(i) for i, _ in run), supervised) for supervised, run in pairs]


def _layer(layer: int, values_TD: Floats) -> dict[str, Any]:
    norms = np.linalg.norm(values_TD, axis=-1)
    return {
        "layer": layer,
        "mean_norm": round(float(norms.mean()), 4),
        "max_norm": round(float(norms.max()), 4),
        "max_norm_token": int(norms.argmax()),
        "max_abs": round(float(np.abs(values_TD).max()), 4),
        "head": [round(float(v), 4) for v in values_TD[0, :HEAD_CHANNELS]],
    }
