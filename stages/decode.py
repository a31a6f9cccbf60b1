"""Lossless speculative decoding with a DFlash drafter, and plain decoding by the same loop (greedy).

Shapes: T tokens, L feature layers, D hidden, B block size.

Each cycle: draft B−1 tokens in one pass of the drafter, verify `[anchor, drafts]` in one pass of the
target, keep the accepted prefix plus one token of the target's own, which is the next anchor. Both
sides keep a cache: the target's is cropped to what was verified; the drafter's holds keys and values of
the injected context only (block keys and values are never kept) and grows by exactly the verified
positions. Source: specification, section 4.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache

from stages.drafter import Drafter
from stages.features import FeatureTap
from stages.layout import KeysValues, Layout
from stages.target import Target


@dataclass(slots=True)
class Decoded:
    """One response.

    Attributes:
        ids: new tokens, the stop token included.
        cycles: per cycle `accepted drafts + 1`; the prefill's token is not a cycle.
        prefill_s, decode_s: wall seconds.
        draft_s, verify_s: parts of `decode_s`.
    """

    ids: list[int]
    cycles: list[int] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0

    @property
    def tau(self) -> float:
        """Mean acceptance length of this response."""
        return sum(self.cycles) / len(self.cycles) if self.cycles else 0.0


class TargetSession:
    """The target with a KV cache and a tap on its feature layers, for one sequence.

    Args:
        target: the model.
        layer_ids: layers whose states are wanted; empty for none.
    """

    def __init__(self, target: Target, layer_ids: tuple[int, ...] = ()) -> None:
        self.target = target
        self.tap = FeatureTap(target, layer_ids) if layer_ids else None
        self.cache = _croppable_cache(target)
        self._cache_argument = target.cache_argument

    def forward(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Append tokens; returns their states after the final norm [T, D] and their features [T, L, D]."""
        ids_1T = torch.tensor([ids], device=self.target.device)
        arguments = {"input_ids": ids_1T, "use_cache": True, self._cache_argument: self.cache}
        if self.tap is None:
            return self.target.decoder(**arguments).last_hidden_state[0], None
        with self.tap.attached():
            hidden_TD = self.target.decoder(**arguments).last_hidden_state[0]
        return hidden_TD, self.tap.take()[0]

    def greedy(self, hidden_TD: torch.Tensor) -> list[int]:
        """The target's argmax token after each position."""
        ids: list[int] = (hidden_TD @ self.target.head.T).argmax(dim=-1).tolist()
        return ids

    def drop_last(self, n: int) -> None:
        """Forget the last n tokens."""
        if n:
            self.cache.crop(-n)


def _croppable_cache(target: Target) -> DynamicCache:
    """A cache that can forget rejected drafts. One that is made for sliding-window layers drops old keys and then
    cannot be cropped; without the config it keeps them all, and the model's mask still applies the window."""
    cache = DynamicCache(config=target.text_config)
    return DynamicCache() if any(cache.is_sliding) else cache


class DraftSession:
    """The drafter with keys and values of the injected context, for one sequence."""

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self.drafter = drafter
        self.target = target
        self.kv: list[KeysValues] = []
        self.n_context = 0
        self._last_1D: torch.Tensor | None = None

    def extend(self, features_TLD: torch.Tensor, ids: list[int] | None = None) -> None:
        """Add verified positions to the context: their features, or their tokens for a drafter that has only those."""
        dtype = self.drafter.fc.weight.dtype
        if self.drafter.spec.features == "none" and ids is not None:
            features_TLD = self.target.embed(torch.tensor(ids, device=self.target.device))[:, None]
        ctx_TD = self.drafter.context(features_TLD.to(dtype))
        new = self.drafter.context_kv(ctx_TD, start=self.n_context)
        self._last_1D = ctx_TD[-1:]
        old = self.kv or [KeysValues(k[:0], v[:0]) for k, v in new]
        self.kv = [KeysValues(torch.cat([k, more_k]), torch.cat([v, more_v]))
                   for (k, v), (more_k, more_v) in zip(old, new, strict=True)]
        self.n_context += features_TLD.shape[0]

    def draft(self, anchor: int, block_size: int) -> list[int]:
        """B−1 greedy drafts behind the anchor token, which stands at position `n_context`."""
        block = torch.full((1, block_size), self.drafter.spec.mask_token_id, device=self.target.device)
        block[0, 0] = anchor
        embedded = self.target.embed(block).to(self.drafter.fc.weight.dtype)
        if self._last_1D is not None:
            embedded = self.drafter.entering(embedded, self._last_1D)
        layout = Layout(torch.tensor([self.n_context], device=self.target.device), (self.n_context,), (1,))
        hidden = self.drafter.blocks(embedded, layout, self.kv)[0, 1:]
        ids: list[int] = (hidden.to(self.target.dtype) @ self.target.head.T).argmax(dim=-1).tolist()
        return ids


@torch.inference_mode()
def decode_plain(target: Target, prompt_ids: list[int], max_new_tokens: int, stop_ids: frozenset[int]) -> Decoded:
    """Plain greedy decoding, one token per pass: the yardstick, and what a block of size 1 does."""
    session = TargetSession(target)
    started = time.perf_counter()
    hidden, _ = session.forward(prompt_ids)
    ids = session.greedy(hidden[-1:])
    out = Decoded(ids=ids, prefill_s=time.perf_counter() - started)
    started = time.perf_counter()
    while len(ids) < max_new_tokens and ids[-1] not in stop_ids:
        hidden, _ = session.forward(ids[-1:])
        ids += session.greedy(hidden)
        out.cycles.append(1)
    out.decode_s = out.verify_s = time.perf_counter() - started
    return out


@torch.inference_mode()
def decode_speculative(
    target: Target, drafter: Drafter, prompt_ids: list[int], max_new_tokens: int, stop_ids: frozenset[int],
    block_size: int | None = None,
) -> Decoded:
    """Greedy speculative decoding. The output equals `decode_plain` token for token (up to rounding ties).

    Args:
        target, drafter: on the same device.
        prompt_ids: at least one token.
        max_new_tokens: limit of new tokens; the last cycle may overshoot and is cut.
        stop_ids: generation ends with the first of these, which is kept.
        block_size: B; None takes the drafter's own.
    """
    size = block_size or drafter.spec.block_size
    session, drafts = TargetSession(target, drafter.spec.feature_layer_ids), DraftSession(drafter, target)
    started = time.perf_counter()
    hidden, features = session.forward(prompt_ids)
    drafts.extend(_present(features), prompt_ids)
    ids = session.greedy(hidden[-1:])
    out = Decoded(ids=ids, prefill_s=time.perf_counter() - started)
    started = time.perf_counter()
    # As the reference does, the last allowed token still serves as an anchor once: that cycle's output is
    # cut off, but its acceptance length counts.
    while len(ids) <= max_new_tokens and not stop_ids.intersection(ids):
        mark = time.perf_counter()
        proposed = drafts.draft(ids[-1], size)
        out.draft_s += time.perf_counter() - mark
        mark = time.perf_counter()
        hidden, features = session.forward([ids[-1], *proposed])
        answers = session.greedy(hidden)
        out.verify_s += time.perf_counter() - mark
        accepted = _agreeing(proposed, answers)
        session.drop_last(size - 1 - accepted)
        drafts.extend(_present(features)[: accepted + 1], [ids[-1], *proposed[:accepted]])
        ids += answers[: accepted + 1]
        out.cycles.append(accepted + 1)
    out.decode_s = time.perf_counter() - started
    out.ids = _cut(ids, max_new_tokens, stop_ids)
    return out


def _present(features: torch.Tensor | None) -> torch.Tensor:
    if features is None:
        raise RuntimeError("this session has no feature tap")
    return features


def _agreeing(proposed: list[int], answers: list[int]) -> int:
    """How many drafts equal the target's answer at their place, from the front."""
    for i, (draft, answer) in enumerate(zip(proposed, answers, strict=False)):
        if draft != answer:
            return i
    return len(proposed)


def _cut(ids: list[int], limit: int, stop_ids: frozenset[int]) -> list[int]:
    ids = ids[:limit]
    for i, token in enumerate(ids):
        if token in stop_ids:
            return ids[: i + 1]
    return ids
