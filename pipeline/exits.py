"""What the exit codes of `dflash` and of the submitted jobs mean."""

from __future__ import annotations

from enum import IntEnum

from cache_schema.durable import is_storage_fault
from cache_schema.errors import BadLocation, DFlashError, FingerprintMismatch, SchemaVersion, StorageFault
from pipeline.errors import PoisonShard, RunInUse


class Exit(IntEnum):
    """Exit codes. Those of `TRY_AGAIN` need nobody: the same command goes on where it stopped."""

    DONE = 0
    BAD = 1
    USAGE = 2
    MISMATCH = 3
    IN_USE = 4
    POISON = 5
    STORAGE = 6
    INTERRUPTED = 130


TRY_AGAIN = (Exit.IN_USE, Exit.STORAGE, Exit.INTERRUPTED)

MEANING = {
    Exit.DONE: "done, or nothing to do",
    Exit.BAD: "bad data, or a run that failed otherwise",
    Exit.USAGE: "a wrong call, recipe or setting",
    Exit.MISMATCH: "the folder or cache was made of other inputs or settings",
    Exit.IN_USE: "another driver holds the run",
    Exit.POISON: "work failed on every attempt; the rest is done",
    Exit.STORAGE: "the storage is full, refuses, or is out of reach",
    Exit.INTERRUPTED: "interrupted",
}

HELP = (
    "Exit codes: "
    + "; ".join(f"{code.value} {text}" for code, text in MEANING.items())
    + f". After {', '.join(str(code.value) for code in TRY_AGAIN)} the same command goes on."
)


def exit_code(error: BaseException) -> Exit:
    """The code of an error that this project raises on purpose."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return Exit.INTERRUPTED
    if type(error).__name__ in ("RecipeError", "ConfigError", "TargetSettingError"):
        return Exit.USAGE
    if type(error).__name__ == "TrainingStopped":
        return Exit.INTERRUPTED
    kinds = {BadLocation: Exit.USAGE, FingerprintMismatch: Exit.MISMATCH, SchemaVersion: Exit.MISMATCH,
             RunInUse: Exit.IN_USE, PoisonShard: Exit.POISON, StorageFault: Exit.STORAGE}  # fmt: skip
    if isinstance(error, OSError) and not isinstance(error, DFlashError):
        return Exit.STORAGE if is_storage_fault(error) else Exit.BAD
    return next((code for kind, code in kinds.items() if isinstance(error, kind)), Exit.BAD)
