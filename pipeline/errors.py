"""Errors of describing and driving a run. Each takes one finished message and survives pickling."""

from __future__ import annotations

from cache_schema.errors import DFlashError


class PipelineError(DFlashError):
    """A run could not be driven to its end; the message says which part and what to do."""


class RecipeError(PipelineError):
    """A recipe is not one: a key is unknown or a value is not of the expected kind."""


class RunInUse(PipelineError):
    """Another driver holds the run, or has taken it over."""


class PoisonShard(PipelineError):
    """A unit of work failed on every attempt, while the rest of the run was finished."""


class StorageError(PipelineError):
    """The disk is full, read-only or not ours. Nothing half-written is kept, and trying again at once is of no use."""
