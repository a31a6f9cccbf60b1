"""The train stage, driven: feature cache in, checkpoints out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from cache_schema.carried import Carried
from cache_schema.storage import Location, join, read_at
from pipeline.errors import PipelineError
from pipeline.extract_step import cache_identity
from pipeline.folder import absolute
from pipeline.pool import cpus_of
from pipeline.recipe import Recipe
from pipeline.run import Run, say_resume
from pipeline.runner import ensure_ray
from stages.config import identity_fields
from stages.train_log import METRICS


def train_job(run: Run) -> Any:
    """The training job of this run, with its fingerprint pinned in the training folder."""
    return job_in(run, run.recipe, run.folder.train)


def job_in(run: Run, recipe: Recipe, folder: Location) -> Any:
    """A training job on a run's cache, with its fingerprint pinned in a folder of its own.

    Args:
        run: whose cache is trained on.
        recipe: gives seed, drafter and training; the run's own, or one that differs from it in these only.
        folder: for `metrics.jsonl`, checkpoints and the rest.

    Raises:
        FingerprintMismatch: the folder holds another training.
        TrainingError, CheckpointError: `train.init_from` names no drafter that can be read.
    """
    from stages.initial import initial_sha256
    from stages.train import TrainJob

    identity, train, initial = cache_identity(run), recipe.train, None
    if train.init_from is not None:
        start = (recipe.base / Path(train.init_from).expanduser()).resolve()
        train = dataclasses.replace(train, init_from=str(start))
        initial = initial_sha256(start)
    made_of = {
        "cache": identity.to_json(),
        "seed": recipe.seed,
        "drafter": identity_fields(recipe.drafter),
        "train": identity_fields(train),
        "mask_token_id": recipe.target.mask_token_id,
        "initial_sha256": initial,
    }
    fingerprint = run.pin("train", folder, made_of)
    return TrainJob(
        recipe.target,
        recipe.drafter,
        train,
        identity,
        recipe.seed,
        run.cache,
        absolute(folder),
        fingerprint,
    )


def run_train(run: Run) -> None:
    """Feature cache in, trained drafter out.

    Raises:
        CacheError, FingerprintMismatch, TrainingError: see the stages.
    """
    import torch

    from cache_schema.reader import FeatureCache
    from pipeline.follow import follow_metrics
    from pipeline.rolling_train import is_rolling, train_rolling
    from stages.checkpoint_places import Checkpoints
    from stages.order import StepPlan
    from stages.train_ray import train_with_ray

    recipe = run.recipe
    job = train_job(run)
    if run.is_done("train", job.fingerprint, lambda: _final_checkpoint(run, job) is not None):
        return
    cache = FeatureCache.open(job.cache_dir, job.identity)
    rolling = is_rolling(run, cache.plan, job.identity)
    if not rolling:
        cache.require_complete()
    plan = StepPlan(cache.plan, recipe.train, recipe.seed)
    with run.stage("train", job.fingerprint) as summary:
        newest = Checkpoints(Carried(run.folder.train)).newest(job.fingerprint)
        done = newest[1].step if newest else 0
        run.folder.begin("train", plan.n_steps)
        say_resume(run, "train", done, plan.n_steps, "steps")
        run.say(
            f"train: {plan.n_training} samples, {len(plan.heldout)} held out, "
            f"{plan.n_steps} steps in {recipe.train.epochs} epochs"
        )
        if done < plan.n_steps and rolling:
            summary |= train_rolling(run, job, cache, plan, done)
        elif done < plan.n_steps:
            gpus = 1 if torch.cuda.is_available() else 0
            with (
                ensure_ray(num_cpus=cpus_of(recipe.train.workers, recipe.train.threads) + 1),
                follow_metrics(run.folder.train, plan.n_steps, done),
            ):
                train_with_ray(job, storage=run.folder.train_scratch / "ray", gpus_per_worker=gpus)
        summary |= _train_summary(run, plan.n_steps)


def _train_summary(run: Run, n_steps: int) -> dict[str, Any]:
    rows = read_rows(run.folder.train)
    heldout = [r for r in rows if r["kind"] == "heldout"]
    steps = [r for r in rows if r["kind"] == "step"]
    return {
        "steps": n_steps,
        "loss": float(steps[-1]["loss"]) if steps else 0.0,
        "simulated_tau": float(heldout[-1]["tau"]) if heldout else 0.0,
        "samples_without_anchor": steps[-1]["skipped"] if steps else 0,
    }


def read_rows(folder: Location) -> list[dict[str, Any]]:
    """The rows of a training folder's `metrics.jsonl`, as far as they are whole."""
    rows = []
    try:
        text = read_at(join(folder, METRICS))
    except FileNotFoundError:
        return []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # the last line of a killed run
            continue
        if isinstance(row, dict) and "kind" in row:
            rows.append(row)
    return rows


def _final_checkpoint(run: Run, job: Any) -> Path | None:
    """The checkpoint of the last step, or None when training has not come so far or the checkpoint is damaged."""
    from stages.checkpoint_places import Checkpoints

    status = run.folder.done("train")
    newest = Checkpoints(Carried(run.folder.train)).newest(job.fingerprint)
    if status is None or newest is None or newest[1].step != status["summary"].get("steps"):
        return None
    return newest[0]


def trained_drafter(run: Run, job: Any) -> tuple[Any, str]:
    """The final drafter (float32) and the SHA-256 of its weights.

    Raises:
        PipelineError: training has not finished.
    """
    from stages import checkpoint
    from stages.drafter import Drafter
    from stages.replicas import Replicas
    from stages.train import trained_spec
    from stages.world import World

    folder = _final_checkpoint(run, job)
    if folder is None:
        raise PipelineError(
            f"{run.folder.train} has no intact checkpoint of the last step; run the train stage, it goes on where it "
            "stopped"
        )
    drafter = Drafter(trained_spec(job))
    checkpoint.load_weights(folder, Replicas(drafter, World()))
    return drafter, json.loads((folder / checkpoint.STATE).read_text())["sha256"][checkpoint.MODEL]
