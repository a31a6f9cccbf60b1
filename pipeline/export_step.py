"""The export stage, driven: trained drafter in, the checkpoint for SGLang and vLLM out."""

from __future__ import annotations

from cache_schema.identity import sha256_json
from pipeline.run import Run
from pipeline.train_step import train_job, trained_drafter


def _is_exported(run: Run) -> bool:
    """Whether the exported folder is what export wrote: it reads, and its weights have the recorded hash."""
    from cache_schema.identity import sha256_file
    from stages.checkpoint_format import CheckpointError, check_folder

    status, folder = run.folder.done("export"), run.folder.export
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
        weights = run.folder.export / "model.safetensors"
        summary |= {
            "tensors": len(dict(drafter.named_parameters())),
            "bytes": weights.stat().st_size,
            "sha256": sha256_file(weights),
            "folder": str(run.folder.export),
        }
