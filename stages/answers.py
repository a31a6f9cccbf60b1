"""The generate stage's unit of work: one part of the responses table, planned, answered, committed.

A part is a fixed slice of the prompts, so what is in it depends on inputs and recipe only; parts may finish
in any order, on any worker, and resume is by part, never by counting lines.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cache_schema.response_format import KEPT_REASONS, Response
from cache_schema.responses import write_part
from cache_schema.storage import Location
from stages.chat import ChatTemplate, PromptLimit, end_of_turn_ids, given_samples
from stages.config import GenerateConfig, TargetConfig
from stages.conversation import Conversation, Reason
from stages.device import use_threads, worker_device
from stages.dialogue import Answered, Dialogue
from stages.engine import Engine, EngineError, load_generation_config, needs_weights
from stages.engines import build_engine
from stages.errors import SampleRefused
from stages.spans import RenderedSample, turn_suffix
from stages.target import Target, load_target, load_tokenizer


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """Everything a worker needs; picklable."""

    target: TargetConfig
    generate: GenerateConfig
    max_prompt_tokens: int
    seed: int
    responses_dir: Location
    too_long: Literal["drop", "shorten"] = "drop"

    @property
    def limit(self) -> PromptLimit:
        """Of the context of an answer."""
        return PromptLimit(max_tokens=self.max_prompt_tokens, too_long=self.too_long)


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
    """Holds the engine and answers parts.

    Args:
        job: what to make.
        target: a loaded target (tests); None loads the job's, where its weights are needed here.
        engine: what answers (tests); None builds the one that the recipe names.

    Raises:
        TargetError, EngineError: target or engine cannot be used.
    """

    def __init__(self, job: GenerateJob, target: Target | None = None, engine: Engine | None = None) -> None:
        use_threads(job.generate.threads)
        self.job = job
        if target is None and engine is None and needs_weights(job.generate):
            target = load_target(job.target, device=worker_device())
        self.tokenizer = target.tokenizer if target else load_tokenizer(job.target)
        generation_config = (getattr(target.model, "generation_config", None) if target
                             else load_generation_config(job.target))
        self.stop_ids = end_of_turn_ids(self.tokenizer, generation_config,
                                        template_kwargs=job.target.chat_template_kwargs)
        self.chat = ChatTemplate(self.tokenizer, job.target.chat_template_kwargs)
        self._engine = engine
        if engine is None and job.generate.mode != "keep":
            self._engine = build_engine(
                job.target, job.generate, seed=job.seed, tokenizer=self.tokenizer, target=target
            )

    @property
    def engine(self) -> Engine:
        """What answers; there is none where given answers are kept."""
        if self._engine is None:
            raise EngineError("generate.mode keep asks nobody for an answer; this is a fault of the generate stage")
        return self._engine

    def run(self, unit: PartUnit, attempt: int) -> dict[str, Any]:
        """Answer and commit one part; returns counts for the driver."""
        started = time.perf_counter()
        ledger: list[dict[str, str]] = []
        make = self._kept if self.job.generate.mode == "keep" else self._answered
        responses = make(unit.conversations, ledger)
        seconds = time.perf_counter() - started
        marker = write_part(self.job.responses_dir, unit.index, responses, ledger, attempt, seconds,
                            planned=[c.sample_id for c in unit.conversations])
        dropped = sum(row["reason"] not in KEPT_REASONS for row in marker["ledger"])
        return {"part": unit.name, "rows": marker["rows"], "dropped": dropped,
                "tokens": sum(len(r.response_ids) for r in responses), "seconds": round(seconds, 3)}

    def _answered(self, conversations: Sequence[Conversation], ledger: list[dict[str, str]]) -> list[Response]:
        """All first turns together, then all second turns, and so on: so that batches stay full."""
        dialogues = [Dialogue(c, self.chat, self.job.limit, self.stop_ids) for c in conversations]
        while asked := [(d, prompt) for d in dialogues if (prompt := d.ask()) is not None]:
            outcomes = self.engine.answer([p for _, p in asked], self.job.generate, seed=self.job.seed,
                                          stop_ids=self.stop_ids)
            for (dialogue, _), outcome in zip(asked, outcomes, strict=True):
                dialogue.take(outcome)
        found: list[Response] = []
        for dialogue in dialogues:
            conversation = dialogue.conversation
            ledger += [_row(conversation.sample_id + suffix, *note) for suffix, *note in dialogue.notes]
            made = ((answered, answered.growing.sample()) for answered in dialogue.samples)
            found += [self._response(conversation, a, s, dialogue.n_turns) for a, s in made
                      if self._long_enough(conversation, s, ledger)]
        return found

    def _response(
        self, conversation: Conversation, answered: Answered, sample: RenderedSample, n_turns: int
    ) -> Response:
        settings = self.job.generate
        sampling = {"temperature": settings.temperature, "top_k": settings.top_k, "top_p": settings.top_p,
                    "max_new_tokens": settings.max_new_tokens, "seed": self.job.seed,
                    "engine": settings.engine, **answered.last.facts}
        if n_turns > 1:
            sampling["turns"] = list(sample.turns)
        return _to_response(conversation, sample, answered.messages, answered.last.finish_reason, sampling)

    def _kept(self, conversations: Sequence[Conversation], ledger: list[dict[str, str]]) -> list[Response]:
        found: list[Response] = []
        for conversation in conversations:
            sample_id, messages = conversation.sample_id, conversation.messages
            try:
                given = given_samples(self.chat, messages, conversation.tools, self.job.limit)
            except SampleRefused as refused:
                ledger.append(_row(sample_id, refused.reason, refused.detail))
                continue
            ledger += [_row(sample_id + t.suffix, t.reason, t.detail) for t in given.refused]
            ledger += [_row(sample_id + suffix, Reason.PROMPT_SHORTENED, note) for suffix, note in given.shortened]
            if messages[-1]["role"] != "assistant":
                number = sum(m["role"] == "assistant" for m in messages) + 1
                ledger.append(_row(sample_id + turn_suffix(number), Reason.UNANSWERED_TURN,
                                   "what follows the last given answer is left out"))
            found += [_to_response(conversation, sample, messages, "given", {"mode": "keep", "turns": sample.turns})
                      for sample in given.samples if self._long_enough(conversation, sample, ledger)]
        return found

    def _long_enough(self, conversation: Conversation, sample: RenderedSample, ledger: list[dict[str, str]]) -> bool:
        needed = self.job.generate.min_response_tokens
        if sample.longest_answer >= needed:
            return True
        ledger.append(_row(conversation.sample_id + sample.suffix, Reason.ANSWER_TOO_SHORT,
                           f"{sample.longest_answer} tokens, at least {needed} needed"))
        return False


def _to_response(
    conversation: Conversation, sample: RenderedSample, messages: list[dict[str, Any]], finish_reason: str,
    sampling: dict[str, Any],
) -> Response:
    return Response(
        conversation.sample_id + sample.suffix, [dict(m) for m in messages], np.array(sample.prompt_ids, np.int32),
        np.array(sample.response_ids, np.int32), sample.loss_mask, finish_reason, conversation.category, sampling,
    )


def _row(sample_id: str, reason: str, detail: str) -> dict[str, str]:
    return {"sample_id": sample_id, "reason": str(reason), "detail": detail}


def plan_parts(conversations: Sequence[Conversation], part_samples: int) -> list[PartUnit]:
    """Cut the prompts into parts, in order."""
    return [PartUnit(i // part_samples, tuple(conversations[i : i + part_samples]))
            for i in range(0, len(conversations), part_samples)]
