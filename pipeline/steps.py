"""The stages of a run, driven: what is there already, what is left, who does it, what came out.

Each `run_*` is safe to call again at any time. It works out what its output is made of (a fingerprint over
identity fields and the stages before it), refuses a folder that holds something else, does what is missing,
and records the stage as done. A finished stage is a no-op that says so.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cache_schema.durable import write_atomic
from cache_schema.errors import FingerprintMismatch
from cache_schema.identity import CacheIdentity, canonical_json, sha256_json
from cache_schema.storage import Storage, open_storage
from pipeline.errors import PipelineError
from pipeline.folder import RunFolder
from pipeline.progress import Progress
from pipeline.recipe import Recipe
from pipeline.runner import ensure_ray, run_pool
from stages.config import identity_fields

LAYER_CONVENTION = "output of decoder layer i, 0-based: output_hidden_states[i + 1] of transformers"
Say = Callable[[str], None]


@dataclass
class Run:
    """One recipe in one folder, with what several stages need worked out once.

    Attributes:
        recipe: the run's configuration.
        say: where plain lines for the user go.
    """

    recipe: Recipe
    say: Say
    folder: RunFolder = field(init=False)

    def __post_init__(self) -> None:
        self.folder = RunFolder(self.recipe.run)

    @functools.cached_property
    def tokenizer(self) -> Any:
        from stages.target import load_tokenizer

        return load_tokenizer(self.recipe.target)

    @functools.cached_property
    def hashes(self) -> Any:
        from stages.target import hash_target

        return hash_target(self.recipe.target, self.tokenizer)

    @functools.cached_property
    def layer_ids(self) -> tuple[int, ...]:
        from stages.target import load_config, shape_of

        return shape_of(load_config(self.recipe.target)).layer_ids(
            self.recipe.cache.n_layers, self.recipe.cache.layer_ids
        )

    @functools.cached_property
    def cache(self) -> str:
        """Where the feature cache lies: an absolute path or a URL, the same for every worker."""
        path = self.recipe.cache.path or str(self.folder.cache)
        return path if "://" in path else str(Path(path).resolve())

    def is_done(self, stage: str, fingerprint: str, whole: Callable[[], bool]) -> bool:
        """Whether the stage has finished with this fingerprint and its output is still all there; says so.

        Args:
            stage: name.
            fingerprint: of what this run would make.
            whole: a cheap look at the output; if something has gone, the stage is not done and makes it again.

        Raises:
            FingerprintMismatch: the folder holds this stage's output under another one.
        """
        status = self.folder.done(stage)
        if status is None:
            return False
        if status["fingerprint"] != fingerprint:
            raise FingerprintMismatch(
                f"{self.folder.path}: stage {stage} was finished with other inputs or settings (fingerprint "
                f"{status['fingerprint'][:12]}…, this run has {fingerprint[:12]}…); use another run folder, or remove "
                f"{self.folder.path / 'status'}/{stage}.json and what the stage made"
            )
        if not whole():
            self.say(f"{stage}: was done, but part of its output is missing or damaged; making that again")
            return False
        self.say(f"{stage}: already done ({_brief(status['summary'])}), nothing to do")
        return True

    def pin(self, stage: str, folder: Path, identity: dict[str, Any]) -> str:
        """Write down what a stage's folder is made of, once; returns the fingerprint.

        Raises:
            FingerprintMismatch: it was made of something else; names each setting that differs, both values.
        """
        from cache_schema.durable import create_once, make_dirs

        make_dirs(folder)
        file = folder / "identity.json"
        plain: dict[str, Any] = json.loads(canonical_json(identity))
        if not create_once(file, canonical_json(plain).encode()):
            found = _read_object(file)
            if found is None:
                raise PipelineError(
                    f"{file} is damaged: expected a JSON object with the settings that made {folder}. Remove that "
                    f"folder to run stage {stage} anew, or restore the file"
                )
            lines = list(_differences("", found, plain))
            if lines:
                raise FingerprintMismatch(
                    f"{folder} was made by stage {stage} with other settings:\n  "
                    + "\n  ".join(lines)
                    + "\nUse another run folder, or remove this one"
                )
        return sha256_json(plain)

    @contextmanager
    def stage(self, name: str, fingerprint: str) -> Iterator[dict[str, Any]]:
        """Times a stage; what the body puts into the dict becomes the stage's summary."""
        started, summary = time.monotonic(), dict[str, Any]()
        yield summary
        seconds = time.monotonic() - started
        self.folder.finish(name, fingerprint, seconds, summary)
        self.say(f"{name}: done in {seconds:.0f} s ({_brief(summary)})")


def _read_object(file: Path) -> dict[str, Any] | None:
    """A JSON object, or None when the file is missing, damaged, or holds something else."""
    try:
        value = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _brief(summary: dict[str, Any]) -> str:
    return ", ".join(
        f"{k.replace('_', ' ')} {v:.4g}" if isinstance(v, float) else f"{k.replace('_', ' ')} {v}"
        for k, v in summary.items()
    )


def _differences(prefix: str, found: Any, expected: Any) -> Iterator[str]:
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted(found.keys() | expected.keys()):
            yield from _differences(f"{prefix}.{key}" if prefix else key, found.get(key), expected.get(key))
    elif found != expected:
        yield f"{prefix}: the folder has {found!r}, this run {expected!r}"


def worker_resources(threads: int | None, default: int = 1, gpu: bool = True) -> dict[str, float]:
    """What Ray sets aside for one worker; a GPU if there is any and the worker computes on it."""
    import torch

    if gpu and torch.cuda.is_available():
        return {"num_cpus": 1, "num_gpus": 1}
    return {"num_cpus": float(threads or default)}


def cpus_of(workers: int, threads: int | None) -> int:
    """CPUs that an own Ray must offer so that all workers fit, however many cores there are."""
    import os

    return max(os.cpu_count() or 1, workers * (threads or 1))


# --- generate -----------------------------------------------------------------------------------------


def run_generate(run: Run) -> None:
    """Prompts in, responses table out: see `pipeline.generate_step`."""
    from pipeline.generate_step import generate

    generate(run)


def first_reasons(ledger: Any) -> str:
    return "; ".join(f"{row['sample_id']}: {row['reason']}: {row['detail']}" for row in ledger[:3])


def say_resume(run: Run, stage: str, have: int, total: int, unit: str) -> None:
    if have:
        run.say(f"{stage}: resuming, {have} of {total} {unit} are committed, {total - have} to do")


def drive_pool(
    run: Run,
    stage: str,
    unit: str,
    todo: list[Any],
    build: Any,
    have: int,
    config: Any,
    on_receipt: Callable[[Any, dict[str, Any]], None] | None = None,
    gpu: bool = True,
) -> None:
    if not todo:
        return
    with (
        ensure_ray(num_cpus=cpus_of(config.workers, config.threads)),
        Progress(have + len(todo), f"{unit}s", stage, done=have) as progress,
    ):
        run_pool(
            todo,
            build,
            n_workers=config.workers,
            resources=worker_resources(config.threads, gpu=gpu),
            progress=progress,
            label=unit,
            on_receipt=on_receipt,
        )


# --- extract ------------------------------------------------------------------------------------------


def cache_identity(run: Run) -> CacheIdentity:
    """What the feature cache of this run is made of.

    Raises:
        ResponsesError: the responses table is missing, incomplete or damaged.
    """
    from cache_schema.responses import ResponsesTable

    recipe = run.recipe
    table = ResponsesTable.open(run.folder.responses)
    if (
        table.identity.target_weights_sha256 != run.hashes.weights
        or table.identity.tokenizer_sha256 != run.hashes.tokenizer
    ):
        raise FingerprintMismatch(
            f"{run.folder.responses} was answered by target {table.identity.target_name!r} (weights "
            f"{table.identity.target_weights_sha256[:12]}…), this recipe's target is {recipe.target.model!r} (weights "
            f"{run.hashes.weights[:12]}…); use another run folder, or the recipe that made these responses"
        )
    return CacheIdentity(
        target_name=recipe.target.model,
        target_revision=recipe.target.revision,
        target_weights_sha256=run.hashes.weights,
        tokenizer_sha256=run.hashes.tokenizer,
        chat_template_sha256=run.hashes.chat_template,
        layer_ids=run.layer_ids,
        layer_convention=LAYER_CONVENTION,
        target_dtype=recipe.target.dtype,
        feature_dtype=str(recipe.cache.dtype),
        feature_bits=recipe.cache.bits,
        feature_group=recipe.cache.group,
        last_hidden=recipe.cache.last_hidden,
        max_length=recipe.cache.max_length,
        responses_sha256=table.responses_hash(),
    )


def run_extract(run: Run) -> None:
    """Responses in, feature cache out.

    Raises:
        ResponsesError, FingerprintMismatch, ShardRefused, PoisonShard: see the stages.
        PipelineError: too large a share of samples had non-finite states.
    """
    import numpy as np

    from cache_schema.layout import feature_format
    from cache_schema.manifest import create_cache
    from cache_schema.marker import committed_shards
    from cache_schema.plan import plan_shards
    from cache_schema.responses import ResponsesTable
    from pipeline.rolling_train import extract_heldout, is_rolling
    from stages.extract import ExtractJob, ExtractWorker, ShardUnit
    from stages.target import load_config, shape_of

    recipe, storage = run.recipe, open_storage(run.cache)
    identity = cache_identity(run)
    ids, lengths = ResponsesTable.open(run.folder.responses).lengths()
    shape = shape_of(load_config(recipe.target))
    bytes_per_token = feature_format(identity).code_bytes(len(identity.layer_ids), shape.hidden_size)
    plan = create_cache(
        storage,
        identity,
        plan_shards(ids, np.minimum(lengths, recipe.cache.max_length), bytes_per_token, recipe.cache.shard_bytes),
    )
    if is_rolling(run, plan, identity):
        extract_heldout(run, plan, identity)
        return
    if run.is_done("extract", identity.fingerprint(), lambda: set(plan.shards()) <= set(committed_shards(storage))):
        return
    with run.stage("extract", identity.fingerprint()) as summary:
        have = set(committed_shards(storage))
        todo = [ShardUnit(s, tuple(plan.samples(s))) for s in plan.shards() if s not in have]
        say_resume(run, "extract", len(have), plan.n_shards, "shards")
        job = ExtractJob(recipe.target, recipe.cache, recipe.extract, identity, run.folder.responses, run.cache)
        guard = QuarantineGuard(len(plan), recipe.extract.max_quarantined_share, storage.where())
        drive_pool(
            run, "extract", "shard", todo, functools.partial(ExtractWorker, job), len(have), recipe.extract, guard.take
        )
        summary |= _cache_summary(storage, guard)


class QuarantineGuard:
    """Stops the run when too large a share of its samples had non-finite states."""

    def __init__(self, n_samples: int, max_share: float, where: str) -> None:
        self.allowed, self.max_share, self.where = max_share * n_samples, max_share, where
        self.quarantined = 0

    def take(self, _unit: Any, receipt: dict[str, Any]) -> None:
        self.quarantined += receipt["quarantined"]
        self.require()

    def require(self) -> None:
        if self.quarantined > self.allowed:
            raise PipelineError(
                f"{self.quarantined} samples had NaN or infinite states, more than extract.max_quarantined_share "
                f"{self.max_share:.1%} allows; their ids are in the ledgers (`dflash cache info {self.where}`). "
                "Look at the target's dtype first: float16 overflows where bfloat16 does not"
            )


def _cache_summary(storage: Storage, guard: QuarantineGuard) -> dict[str, Any]:
    from cache_schema.reader import FeatureCache

    cache = FeatureCache.open(storage, require_complete=True)
    if len(cache) == 0:
        raise PipelineError(
            f"{storage.where()} holds no sample: all {len(cache.plan)} are in the ledger, "
            f"{first_reasons(cache.ledger())}"
        )
    guard.quarantined = sum(row["reason"] == "non_finite" for row in cache.ledger())
    guard.require()
    markers = cache.markers.values()
    return {
        "samples": len(cache),
        "tokens": sum(m.tokens for m in markers),
        "shards": len(markers),
        "bytes": sum(m.bytes for m in markers),
        "ledger_rows": len(cache.ledger()),
    }


# --- train --------------------------------------------------------------------------------------------


def train_job(run: Run) -> Any:
    """The training job of this run, with its fingerprint pinned in the training folder."""
    from stages.train import TrainJob

    recipe = run.recipe
    identity = cache_identity(run)
    made_of = {
        "cache": identity.to_json(),
        "seed": recipe.seed,
        "drafter": identity_fields(recipe.drafter),
        "train": identity_fields(recipe.train),
        "mask_token_id": recipe.target.mask_token_id,
    }
    fingerprint = run.pin("train", run.folder.train, made_of)
    return TrainJob(
        recipe.target,
        recipe.drafter,
        recipe.train,
        identity,
        recipe.seed,
        run.cache,
        run.folder.train.resolve(),
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
    from stages import checkpoint
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
        newest = checkpoint.newest_checkpoint(run.folder.train / "checkpoints", job.fingerprint)
        done = newest[1].step if newest else 0
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
                follow_metrics(run.folder.train / "metrics.jsonl", plan.n_steps, done),
            ):
                train_with_ray(job, storage=run.folder.train / "ray", gpus_per_worker=gpus)
        summary |= _train_summary(run, plan.n_steps)


def _train_summary(run: Run, n_steps: int) -> dict[str, Any]:
    rows = _metrics(run.folder.train / "metrics.jsonl")
    heldout = [r for r in rows if r["kind"] == "heldout"]
    steps = [r for r in rows if r["kind"] == "step"]
    return {
        "steps": n_steps,
        "loss": float(steps[-1]["loss"]) if steps else 0.0,
        "simulated_tau": float(heldout[-1]["tau"]) if heldout else 0.0,
        "samples_without_anchor": steps[-1]["skipped"] if steps else 0,
    }


def _metrics(file: Path) -> list[dict[str, Any]]:
    rows = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:  # the last line of a killed run
            continue
        if isinstance(row, dict) and "kind" in row:
            rows.append(row)
    return rows


def _final_checkpoint(run: Run, job: Any) -> Path | None:
    """The checkpoint of the last step, or None when training has not come so far or the checkpoint is damaged."""
    from stages import checkpoint

    status = run.folder.done("train")
    newest = checkpoint.newest_checkpoint(run.folder.train / "checkpoints", job.fingerprint)
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
    from stages.train import make_spec

    folder = _final_checkpoint(run, job)
    if folder is None:
        raise PipelineError(
            f"{run.folder.train} has no intact checkpoint of the last step; run the train stage, it goes on where it "
            "stopped"
        )
    drafter = Drafter(make_spec(job.target, job.drafter, job.identity.layer_ids))
    checkpoint.load_weights(folder, drafter)
    return drafter, json.loads((folder / checkpoint.STATE).read_text())["sha256"][checkpoint.MODEL]


# --- evaluate -----------------------------------------------------------------------------------------


def run_evaluate(run: Run) -> None:
    """Trained drafter in, real speculative decoding out.

    Raises:
        PromptError, PipelineError, TargetError: see the stages.
    """
    from stages.chat import render_prompt
    from stages.evaluate import EvalPrompt
    from stages.prompts import import_prompts, prompts_sha256, to_prompt

    recipe, folder = run.recipe, run.folder.evaluate
    job = train_job(run)
    drafter, weights_sha256 = trained_drafter(run, job)
    found = import_prompts(recipe.evaluate.sources, recipe.base)
    made_of = {
        "weights_sha256": weights_sha256,
        "train": job.fingerprint,
        "evaluate": identity_fields(recipe.evaluate),
        "prompts_sha256": prompts_sha256(found.conversations),
    }
    fingerprint = run.pin("evaluate", folder, made_of)
    if run.is_done("evaluate", fingerprint, lambda: _read_object(folder / "results.json") is not None):
        return
    _require_unseen(run, found.conversations)
    prompts = [
        EvalPrompt(
            c.sample_id,
            c.category or "all",
            str(c.messages[-1]["content"]),
            render_prompt(run.tokenizer, c.messages, tools=c.tools, template_kwargs=recipe.target.chat_template_kwargs),
        )
        for c in map(to_prompt, found.conversations)
    ]
    with run.stage("evaluate", fingerprint) as summary:
        results = _evaluate(run, drafter, prompts)
        write_atomic(folder / "results.json", (json.dumps(results, indent=1) + "\n").encode())
        trained = results["drafters"]["trained"]
        summary |= {
            "prompts": len(prompts),
            "rejected": len(found.rejects),
            "tau": trained["tau"],
            "speedup": trained["speedup"],
            "identical": trained["identical"],
        }


def _require_unseen(run: Run, conversations: Any) -> None:
    """Evaluation prompts must not be among those trained on: by content, whatever their ids."""
    from cache_schema.responses import ResponsesTable
    from stages.prompts import to_prompt

    seen = {canonical_json(r.messages): r.sample_id for r in ResponsesTable.open(run.folder.responses)}
    both = [
        (c.sample_id, seen[canonical_json([dict(m) for m in to_prompt(c).messages])])
        for c in conversations
        if canonical_json([dict(m) for m in to_prompt(c).messages]) in seen
    ]
    if both:
        raise PipelineError(
            f"evaluate.sources: {len(both)} prompts were trained on too, the first is {both[0][0]!r} (training sample "
            f"{both[0][1]!r}); τ on them says nothing about new prompts, so take them out of one side"
        )


def _evaluate(run: Run, drafter: Any, prompts: list[Any]) -> dict[str, Any]:
    import torch

    from stages.chat import end_of_turn_ids
    from stages.device import use_threads, worker_device
    from stages.drafter import Drafter
    from stages.evaluate import Tally, evaluate_prompt, warm_up
    from stages.target import DTYPES, load_target

    config = run.recipe.evaluate
    use_threads(config.threads)
    target = load_target(run.recipe.target, device=worker_device(), dtype=config.dtype)
    stop_ids = end_of_turn_ids(
        target.tokenizer,
        getattr(target.model, "generation_config", None),
        template_kwargs=run.recipe.target.chat_template_kwargs,
    )
    drafters = {"trained": drafter} | (
        {"untrained": Drafter(drafter.spec, seed=run.recipe.seed)} if config.untrained else {}
    )
    for model in drafters.values():  # weights as they are exported: rounded to bfloat16
        model.to(torch.bfloat16).to(target.device, DTYPES[config.dtype]).requires_grad_(False)
    tallies = {name: Tally(drafter.spec.block_size) for name in drafters}
    rows_dir = run.folder.evaluate / "prompts"
    rows_dir.mkdir(exist_ok=True)
    finished = {p.sample_id: _finished_row(_row_file(rows_dir, p.sample_id), drafters) for p in prompts}
    have = [s for s, rows in finished.items() if rows is not None]
    say_resume(run, "evaluate", len(have), len(prompts), "prompts")
    if len(have) < len(prompts):
        warm_up(target, drafters, prompts[0], stop_ids)
    with Progress(len(prompts), "prompts", "evaluate", done=len(have)) as progress:
        for prompt in prompts:
            rows = finished[prompt.sample_id]
            if rows is None:
                rows = evaluate_prompt(
                    target, drafters, prompt, max_new_tokens=config.max_new_tokens, stop_ids=stop_ids
                )
                write_atomic(_row_file(rows_dir, prompt.sample_id), json.dumps(rows).encode())
                progress.update(1)
            for name, row in rows.items():
                tallies[name].rows.append(row)
    return {
        "block_size": drafter.spec.block_size,
        "max_new_tokens": config.max_new_tokens,
        "dtype": config.dtype,
        "heldout_prompts": len(prompts),
        "drafters": {name: t.results() for name, t in tallies.items()},
    }


def _finished_row(file: Path, names: Any) -> dict[str, Any] | None:
    """A prompt's rows by drafter, or None when it has to be decoded (again)."""
    rows = _read_object(file)
    whole = rows is not None and rows.keys() == set(names) and all(isinstance(r, dict) for r in rows.values())
    return rows if whole else None


def _row_file(folder: Path, sample_id: str) -> Path:
    return folder / f"{sha256_json(sample_id)[:32]}.json"


# --- export -------------------------------------------------------------------------------------------


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


STEPS: dict[str, Callable[[Run], None]] = {
    "generate": run_generate,
    "extract": run_extract,
    "train": run_train,
    "evaluate": run_evaluate,
    "export": run_export,
}
