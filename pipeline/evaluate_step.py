"""The evaluate stage, driven: speculative decoding with the trained drafter, prompt by prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cache_schema.durable import write_atomic
from cache_schema.identity import canonical_json, sha256_json
from pipeline.errors import PipelineError
from pipeline.progress import Progress
from pipeline.run import Run, read_object, say_resume
from pipeline.train_step import train_job, trained_drafter
from stages.config import identity_fields


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
    if run.is_done("evaluate", fingerprint, lambda: read_object(folder / "results.json") is not None):
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
    """Evaluation prompts must not be among those trained on: by what the user said, whatever ids and answers."""
    from cache_schema.responses import ResponsesTable
    from stages.prompts import to_prompt

    def asked(messages: Any) -> list[str]:
        return [canonical_json(dict(m)) for m in messages if m["role"] != "assistant"]

    seen: dict[tuple[str, ...], str] = {}
    for response in ResponsesTable.open(run.folder.responses):
        said = asked(response.messages)
        seen |= {tuple(said[: n + 1]): response.sample_id for n in range(len(said))}
    prompts = [(c.sample_id, tuple(asked(to_prompt(c).messages))) for c in conversations]
    both = [(sample_id, seen[said]) for sample_id, said in prompts if said in seen]
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
    rows = read_object(file)
    whole = rows is not None and rows.keys() == set(names) and all(isinstance(r, dict) for r in rows.values())
    return rows if whole else None


def _row_file(folder: Path, sample_id: str) -> Path:
    return folder / f"{sha256_json(sample_id)[:32]}.json"
