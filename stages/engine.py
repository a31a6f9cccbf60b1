"""What answers prompts: one small interface, whatever stands behind it.

An engine gets prompts as token ids and gives one outcome for each, in the order of the prompts, however they were
batched and whichever was finished first: an `Answer`, or a `Refusal` that says why there is none. It raises only
what stops every other prompt too (no server, a wrong model, no memory), so that no sample is lost on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from stages.config import GenerateConfig, TargetConfig
from stages.errors import StageError

CONTEXT_LENGTH = "context_length"
"""Reason of a refusal: prompt and answer do not fit the engine."""


class EngineError(StageError):
    """An engine cannot answer at all: a server is down, refuses the key, or serves another model."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the target is asked."""

    sample_id: str
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """What it answered; `ids` include the token that ended the turn."""

    sample_id: str
    ids: list[int]
    finish_reason: Literal["stop", "length"]
    facts: dict[str, Any] = field(default_factory=dict)
    """What the engine says about it, for the record."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a prompt has no answer."""

    sample_id: str
    reason: str
    """A snake_case code, for counting."""
    detail: str
    """What was found and what was expected."""


class Engine(Protocol):
    """Answers prompts."""

    def answer(
        self, prompts: Sequence[Prompt], config: GenerateConfig, *, seed: int, stop_ids: frozenset[int]
    ) -> list[Answer | Refusal]:
        """One outcome per prompt, in the order of the prompts.

        Args:
            prompts: any number, of any lengths, each of at least one token.
            config: lengths and sampling.
            seed: of the run; a sample's random stream comes from it and the sample id.
            stop_ids: a turn ends with the first of these.

        Raises:
            EngineError: nothing can be answered.
        """
        ...


def needs_weights(config: GenerateConfig) -> bool:
    """Whether a worker of the generate stage computes with the target's weights itself, through transformers."""
    return config.mode != "keep" and config.engine == "transformers"


def needs_device(config: GenerateConfig) -> bool:
    """Whether a worker of the generate stage computes with the target at all; servers have machines of their own."""
    return config.mode != "keep" and config.engine != "openai"


def load_generation_config(config: TargetConfig) -> Any:
    """The target's generation config (its end-of-turn ids), without weights; None if it has none."""
    from transformers import GenerationConfig

    from stages.target import resolve_model

    try:
        return GenerationConfig.from_pretrained(resolve_model(config), revision=config.revision or "main")
    except OSError:
        return None
