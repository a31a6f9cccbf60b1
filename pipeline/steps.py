"""The stages of a run by name, in their order."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.evaluate_step import run_evaluate
from pipeline.export_step import run_export
from pipeline.extract_step import run_extract
from pipeline.generate_step import run_generate
from pipeline.run import Run
from pipeline.train_step import run_train

STEPS: dict[str, Callable[[Run], None]] = {
    "generate": run_generate,
    "extract": run_extract,
    "train": run_train,
    "evaluate": run_evaluate,
    "export": run_export,
}
