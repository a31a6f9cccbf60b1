"""The export stage, driven: trained drafter in, the checkpoint for SGLang and vLLM out; and what is there, checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cache_schema.identity import sha256_json
from pipeline.folder import EXPORT
from pipeline.run import Run
from pipeline.train_step import train_job, trained_drafter


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
    drafter, weights_sha256 = trained_drafter(run, job)
    fingerprint = sha256_json({"weights_sha256": weights_sha256, "train": job.fingerprint})
    if run.is_done("export", fingerprint, lambda: _is_exported(run)):
        return
    with run.stage("export", fingerprint) as summary:
        card = model_card(run.recipe, drafter.spec, job, run.folder)
        export_drafter(drafter, run.folder.export, card=card)
        run.folder.files.keep_tree(EXPORT, exactly=True)
        weights = run.folder.export / "model.safetensors"
        summary |= {
            "tensors": len(dict(drafter.named_parameters())),
            "bytes": weights.stat().st_size,
            "sha256": sha256_file(weights),
            "folder": run.folder.storage.where(EXPORT),
        }


def check_exported(run: Run, folder: Path | None = None) -> list[Any]:
    """Every rule of `stages.export_check` for the run's exported folder, or for another drafter's.

    The run's own folder is also compared with the trained weights, where they are still there.

    Args:
        run: whose target the drafter must fit.
        folder: another drafter's folder; None takes what this run exported.
    """
    from pipeline.errors import PipelineError
    from stages.export_check import check_export
    from stages.target import load_config, shape_of

    trained = None
    if folder is None:
        run.folder.files.fetch_tree(EXPORT)
        try:
            trained, _ = trained_drafter(run, train_job(run))
        except PipelineError:
            run.say("export: the trained weights are not there any more, so the export is not compared with them")
    return check_export(folder or run.folder.export, shape_of(load_config(run.recipe.target)), trained)
