"""A conversation whose assistant's turns are all answered anew by the target, one after the other.

    user turn 1 → the target's answer 1 → user turn 2 → the target's answer 2 → …

Turn k is asked with the target's own earlier answers as context, as text in the template: what a chat with the
target would have shown it. Several given answers in a row are one turn. A given turn to which a tool's result
belongs is answered anew as well, but the conversation goes on with the given call, since the result is its own.

Turns share a sample as long as the ids of one context continue those of the turn before it, answer included.
Where they do not (the template drops earlier reasoning, the text of an answer tokenizes otherwise than the target
wrote it, early turns were left out, a given tool call took the answer's place), the turn starts its own sample.
What is supervised is exactly the ids that the target gave, behind exactly the ids that it was asked with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from stages.conversation import Conversation, Reason
from stages.engine import Answer, Prompt, Refusal
from stages.errors import SampleRefused
from stages.shorten import FittedPrompt, PromptLimit, fit_prompt
from stages.spans import GrowingSample, turn_suffix
from stages.template import ChatTemplate


@dataclass(frozen=True, slots=True)
class _Turn:
    """What others say before an answer, and what is given in its place."""

    before: list[dict[str, Any]]
    given: list[dict[str, Any]]
    stays: bool
    """The given turn stays in the context of later turns, because a tool's result follows it."""


@dataclass(slots=True)
class Answered:
    """A sample of the dialogue."""

    growing: GrowingSample
    messages: list[dict[str, Any]]
    """Context of its last answer, as the target saw it."""
    last: Answer


@dataclass(slots=True)
class Dialogue:
    """One conversation being played. Ask, answer, ask again until `ask` gives None.

    Attributes:
        samples: of the turns answered so far, in order.
        notes: turns that are in no sample and why, and what was shortened: (suffix, reason, detail).
    """

    conversation: Conversation
    chat: ChatTemplate
    limit: PromptLimit
    stop_ids: frozenset[int]
    samples: list[Answered] = field(default_factory=list)
    notes: list[tuple[str, str, str]] = field(default_factory=list)
    _turns: list[_Turn] = field(init=False)
    _context: list[dict[str, Any]] = field(default_factory=list)
    _n_answered: int = 0
    _asked: FittedPrompt | None = None

    def __post_init__(self) -> None:
        self._turns = split_turns(self.conversation.messages)
        try:
            self.chat.require_plain_text(list(self._what_stays()), self.conversation.tools)
        except SampleRefused as refused:
            self._stop(str(refused.reason), refused.detail)

    def _what_stays(self) -> Iterator[dict[str, Any]]:
        for turn in self._turns:
            yield from turn.before
            if turn.stays:
                yield from turn.given

    @property
    def n_turns(self) -> int:
        """The assistant's turns in all."""
        return len(self._turns)

    def ask(self) -> Prompt | None:
        """The next turn's context; None when the last one is answered or no further one can be asked."""
        if self._n_answered >= self.n_turns:
            return None
        turn = self._turns[self._n_answered]
        number = self._n_answered + 1
        self._context += turn.before
        try:
            fitted = fit_prompt(self.chat, self._context, self.conversation.tools, self.limit)
        except SampleRefused as refused:
            self._stop(str(refused.reason), refused.detail)
            return None
        if fitted.n_left_out:
            self.notes.append((turn_suffix(number), str(Reason.PROMPT_SHORTENED), fitted.note))
        self._asked = fitted
        return Prompt(self.conversation.sample_id + turn_suffix(number), fitted.ids)

    def take(self, outcome: Answer | Refusal) -> None:
        """The outcome of the prompt that `ask` gave last."""
        if isinstance(outcome, Refusal):
            self._stop(outcome.reason, outcome.detail)
            return
        assert self._asked is not None
        fitted, turn = self._asked, self._turns[self._n_answered]
        self._n_answered += 1
        number = self._n_answered
        messages = [dict(m) for m in fitted.messages]
        newest = self.samples[-1] if self.samples else None
        if newest is not None and newest.growing.extend(fitted.ids, outcome.ids, number):
            newest.messages, newest.last = messages, outcome
        else:
            growing = GrowingSample(fitted.ids, outcome.ids, number, turn_suffix(number))
            self.samples.append(Answered(growing, messages, outcome))
        self._go_on(turn, outcome)

    def _go_on(self, turn: _Turn, answer: Answer) -> None:
        if self._n_answered == self.n_turns:
            return
        if turn.stays:
            self._context += turn.given
            return
        said = answer.ids[:-1] if answer.ids and answer.ids[-1] in self.stop_ids else answer.ids
        control = [i for i in said if i in self.chat.control_ids]
        if control:
            text = self.chat.decode(control[:1])
            detail = f"the target's answer before it holds the control token {text!r}, which no text can repeat"
            self._stop(str(Reason.SPECIAL_TOKEN_TEXT), detail)
            return
        self._context.append({"role": "assistant", "content": self.chat.decode(said)})

    def _stop(self, reason: str, detail: str) -> None:
        """No further turn can be asked, since its context would need the answer to this one."""
        number, n = self._n_answered + 1, self.n_turns
        more = "" if number == n else f" (turn {number} of {n}; those behind it need its answer)"
        self.notes.append((turn_suffix(number), reason, detail + more))
        self._n_answered = n


def split_turns(messages: list[dict[str, Any]]) -> list[_Turn]:
    """The assistant's turns of a conversation, each with the messages before it; the last one may have no answer."""
    turns: list[_Turn] = []
    before: list[dict[str, Any]] = []
    given: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            given.append(message)
            continue
        if given:
            turns.append(_Turn(before, given, stays=message["role"] == "tool"))
            before, given = [], []
        before.append(message)
    turns.append(_Turn(before, given, stays=False))
    return turns
