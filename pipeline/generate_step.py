"""The generate stage, driven: prompts are imported and mixed, parts planned and answered, and the outcome judged."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cache_schema.identity import ResponsesIdentity
from cache_schema.storage import join
from pipeline.errors import PipelineError
from pipeline.folder import REJECTS
from pipeline.pool import drive_pool
from pipeline.run import Run, first_reasons, say_resume
from stages.config import identity_fields

if TYPE_CHECKING:
    from cache_schema.ledger import PartLedgerRow
    from cache_schema.responses import ResponsesTable
    from stages.prompts import Conversation, PromptImport


def run_generate(run: Run) -> None:
    """Prompts in, responses table out.

    Raises:
        PromptError, TargetError, EngineError, FingerprintMismatch, PoisonShard: see the stages.
        PipelineError: no usable response, or too many prompts without one.
    """
    from cache_schema.responses import ResponsesTable, committed_parts, create_responses, write_rejects
    from stages.answers import GenerateJob, GenerateWorker, plan_parts
    from stages.engine import needs_device
    from stages.prompts import answers_of, import_prompts

    recipe, folder = run.recipe, run.folder.responses
    found = import_prompts(recipe.prompts, recipe.base, recipe.seed)
    identity = responses_identity(run, found)
    asked = answers_of(found.conversations, recipe.generate.answers_per_prompt)
    parts = plan_parts(asked, recipe.generate.part_samples)
    create_responses(folder, identity, len(parts), len(asked))
    if run.is_done("generate", identity.fingerprint(), lambda: len(committed_parts(folder)) == len(parts)):
        return
    write_rejects(join(folder, REJECTS), found.rejects)
    _say_import(run, found)
    with run.stage("generate", identity.fingerprint()) as summary:
        have = committed_parts(folder)
        todo = [p for p in parts if p.index not in have]
        say_resume(run, "generate", len(have), len(parts), "parts")
        limit, too_long = recipe.prompts.max_prompt_tokens, recipe.prompts.too_long
        job = GenerateJob(recipe.target, recipe.generate, limit, recipe.seed, folder, too_long)
        build, gpu = functools.partial(GenerateWorker, job), needs_device(recipe.generate)
        drive_pool(run, "generate", "part", todo, build, len(have), recipe.generate, gpu=gpu)
        table = ResponsesTable.open(folder)
        summary |= _summary(table, found)
        _require_enough(run, table, asked)


def responses_identity(run: Run, found: PromptImport) -> ResponsesIdentity:
    """What the responses table of this run is made of."""
    from stages.prompts import prompts_sha256

    recipe = run.recipe
    settings = identity_fields(recipe.generate) | {
        "seed": recipe.seed,
        "dtype": recipe.target.dtype,
        "max_prompt_tokens": recipe.prompts.max_prompt_tokens,
        "too_long": recipe.prompts.too_long,
    }
    return ResponsesIdentity(
        target_name=recipe.target.model,
        target_revision=recipe.target.revision,
        target_weights_sha256=run.hashes.weights,
        tokenizer_sha256=run.hashes.tokenizer,
        chat_template_sha256=run.hashes.chat_template,
        chat_template_kwargs=dict(recipe.target.chat_template_kwargs),
        prompts_sha256=prompts_sha256(found.conversations),
        settings=settings,
    )


def _say_import(run: Run, found: PromptImport) -> None:
    rejects = f" ({found.reasons()}; see {join(run.folder.responses, REJECTS)})" if found.rejects else ""
    run.say(
        f"generate: {len(found.conversations)} prompts from {found.n_rows} rows, {len(found.rejects)} rejected{rejects}"
    )
    if found.duplicate_content:
        run.say(
            f"generate: {found.duplicate_content} rows repeat the messages of an earlier one under another id "
            f"(prompts.duplicates: {run.recipe.prompts.duplicates})"
        )
    if found.n_not_taken:
        run.say("generate: the mix takes " + ", ".join(f"{s.n_taken} of {s.n_fit} of {s.path}" for s in found.sources))


def _summary(table: ResponsesTable, found: PromptImport) -> dict[str, Any]:
    prompts = sum(len(r.prompt_ids) for r in table)
    return {
        "responses": len(table),
        "prompt_tokens": prompts,
        "response_tokens": int(table.lengths()[1].sum()) - prompts,
        "rejected": len(found.rejects),
        "dropped": len(_dropped(table)),
        "shortened": sum(row["reason"] == "prompt_shortened" for row in table.ledger),
        "duplicate_content": found.duplicate_content,
    }


def _dropped(table: ResponsesTable) -> list[PartLedgerRow]:
    from cache_schema.responses import KEPT_REASONS

    return [row for row in table.ledger if row["reason"] not in KEPT_REASONS]


def _require_enough(run: Run, table: ResponsesTable, asked: Sequence[Conversation]) -> None:
    from cache_schema.responses import conversation_id

    if len(table) == 0:
        raise PipelineError(
            f"generate made no usable response out of {table.n_parts} parts; {table.folder}'s ledger says why: "
            + first_reasons(table.ledger)
        )
    dropped, max_share = _dropped(table), run.recipe.prompts.max_bad_share
    hurt = {conversation_id(row["sample_id"]) for row in dropped}
    if len(hurt) > max_share * len(asked):
        raise PipelineError(
            f"generate dropped turns of {len(hurt)} of {len(asked)} prompts, more than prompts.max_bad_share "
            f"{max_share:.0%} allows: {first_reasons(dropped)}"
        )
