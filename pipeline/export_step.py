"""The export stage, driven: trained drafter in, the checkpoint for SGLang and vLLM out; and what is there, checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cache_schema.identity import sha256_json
from pipeline.errors import PipelineError
from pipeline.folder import EVALUATE, EXPORT, RESULTS
from pipeline.run import Run, read_object
from pipeline.train_step import Trained, train_job, trained_drafter


def _is_exported(run: Run) -> bool:
    """Whether the exported folder is what export wrote: it reads, and its weights have the recorded hash."""
    from cache_schema.identity import sha256_file
    from stages.checkpoint_format import CheckpointError, check_folder

    status, folder = run.folder.done("export"), run.folder.export
    run.folder.files.fetch_tree(EXPORT)
    try:
        check_folder(folder)
    except CheckpointError:
        return False
    return status is not None and status["summary"].get("sha256") == sha256_file(folder / "model.safetensors")


def run_export(run: Run) -> None:
    """Trained drafter in, the checkpoint for SGLang and vLLM out.

    Raises:
        PipelineError, CheckpointError: see the stages.
    """
    from cache_schema.identity import sha256_file
    from pipeline.model_card import model_card
    from stages.export import export_drafter

    job = train_job(run)
    trained = trained_drafter(run, job)
    fingerprint = sha256_json({"weights_sha256": trained.weights_sha256, "train": job.fingerprint})
    results = _results_of(run, trained)
    if run.is_done("export", fingerprint, lambda: _is_exported(run)):
        return
    with run.stage("export", fingerprint) as summary:
        card = model_card(run.recipe, job, trained, results)
        export_drafter(trained.drafter, run.folder.export, card=card)
        run.folder.files.keep_tree(EXPORT, exactly=True)
        weights = run.folder.export / "model.safetensors"
        summary |= {
            "tensors": len(dict(trained.drafter.named_parameters())),
            "bytes": weights.stat().st_size,
            "sha256": sha256_file(weights),
            "step": trained.step,
            "folder": run.folder.storage.where(EXPORT),
        }


def _results_of(run: Run, trained: Trained) -> dict[str, Any] | None:
    """What `evaluate` measured of these very weights, or None if it measured none that were trained here.

    Raises:
        PipelineError: it measured those of another step.
    """
    results = read_object(run.folder.storage, f"{EVALUATE}/{RESULTS}")
    made = results.get("made_of") if results is not None else None
    if not isinstance(made, dict):
        return None
    if made != trained.made:
        raise PipelineError(
            f"{run.folder.storage.where(f'{EVALUATE}/{RESULTS}')} is of step {made.get('step')}, but export would "
            f"write step {trained.step} (evaluate.checkpoint: {run.recipe.evaluate.checkpoint}); export what was "
            "evaluated, or evaluate this one in another run folder"
        )
    return results


def check_exported(run: Run, folder: Path | None = None) -> list[Any]:
    """Every rule of `stages.export_check` for the run's exported folder, or for another drafter's.

    The run's own folder is also compared with the trained weights, where they are still there.

    Args:
        run: whose target the drafter must fit.
        folder: another drafter's folder; None takes what this run exported.
    """
    from stages.export_check import check_export
    from stages.target import load_config, shape_of

    trained = None
    if folder is None:
        run.folder.files.fetch_tree(EXPORT)
        try:
            trained = trained_drafter(run, train_job(run)).drafter
        except PipelineError:
            run.say("export: the trained weights are not there any more, so the export is not compared with them")
    return check_export(folder or run.folder.export, shape_of(load_config(run.recipe.target)), trained)
