"""Many trainings on one cache: every setting of a sweep with every seed, each in a folder of its own.

A training that is finished is not made again; one that was stopped goes on from its newest checkpoint. They run in this
process, or several at a time in processes of their own, without Ray: each is small.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import multiprocessing
import re
import time
import traceback
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_schema.durable import write_atomic
from cache_schema.errors import DFlashError
from cache_schema.storage import open_storage
from pipeline.errors import PipelineError
from pipeline.jobs import run_stages
from pipeline.run import Run, Say, read_object
from pipeline.sweep_file import Sweep
from pipeline.train_step import job_in, read_rows

RESULT = "result.json"
CRASH = "crash.txt"
"""Where the traceback of a training that crashed stands, in its folder."""


@dataclass(frozen=True, slots=True)
class Training:
    """One setting with one seed."""

    setting: str
    seed: int
    folder: Path
    job: Any

    def result(self) -> dict[str, Any] | None:
        """What it came to, or None when it has not been finished with these settings."""
        found = read_object(open_storage(self.folder), RESULT)
        return found if found is not None and found.get("fingerprint") == self.job.fingerprint else None


def planned_sweep(sweep: Sweep, out: Path, say: Say) -> list[Training]:
    """Make the cache if it is not there; returns every training, done or not.

    Args:
        sweep: what to train.
        out: folder of the sweep.
        say: where plain lines go.

    Raises:
        FingerprintMismatch: the folder holds a training with other settings.
        DFlashError: the cache could not be made.
    """
    run = run_stages(sweep.recipe_file, [], ["generate", "extract"], say)
    return list(_trainings(sweep, run, out))


def run_sweep(trainings: list[Training], say: Say, *, workers: int = 1) -> None:
    """Train what is missing.

    Args:
        trainings: of `planned_sweep`.
        say: where plain lines go.
        workers: trainings at a time.

    Raises:
        PipelineError: some trainings failed; the others are done.
    """
    todo = [t for t in trainings if t.result() is None]
    say(f"sweep: {len(trainings)} trainings, {len(trainings) - len(todo)} are done, {len(todo)} to do")
    failed: list[str] = []
    began = time.monotonic()
    for i, (training, outcome) in enumerate(_each(todo, workers), start=1):
        name = f"{training.setting}, seed {training.seed}"
        if isinstance(outcome, DFlashError):
            failed.append(f"{name}: {outcome}")
            say(f"sweep: {name} failed: {outcome}")
            continue
        left_s = (time.monotonic() - began) / i * (len(todo) - i)
        tau, seconds = outcome["tau"], outcome["seconds"]
        say(f"sweep: {i} of {len(todo)}: {name}: τ {tau:.3f} in {seconds:.0f} s; about {left_s / 60:.0f} min left")
    if failed:
        raise PipelineError(f"{len(failed)} of {len(trainings)} trainings failed:\n  " + "\n  ".join(failed))


def _trainings(sweep: Sweep, run: Run, out: Path) -> Iterator[Training]:
    for setting in sweep.settings:
        for seed in sweep.seeds:
            folder = out / "trainings" / _folder_name(setting) / f"seed-{seed}"
            yield Training(setting, seed, folder, job_in(run, sweep.recipe(setting, seed), folder))


def _folder_name(setting: str) -> str:
    """Readable, and another one for every setting."""
    plain = re.sub(r"[^A-Za-z0-9.-]+", "-", setting).strip("-.")[:40]
    return f"{plain}-{hashlib.sha256(setting.encode()).hexdigest()[:6]}"


def _each(todo: list[Training], workers: int) -> Iterator[tuple[Training, Any]]:
    """Each training with its result, or with the error that it ended with, as they come."""
    if workers == 1:
        for training in todo:
            yield training, _train(training)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        running = {pool.submit(_train, training): training for training in todo}
        for done in concurrent.futures.as_completed(running):
            try:
                yield running[done], done.result()
            except BrokenProcessPool:
                text = "a process was killed (out of memory?), and with it what was left; run the same command again"
                yield running[done], PipelineError(f"{text}, with fewer --workers")


def _train(training: Training) -> dict[str, Any] | DFlashError:
    """Train; returns the result, or the error that it ended with: one training never ends the sweep."""
    from stages.errors import TrainingStopped
    from stages.train import train_rank
    from stages.world import World

    began = time.monotonic()
    try:
        train_rank(training.job, World())
        result = summed_up(training, time.monotonic() - began)
        write_atomic(training.folder / RESULT, (json.dumps(result, indent=1) + "\n").encode())
    except TrainingStopped:
        raise
    except DFlashError as error:
        return error
    except Exception as error:  # the others are trained all the same
        training.folder.mkdir(parents=True, exist_ok=True)
        (training.folder / CRASH).write_text(traceback.format_exc(), encoding="utf-8")
        # As text: not every error can be sent from one process to another.
        return PipelineError(f"crashed: {type(error).__name__}: {error} (traceback in {training.folder / CRASH})")
    return result


def summed_up(training: Training, seconds: float) -> dict[str, Any]:
    """The figures of a finished training, from its `metrics.jsonl`.

    Raises:
        PipelineError: no held-out sample was looked at, so that there is no τ.
    """
    rows = read_rows(training.folder)
    looks = [row for row in rows if row["kind"] == "heldout"]
    if not looks:
        raise PipelineError(
            f"{training.folder}: no sample is held out, so that settings cannot be compared; raise train.heldout_share"
        )
    last = looks[-1]
    return {
        "fingerprint": training.job.fingerprint,
        "setting": training.setting,
        "seed": training.seed,
        "tau": last["tau"],
        "loss": last["loss"],
        "accuracy": last["accuracy"],
        "samples": last["samples"],
        "steps": last["step"],
        "seconds": round(seconds, 1),
        "curve": [[row["step"], row["tau"]] for row in looks],
    }
