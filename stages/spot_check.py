"""One sample of each shard goes through the target alone, and must get the states that it got in its batch.

Shapes: T tokens, L feature layers, D hidden.

The comparison is made before quantisation. Which sample it is depends on the shard's name alone, so every attempt and
every worker looks at the same one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from cache_schema.errors import ShardRefused
from stages.agreement import disagreement
from stages.capture import Captured, take_rows
from stages.features import capture_features
from stages.packing import Ids
from stages.target import Target


def chosen_sample(shard: str, n_samples: int) -> int | None:
    """Index of the sample that is looked at; None if there is none."""
    if n_samples == 0:
        return None
    return int.from_bytes(hashlib.sha256(shard.encode()).digest()[:8], "big") % n_samples


@dataclass(frozen=True, slots=True)
class SpotCheck:
    """States of the chosen sample as they came out of its batch."""

    sample_id: str
    ids: Ids
    features_TLD: torch.Tensor
    final_TD: torch.Tensor | None

    @classmethod
    def of(cls, sample_id: str, ids: Ids, captured: Captured, place: int) -> SpotCheck:
        """Keep what a batch gave for one of its samples."""
        final = None if captured.final_RD is None else take_rows(captured.final_RD, captured.rows[place]).clone()
        return cls(sample_id, ids, captured.features(place), final)

    def refusal(self, target: Target, layer_ids: tuple[int, ...], shard: str, way: str) -> ShardRefused | None:
        """Compare with the sample alone.

        Returns:
            None if they agree, else what is wrong: shard, layer and sample, what was found and expected, what to do.
        """
        (alone_TLD,), final = capture_features(target, layer_ids, [self.ids.tolist()],
                                               last_hidden=self.final_TD is not None)
        if not bool(torch.isfinite(self.features_TLD).all() and torch.isfinite(alone_TLD).all()):
            return None  # such a sample goes into the ledger
        wrong: Any = disagreement(self.features_TLD, alone_TLD, target.dtype)
        what = "" if wrong is None else f"layer {layer_ids[wrong[0]]}"
        if wrong is None and self.final_TD is not None and final is not None:
            wrong = disagreement(self.final_TD[:, None], final[0][:, None], target.dtype)
            what = "the states after the final norm"
        if wrong is None:
            return None
        return ShardRefused(
            f"{shard}, sample {self.sample_id!r}: {what} is not what the target gives for this sample alone: "
            f"{wrong[1]}. Batches were {way}; set extract.batching to single (slower), and report this target"
        )
