"""The evaluate stage, driven: speculative decoding with the trained drafter, or with an existing one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cache_schema.identity import canonical_json
from cache_schema.names import RESPONSES_JSON
from cache_schema.storage import open_storage
from pipeline.errors import PipelineError
from pipeline.folder import RESULTS
from pipeline.run import Run, read_object
from pipeline.train_step import train_job, trained_drafter
from stages.config import identity_fields


def run_evaluate(run: Run) -> None:
    """Drafter in, real speculative decoding out: `results.json`, and `schedule.json` with the best block sizes.

    Raises:
        PromptError, PipelineError, TargetError, CheckpointError: see the stages.
    """
    from stages.prompts import prompts_sha256

    recipe, storage = run.recipe, open_storage(run.folder.evaluate)
    drafter, made_of = _drafter(run)
    conversations, n_rejected = _conversations(run)
    made_of |= {"evaluate": identity_fields(recipe.evaluate), "prompts_sha256": prompts_sha256(conversations)}
    fingerprint = run.pin("evaluate", run.folder.evaluate, made_of)
    if run.is_done("evaluate", fingerprint, lambda: read_object(storage, RESULTS) is not None):
        return
    _require_unseen(run, conversations)
    prompts = _rendered(run, conversations)
    with run.stage("evaluate", fingerprint) as summary:
        results = _evaluate(run, drafter, prompts)
        storage.replace(RESULTS, (json.dumps(results, indent=1) + "\n").encode())
        storage.replace("schedule.json", (json.dumps(results["schedule"], indent=1) + "\n").encode())
        trained = results["drafters"]["trained"]
        summary |= {
            "prompts": len(prompts),
            "rejected": n_rejected,
            "tau": trained["tau"],
            "speedup": trained["speedup"],
            "identical": trained["identical"],
        }


def _drafter(run: Run) -> tuple[Any, dict[str, Any]]:
    """The drafter to evaluate, trained here or given as a folder, and what it is made of."""
    given = run.recipe.evaluate.drafter
    if given is None:
        job = train_job(run)
        drafter, weights_sha256 = trained_drafter(run, job)
        return drafter, {"weights_sha256": weights_sha256, "train": job.fingerprint}
    from cache_schema.identity import sha256_file
    from stages.checkpoint_format import load_drafter
    from stages.export_check import require_fit
    from stages.target import load_config, shape_of

    folder = run.recipe.base / Path(given).expanduser()
    drafter = load_drafter(folder)
    require_fit(drafter.spec, shape_of(load_config(run.recipe.target)), str(folder))
    config = json.loads((folder / "config.json").read_bytes())
    return drafter, {"weights_sha256": sha256_file(folder / "model.safetensors"), "config": config}


def _conversations(run: Run) -> tuple[list[Any], int]:
    """What is asked, from sources and benchmarks, and how many rows were rejected."""
    from stages.prompts import import_prompts

    config = run.recipe.evaluate
    found = import_prompts(config.sources, run.recipe.base) if config.sources else None
    conversations = list(found.conversations) if found else []
    if config.benchmarks:
        from stages.benchmarks import load_benchmark

        for name in config.benchmarks:
            conversations += load_benchmark(name, config.benchmark_prompts)
    return conversations, len(found.rejects) if found else 0


def _rendered(run: Run, conversations: list[Any]) -> list[Any]:
    from stages.chat import render_prompt
    from stages.evaluate import EvalPrompt
    from stages.prompts import to_prompt

    kwargs = run.recipe.target.chat_template_kwargs
    return [
        EvalPrompt(
            c.sample_id,
            c.category or "all",
            str(c.messages[-1]["content"]),
            render_prompt(run.tokenizer, c.messages, tools=c.tools, template_kwargs=kwargs),
            c.difficulty,
        )
        for c in map(to_prompt, conversations)
    ]


def _require_unseen(run: Run, conversations: Any) -> None:
    """Evaluation prompts must not be among those trained on: by what the user said, whatever ids and answers."""
    from cache_schema.responses import ResponsesTable
    from stages.prompts import to_prompt

    def asked(messages: Any) -> list[str]:
        return [canonical_json(dict(m)) for m in messages if m["role"] != "assistant"]

    if not open_storage(run.folder.responses).exists(RESPONSES_JSON):
        return  # an existing drafter is evaluated, and nothing was trained here
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
    from pipeline.evaluate_results import measure_passes, middle_of, results_of, schedule_of
    from pipeline.evaluate_units import plan_units
    from stages.evaluate import Variant
    from stages.schedule import size_by_rows

    config = run.recipe.evaluate
    own = drafter.spec.block_size
    sizes = config.block_sizes or (own,)
    longest = max((len(p.ids) for p in prompts), default=0) + config.max_new_tokens + max(sizes)
    bench = _bench(run, drafter, longest)
    trained = [Variant("trained", size, size) for size in sizes]
    first = own if own in sizes else sizes[0]
    main = [*trained, *([Variant("untrained", first, first)] if config.untrained else [])]
    columns = bench.decode(plan_units(prompts, config.temperatures, config.batch_sizes, main, trained))
    passes = measure_passes(bench, sizes, config.batch_sizes, middle_of(prompts, columns))
    schedule = schedule_of(columns, passes, config.temperatures[0], config.batch_sizes[0])
    if config.block_size == "schedule":
        follow = [Variant("trained", "schedule", size_by_rows(schedule))]
        columns |= bench.decode(plan_units(prompts, config.temperatures, config.batch_sizes, follow, follow))
    return results_of(bench, columns, own, len(prompts), passes, schedule)


def _bench(run: Run, drafter: Any, longest: int) -> Any:
    """Target and drafters, loaded, placed, and checked for what the settings need of them."""
    import torch

    from pipeline.evaluate_units import Bench
    from stages.chat import end_of_turn_ids
    from stages.device import use_threads, worker_device
    from stages.drafter import Drafter
    from stages.sessions import check_target
    from stages.target import DTYPES, load_target

    config = run.recipe.evaluate
    use_threads(config.threads)
    target = load_target(run.recipe.target, device=worker_device(), dtype=config.dtype)
    check_target(target, sampled=any(config.temperatures), ragged=max(config.batch_sizes) > 1, longest=longest)
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
    return Bench(run, target, drafters, stop_ids, config.max_new_tokens)
