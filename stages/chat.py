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

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from stages.conversation import Reason
from stages.errors import SampleRefused, TargetError

Messages = Sequence[Mapping[str, Any]]
_PROBE = "Zq7probe"
"""Text that no template changes, to see what a template writes behind an answer."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """What a template writes behind an assistant's answer, cut at the token that ends the turn."""

    kept: list[int]
    """Ids up to and including the end-of-turn token; empty if the template has none."""
    trailer: list[int]
    """Ids behind it, which the model never writes."""


@dataclass(frozen=True, slots=True)
class RenderedSample:
    """A sample with given answers, as ids."""

    prompt_ids: list[int]
    response_ids: list[int]
    """From the first supervised answer to the end of the last one; turns of others may lie between."""
    loss_mask: NDArray[np.uint8]
    """[prompt + response tokens] uint8; 1 on the assistant's tokens, the end of turn included, headers excluded."""
    suffix: str
    """Empty for the conversation's first sample, else `#turn-2` and so on (by the assistant's turns, 1-based):
    to be appended to the sample id."""


@dataclass(frozen=True, slots=True)
class RefusedTurn:
    """An assistant's turn whose boundary cannot be found."""

    suffix: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class GivenSamples:
    """All that came out of one conversation: at least one sample, and the turns that are in none."""

    samples: list[RenderedSample]
    refused: list[RefusedTurn]


def render_prompt(
    tokenizer: Any,
    messages: Messages,
    *,
    tools: Sequence[Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids of a conversation up to the point where the assistant speaks.

    The template writes bos itself where the model wants one, so the tokenizer adds no special tokens.

    Raises:
        SampleRefused: the template cannot render this conversation (`template_error`).
        TargetError: the tokenizer has no chat template.
    """
    chat = _Chat(tokenizer, tools, template_kwargs or {})
    return chat.ids(chat.text(messages, ask=True))


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
    """What the template writes behind an answer, found by rendering a probe.

    The end-of-turn token is the first added (special) token there.

    Raises:
        TargetError: no chat template, or one that cannot render a question with its answer.
    """
    chat = _Chat(tokenizer, None, template_kwargs or {})
    try:
        text = chat.text([{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}])
    except SampleRefused as error:
        raise TargetError(f"the chat template cannot render one question and its answer: {error.detail}") from error
    _, probe, tail = text.rpartition(_PROBE)
    if not probe:
        raise TargetError(f"the chat template leaves out the assistant's answer: it renders {tail!r}; use another one")
    ids = chat.ids(tail)
    added = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
    end = next((i + 1 for i, token in enumerate(ids) if token in added), 0)
    return TurnEnd(ids[:end], ids[end:])


def render_given(
    tokenizer: Any,
    messages: Messages,
    *,
    tools: Sequence[Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> GivenSamples:
    """Ids and masks of a conversation whose answers are given.

    Args:
        tokenizer: the target's, with its chat template.
        messages: the conversation; what follows the last answer is left out.
        tools: tool schemas for the template.
        template_kwargs: passed to the template.

    Raises:
        SampleRefused: the template cannot render it (`template_error`), it has no answer (`empty_loss_mask`), or
            the boundary of no answer can be found (`prefix_mismatch`, `no_end_of_turn`).
        TargetError: the tokenizer has no usable chat template.
    """
    chat = _Chat(tokenizer, tools, template_kwargs or {})
    end = turn_end(tokenizer, template_kwargs=template_kwargs)
    done: list[_Growing] = []
    refused: list[RefusedTurn] = []
    turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    for number, k in enumerate(turns, start=1):
        try:
            prefix, response = _split_turn(chat, end, messages, k)
        except SampleRefused as error:
            if error.reason == Reason.TEMPLATE_ERROR:
                raise
            refused.append(RefusedTurn(f"#turn-{number}", str(error.reason), error.detail))
            continue
        if not done or not done[-1].extend(prefix, response):
            done.append(_Growing(prefix, response, f"#turn-{number}" if done else ""))
    if not done:
        if refused:
            raise SampleRefused(refused[0].reason, refused[0].detail)
        detail = f"none of the {len(messages)} messages is an answer of the assistant; expected at least one"
        raise SampleRefused(Reason.EMPTY_LOSS_MASK, detail)
    return GivenSamples([g.sample() for g in done], refused)


def _split_turn(chat: _Chat, end: TurnEnd, messages: Messages, k: int) -> tuple[list[int], list[int]]:
    """Ids of the context of turn k, and of its answer."""
    prefix_text, full_text = chat.text(messages[:k], ask=True), chat.text(messages[: k + 1])
    prefix, full = chat.ids(prefix_text), chat.ids(full_text)
    same = full[: len(prefix)] == prefix
    rest = full[len(prefix) :] if same else _rest_by_text(chat, prefix_text, full_text, prefix, full)
    if rest is None:
        at = next((i for i, (a, b) in enumerate(zip(prefix, full, strict=False)) if a != b), len(full))
        raise SampleRefused(
            Reason.PREFIX_MISMATCH,
            f"message {k}: beside the answer, the template renders its context otherwise from token {at} of "
            f"{len(prefix)} on; expected the generation prompt, unchanged, before the answer",
        )
    suffix = end.kept + end.trailer
    if rest[max(0, len(rest) - len(suffix)) :] != suffix:
        raise SampleRefused(
            Reason.NO_END_OF_TURN,
            f"message {k}: its last ids are {rest[-len(suffix) :]}, expected the template's end of turn {suffix}",
        )
    response = rest[: len(rest) - len(end.trailer)]
    if not response:
        raise SampleRefused(Reason.EMPTY_LOSS_MASK, f"message {k} renders to no token; expected at least one to learn")
    return prefix, response


def _rest_by_text(
    chat: _Chat, prefix_text: str, full_text: str, prefix: list[int], full: list[int]
) -> list[int] | None:
    if not full_text.startswith(prefix_text):
        return None
    rest = chat.ids(full_text[len(prefix_text) :])
    # A tokenizer that marks the beginning of every text would put a blank here that the conversation lacks.
    return rest if chat.decode(prefix + rest) == chat.decode(full) else None


class _Growing:
    """A sample to which later turns are added while their context continues it."""

    def __init__(self, prefix: list[int], response: list[int], suffix: str) -> None:
        self.ids = prefix + response
        self.n_prompt = len(prefix)
        self.answers = [(len(prefix), len(self.ids))]
        self.suffix = suffix

    def extend(self, prefix: list[int], response: list[int]) -> bool:
        if prefix[: len(self.ids)] != self.ids:
            return False
        self.ids = prefix + response
        self.answers.append((len(prefix), len(self.ids)))
        return True

    def sample(self) -> RenderedSample:
        mask = np.zeros(len(self.ids), dtype=np.uint8)
        for start, stop in self.answers:
            mask[start:stop] = 1
        return RenderedSample(self.ids[: self.n_prompt], self.ids[self.n_prompt :], mask, self.suffix)


@dataclass(frozen=True, slots=True)
class _Chat:
    tokenizer: Any
    tools: Sequence[Any] | None
    template_kwargs: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not getattr(self.tokenizer, "chat_template", None):
            raise TargetError(
                "the target's tokenizer has no chat template; take an instruct model, or put a chat_template.jinja "
                "into its folder"
            )

    def text(self, messages: Messages, *, ask: bool = False) -> str:
        try:
            rendered = self.tokenizer.apply_chat_template(
                [dict(m) for m in messages], tools=list(self.tools) if self.tools else None, tokenize=False,
                add_generation_prompt=ask, **self.template_kwargs,
            )  # fmt: skip
        # What a template says with raise_exception, and what Jinja gives for content that it was not written for.
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            roles = ", ".join(str(m["role"]) for m in messages)
            detail = f"the chat template cannot render the turns {roles}: {type(error).__name__}: {error}"
            raise SampleRefused(Reason.TEMPLATE_ERROR, detail) from error
        return str(rendered)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
