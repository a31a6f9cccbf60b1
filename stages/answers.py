"""The generate stage's unit of work: one part of the responses table, planned, answered, committed.

A part is a fixed slice of the prompts, so what is in it depends on inputs and recipe only; parts may finish
in any order, on any worker, and resume is by part, never by counting lines.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cache_schema.response_format import Response
from cache_schema.responses import write_part
from stages.chat import end_of_turn_ids, render_given, render_prompt
from stages.config import GenerateConfig, TargetConfig
from stages.conversation import Conversation
from stages.device import use_threads, worker_device
from stages.errors import SampleRefused
from stages.generate import Answer, Prompt, answer_batch
from stages.prompts import to_prompt
from stages.target import Target, load_target

PROMPT_TOO_LONG, ANSWER_TOO_SHORT, TURN_REFUSED = "prompt_too_long", "answer_too_short", "turn_refused"
UNANSWERED = "unanswered_turn"


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """Everything a worker needs; picklable."""

    target: TargetConfig
    generate: GenerateConfig
    max_prompt_tokens: int
    seed: int
    responses_dir: Path


@dataclass(frozen=True, slots=True)
class PartUnit:
    """One part to make: its index and its conversations, in order."""

    index: int
    conversations: tuple[Conversation, ...]

    @property
    def name(self) -> str:
        """As in the responses table."""
        return f"part-{self.index:05d}"


class GenerateWorker:
    """Holds the target and answers parts.

    Args:
        job: what to make.
        target: a loaded target (tests); None loads the job's.
    """

    def __init__(self, job: GenerateJob, target: Target | None = None) -> None:
        use_threads(job.generate.threads)
        self.job = job
        self.target = target or load_target(job.target, device=worker_device())
        self.stop_ids = end_of_turn_ids(self.target.tokenizer, getattr(self.target.model, "generation_config", None),
                                        template_kwargs=job.target.chat_template_kwargs)

    def run(self, unit: PartUnit, attempt: int) -> dict[str, Any]:
        """Answer and commit one part; returns counts for the driver."""
        started = time.perf_counter()
        ledger: list[dict[str, str]] = []
        make = self._kept if self.job.generate.mode == "keep" else self._answered
        responses = make(unit.conversations, ledger)
        seconds = time.perf_counter() - started
        marker = write_part(self.job.responses_dir, unit.index, responses, ledger, attempt, seconds,
                            planned=[c.sample_id for c in unit.conversations])
        return {"part": unit.name, "rows": marker["rows"], "dropped": len(marker["ledger"]),
                "tokens": sum(len(r.response_ids) for r in responses), "seconds": round(seconds, 3)}

    def _answered(self, conversations: Sequence[Conversation], ledger: list[dict[str, str]]) -> list[Response]:
        asked: list[tuple[Conversation, Prompt]] = []
        for conversation in map(to_prompt, conversations):
            try:
                asked.append((conversation, Prompt(conversation.sample_id, self._prompt_ids(conversation))))
            except SampleRefused as refused:
                ledger.append(_row(conversation.sample_id, refused.reason, refused.detail))
        answers: dict[str, Answer] = {}
        for batch in _batches([p for _, p in asked], self.job.generate.batch_size):
            made = answer_batch(self.target, batch, self.job.generate, seed=self.job.seed, stop_ids=self.stop_ids)
            answers.update((answer.sample_id, answer) for answer in made)
        responses = (self._response(c, p, answers[p.sample_id], ledger) for c, p in asked)
        return [r for r in responses if r is not None]

    def _prompt_ids(self, conversation: Conversation) -> list[int]:
        ids = render_prompt(self.target.tokenizer, conversation.messages, tools=conversation.tools,
                            template_kwargs=self.job.target.chat_template_kwargs)
        limit = self.job.max_prompt_tokens
        if len(ids) > limit:
            raise SampleRefused(PROMPT_TOO_LONG, _too_long(len(ids), limit))
        return ids

    def _response(
        self, conversation: Conversation, prompt: Prompt, answer: Answer, ledger: list[dict[str, str]]
    ) -> Response | None:
        settings = self.job.generate
        if len(answer.ids) < settings.min_response_tokens:
            ledger.append(_row(prompt.sample_id, ANSWER_TOO_SHORT,
                               f"{len(answer.ids)} tokens, at least {settings.min_response_tokens} needed"))
            return None
        mask = np.zeros(len(prompt.ids) + len(answer.ids), dtype=np.uint8)
        mask[len(prompt.ids) :] = 1
        sampling = {"temperature": settings.temperature, "top_k": settings.top_k, "top_p": settings.top_p,
                    "max_new_tokens": settings.max_new_tokens, "seed": self.job.seed}
        return Response(prompt.sample_id, [dict(m) for m in conversation.messages], np.array(prompt.ids, np.int32),
                        np.array(answer.ids, np.int32), mask, answer.finish_reason, conversation.category, sampling)

    def _kept(self, conversations: Sequence[Conversation], ledger: list[dict[str, str]]) -> list[Response]:
        found: list[Response] = []
        for conversation in conversations:
            try:
                given = render_given(self.target.tokenizer, conversation.messages, tools=conversation.tools,
                                     template_kwargs=self.job.target.chat_template_kwargs)
            except SampleRefused as refused:
                ledger.append(_row(conversation.sample_id, refused.reason, refused.detail))
                continue
            ledger += [_row(conversation.sample_id + t.suffix, TURN_REFUSED, f"{t.reason}: {t.detail}")
                       for t in given.refused]
            if conversation.messages[-1]["role"] != "assistant":
                ledger.append(_row(conversation.sample_id + "#unanswered", UNANSWERED,
                                   "what follows the last given answer is left out"))
            for sample in given.samples:
                sample_id, limit = conversation.sample_id + sample.suffix, self.job.max_prompt_tokens
                if len(sample.prompt_ids) > limit:
                    ledger.append(_row(sample_id, PROMPT_TOO_LONG, _too_long(len(sample.prompt_ids), limit)))
                    continue
                found.append(Response(
                    sample_id, [dict(m) for m in conversation.messages],
                    np.array(sample.prompt_ids, np.int32), np.array(sample.response_ids, np.int32), sample.loss_mask,
                    "given", conversation.category, {"mode": "keep"},
                ))
        return found


def _too_long(n_tokens: int, limit: int) -> str:
    return f"{n_tokens} tokens, at most {limit} allowed (prompts.max_prompt_tokens)"


def _row(sample_id: str, reason: str, detail: str) -> dict[str, str]:
    return {"sample_id": sample_id, "reason": str(reason), "detail": detail}


def _batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Prompts of similar length together; a pure function of the part."""
    ordered = sorted(prompts, key=lambda p: len(p.ids))
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]


def plan_parts(conversations: Sequence[Conversation], part_samples: int) -> list[PartUnit]:
    """Cut the prompts into parts, in order."""
    return [PartUnit(i // part_samples, tuple(conversations[i : i + part_samples]))
            for i in range(0, len(conversations), part_samples)]
