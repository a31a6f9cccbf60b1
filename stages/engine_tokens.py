"""From a server's reply to the token ids of an answer, with proof.

Two kinds of servers:
  - Those that return ids (`token_ids`, and `prompt_token_ids` of what they really answered): theirs are taken as
    they are, once the prompt's have been compared with ours.
  - Those that return text only. It is tokenized here, once, and taken only if four things agree: decoding gives the
    text again, no byte was lost on the way (U+FFFD), no end of turn stands inside, and the server counted as many
    tokens as were found. What this cannot see is another split of the same text into equally many tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stages.engine import CONTEXT_LENGTH, Answer, Prompt, Refusal

NO_TOKEN_IDS, ROUND_TRIP, OTHER_PROMPT = "no_token_ids", "round_trip", "other_prompt"
UNFINISHED = "unfinished"
_LOST = "�"
_SHOWN = 80


class BadReply(Exception):
    """A reply that is none: not what the protocol says. Asking again may help."""


@dataclass(frozen=True, slots=True)
class TokenReader:
    """Reads answers out of replies.

    Attributes:
        tokenizer: the target's.
        stop_ids: a turn ends with the first of these.
        end_id: ends the turn where a server only says that it ended; None if nothing is known to.
        max_new_tokens: what was asked for.
    """

    tokenizer: Any
    stop_ids: frozenset[int]
    end_id: int | None
    max_new_tokens: int

    def read(self, prompt: Prompt, body: Mapping[str, Any]) -> Answer | Refusal:
        """The answer to `prompt` in a reply.

        Raises:
            BadReply: the reply lacks what every reply has.
        """
        choice = first_choice(body)
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            detail = f"the server ended the answer for reason {reason!r}; expected 'stop' or 'length'"
            return Refusal(prompt.sample_id, UNFINISHED, detail)
        problem = other_prompt(prompt.ids, body)
        if problem:
            return Refusal(prompt.sample_id, OTHER_PROMPT, problem)
        ids = token_list(choice, "token_ids")
        found = self._from_text(choice, body) if ids is None else self._from_ids(ids, choice)
        if isinstance(found, tuple):
            return Refusal(prompt.sample_id, *found)
        facts = {"tokens": "text" if ids is None else "server", **_facts(body)}
        return self._answer(prompt, found, facts)

    def _answer(self, prompt: Prompt, ids: list[int], facts: dict[str, Any]) -> Answer | Refusal:
        first = next((i for i, token in enumerate(ids) if token in self.stop_ids), None)
        if first is not None:
            return Answer(prompt.sample_id, ids[: first + 1], "stop", facts)
        if len(ids) != self.max_new_tokens:
            detail = (f"the server stopped after {len(ids)} tokens without an end of turn, expected "
                      f"{self.max_new_tokens} (generate.max_new_tokens): prompt ({len(prompt.ids)} tokens) and answer "
                      "do not fit its context")
            return Refusal(prompt.sample_id, CONTEXT_LENGTH, detail)
        return Answer(prompt.sample_id, ids, "length", facts)

    def _from_ids(self, ids: list[int], choice: Mapping[str, Any]) -> list[int] | tuple[str, str]:
        if choice["finish_reason"] == "length" or self.stop_ids.intersection(ids):
            return ids
        # Some servers keep the token that ended the turn to themselves, but name it.
        named = next((v for k in ("stop_reason", "matched_stop") if type(v := choice.get(k)) is int), self.end_id)
        if named in self.stop_ids:
            return [*ids, named]
        return NO_TOKEN_IDS, f"the server ended the turn with {named!r}, which is none of {sorted(self.stop_ids)}"

    def _from_text(self, choice: Mapping[str, Any], body: Mapping[str, Any]) -> list[int] | tuple[str, str]:
        text, counted = choice.get("text"), usage(body, "completion_tokens")
        if not isinstance(text, str):
            raise BadReply("its first choice has neither token_ids nor text")
        if counted is None:
            return NO_TOKEN_IDS, "the server returns text only and does not say of how many tokens it is"
        ids = encode(self.tokenizer, text)
        if _LOST in text or decode(self.tokenizer, ids) != text:
            return ROUND_TRIP, f"the text does not come back from its token ids: {_shown(text)}"
        if self.stop_ids.intersection(ids):
            return ROUND_TRIP, f"an end of turn stands inside the text: {_shown(text)}"
        if choice["finish_reason"] == "stop":
            if self.end_id is None:
                return NO_TOKEN_IDS, "the server returns text only, and the chat template names no end of turn"
            ids = [*ids, self.end_id]
        if len(ids) != counted:
            return ROUND_TRIP, f"the text is {len(ids)} tokens here and {counted} at the server: {_shown(text)}"
        return ids


def first_choice(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first answer in a reply.

    Raises:
        BadReply: there is none.
    """
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise BadReply(f"it has no choices: {_shown(str(dict(body)))}")
    return choices[0]


def token_list(choice: Mapping[str, Any], name: str) -> list[int] | None:
    """A list of token ids, or None where there is none.

    Raises:
        BadReply: it is something else, or empty.
    """
    value = choice.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(type(i) is int and 0 <= i < 2**31 for i in value):
        raise BadReply(f"its {name} are {_shown(str(value))}; expected token ids")
    return value


def other_prompt(ids: list[int], body: Mapping[str, Any]) -> str | None:
    """What shows that a reply answers another prompt than `ids`; None if nothing does.

    Raises:
        BadReply: see `token_list`.
    """
    theirs = token_list(first_choice(body), "prompt_token_ids")
    if theirs is not None and theirs != ids:
        at = next((i for i, (a, b) in enumerate(zip(ids, theirs, strict=False)) if a != b), min(len(ids), len(theirs)))
        return f"the server answered a prompt of {len(theirs)} tokens that differs from ours ({len(ids)}) at token {at}"
    counted = usage(body, "prompt_tokens")
    if theirs is None and counted is not None and counted != len(ids):
        return f"the server answered a prompt of {counted} tokens, ours has {len(ids)}"
    return None


def usage(body: Mapping[str, Any], name: str) -> int | None:
    """A count in a reply's `usage`; None if it is not told."""
    counts = body.get("usage")
    value = counts.get(name) if isinstance(counts, dict) else None
    return value if type(value) is int else None


def prompt_text(tokenizer: Any, ids: list[int]) -> str | None:
    """The text that a server tokenizes to exactly `ids`; None if there is none.

    A server adds what its tokenizer adds to every text (bos, mostly), so that is left out where the ids begin with it.
    """
    text = decode(tokenizer, ids)
    candidates = [text]
    if tokenizer.bos_token and text.startswith(tokenizer.bos_token):
        candidates.append(text.removeprefix(tokenizer.bos_token))
    return next((t for t in candidates if list(tokenizer(t, verbose=False)["input_ids"]) == ids), None)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, nothing added."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def decode(tokenizer: Any, ids: list[int]) -> str:
    """The text of token ids, special tokens included."""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _facts(body: Mapping[str, Any]) -> dict[str, Any]:
    fingerprint = body.get("system_fingerprint")
    return {"server_build": fingerprint} if isinstance(fingerprint, str) else {}


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
