"""One row of a prompt source becomes one conversation, or a refusal that says what is wrong with it.

Forms of a row, the first that is there counts:
  - `messages`: OpenAI's list of {role, content, …};
  - `conversations`: ShareGPT's list, as {from, value} or as {role, content};
  - `prompt`: one user turn as text, or a list of messages.

Roles end as system, user, assistant or tool. Text parts of a content list are joined with a line break (as vLLM
does for templates that take text); any other part is refused. Of a message's other keys those in `_EXTRAS` are
kept, the rest is not for the model. A conversation has a user turn, and nothing but system turns before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cache_schema.errors import CacheError
from cache_schema.identity import canonical_json, sha256_bytes
from cache_schema.names import MAX_SAMPLE_ID_BYTES, require_sample_id
from stages.errors import SampleRefused

FORMS = ("messages", "conversations", "prompt")
ID_FIELDS = ("id", "sample_id", "uuid", "prompt_id")
FIELDS = (*FORMS, *ID_FIELDS, "category", "difficulty", "tools")
"""All fields of a row that are looked at."""
_ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
    "function_call": "assistant",
    "tool": "tool", "function": "tool", "tool_response": "tool", "observation": "tool", "ipython": "tool",
}  # fmt: skip
_EXTRAS = ("name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking")
_SHOWN = 60
_SHOWN_FIELDS = 8
_CONTENT_ID_DIGITS = 16
_SUFFIX_BYTES = len("~99999#turn-99999")
_SAMPLE_ID = re.compile(r"(#turn-|~)\d+\Z")


class Reason(StrEnum):
    """Why a row of a prompt source was rejected."""

    BAD_UTF8 = "bad_utf8"
    BAD_JSON = "bad_json"
    NOT_AN_OBJECT = "not_an_object"
    NO_KNOWN_FIELD = "no_known_field"
    NOT_A_LIST = "messages_not_a_list"
    NO_MESSAGES = "no_messages"
    BAD_MESSAGE = "bad_message"
    UNKNOWN_ROLE = "unknown_role"
    UNSUPPORTED_CONTENT = "unsupported_content"
    EMPTY_CONTENT = "empty_content"
    BAD_TOOL_CALLS = "bad_tool_calls"
    BAD_TOOLS = "bad_tools"
    NO_USER_TURN = "no_user_turn"
    FIRST_TURN_NOT_USER = "first_turn_not_user"
    BAD_ID = "bad_id"
    BAD_VALUE = "bad_value"
    DUPLICATE_ID = "duplicate_id"
    DUPLICATE_CONTENT = "duplicate_content"
    # Found later, when there are token ids:
    PROMPT_TOO_LONG = "prompt_too_long"
    SPECIAL_TOKEN_TEXT = "special_token_text"
    TEMPLATE_ERROR = "template_error"
    PREFIX_MISMATCH = "prefix_mismatch"
    NO_END_OF_TURN = "no_end_of_turn"
    EMPTY_LOSS_MASK = "empty_loss_mask"
    ANSWER_TOO_SHORT = "answer_too_short"
    # Not a loss (`KEPT_REASONS`): the sample is there, without its earliest turns, or without the question at its end.
    PROMPT_SHORTENED = "prompt_shortened"
    UNANSWERED_TURN = "unanswered_turn"


@dataclass(frozen=True, slots=True)
class Conversation:
    """One sample as it is asked, before any tokenizer."""

    sample_id: str
    messages: list[dict[str, Any]]
    """Each has `role` and `content` (text, or None beside `tool_calls`), and perhaps keys of `_EXTRAS`."""
    category: str | None = None
    tools: list[dict[str, Any]] | None = None
    """Tool schemas for the chat template."""
    difficulty: str | None = None
    """As the data has it; evaluation counts by it."""

    def content_json(self) -> str:
        """Canonical JSON of what the model is shown; equal for equal conversations whatever their ids."""
        return canonical_json(self.messages if self.tools is None else [self.messages, self.tools])


def parse_row(row: Any, default_category: str | None = None) -> Conversation:
    """The conversation in a row.

    Args:
        row: parsed JSON, or a row of a table.
        default_category: taken when the row has none.

    Raises:
        SampleRefused: the row cannot be used; `reason` is one of `Reason`.
    """
    if not isinstance(row, Mapping):
        raise SampleRefused(Reason.NOT_AN_OBJECT, f"the row is {shown(row)}; expected a JSON object")
    messages = [_message(m, i) for i, m in enumerate(_raw_messages(row))]
    _require_turns(messages)
    tools = _tools(row.get("tools"))
    category = row.get("category")
    category = category if isinstance(category, str) and category else default_category
    conversation = Conversation(row_id(row) or "", messages, category, tools)
    try:
        content = conversation.content_json()
        canonical_json(category)
        sample_id = conversation.sample_id or sha256_bytes(content.encode())[:_CONTENT_ID_DIGITS]
    except CacheError as error:
        raise SampleRefused(Reason.BAD_VALUE, f"{error}; expected JSON values and text that UTF-8 can hold") from error
    return Conversation(sample_id, messages, category, tools, difficulty_of(row))


def difficulty_of(row: Mapping[str, Any]) -> str | None:
    """The row's difficulty as text, if it has a text or a whole number there."""
    value = row.get("difficulty")
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) and value != "" else None


def row_id(row: Mapping[str, Any]) -> str | None:
    """The row's own id as text, from the first of `ID_FIELDS` that is there; None if it has none.

    Raises:
        SampleRefused: the id is neither text nor a whole number, or cannot be stored.
    """
    for name in ID_FIELDS:
        value = row.get(name)
        if value is None or value == "":
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # a table with missing ids has its whole numbers as floats
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise SampleRefused(Reason.BAD_ID, f"{name} is {shown(value)}; expected text or a whole number")
        _require_id(name, str(value))
        return str(value)
    return None


def _require_id(name: str, value: str) -> None:
    try:
        require_sample_id(value)
    except CacheError as error:
        raise SampleRefused(Reason.BAD_ID, f"{name}: {error}") from error
    # Samples are named <id>~2#turn-3, which has to be storable and must be no other row's id.
    longest = MAX_SAMPLE_ID_BYTES - _SUFFIX_BYTES
    if len(value.encode()) > longest:
        detail = f"{name} is {shown(value)} of {len(value.encode())} bytes; expected at most {longest}"
        raise SampleRefused(Reason.BAD_ID, detail)
    if _SAMPLE_ID.search(value):
        detail = f"{name} is {shown(value)}; expected neither ~<number> nor #turn-<number> at its end: samples end so"
        raise SampleRefused(Reason.BAD_ID, detail)


def shown(value: Any) -> str:
    """A value for a message: its type (unless it is text) and the beginning of its `repr`, which UTF-8 can hold."""
    if value is None:
        return "null"
    text = repr(value)
    text = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
    return text if isinstance(value, str) else f"{type(value).__name__} {text}"


def _raw_messages(row: Mapping[str, Any]) -> list[Any]:
    name = next((n for n in FORMS if row.get(n) is not None), None)
    if name is None:
        fields = ", ".join(shown(str(name)) for name in sorted(map(str, row))[:_SHOWN_FIELDS]) or "none"
        detail = f"the row's fields are: {fields}; expected one of {', '.join(FORMS)}"
        raise SampleRefused(Reason.NO_KNOWN_FIELD, detail)
    value = row[name]
    if name == "prompt" and isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise SampleRefused(Reason.NOT_A_LIST, f"{name} is {shown(value)}; expected a list of messages")
    if not value:
        raise SampleRefused(Reason.NO_MESSAGES, f"{name} is an empty list; expected at least one user turn")
    return value


def _message(raw: Any, i: int) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise SampleRefused(Reason.BAD_MESSAGE, f"message {i} is {shown(raw)}; expected an object with a role")
    spoken = raw.get("role", raw.get("from"))
    role = _ROLES.get(spoken) if isinstance(spoken, str) else None
    if role is None:
        detail = f"message {i} has role {shown(spoken)}; expected one of {', '.join(_ROLES)}"
        raise SampleRefused(Reason.UNKNOWN_ROLE, detail)
    content = raw.get("content") if raw.get("content") is not None else raw.get("value")
    extras = {k: raw[k] for k in _EXTRAS if raw.get(k) is not None}
    if spoken == "function_call" and "tool_calls" not in extras:
        content, extras["tool_calls"] = None, [_sharegpt_call(content, i)]
    if not extras.get("tool_calls", True):
        del extras["tool_calls"]  # an empty list is no call
    _require_tool_calls(extras.get("tool_calls"), role, i)
    text = None if content is None and "tool_calls" in extras else _text(content, i)
    # A tool may return nothing and a system turn may be blank on purpose; user and assistant have to speak.
    if role in ("user", "assistant") and "tool_calls" not in extras and not (text or "").strip():
        raise SampleRefused(Reason.EMPTY_CONTENT, f"message {i} ({role}) has no text; expected some")
    return {"role": role, "content": text, **extras}


def _text(content: Any, i: int) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise SampleRefused(Reason.EMPTY_CONTENT, f"message {i} has no content; expected text")
    if not isinstance(content, list):
        detail = f"message {i} has content {shown(content)}; expected text or text parts"
        raise SampleRefused(Reason.UNSUPPORTED_CONTENT, detail)
    return "\n".join(_part(part, i) for part in content)


def _part(part: Any, i: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = f"a part of type {shown(part.get('type'))}" if isinstance(part, Mapping) else f"the part {shown(part)}"
    raise SampleRefused(Reason.UNSUPPORTED_CONTENT, f"message {i} has {kind}; expected only text parts")


def _sharegpt_call(value: Any, i: int) -> dict[str, Any]:
    try:
        call = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        call = None
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        detail = f"message {i} (function_call) is {shown(value)}; expected a JSON object with name and arguments"
        raise SampleRefused(Reason.BAD_TOOL_CALLS, detail)
    return {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}


def _require_tool_calls(calls: Any, role: str, i: int) -> None:
    if calls is None:
        return
    if role != "assistant" or not isinstance(calls, list) or not all(isinstance(c, Mapping) for c in calls):
        detail = f"message {i} ({role}) has tool_calls {shown(calls)}; expected objects in a list, from the assistant"
        raise SampleRefused(Reason.BAD_TOOL_CALLS, detail)


def _tools(value: Any) -> list[dict[str, Any]] | None:
    tools = value
    if isinstance(value, str):  # tables often hold the schemas as JSON text
        try:
            tools = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError):
            tools = False
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(t, Mapping) for t in tools):
        raise SampleRefused(Reason.BAD_TOOLS, f"tools is {shown(value)}; expected a list of tool schemas")
    return [dict(t) for t in tools]


def _require_turns(messages: list[dict[str, Any]]) -> None:
    roles = [m["role"] for m in messages]
    first = next((r for r in roles if r != "system"), None)
    if first is None:
        raise SampleRefused(Reason.NO_USER_TURN, f"the roles are {', '.join(roles)}; expected a user turn")
    if first != "user":
        raise SampleRefused(Reason.FIRST_TURN_NOT_USER, f"the first turn is from {first}; expected it from user")
