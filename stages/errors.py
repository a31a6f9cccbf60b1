"""Errors of the stages. Each takes finished text, so that pickling across a process boundary keeps it whole."""

from __future__ import annotations

from cache_schema.errors import DFlashError


class StageError(DFlashError):
    """A stage cannot do what it was asked to. The message says what was found, what was expected, what to do."""


class TargetError(StageError):
    """The target model cannot be fetched, loaded or used."""


class TargetSettingError(TargetError):
    """A setting of the recipe does not fit the target: a layer that it lacks, a MASK id that it uses."""


class PromptError(StageError):
    """A source of prompts is missing, empty or unfit as a whole (single bad rows are rejects, not errors)."""


class TrainingError(StageError):
    """Training cannot go on: a loss or gradient that is not finite, or nothing left to train on."""


class TrainingStopped(StageError):
    """Training was told to stop and did so in good order; nothing is wrong, and the next run goes on."""


class SampleRefused(StageError):
    """One sample cannot be used. Whoever works through samples turns it into a reject or ledger row and goes on.

    Attributes:
        reason: a snake_case code, for counting.
        detail: what was found and what was expected.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"
