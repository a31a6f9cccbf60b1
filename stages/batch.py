"""From cached samples to what a training step needs.

Shapes: S samples, T context tokens, A anchors, B block size, L feature layers, D hidden, G groups of channels;
C context rows and N blocks of all samples, R supervised slots.

Samples lie end to end: context rows, then blocks, and nothing is padded. Rows of features at or after a sample's last
anchor are seen by no block, so they are left out. Quantised features stay codes and scales until they are on the device
that computes: fewer bytes to pin and to move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cache_schema.quantized import FeatureFormat
from stages.anchors import Bools, Ints, supervised_slots
from stages.layout import Layout
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
        last_hidden_TD: the target's states after its final norm, up to the last supervised slot, for distillation.
    """

    sample_id: str
    features_TLD: torch.Tensor
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    anchors: Ints
    scale_TLG: torch.Tensor | None = None
    format: FeatureFormat | None = None
    last_hidden_TD: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed tensors of a micro-batch.

    Attributes:
        features_CLD: bfloat16 or float16, or codes; each sample's rows below its last anchor.
        context_ids_C: int64 token ids of the same rows.
        layout: where samples and blocks stand.
        anchor_ids_N: int64 token ids of the blocks' first slots; the others hold the mask token.
        rows_R: int64, the slots that have a label, `n·B + k`, ascending.
        labels_R: int64 token ids.
        block_size, mask_token_id: of the drafter.
        sample_ids: S of them.
        scale_CLG, format: of quantised features: scales in float32, and what the codes mean.
        teacher_RD: the target's states after its final norm that its distribution for each label comes from.
    """

    features_CLD: torch.Tensor
    context_ids_C: torch.Tensor
    layout: Layout
    anchor_ids_N: torch.Tensor
    rows_R: torch.Tensor
    labels_R: torch.Tensor
    block_size: int
    mask_token_id: int
    sample_ids: tuple[str, ...]
    scale_CLG: torch.Tensor | None = None
    format: FeatureFormat | None = None
    teacher_RD: torch.Tensor | None = None

    @property
    def n_blocks(self) -> int:
        """N."""
        return len(self.anchor_ids_N)

    @property
    def supervised_NB(self) -> torch.Tensor:
        """Which slots have a label."""
        flat = torch.zeros(self.n_blocks * self.block_size, dtype=torch.bool, device=self.rows_R.device)
        return flat.index_fill_(0, self.rows_R, True).view(-1, self.block_size)

    def features(self, dtype: torch.dtype) -> torch.Tensor:
        """The features themselves, [C, L, D], each value rounded once to `dtype`, on the batch's device."""
        if self.scale_CLG is None or self.format is None:
            return self.features_CLD.to(dtype)
        return dequantize(self.features_CLD, self.scale_CLG, self.format, dtype)

    def embedded(self, embed: torch.nn.Module, dtype: torch.dtype) -> torch.Tensor:
        """Embeddings of `[anchor, MASK × (B−1)]`, [N, B, D]: one row per anchor, and the mask's row repeated."""
        ids = torch.nn.functional.pad(self.anchor_ids_N, (0, 1), value=self.mask_token_id)
        rows: torch.Tensor = embed(ids).to(dtype)
        blocks_NBD = rows[-1].repeat(self.n_blocks, self.block_size, 1)
        blocks_NBD[:, 0] = rows[:-1]
        return blocks_NBD

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        moved: dict[str, Any] = {
            field.name: move(getattr(self, field.name))
            for field in fields(self)
            if isinstance(getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **moved, layout=replace(self.layout, anchors_N=move(self.layout.anchors_N)))


def make_batch(samples: Sequence[TrainingSample], block_size: int, mask_token_id: int) -> Batch:
    """Pack samples into one batch.

    Args:
        samples: at least one; each with at least one anchor.
        block_size: B.
        mask_token_id: fills slots 1…B−1 of every block.
    """
    visible = [int(s.anchors.max()) for s in samples]
    slots = [_labelled(s, block_size) for s in samples]
    supervised = np.concatenate([found for found, _ in slots]).ravel()
    labels = np.concatenate([found for _, found in slots]).ravel()
    rows = np.flatnonzero(supervised)
    layout = Layout(_packed([torch.from_numpy(s.anchors) for s in samples]), tuple(visible),
                    tuple(len(s.anchors) for s in samples))
    teachers = [_teacher(s, found) for s, (found, _) in zip(samples, slots, strict=True)]
    scales = [s.scale_TLG[:n] for s, n in zip(samples, visible, strict=True) if s.scale_TLG is not None]
    return Batch(
        features_CLD=_packed([s.features_TLD[:n] for s, n in zip(samples, visible, strict=True)]),
        context_ids_C=_packed([_ids(s.input_ids[:n]) for s, n in zip(samples, visible, strict=True)]),
        layout=layout,
        anchor_ids_N=_packed([_ids(s.input_ids[s.anchors]) for s in samples]),
        rows_R=torch.from_numpy(rows), labels_R=_ids(labels[rows]),
        block_size=block_size, mask_token_id=mask_token_id, sample_ids=tuple(s.sample_id for s in samples),
        scale_CLG=_packed(scales) if scales else None, format=samples[0].format,
        teacher_RD=_packed([t for t in teachers if t is not None]) if teachers[0] is not None else None,
    )  # fmt: skip


def _labelled(sample: TrainingSample, block_size: int) -> tuple[Bools, npt.NDArray[np.int32]]:
    """Which slots have a label, and tokens that are right where they have, [A, B] each."""
    places = np.minimum(sample.anchors[:, None] + np.arange(block_size), len(sample.input_ids) - 1)
    return supervised_slots(sample.loss_mask, sample.anchors, block_size), sample.input_ids[places]


def _teacher(sample: TrainingSample, supervised_AB: Bools) -> torch.Tensor | None:
    """States of the positions before the labels', in the order of the supervised slots."""
    if sample.last_hidden_TD is None:
        return None
    blocks, slots = np.nonzero(supervised_AB)
    return sample.last_hidden_TD[torch.from_numpy(sample.anchors[blocks] + slots - 1)]


def _ids(tokens: npt.NDArray[np.int32]) -> torch.Tensor:
    return torch.from_numpy(tokens.astype(np.int64))


def _packed(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))
