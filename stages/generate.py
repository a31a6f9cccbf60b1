"""The target answers prompts in batches: greedy, or sampled with a random stream per sample.

Shapes: S sequences of a batch, T tokens (prompts padded on the left), V vocabulary.

A sample's random numbers depend on (seed, sample id) and the step only, so its answer does not depend on
which samples share its batch, beyond rounding. Masks come from lengths, never from ids: pad may equal
eos, and eos may stand inside a multi-turn prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from stages.anchors import stable_key
from stages.config import GenerateConfig
from stages.engine import CONTEXT_LENGTH, Answer, Prompt, Refusal
from stages.target import Target
from stages.target_limits import position_limit


class TransformersEngine:
    """The target in this process, by transformers, in static batches of prompts of similar length.

    Args:
        target: the loaded model.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.limit = position_limit(target)

    def answer(
        self, prompts: Sequence[Prompt], config: GenerateConfig, *, seed: int, stop_ids: frozenset[int]
    ) -> list[Answer | Refusal]:
        """See `engine.Engine`; the batches are a pure function of prompts and config.

        Refused is a prompt that could grow past the target's position limit: what it is answered there would depend
        on the batch, or there are no positions for it.
        """
        outcomes: dict[str, Answer | Refusal] = {p.sample_id: refusal for p in prompts
                                                 if (refusal := self._too_long(p, config))}
        fitting = [p for p in prompts if p.sample_id not in outcomes]
        for batch in batches_by_length(fitting, config.batch_size):
            made = answer_batch(self.target, batch, config, seed=seed, stop_ids=stop_ids)
            outcomes.update((answer.sample_id, answer) for answer in made)
        return [outcomes[p.sample_id] for p in prompts]

    def _too_long(self, prompt: Prompt, config: GenerateConfig) -> Refusal | None:
        whole = len(prompt.ids) + config.max_new_tokens
        if self.limit is None or whole <= self.limit.tokens:
            return None
        detail = (f"prompt of {len(prompt.ids)} tokens and generate.max_new_tokens {config.max_new_tokens} are "
                  f"{whole}, but target {self.target.name} {self.limit.why}; answer it by a server "
                  "(generate.engine: openai)")
        return Refusal(prompt.sample_id, CONTEXT_LENGTH, detail)


def batches_by_length(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Prompts of similar length together; a pure function of the prompts."""
    ordered = sorted(prompts, key=lambda p: len(p.ids))
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]


@torch.inference_mode()
def answer_batch(
    target: Target, prompts: Sequence[Prompt], config: GenerateConfig, *, seed: int, stop_ids: frozenset[int]
) -> list[Answer]:
    """Answer a batch of prompts; finished rows leave the batch at once.

    Args:
        target: the model.
        prompts: at least one, each of at least one token.
        config: lengths and sampling.
        seed: of the run.
        stop_ids: a turn ends with the first of these.

    Returns:
        One answer per prompt, in the order of the prompts.
    """
    longest = max(len(p.ids) for p in prompts)
    ids_ST = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask_ST = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids_ST[row, longest - len(prompt.ids) :] = torch.tensor(prompt.ids)
        mask_ST[row, longest - len(prompt.ids) :] = 1
    batch = _Batch(target, ids_ST.to(target.device), mask_ST.to(target.device))
    samplers = [_Sampler(config, stable_key("generate", seed, p.sample_id)) for p in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))
    while alive:
        logits_SV = batch.step()
        chosen = _choose(logits_SV, [samplers[i] for i in alive], config)
        for i, token in zip(alive, chosen, strict=True):
            answers[i].append(token)
        keep = [row for row, i in enumerate(alive)
                if answers[i][-1] not in stop_ids and len(answers[i]) < config.max_new_tokens]
        batch.advance([chosen[row] for row in keep], keep)
        alive = [alive[row] for row in keep]
    return [Answer(p.sample_id, ids, "stop" if ids[-1] in stop_ids else "length")
            for p, ids in zip(prompts, answers, strict=True)]


class _Batch:
    """Rows being decoded together, with their KV cache."""

    def __init__(self, target: Target, ids_ST: torch.Tensor, mask_ST: torch.Tensor) -> None:
        self.target = target
        self.cache = DynamicCache(config=target.text_config)
        self.mask_ST = mask_ST
        self.new_ST = ids_ST
        self.positions_ST = (mask_ST.cumsum(dim=1) - 1).clamp(min=0)
        self._cache_argument = target.cache_argument

    def step(self) -> torch.Tensor:
        """Logits [S, V] behind the last token of every row, float32."""
        arguments: dict[str, Any] = {self._cache_argument: self.cache}
        out = self.target.decoder(input_ids=self.new_ST, attention_mask=self.mask_ST, position_ids=self.positions_ST,
                                  use_cache=True, **arguments)
        logits_SV: torch.Tensor = (out.last_hidden_state[:, -1] @ self.target.head.T).float()
        return logits_SV

    def advance(self, tokens: list[int], keep: list[int]) -> None:
        """Append a token to each kept row and forget the others."""
        if len(keep) < self.mask_ST.shape[0]:
            rows = torch.tensor(keep, dtype=torch.long, device=self.mask_ST.device)
            if keep:
                self.cache.batch_select_indices(rows)
            self.mask_ST, self.positions_ST = self.mask_ST[rows], self.positions_ST[rows]
        self.new_ST = torch.tensor(tokens, dtype=torch.long, device=self.mask_ST.device)[:, None]
        self.mask_ST = torch.cat([self.mask_ST, torch.ones_like(self.new_ST)], dim=1)
        self.positions_ST = self.positions_ST[:, -1:] + 1


class _Sampler:
    """The random stream of one sample: one uniform number per token."""

    def __init__(self, config: GenerateConfig, key: int) -> None:
        self.generator = torch.Generator().manual_seed(key % 2**63) if config.temperature > 0 else None

    def uniform(self) -> float:
        return float(torch.rand((), generator=self.generator, dtype=torch.float64))


def _choose(logits_SV: torch.Tensor, samplers: list[_Sampler], config: GenerateConfig) -> list[int]:
    if config.temperature == 0:
        greedy: list[int] = logits_SV.argmax(dim=-1).tolist()
        return greedy
    probabilities_SV, order_SV = truncated_distribution(logits_SV, config)
    cumulative_SV = probabilities_SV.cumsum(dim=-1)
    draws = torch.tensor([s.uniform() for s in samplers], dtype=cumulative_SV.dtype, device=cumulative_SV.device)
    places = torch.searchsorted(cumulative_SV, (draws * cumulative_SV[:, -1])[:, None], right=True)
    ids: list[int] = order_SV.gather(1, places.clamp(max=order_SV.shape[1] - 1))[:, 0].tolist()
    return ids


def truncated_distribution(logits_SV: torch.Tensor, config: GenerateConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities after temperature, top-k and top-p, in descending order, with the ids in that order.

    Equal logits are ordered by id (a stable sort), so that ties do not depend on the batch. Top-p keeps
    the smallest set of most likely tokens whose probability reaches p.
    """
    scaled_SV = logits_SV.double() / config.temperature
    sorted_SV, order_SV = scaled_SV.sort(dim=-1, descending=True, stable=True)
    if config.top_k:
        sorted_SV[:, config.top_k :] = float("-inf")
    probabilities_SV = sorted_SV.softmax(dim=-1)
    before_SV = probabilities_SV.cumsum(dim=-1) - probabilities_SV
    probabilities_SV = torch.where(before_SV < config.top_p, probabilities_SV, 0.0)
    return probabilities_SV / probabilities_SV.sum(dim=-1, keepdim=True), order_SV
