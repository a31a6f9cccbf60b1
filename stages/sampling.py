"""Sampling: the target's processed distribution, exact speculative acceptance, and random streams per sample.

Shapes: N any number of distributions, V vocabulary, R rows, B block size, K = B−1 drafts.

A draft x from q is accepted with min(1, p(x)/q(x)); at the first refusal the token comes from the residual
`max(p − q, 0)`, normalised. Whatever q is, the tokens are then distributed as p. A greedy draft is q = one-hot:
accepted with p(x), and the residual is p without x. Source: specification, section 4; Leviathan et al. 2022,
arXiv 2211.17192.

A random number is a pure function of (seed, sample id, index of the new token, purpose), so a sample gets the same
numbers whatever batch it is in. Drafts that are thrown away may meet the same numbers again in the next cycle: what was
decided so far depends on earlier indices only, so they are still independent of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from stages.config import ConfigError

ACCEPT, CHOOSE, DRAFT = range(3)
"""Purposes of a random number."""
_PURPOSES = 4
_CHUNK = 1 << 24
"""Probabilities that are made float64 at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are chosen: temperature, then top-k, then top-p.

    Attributes:
        temperature: 0 is greedy, and then the others mean nothing.
        top_k: 0 is off.
        top_p: smallest set of most probable tokens with at least this share.
        drafts: `greedy` takes the drafter's argmax; `sampled` draws from its distribution, processed the same way.
        seed: of all random streams.

    Raises:
        ConfigError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    drafts: Literal["greedy", "sampled"] = "greedy"
    seed: int = 0

    def __post_init__(self) -> None:
        for ok, name, rule in (
            (0 <= self.temperature < float("inf"), "temperature", "it must be 0 (greedy) or above"),
            (self.top_k >= 0, "top_k", "it must be 0 (off) or above"),
            (0 < self.top_p <= 1, "top_p", "it must be in (0, 1]"),
            (self.drafts in ("greedy", "sampled"), "drafts", "it must be greedy or sampled"),
        ):
            if not ok:
                raise ConfigError(f"sampling: {name} is {getattr(self, name)!r}, but {rule}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


GREEDY = Sampling()


def probabilities(logits_NV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution that is sampled from, float32 [N, V] (any leading shape).

    Ties at the edge of top-k or top-p are broken by the lower token id, so that exactly k tokens are left.
    """
    logits = logits_NV.float() / sampling.temperature
    if not sampling.top_k and sampling.top_p >= 1:
        return logits.softmax(dim=-1)
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ranked[..., sampling.top_k :] = -torch.inf
    ranked = ranked.softmax(dim=-1)
    if sampling.top_p < 1:
        before = ranked.cumsum(dim=-1) - ranked
        ranked = ranked.masked_fill(before >= sampling.top_p, 0.0)
        ranked = ranked / ranked.sum(dim=-1, keepdim=True)
    return torch.zeros_like(ranked).scatter_(-1, order, ranked)


def draw(probabilities_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
    """One token from each distribution by its inverse, int64 [N]; a token of probability 0 is never drawn."""
    out = []
    rows = max(1, _CHUNK // probabilities_NV.shape[-1])
    for part, uniform in zip(probabilities_NV.split(rows), uniform_N.split(rows), strict=True):
        cumulative = part.double().cumsum(dim=-1)
        total = cumulative[:, -1:]
        # Rounding must not reach the total: behind it is no token.
        point = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
        out.append(torch.searchsorted(cumulative, point, right=True)[:, 0])
    return torch.cat(out)


def accepts(
    drafts_RK: torch.Tensor, p_RBV: torch.Tensor, q_RKV: torch.Tensor | None, uniform_RK: torch.Tensor
) -> torch.Tensor:
    """Whether each draft by itself is accepted, boolean [R, K].

    Args:
        drafts_RK: drafted tokens.
        p_RBV: the target's distribution at each slot.
        q_RKV: the distribution that each draft was drawn from; None for greedy drafts (one-hot).
        uniform_RK: in [0, 1).
    """
    p_RK = p_RBV[:, : drafts_RK.shape[1]].gather(2, drafts_RK[..., None])[..., 0].double()
    if q_RKV is None:
        return uniform_RK < p_RK
    return uniform_RK * q_RKV.gather(2, drafts_RK[..., None])[..., 0].double() < p_RK


def residual(p_NV: torch.Tensor, q_NV: torch.Tensor) -> torch.Tensor:
    """`max(p − q, 0)`, not normalised; p itself where nothing is left (p = q but for rounding)."""
    left = (p_NV - q_NV).clamp(min=0)
    return torch.where(left.sum(dim=-1, keepdim=True) > 0, left, p_NV)


def after_drafts(
    accepted_R: torch.Tensor, drafts_RK: torch.Tensor, p_RBV: torch.Tensor, q_RKV: torch.Tensor | None
) -> torch.Tensor:
    """What the token behind the accepted drafts is drawn from, [R, V] (not normalised).

    The residual at the refused draft, or the target's own distribution where all were accepted.
    """
    rows = torch.arange(len(accepted_R), device=accepted_R.device)
    p_RV = p_RBV[rows, accepted_R]
    n_drafts = drafts_RK.shape[1]
    if n_drafts == 0:
        return p_RV
    at = accepted_R.clamp(max=n_drafts - 1)
    one_hot = drafts_RK[rows, at][:, None]
    q_RV = torch.zeros_like(p_RV).scatter_(1, one_hot, 1.0) if q_RKV is None else q_RKV[rows, at]
    return torch.where((accepted_R < n_drafts)[:, None], residual(p_RV, q_RV), p_RV)


def leading(accepts_RK: torch.Tensor) -> torch.Tensor:
    """Accepted drafts from the front, int64 [R]."""
    return accepts_RK.long().cumprod(dim=1).sum(dim=1)


# --- random streams ----------------------------------------------------------------------------------------------


class Streams:
    """Random numbers of a batch's rows.

    Args:
        seed: of all.
        sample_ids: one per row.
    """

    def __init__(self, seed: int, sample_ids: Sequence[str], device: torch.device) -> None:
        self.keys_R = torch.tensor([_key(seed, s) for s in sample_ids], dtype=torch.int64, device=device)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows."""
        self.keys_R = self.keys_R[torch.as_tensor(rows, device=self.keys_R.device)]

    def uniform(self, token_index_RK: torch.Tensor, purpose: int) -> torch.Tensor:
        """Numbers in [0, 1), float64, for new tokens by their index, [R, K]."""
        counter = token_index_RK * _PURPOSES + purpose
        return _uniform(self.keys_R[:, None] + counter * _signed(0x9E3779B97F4A7C15))


def _key(seed: int, sample_id: str) -> int:
    digest = hashlib.sha256(f"{seed}\n{sample_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Right shift that brings in zeros (int64 has the arithmetic one only)."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _uniform(z: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014) over int64 that wraps, as 53-bit fractions."""
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shifted(z, 31)
    return _shifted(z, 11).double() * 2.0**-53
