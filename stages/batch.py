"""From cached samples to what a training step needs.

Shapes: S samples, T context tokens, A anchors, B block size, L feature layers, D hidden, G groups of channels,
R supervised rows.

Rows of features at or after a sample's last anchor are seen by no block, so they are left out. Quantised features
stay codes and scales until they are on the device that computes: fewer bytes to pad, to pin and to move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cache_schema.quantized import FeatureFormat
from stages.anchors import Ints, supervised_slots
from stages.quantize import dequantize


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One cached sample with its anchors for this epoch.

    Attributes:
        sample_id: of the responses table.
        features_TLD: bfloat16 or float16, or codes; up to the last anchor at least.
        input_ids, loss_mask: of the whole sample.
        anchors: ascending positions, at least one.
        scale_TLG, format: of quantised features: scales in float32, and what the codes mean.
    """

    sample_id: str
    features_TLD: torch.Tensor
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    anchors: Ints
    scale_TLG: torch.Tensor | None = None
    format: FeatureFormat | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded tensors of a micro-batch.

    Attributes:
        features_STLD: bfloat16 or float16, or codes; zeros behind a sample's last visible row.
        anchors_SA: −1 marks a padding block.
        block_ids_SAB: `[anchor token, MASK × (B−1)]`.
        labels_SAB: token ids; meaningful where supervised.
        supervised_SAB: which slots have a label.
        sample_ids: S of them.
        scale_STLG, format: of quantised features: scales in float32, and what the codes mean.
    """

    features_STLD: torch.Tensor
    anchors_SA: torch.Tensor
    block_ids_SAB: torch.Tensor
    labels_SAB: torch.Tensor
    supervised_SAB: torch.Tensor
    sample_ids: tuple[str, ...]
    scale_STLG: torch.Tensor | None = None
    format: FeatureFormat | None = None

    def features(self, dtype: torch.dtype) -> torch.Tensor:
        """The features themselves, [S, T, L, D], each value rounded once to `dtype`, on the batch's device."""
        if self.scale_STLG is None or self.format is None:
            return self.features_STLD.to(dtype)
        return dequantize(self.features_STLD, self.scale_STLG, self.format, dtype)

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        scale = move(self.scale_STLG) if self.scale_STLG is not None else None
        return Batch(move(self.features_STLD), move(self.anchors_SA), move(self.block_ids_SAB), move(self.labels_SAB),
                     move(self.supervised_SAB), self.sample_ids, scale, self.format)


def make_batch(samples: Sequence[TrainingSample], block_size: int, mask_token_id: int) -> Batch:
    """Pad samples into one batch.

    Args:
        samples: at least one; each with at least one anchor.
        block_size: B.
        mask_token_id: fills slots 1…B−1 of every block.
    """
    n_anchors = max(len(s.anchors) for s in samples)
    anchors = np.full((len(samples), n_anchors), -1, dtype=np.int64)
    blocks = np.full((len(samples), n_anchors, block_size), mask_token_id, dtype=np.int64)
    labels = np.zeros_like(blocks)
    supervised = np.zeros(blocks.shape, dtype=bool)
    for row, sample in enumerate(samples):
        own = sample.anchors
        anchors[row, : len(own)] = own
        blocks[row, : len(own), 0] = sample.input_ids[own]
        places = np.minimum(own[:, None] + np.arange(block_size), len(sample.input_ids) - 1)
        labels[row, : len(own)] = sample.input_ids[places]
        supervised[row, : len(own)] = supervised_slots(sample.loss_mask, own, block_size)
    visible = [int(s.anchors[-1]) for s in samples]
    scales = [s.scale_TLG for s in samples if s.scale_TLG is not None]
    return Batch(_padded([s.features_TLD for s in samples], visible), torch.from_numpy(anchors),
                 torch.from_numpy(blocks), torch.from_numpy(labels), torch.from_numpy(supervised),
                 tuple(s.sample_id for s in samples), _padded(scales, visible) if scales else None, samples[0].format)


def _padded(rows: Sequence[torch.Tensor], lengths: Sequence[int]) -> torch.Tensor:
    """The first rows of each, one below the other, zeros behind them."""
    padded = torch.zeros(len(rows), max(lengths), *rows[0].shape[1:], dtype=rows[0].dtype)
    for i, (sample, n) in enumerate(zip(rows, lengths, strict=True)):
        padded[i, :n] = sample[:n]
    return padded
