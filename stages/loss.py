"""Cross-entropy through the frozen head: in tiles, with the gradient computed along with the value.

Shapes: R rows (supervised slots), C rows of a chunk, D hidden, V vocabulary, W words (columns of V) of a tile.

The head is frozen, so its own gradient is not needed and the gradient for a row is known as soon as
its logits are: `(softmax − onehot) @ head`. One tile of logits is alive at a time: rows of a chunk by words. Over the
tiles of a chunk run the largest logit, the sum of `exp(logit − largest)` and that sum's product with the head, all of
them scaled down when a larger logit turns up (online softmax: Milakov and Gimelshein, arXiv 1805.02867). At V = 152 K
and 512 blocks × 15 slots, full logits would take 4.7 GB in float32.

Losses are per row, and so are the gradients that are kept: weights are put on outside, by plain autograd, and may
depend on the losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

TILE = {"cpu": (512, 1024), "cuda": (1024, 1 << 16)}
"""Rows and words of a tile of float32 logits. On a CPU it has to stay in a core's own cache (2 MB here)."""
CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
"""Of whole rows of float32 logits, which a further loss needs."""


class Further(Protocol):
    """A second loss on the same logits, mixed with cross-entropy."""

    @property
    def share(self) -> float:
        """Of this loss in the sum; cross-entropy has the rest."""
        ...

    def terms(
        self, part: slice, logits_CV: torch.Tensor, log_z_C: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Its value [C] and its gradient with respect to the logits [C, V], both float32.

        Args:
            part: which of the rows.
            logits_CV: float32; not to be changed.
            log_z_C: their log-sum-exp.
        """
        ...


class RowLosses(NamedTuple):
    """What each supervised slot gave, [R] each."""

    loss_R: torch.Tensor
    """Float32, differentiable: cross-entropy, mixed with the further loss if there is one."""
    cross_entropy_R: torch.Tensor
    """Float32, no gradient; the label's probability is `exp(−cross_entropy)`."""
    predictions_R: torch.Tensor
    """Int64: the likeliest token."""


class FrozenHeadLoss(torch.autograd.Function):
    """See `head_losses`."""

    @staticmethod
    def forward(
        ctx: Any, hidden_RD: torch.Tensor, head_VD: torch.Tensor, labels_R: torch.Tensor, further: Further | None
    ) -> RowLosses:
        grad_RD = torch.empty_like(hidden_RD) if hidden_RD.requires_grad else None
        made = RowLosses(
            hidden_RD.new_empty(len(labels_R), dtype=torch.float32),
            hidden_RD.new_empty(len(labels_R), dtype=torch.float32), torch.empty_like(labels_R),
        )  # fmt: skip
        n, _ = TILE.get(head_VD.device.type, TILE["cuda"])
        for start in range(0, len(labels_R), n):
            part = slice(start, start + n)
            hidden_CD = hidden_RD[part].to(head_VD.dtype)
            chunk = _chunk(hidden_CD, head_VD, labels_R[part], wants_grad=grad_RD is not None)
            loss_C, grad_CD = chunk.cross_entropy_C, chunk.grad_CD
            if further is not None:
                loss_C, grad_CD = _mixed(part, hidden_CD, head_VD, chunk, further)
            made.loss_R[part], made.cross_entropy_R[part] = loss_C, chunk.cross_entropy_C
            made.predictions_R[part] = chunk.predictions_C
            if grad_RD is not None and grad_CD is not None:
                grad_RD[part] = grad_CD
        ctx.save_for_backward(*([grad_RD] if grad_RD is not None else []))
        ctx.mark_non_differentiable(made.cross_entropy_R, made.predictions_R)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_R: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (grad_RD,) = ctx.saved_tensors
        return grad_RD * grad_R[:, None].to(grad_RD.dtype), None, None, None


class _Chunk(NamedTuple):
    """Of some rows: log-sum-exp, cross-entropy, predictions, and the gradient of the cross-entropy [C, D]."""

    log_z_C: torch.Tensor
    cross_entropy_C: torch.Tensor
    predictions_C: torch.Tensor
    grad_CD: torch.Tensor | None


def _chunk(hidden_CD: torch.Tensor, head_VD: torch.Tensor, labels_C: torch.Tensor, *, wants_grad: bool) -> _Chunk:
    highest_C = hidden_CD.new_full(labels_C.shape, -torch.inf, dtype=torch.float32)
    sum_C, at_label_C = torch.zeros_like(highest_C), torch.zeros_like(highest_C)
    predictions_C = torch.zeros_like(labels_C)
    moment_CD = torch.zeros_like(hidden_CD, dtype=torch.float32) if wants_grad else None
    for words, logits_CW in _tiles(hidden_CD, head_VD):
        inside_C = (labels_C >= words.start) & (labels_C < words.stop)
        column_C = (labels_C - words.start).clamp(0, logits_CW.shape[1] - 1)
        at_label_C = torch.where(inside_C, logits_CW.gather(1, column_C[:, None])[:, 0], at_label_C)
        best_C = logits_CW.amax(dim=-1)
        # Only rows with a new largest logit are searched for its place: in the long run one in as many as tiles passed.
        (risen,) = (best_C > highest_C).nonzero(as_tuple=True)
        predictions_C[risen] = logits_CW[risen].argmax(dim=-1) + words.start
        before_C, highest_C = highest_C, torch.maximum(highest_C, best_C)
        faded_C = (before_C - highest_C).exp()
        logits_CW.sub_(highest_C[:, None]).exp_()
        sum_C.mul_(faded_C).add_(logits_CW.sum(dim=-1))
        if moment_CD is not None:
            moment_CD.mul_(faded_C[:, None])
            _add_product(moment_CD, logits_CW, head_VD[words])
    log_z_C = highest_C + sum_C.log()
    grad_CD = moment_CD.div_(sum_C[:, None]).sub_(head_VD[labels_C]) if moment_CD is not None else None
    return _Chunk(log_z_C, log_z_C - at_label_C, predictions_C, grad_CD)


def _tiles(hidden_CD: torch.Tensor, head_VD: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Tiles of float32 logits, each valid until the next."""
    _, n = TILE.get(head_VD.device.type, TILE["cuda"])
    buffer = hidden_CD.new_empty(len(hidden_CD) * min(n, len(head_VD)))
    for start in range(0, len(head_VD), n):
        words = slice(start, min(start + n, len(head_VD)))
        tile_CW = buffer[: len(hidden_CD) * (words.stop - words.start)].view(len(hidden_CD), -1)
        yield words, torch.mm(hidden_CD, head_VD[words].T, out=tile_CW).float()


def _add_product(sums_CD: torch.Tensor, weights_CW: torch.Tensor, head_WD: torch.Tensor) -> None:
    if head_WD.dtype == sums_CD.dtype:
        sums_CD.addmm_(weights_CW, head_WD)
    else:
        sums_CD.add_(weights_CW.to(head_WD.dtype) @ head_WD)


def _mixed(
    part: slice, hidden_CD: torch.Tensor, head_VD: torch.Tensor, chunk: _Chunk, further: Further
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Loss and gradient of cross-entropy and a further loss together; that one sees whole rows of logits."""
    n = max(1, CHUNK_BYTES.get(head_VD.device.type, CHUNK_BYTES["cuda"]) // (4 * len(head_VD)))
    values, changes = [], []
    for start in range(0, len(hidden_CD), n):
        rows = slice(start, min(start + n, len(hidden_CD)))
        logits_CV = (hidden_CD[rows] @ head_VD.T).float()
        place = slice(part.start + rows.start, part.start + rows.stop)
        value_C, change_CV = further.terms(place, logits_CV, chunk.log_z_C[rows])
        values.append(value_C)
        changes.append((change_CV.to(head_VD.dtype) @ head_VD).float() if chunk.grad_CD is not None else None)
    loss_C = torch.lerp(chunk.cross_entropy_C, torch.cat(values), further.share)
    if chunk.grad_CD is None:
        return loss_C, None
    return loss_C, torch.lerp(chunk.grad_CD, torch.cat([c for c in changes if c is not None]), further.share)


def head_losses(
    hidden_RD: torch.Tensor, head_VD: torch.Tensor, labels_R: torch.Tensor, further: Further | None = None
) -> RowLosses:
    """The loss of each row, and the predictions that come with it.

    Args:
        hidden_RD: drafter states after its final norm, for the supervised slots only.
        head_VD: the target's frozen head; logits are computed in its dtype and reduced in float32.
        labels_R: int64 token ids.
        further: another loss to mix in.
    """
    return RowLosses(*FrozenHeadLoss.apply(hidden_RD, head_VD, labels_R, further))  # type: ignore[no-untyped-call]
