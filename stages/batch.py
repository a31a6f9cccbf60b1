"""From cached samples to what a training step needs.

Shapes: S samples, T context tokens, A anchors, B block size, L feature layers, D hidden, R supervised rows.

Rows of features at or after a sample's last anchor are seen by no block, so they are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stages.anchors import Ints, supervised_slots


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One cached sample with its anchors for this epoch.

    Attributes:
        sample_id: of the responses table.
        features_TLD: bfloat16 or float16 tensor.
        input_ids, loss_mask: [T].
        anchors: ascending positions, at least one.
    """

    sample_id: str
    features_TLD: torch.Tensor
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    anchors: Ints


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded tensors of a micro-batch.

    Attributes:
        features_STLD: zeros behind a sample's last visible row.
        anchors_SA: −1 marks a padding block.
        block_ids_SAB: `[anchor token, MASK × (B−1)]`.
        labels_SAB: token ids; meaningful where supervised.
        supervised_SAB: which slots have a label.
        sample_ids: S of them.
    """

    features_STLD: torch.Tensor
    anchors_SA: torch.Tensor
    block_ids_SAB: torch.Tensor
    labels_SAB: torch.Tensor
    supervised_SAB: torch.Tensor
    sample_ids: tuple[str, ...]

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=True)

        return Batch(move(self.features_STLD), move(self.anchors_SA), move(self.block_ids_SAB), move(self.labels_SAB),
                     move(self.supervised_SAB), self.sample_ids)


def make_batch(samples: Sequence[TrainingSample], block_size: int, mask_token_id: int) -> Batch:
    """Pad samples into one batch.

    Args:
        samples: at least one; each with at least one anchor.
        block_size: B.
        mask_token_id: fills slots 1…B−1 of every block.
    """
    n_anchors = max(len(s.anchors) for s in samples)
    n_context = max(int(s.anchors[-1]) for s in samples)
    _, n_layers, hidden = samples[0].features_TLD.shape
    features = torch.zeros(len(samples), n_context, n_layers, hidden, dtype=samples[0].features_TLD.dtype)
    anchors = np.full((len(samples), n_anchors), -1, dtype=np.int64)
    blocks = np.full((len(samples), n_anchors, block_size), mask_token_id, dtype=np.int64)
    labels = np.zeros_like(blocks)
    supervised = np.zeros(blocks.shape, dtype=bool)
    for row, sample in enumerate(samples):
        own, n_rows = sample.anchors, int(sample.anchors[-1])
        features[row, :n_rows] = sample.features_TLD[:n_rows]
        anchors[row, : len(own)] = own
        blocks[row, : len(own), 0] = sample.input_ids[own]
        places = np.minimum(own[:, None] + np.arange(block_size), len(sample.input_ids) - 1)
        labels[row, : len(own)] = sample.input_ids[places]
        supervised[row, : len(own)] = supervised_slots(sample.loss_mask, own, block_size)
    return Batch(features, torch.from_numpy(anchors), torch.from_numpy(blocks), torch.from_numpy(labels),
                 torch.from_numpy(supervised), tuple(s.sample_id for s in samples))
