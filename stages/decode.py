"""Lossless speculative decoding with a DFlash drafter, and plain decoding by the same loop, in batches.

Shapes: R rows (sequences), Q new tokens of a pass, L feature layers, D hidden, V vocabulary, B block size, K = B−1.

Each cycle: draft B−1 tokens of every row in one pass of the drafter, verify `[anchor, drafts]` in one pass of the
target, keep each row's accepted prefix plus one token of the target's own, which is its next anchor. Rows accept
different numbers of drafts, so their caches are ragged (`stages.kv`); a row that has ended leaves the batch. Plain
decoding is the same loop with a block of size 1. Source: specification, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from stages.clock import Clock
from stages.drafter import Drafter
from stages.sampling import (
    ACCEPT,
    CHOOSE,
    DRAFT,
    GREEDY,
    Sampling,
    Streams,
    accepts,
    after_drafts,
    draw,
    leading,
    probabilities,
)
from stages.sessions import DraftSession, RecomputingSession, TargetSession, open_session, target_logits
from stages.target import Target

PARTS = ("draft", "verify", "sampling", "cache", "rest")
"""What a cycle's time is divided into."""
BlockSize = int | Callable[[int], int]
"""B, or B by the number of rows that are still decoded."""


@dataclass(slots=True)
class Decoded:
    """One response.

    Attributes:
        ids: new tokens, the stop token included.
        cycles: per cycle `accepted drafts + 1`; the prefill's token is not a cycle.
        blocks: per cycle the block size.
        prefill_s, decode_s: seconds of the batch, until this row left it.
        parts: `decode_s` by part (see `PARTS`).
    """

    ids: list[int]
    cycles: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def tau(self) -> float:
        """Mean acceptance length of this response."""
        return sum(self.cycles) / len(self.cycles) if self.cycles else 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to decode: its id, which its random numbers depend on, and its token ids (at least one)."""

    sample_id: str
    ids: list[int]


@dataclass(slots=True)
class DecodedBatch:
    """Several responses, decoded together.

    Attributes:
        rows: one per request, in order.
        prefill_s, decode_s: wall seconds.
        parts: `decode_s` by part.
        target_kv_bytes, drafter_kv_bytes: largest size of either cache, each row as long as the longest.
    """

    rows: list[Decoded]
    prefill_s: float
    decode_s: float
    parts: dict[str, float]
    target_kv_bytes: int
    drafter_kv_bytes: int


class Loop:
    """One batch being decoded: the rows still at work, their sessions, their random numbers."""

    def __init__(
        self, target: Target, requests: Sequence[Request], drafter: Drafter | None, block_size: BlockSize,
        max_new_tokens: int, stop_ids: frozenset[int], sampling: Sampling,
    ) -> None:
        self.target, self.requests, self.sampling = target, requests, sampling
        self.block_of = block_size if callable(block_size) else lambda _: block_size
        self.stop_ids = stop_ids
        # As the reference does, the last allowed token of a drafted response still serves as an anchor once: that
        # cycle's output is cut off, but its acceptance length counts.
        self.limit = max_new_tokens + (drafter is not None)
        self.max_new_tokens = max_new_tokens
        largest = max(self.block_of(n) for n in range(1, len(requests) + 1))
        reserve = max(len(r.ids) for r in requests) + max_new_tokens + 2 * largest
        layer_ids = drafter.spec.feature_layer_ids if drafter is not None else ()
        self.session: TargetSession | RecomputingSession = open_session(target, layer_ids, len(requests), reserve)
        self.drafts = DraftSession(drafter, target, len(requests), reserve) if drafter is not None else None
        self.streams = Streams(sampling.seed, [r.sample_id for r in requests], target.device)
        self.rows = [Decoded(ids=[]) for _ in requests]
        self.working = list(range(len(requests)))
        self.last_lap = [0] * len(requests)
        self.anchors_R = torch.empty(0)

    def prefill(self) -> None:
        lengths = [len(r.ids) for r in self.requests]
        ids_RT = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
        for row, request in enumerate(self.requests):
            ids_RT[row, : lengths[row]] = torch.tensor(request.ids)
        ids_RT = ids_RT.to(self.target.device)
        hidden, features = self.session.forward(ids_RT)
        self.session.advance(lengths)
        if self.drafts is not None and features is not None:
            self.drafts.extend(features, lengths, ids_RT)
        ends = torch.tensor(lengths, device=hidden.device) - 1
        last_RV = target_logits(self.target, hidden[torch.arange(len(lengths), device=hidden.device), ends])
        self.anchors_R = self._choose(last_RV)
        for decoded, token in zip(self.rows, self.anchors_R.tolist(), strict=True):
            decoded.ids.append(token)

    def _choose(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """The first new token of each row."""
        if self.sampling.greedy:
            return logits_RV.argmax(dim=-1)
        first = torch.zeros(len(logits_RV), 1, dtype=torch.long, device=logits_RV.device)
        return draw(probabilities(logits_RV, self.sampling), self.streams.uniform(first, CHOOSE)[:, 0])

    def cycle(self, clock: Clock) -> None:
        size = self.block_of(len(self.working)) if self.drafts is not None else 1
        drafts_RK, q_RKV = self._draft(size)
        clock.lap("draft")
        block_RB = torch.cat([self.anchors_R[:, None], drafts_RK], dim=1)
        hidden, features = self.session.forward(block_RB)
        logits_RBV = target_logits(self.target, hidden)
        clock.lap("verify")
        accepted_R, next_R = self._judge(logits_RBV, drafts_RK, q_RKV)
        self.anchors_R = next_R
        host = torch.cat([accepted_R[:, None], next_R[:, None], drafts_RK], dim=1).tolist()
        clock.lap("sampling")
        counts = [row[0] + 1 for row in host]
        self.session.advance(counts)
        if self.drafts is not None and features is not None:
            self.drafts.extend(features, counts, block_RB)
        clock.lap("cache")
        for index, (accepted, token, *drafts) in zip(self.working, host, strict=True):
            row = self.rows[index]
            row.ids += [*drafts[:accepted], token]
            row.cycles.append(accepted + 1)
            row.blocks.append(size)

    def _indices(self, n: int) -> torch.Tensor:
        """Indices of the next n new tokens of each row, [R, n]."""
        done_R = torch.tensor([len(self.rows[i].ids) for i in self.working], device=self.target.device)
        return done_R[:, None] + torch.arange(n, device=self.target.device)

    def _draft(self, size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts [R, K], and the distribution that each was drawn from when drafts are sampled."""
        if size == 1 or self.drafts is None:
            return self.anchors_R.new_empty(len(self.anchors_R), 0), None
        logits_RKV = self.drafts.draft(self.anchors_R, size)
        if self.sampling.greedy or self.sampling.drafts == "greedy":
            return logits_RKV.argmax(dim=-1), None
        q_RKV = probabilities(logits_RKV, self.sampling)
        uniform_RK = self.streams.uniform(self._indices(size - 1), DRAFT)
        return draw(q_RKV.flatten(0, 1), uniform_RK.flatten()).view(uniform_RK.shape), q_RKV

    def _judge(
        self, logits_RBV: torch.Tensor, drafts_RK: torch.Tensor, q_RKV: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Per row the accepted drafts, and the token behind them."""
        if self.sampling.greedy:
            answers_RB = logits_RBV.argmax(dim=-1)
            accepted_R = leading(drafts_RK == answers_RB[:, :-1])
            return accepted_R, answers_RB.gather(1, accepted_R[:, None])[:, 0]
        indices_RB = self._indices(logits_RBV.shape[1])
        p_RBV = probabilities(logits_RBV, self.sampling)
        uniform_RK = self.streams.uniform(indices_RB[:, :-1], ACCEPT)
        accepted_R = leading(accepts(drafts_RK, p_RBV, q_RKV, uniform_RK))
        uniform_R = self.streams.uniform(indices_RB.gather(1, accepted_R[:, None]), CHOOSE)[:, 0]
        return accepted_R, draw(after_drafts(accepted_R, drafts_RK, p_RBV, q_RKV), uniform_R)

    def dismiss(self, clock: Clock) -> None:
        """Rows that have ended leave the batch."""
        stay = [place for place, index in enumerate(self.working) if not self._ended(self.rows[index])]
        if len(stay) == len(self.working):
            return
        for place in set(range(len(self.working))) - set(stay):
            self.last_lap[self.working[place]] = clock.n_laps
        self.working = [self.working[place] for place in stay]
        if stay:
            self.session.select(stay)
            self.streams.select(stay)
            self.anchors_R = self.anchors_R[torch.tensor(stay, device=self.anchors_R.device)]
            if self.drafts is not None:
                self.drafts.select(stay)

    def _ended(self, row: Decoded) -> bool:
        newest = row.ids[-row.cycles[-1] :] if row.cycles else row.ids
        return len(row.ids) >= self.limit or not self.stop_ids.isdisjoint(newest)


@torch.inference_mode()
def decode_batch(
    target: Target, requests: Sequence[Request], *, drafter: Drafter | None = None, block_size: BlockSize | None = None,
    max_new_tokens: int, stop_ids: frozenset[int], sampling: Sampling = GREEDY,
) -> DecodedBatch:
    """Decode requests together. Greedily the output equals plain decoding token for token (up to rounding ties);
    with a temperature it is distributed as plain sampling.

    Args:
        target, drafter: on the same device; without a drafter this is plain decoding.
        requests: at least one.
        block_size: B, or B by the number of rows at work; None takes the drafter's own. 1 drafts nothing.
        max_new_tokens: limit of new tokens; the last cycle may overshoot and is cut.
        stop_ids: a response ends with the first of these, which is kept.
        sampling: how tokens are chosen.

    Raises:
        TargetError: this target cannot be decoded in a batch.
    """
    size = 1 if drafter is None else block_size or drafter.spec.block_size
    loop = Loop(target, requests, drafter, size, max_new_tokens, stop_ids, sampling)
    clock = Clock(target.device)
    loop.prefill()
    clock.lap("prefill")
    loop.dismiss(clock)
    while loop.working:
        loop.cycle(clock)
        loop.dismiss(clock)
        clock.lap("rest")
    parts = clock.seconds(1)
    prefill_s = clock.seconds(0, 1)["prefill"]
    for row, last in zip(loop.rows, loop.last_lap, strict=True):
        row.ids = _cut(row.ids, max_new_tokens, stop_ids)
        row.prefill_s = prefill_s
        row.parts = clock.seconds(1, last) if len(requests) > 1 else parts
        row.decode_s = sum(row.parts.values())
    drafter_kv = loop.drafts.kv.peak_bytes if loop.drafts is not None else 0
    return DecodedBatch(loop.rows, prefill_s, sum(parts.values()), parts, loop.session.peak_bytes, drafter_kv)


def decode_plain(target: Target, prompt_ids: list[int], max_new_tokens: int, stop_ids: frozenset[int]) -> Decoded:
    """Plain greedy decoding of one prompt, one token per pass: the yardstick, and what a block of size 1 does."""
    return decode_batch(target, [Request("", prompt_ids)], max_new_tokens=max_new_tokens, stop_ids=stop_ids).rows[0]


def decode_speculative(
    target: Target, drafter: Drafter, prompt_ids: list[int], max_new_tokens: int, stop_ids: frozenset[int],
    block_size: int | None = None,
) -> Decoded:
    """Greedy speculative decoding of one prompt; the arguments are those of `decode_batch`."""
    return decode_batch(
        target, [Request("", prompt_ids)], drafter=drafter, block_size=block_size, max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
    ).rows[0]


def _cut(ids: list[int], limit: int, stop_ids: frozenset[int]) -> list[int]:
    ids = ids[:limit]
    for i, token in enumerate(ids):
        if token in stop_ids:
            return ids[: i + 1]
    return ids
