"""Where the training's signals go beside `metrics.jsonl`: TensorBoard by default, W&B, MLflow and Trackio on request.

One small interface: `log` takes a step and flat numbers, `close` ends. Each library is imported only when its tracker
is asked for. None is given a credential: each reads its own environment variables (WANDB_API_KEY, MLFLOW_TRACKING_URI
and so on), so that no recipe, fingerprint or log ever holds one.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from stages.errors import TrainingError

TENSORBOARD = "tensorboard"
"""Folder of TensorBoard's event files, in the training folder."""


class Tracker(Protocol):
    """Takes the signals of a training run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers by name (`train/loss`, `heldout/tau`, …) of a step."""

    def close(self) -> None:
        """Everything that was logged is kept; nothing follows."""


class TensorBoard:
    """Event files in `<training folder>/tensorboard`, written by tensorboardX."""

    def __init__(self, folder: Path, _name: str, _settings: Mapping[str, Any]) -> None:
        writer = _library("tensorboardX", "tensorboard")
        self._writer = writer.SummaryWriter(str(folder / TENSORBOARD), flush_secs=10)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases with the training's name; a resumed training goes on in the same one."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        library = _library("wandb", "wandb")
        self._run = library.init(
            project="dflash", name=name, id=_run_id(folder), resume="allow", dir=str(folder), config=dict(settings)
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow in the experiment `dflash`; every start of a training is a run of its own."""

    def __init__(self, _folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        self._library = _library("mlflow", "mlflow")
        self._library.set_experiment("dflash")
        self._library.start_run(run_name=name)
        self._library.log_params(dict(settings))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._library.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._library.end_run()


class Trackio:
    """A run of Trackio in the project `dflash`; a resumed training goes on in the same one."""

    def __init__(self, folder: Path, _name: str, settings: Mapping[str, Any]) -> None:
        library = _library("trackio", "trackio")
        self._run = library.init(project="dflash", name=_run_id(folder), resume="allow", config=dict(settings))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


_KINDS: dict[str, Callable[[Path, str, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "trackio": Trackio,
}  # fmt: skip


def open_trackers(kinds: Sequence[str], folder: Path, settings: Mapping[str, Any]) -> list[Tracker]:
    """The trackers of a training.

    Args:
        kinds: of `train.trackers`.
        folder: of the run's training files.
        settings: what is trained, flat, for the trackers that show it.

    Raises:
        TrainingError: a tracker's library is not installed.
    """
    return [_KINDS[kind](folder, folder.parent.name or "train", settings) for kind in kinds]


def flat_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """A row of `metrics.jsonl` as numbers by name: `train/loss`, `heldout/accuracy/slot_01`, …; gaps are left out."""
    prefix = "train" if row["kind"] == "step" else str(row["kind"])
    out: dict[str, float] = {}
    for name, value in row.items():
        if name in ("kind", "step"):
            continue
        for key, number in _numbers(name, value):
            if math.isfinite(number):
                out[f"{prefix}/{key}"] = number
    return out


def _numbers(name: str, value: Any) -> list[tuple[str, float]]:
    if isinstance(value, Mapping):
        return [(f"{name}/{key}", float(v)) for key, v in value.items()]
    if isinstance(value, list | tuple):
        return [(f"{name}/slot_{k:02d}", float(v)) for k, v in enumerate(value, start=1)]
    return [(name, float(value))] if isinstance(value, int | float) else []


def _library(module: str, kind: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TrainingError(
            f"train.trackers names {kind}, but its library {module} cannot be imported ({error}); install it with "
            f"`pip install 'dflash[{kind}]'`, or leave {kind} out"
        ) from error


def _run_id(folder: Path) -> str:
    """The same for every start of a training in this folder."""
    import hashlib

    path = str(folder.resolve())
    return f"{folder.parent.name or 'train'}-{hashlib.sha256(path.encode()).hexdigest()[:8]}"
