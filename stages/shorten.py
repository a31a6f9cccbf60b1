"""Prompts that are too long: dropped, or shortened by leaving out the earliest turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stages.conversation import Reason
from stages.errors import SampleRefused
from stages.template import ChatTemplate, Messages, Tools


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLimit:
    """How long the context of an answer may be, and what happens to a longer one."""

    max_tokens: int
    too_long: Literal["drop", "shorten"] = "drop"


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    """A context that is short enough."""

    messages: list[Mapping[str, Any]]
    ids: list[int]
    n_left_out: int = 0
    """Messages left out behind the system turns."""
    n_tokens: int = 0
    """Tokens before messages were left out."""

    @property
    def note(self) -> str:
        """What was done, for the ledger."""
        return f"the first {self.n_left_out} messages left out, from {self.n_tokens} to {len(self.ids)} tokens"


def fit_prompt(chat: ChatTemplate, messages: Messages, tools: Tools, limit: PromptLimit | None) -> FittedPrompt:
    """The context as ids, without its earliest turns if need be and if that is allowed.

    Args:
        chat: the target's template.
        messages: the context, up to the point where the assistant speaks.
        tools: tool schemas.
        limit: None lets any length pass.

    Raises:
        SampleRefused: too long and not to be shortened, or too long with the latest user turn alone
            (`prompt_too_long`); or as `ChatTemplate.text`.
    """
    ids = chat.prompt_ids(messages, tools)
    n_tokens = len(ids)
    if limit is None or n_tokens <= limit.max_tokens:
        return FittedPrompt(list(messages), ids, 0, n_tokens)
    for shorter in shortened(messages) if limit.too_long == "shorten" else ():
        ids = chat.prompt_ids(shorter, tools)
        if len(ids) <= limit.max_tokens:
            return FittedPrompt(shorter, ids, len(messages) - len(shorter), n_tokens)
    allowed = f"{n_tokens} tokens, at most {limit.max_tokens} allowed (prompts.max_prompt_tokens)"
    rest = "" if len(ids) == n_tokens else f"; {len(ids)} with the latest user turn alone"
    raise SampleRefused(Reason.PROMPT_TOO_LONG, allowed + rest)


def shortened(messages: Messages) -> Iterator[list[Mapping[str, Any]]]:
    """The conversation without its first turn, its first two turns, and so on.

    The system turns before the first user turn stay, and so does what follows the latest user turn. A turn is a
    message of the user with all that follows it, so that no answer or tool result loses what it belongs to.
    """
    users = [i for i, m in enumerate(messages) if m["role"] == "user"]
    head: Sequence[Mapping[str, Any]] = messages[: users[0]] if users else ()
    for start in users[1:]:
        yield [*head, *messages[start:]]
