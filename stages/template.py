"""The target's chat template: conversations to text, text to ids, and where a turn ends.

Text of control tokens ("<|im_end|>" in a user's question) would become the tokens themselves, here and in every
server that takes text. A conversation that holds such text is refused (`special_token_text`): no engine can answer
it otherwise than with a broken frame of turns, and nothing but the template may write control tokens.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from stages.conversation import Reason
from stages.errors import SampleRefused, TargetError, TargetSettingError

Message = Mapping[str, Any]
Messages = Sequence[Message]
Tools = Sequence[Any] | None
_PROBE = "Zq7probe"
"""Text that no template changes, to see what a template writes behind an answer."""
_TODAY = "2024-07-26"
"""What templates that write today's date are given, unless the recipe says otherwise: a prompt must not depend on
the day on which it is rendered. It is the date that Llama 3's template falls back to."""
_CLOCK = "strftime_now"
"""The function by which a template asks for the date. In `chat_template_kwargs` it may be a date (2026-01-31)."""
_DIRECTIVES = "YymdbBaAjHIMSpe"
_PINNED_CLOCK = (
    "{% macro strftime_now(format) %}{% set made = namespace(text=format) %}{% for directive, value in pinned_clock %}"
    "{% set made.text = made.text | replace(directive, value) %}{% endfor %}{{ made.text }}{% endmacro +%}"
)
"""Stands before a template that asks for the date, and takes the place of the function of that name."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """What a template writes behind an assistant's answer, cut at the token that ends the turn."""

    kept: list[int]
    """Ids up to and including the end-of-turn token; empty if the template has none."""
    trailer: list[int]
    """Ids behind it, which the model never writes."""


class ChatTemplate:
    """A tokenizer's chat template with the recipe's arguments.

    Args:
        tokenizer: the target's.
        template_kwargs: passed to the template, e.g. `{enable_thinking: false}`.

    Raises:
        TargetError: the tokenizer has no chat template, or `strftime_now` is no date.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise TargetError(
                "the target's tokenizer has no chat template; take an instruct model, or put a chat_template.jinja "
                "into its folder"
            )
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self._clock = _clock(self.template_kwargs.pop(_CLOCK, _TODAY))

    def text(self, messages: Messages, tools: Tools = None, *, ask: bool = False) -> str:
        """The conversation as text; `ask` adds what stands before an answer.

        Raises:
            SampleRefused: the template cannot render it (`template_error`).
        """
        schemas, arguments = list(tools) if tools else None, self.template_kwargs
        try:
            template = self.tokenizer.get_chat_template(None, schemas)
            if _CLOCK in template:
                template, arguments = _PINNED_CLOCK + template, arguments | {"pinned_clock": self._clock}
            rendered = self.tokenizer.apply_chat_template(
                [_with_parsed_arguments(m) for m in messages], tools=schemas, chat_template=template, tokenize=False,
                add_generation_prompt=ask, **arguments,
            )  # fmt: skip
        # What a template says with raise_exception, and what Jinja gives for content that it was not written for.
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            roles = ", ".join(str(m["role"]) for m in messages)
            detail = f"the chat template cannot render the turns {roles}: {type(error).__name__}: {error}"
            raise SampleRefused(Reason.TEMPLATE_ERROR, detail) from error
        return str(rendered)

    def ids(self, text: str) -> list[int]:
        """Ids of text, control tokens included; the template writes bos itself where the model wants one."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def prompt_ids(self, messages: Messages, tools: Tools = None) -> list[int]:
        """Ids of a conversation up to the point where the assistant speaks.

        Raises:
            SampleRefused: as `text`.
        """
        return self.ids(self.text(messages, tools, ask=True))

    @functools.cached_property
    def end(self) -> TurnEnd:
        """What the template writes behind an answer, found by rendering a probe.

        The end-of-turn token is the first added (special) token there.

        Raises:
            TargetError: the template cannot render a question with its answer.
        """
        try:
            text = self.text([{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}])
        except SampleRefused as error:
            raise TargetError(f"the chat template cannot render one question and its answer: {error.detail}") from error
        _, probe, tail = text.rpartition(_PROBE)
        if not probe:
            raise TargetError(
                f"the chat template leaves out the assistant's answer: it renders {tail!r}; use another one"
            )
        ids = self.ids(tail)
        added = set(self.tokenizer.added_tokens_decoder) | set(self.tokenizer.all_special_ids)
        end = next((i + 1 for i, token in enumerate(ids) if token in added), 0)
        return TurnEnd(ids[:end], ids[end:])

    @functools.cached_property
    def control_ids(self) -> frozenset[int]:
        """Tokens that only the template may write: those that the tokenizer marks special, and the end of turn.

        Added tokens that are not special (`<think>`, `<tool_call>`) belong to what a model writes.
        """
        marked = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return frozenset(marked | set(self.tokenizer.all_special_ids) | set(self.end.kept[-1:]))

    def control_token_in(self, value: Any) -> str | None:
        """A control token that the tokenizer finds in the texts of a message or of tool schemas; None if none."""
        text = "\n".join(_texts(value))
        for token in set(self.ids(text)) & self.control_ids:
            shown = self.tokenizer.convert_ids_to_tokens(token)
            # Text that a tokenizer does not know becomes its unknown token, which is then no control token.
            if token != self.tokenizer.unk_token_id or shown in text:
                return str(shown)
        return None

    def require_plain_text(self, messages: Messages, tools: Tools = None) -> None:
        """Refuse text that would become control tokens.

        Raises:
            SampleRefused: `special_token_text`.
        """
        parts = [(f"message {i} ({m['role']})", {k: v for k, v in m.items() if k != "role"})
                 for i, m in enumerate(messages)]  # fmt: skip
        for where, value in [*parts, ("tools", tools)]:
            token = self.control_token_in(value) if value else None
            if token is not None:
                raise SampleRefused(
                    Reason.SPECIAL_TOKEN_TEXT,
                    f"{where} holds the text {token!r}, which the target's tokenizer turns into a control token; "
                    "expected text without it",
                )


def _clock(date: Any) -> list[list[str]]:
    """Each directive of `strftime` with what it gives on this date."""
    try:
        day = datetime.datetime.fromisoformat(str(date))
    except ValueError as error:
        raise TargetSettingError(
            f"target.chat_template_kwargs.{_CLOCK} is {date!r}; give the date that the template is to see, "
            "such as 2026-01-31"
        ) from error
    plain = [[f"%-{d}", day.strftime(f"%{d}").lstrip("0")] for d in "mdj"]
    return [*plain, *([f"%{d}", day.strftime(f"%{d}")] for d in _DIRECTIVES)]


def _with_parsed_arguments(message: Message) -> dict[str, Any]:
    """The message, with the arguments of tool calls as objects: OpenAI's rows have them as JSON text, which
    templates would quote once more (servers parse them before they render, too)."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    return dict(message) | {"tool_calls": [_parsed_call(call) for call in calls]}


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": parsed}} if isinstance(parsed, dict) else call


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
