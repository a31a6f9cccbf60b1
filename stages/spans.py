"""Samples with one or several supervised stretches, grown turn by turn as long as contexts continue each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def turn_suffix(number: int) -> str:
    """What is appended to a conversation's id for its assistant's turn `number` (1-based); empty for the first."""
    return f"#turn-{number}" if number > 1 else ""


@dataclass(frozen=True, slots=True)
class RenderedSample:
    """A sample as ids."""

    prompt_ids: list[int]
    response_ids: list[int]
    """From the first supervised answer to the end of the last one; turns of others may lie between."""
    loss_mask: NDArray[np.uint8]
    """[prompt + response tokens] uint8; 1 on the assistant's tokens, the end of turn included, headers excluded."""
    suffix: str
    """Empty for the conversation's first sample, else `#turn-2` and so on (by the assistant's turns, 1-based):
    to be appended to the sample id."""
    turns: tuple[int, ...]
    """The assistant's turns (1-based) that are supervised here."""
    longest_answer: int
    """Tokens of the longest supervised stretch."""


class GrowingSample:
    """A sample to which later turns are added while their context continues it.

    Args:
        prompt: ids of the first answer's context.
        answer: its ids.
        number: which of the assistant's turns it is, 1-based.
        suffix: of the sample.
    """

    def __init__(self, prompt: list[int], answer: list[int], number: int, suffix: str) -> None:
        self.ids = prompt + answer
        self.n_prompt = len(prompt)
        self.stretches = [(len(prompt), len(self.ids))]
        self.turns = [number]
        self.suffix = suffix

    def extend(self, prompt: list[int], answer: list[int], number: int) -> bool:
        """Add a turn; false, and nothing done, when its context does not begin with the sample so far."""
        if prompt[: len(self.ids)] != self.ids:
            return False
        self.ids = prompt + answer
        self.stretches.append((len(prompt), len(self.ids)))
        self.turns.append(number)
        return True

    def sample(self) -> RenderedSample:
        """The sample as it is now."""
        mask = np.zeros(len(self.ids), dtype=np.uint8)
        for start, stop in self.stretches:
            mask[start:stop] = 1
        return RenderedSample(self.ids[: self.n_prompt], self.ids[self.n_prompt :], mask, self.suffix,
                              tuple(self.turns), max(stop - start for start, stop in self.stretches))  # fmt: skip
