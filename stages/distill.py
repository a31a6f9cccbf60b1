"""Learning from the target's whole distribution: a second loss on the drafter's logits.

The cache's `last_hidden` holds the target's states after its final norm; the frozen head turns that of the position
before a slot's token into the exact distribution q that the target draws the token from. The drafter's p comes from the
same head. Value and gradient are computed per chunk of rows, as those of the cross-entropy.

| loss | value | gradient by the logits of p |
|---|---|---|
| `l1` | Σ∣p − q∣ (twice the share of drafts that sampling rejects) | p · (s − Σ p·s), s = sign(p − q) |
| `kl` | KL(q‖p) | p − q |
| `reverse_kl` | KL(p‖q) | p · (log p − log q − KL(p‖q)) |

Shapes: R supervised slots, C rows of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from stages.config import DistillConfig

Terms = tuple[torch.Tensor, torch.Tensor]


def _l1(log_p: torch.Tensor, log_q: torch.Tensor) -> Terms:
    p = log_p.exp()
    difference = p - log_q.exp()
    sign = difference.sign()
    return difference.abs().sum(dim=-1), p * (sign - (p * sign).sum(dim=-1, keepdim=True))


def _kl(log_p: torch.Tensor, log_q: torch.Tensor) -> Terms:
    q = log_q.exp()
    return (q * (log_q - log_p)).sum(dim=-1), log_p.exp() - q


def _reverse_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> Terms:
    p, ratio = log_p.exp(), log_p - log_q
    value = (p * ratio).sum(dim=-1)
    return value, p * (ratio - value[:, None])


_LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], Terms]] = {"l1": _l1, "kl": _kl, "reverse_kl": _reverse_kl}


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's distribution for every supervised slot; a `stages.loss.Further`.

    Attributes:
        config: which loss, and its share.
        hidden_RD: the target's states after its final norm, one position before each slot's token.
        head_VD: the target's head, in the dtype of the computation.
    """

    config: DistillConfig
    hidden_RD: torch.Tensor
    head_VD: torch.Tensor

    @property
    def share(self) -> float:
        """Of this loss in the sum."""
        return self.config.share

    def terms(self, part: slice, logits_CV: torch.Tensor, log_z_C: torch.Tensor) -> Terms:
        """Value [C] and gradient by the logits [C, V] of the rows `part`, float32 (see `stages.loss.Further`)."""
        teacher_CV = (self.hidden_RD[part].to(self.head_VD.dtype) @ self.head_VD.T).float()
        return _LOSSES[self.config.loss](logits_CV - log_z_C[:, None], teacher_CV.log_softmax(dim=-1))
