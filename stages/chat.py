"""Conversations as token ids: prompts for the target, and masks for answers that are given.

Boundaries come from rendering a conversation turn by turn and comparing token ids; never from a regular
expression over the text, and never from pad or eos ids (pad may be eos, and either may stand inside a turn).

For the assistant's turn k, with `ids` = render, then tokenize:
    prefix = ids(messages[:k], generation prompt)      what the target sees when it answers
    full   = ids(messages[:k+1])                       the same with the answer
`full` must begin with `prefix`; the rest, up to and including the end-of-turn token, is the response. What the
template writes behind that token (a line break, mostly) belongs to no turn. Where only the texts agree, because
the tokenizer merged the header's end with the answer's beginning, the rest is tokenized by itself: these are the
ids that the target continues from when it is served.

Turns whose prefix continues the sample before them share one sample. Where it does not (Qwen3 leaves out the
reasoning of earlier turns), the turn starts a sample of its own, with the context that really produces it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.conversation import Reason
from stages.errors import SampleRefused, TargetError
from stages.shorten import FittedPrompt, PromptLimit, fit_prompt
from stages.spans import GrowingSample, RenderedSample, turn_suffix
from stages.template import ChatTemplate, Message, Messages, Tools, TurnEnd

__all__ = [
    "ChatTemplate",
    "GivenSamples",
    "PromptLimit",
    "RefusedTurn",
    "RenderedSample",
    "TurnEnd",
    "end_of_turn_ids",
    "given_samples",
    "render_given",
    "render_prompt",
    "turn_end",
]


@dataclass(frozen=True, slots=True)
class RefusedTurn:
    """An assistant's turn that is in no sample."""

    suffix: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class GivenSamples:
    """All that came out of one conversation: at least one sample, and the turns that are in none."""

    samples: list[RenderedSample]
    refused: list[RefusedTurn]
    shortened: list[tuple[str, str]]
    """Suffix of a turn whose context lost its earliest messages, and how much."""


def render_prompt(
    tokenizer: Any,
    messages: Messages,
    *,
    tools: Sequence[Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids of a conversation up to the point where the assistant speaks.

    Raises:
        SampleRefused: the template cannot render this conversation (`template_error`).
        TargetError: the tokenizer has no chat template.
    """
    return ChatTemplate(tokenizer, template_kwargs).prompt_ids(messages, tools)


def end_of_turn_ids(
    tokenizer: Any, generation_config: Any = None, *, template_kwargs: Mapping[str, Any] | None = None
) -> frozenset[int]:
    """Ids that end an answer: the tokenizer's eos, those of the generation config, and the template's own.

    Raises:
        TargetError: there is none at all, so that no answer would ever end.
    """
    config_eos = getattr(generation_config, "eos_token_id", None)
    ids = {tokenizer.eos_token_id, *(config_eos if isinstance(config_eos, list | tuple) else [config_eos])}
    ids.update(turn_end(tokenizer, template_kwargs=template_kwargs).kept[-1:])
    found = frozenset(int(i) for i in ids if i is not None)
    if not found:
        raise TargetError(
            "the target has no token that ends a turn: neither tokenizer, generation config nor chat template "
            "names one; set eos_token in tokenizer_config.json"
        )
    return found


def turn_end(tokenizer: Any, *, template_kwargs: Mapping[str, Any] | None = None) -> TurnEnd:
    """What the template writes behind an answer: `ChatTemplate.end`.

    Raises:
        TargetError: no chat template, or one that cannot render a question with its answer.
    """
    return ChatTemplate(tokenizer, template_kwargs).end


def render_given(
    tokenizer: Any,
    messages: Messages,
    *,
    tools: Sequence[Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> GivenSamples:
    """`given_samples` for one conversation of any length.

    Raises:
        SampleRefused: as there.
        TargetError: the tokenizer has no usable chat template.
    """
    return given_samples(ChatTemplate(tokenizer, template_kwargs), messages, tools)


def given_samples(
    chat: ChatTemplate, messages: Messages, tools: Tools = None, limit: PromptLimit | None = None
) -> GivenSamples:
    """Ids and masks of a conversation whose answers are given: every one of them is supervised.

    Args:
        chat: the target's template.
        messages: the conversation; what follows the last answer is left out.
        tools: tool schemas for the template.
        limit: of the context of an answer; None lets any length pass.

    Raises:
        SampleRefused: the template cannot render it (`template_error`), it has no answer (`empty_loss_mask`), a
            text in it would become a control token (`special_token_text`), or all of its answers are refused:
            `prefix_mismatch` and `no_end_of_turn` (no boundary), `prompt_too_long`.
        TargetError: the template is not usable at all.
    """
    turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        detail = f"none of the {len(messages)} messages is an answer of the assistant; expected at least one"
        raise SampleRefused(Reason.EMPTY_LOSS_MASK, detail)
    chat.require_plain_text(messages[: turns[-1] + 1], tools)
    done: list[GrowingSample] = []
    found = GivenSamples([], [], [])
    for number, k in enumerate(turns, start=1):
        suffix = turn_suffix(number)
        try:
            context = fit_prompt(chat, messages[:k], tools, limit)
            response = _answer_ids(chat, context, messages[k], k, tools)
        except SampleRefused as error:
            if error.reason == Reason.TEMPLATE_ERROR:
                raise
            found.refused.append(RefusedTurn(suffix, str(error.reason), error.detail))
            continue
        if context.n_left_out:
            found.shortened.append((suffix, context.note))
        if not done or not done[-1].extend(context.ids, response, number):
            done.append(GrowingSample(context.ids, response, number, suffix))
    if not done:
        raise SampleRefused(found.refused[0].reason, found.refused[0].detail)
    found.samples.extend(g.sample() for g in done)
    return found


def _answer_ids(chat: ChatTemplate, context: FittedPrompt, answer: Message, k: int, tools: Tools) -> list[int]:
    """Ids of a given answer behind its context."""
    full_text = chat.text([*context.messages, answer], tools)
    prefix, full = context.ids, chat.ids(full_text)
    same = full[: len(prefix)] == prefix
    if same:
        rest: list[int] | None = full[len(prefix) :]
    else:
        rest = _rest_by_text(chat, chat.text(context.messages, tools, ask=True), full_text, prefix, full)
    if rest is None:
        at = next((i for i, (a, b) in enumerate(zip(prefix, full, strict=False)) if a != b), len(full))
        raise SampleRefused(
            Reason.PREFIX_MISMATCH,
            f"message {k}: beside the answer, the template renders its context otherwise from token {at} of "
            f"{len(prefix)} on; expected the generation prompt, unchanged, before the answer",
        )
    suffix = chat.end.kept + chat.end.trailer
    if rest[max(0, len(rest) - len(suffix)) :] != suffix:
        raise SampleRefused(
            Reason.NO_END_OF_TURN,
            f"message {k}: its last ids are {rest[-len(suffix) :]}, expected the template's end of turn {suffix}",
        )
    response = rest[: len(rest) - len(chat.end.trailer)]
    if not response:
        raise SampleRefused(Reason.EMPTY_LOSS_MASK, f"message {k} renders to no token; expected at least one to learn")
    return response


def _rest_by_text(
    chat: ChatTemplate, prefix_text: str, full_text: str, prefix: list[int], full: list[int]
) -> list[int] | None:
    if not full_text.startswith(prefix_text):
        return None
    rest = chat.ids(full_text[len(prefix_text) :])
    # A tokenizer that marks the beginning of every text would put a blank here that the conversation lacks.
    return rest if chat.decode(prefix + rest) == chat.decode(full) else None
