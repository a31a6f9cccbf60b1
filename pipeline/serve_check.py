"""Does the exported drafter do in a server what it did here? Same text as without it, and the same acceptance.

Prompts go one after the other, as token ids, greedily, to a server without the drafter and to one with it. Two things
are asked: is the text the server's own plain text (a difference must be a tie within rounding, see
`stages.evaluate`), and is the share of accepted drafts at each position within the interval of what our own engine
accepts on the same prompts (see `stages.acceptance`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import PipelineError
from pipeline.folder import RESULTS, SERVE_CHECK
from pipeline.progress import Progress
from pipeline.run import Run
from pipeline.vllm_server import free_port, running, server_command

SERVE_CHECK_VERSION = 1
ANSWER_S = 10.0
"""How long a running server may take to say that it is there."""
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """How the check is made.

    Attributes:
        drafter: exported folder.
        vllm_python: Python of an environment with vLLM, to start two servers one after the other; or
        urls: of running servers, without the drafter and with it, that nobody else uses meanwhile.
        n_prompts: of the evaluation's, evenly spread.
        max_new_tokens: of each answer.
        dtype: the servers'; ours computes in the same.
    """

    drafter: Path
    vllm_python: Path | None = None
    urls: tuple[str, str] | None = None
    n_prompts: int = 20
    max_new_tokens: int = 112
    dtype: Dtype = "float32"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a server answered: per prompt the token ids, and what it counted (None where it counts nothing)."""

    ids: list[list[int]]
    counts: list[Any] | None
    version: str | None


def check_serving(run: Run, serving: Serving) -> dict[str, Any]:
    """Make the check; writes and returns `serve-check/results.json`, whose `ok` is the verdict.

    Raises:
        PipelineError, EngineError: a server cannot be started or asked, or refuses a prompt.
        CheckpointError: the drafter cannot be read, or is for another target.
    """
    from transformers.utils import logging

    from stages.acceptance import accepted_of, compare
    from stages.target import DTYPES

    logging.disable_progress_bar()
    engines = _met(run, serving)  # first what fails in a moment, then what takes minutes
    prompts = _chosen(run, serving.n_prompts)
    target, drafter, stop_ids = _models(run, serving)
    size = drafter.spec.block_size
    longest = served_length(max(len(p.ids) for p in prompts), serving.max_new_tokens, size)
    answers = []
    for number, with_drafter in enumerate((False, True)):
        with _server(run, serving, with_drafter, size, longest, number) as url:
            engine = engines[number] or _engine(run, url, serving)
            answers.append(_ask(run, url, engine, prompts, stop_ids, with_drafter))
    plain, drafted = answers
    drafter.to(target.device, DTYPES[serving.dtype])
    if drafted.counts is not None:  # what a running server was started with
        size = len(drafted.counts[0].by_position) + 1
    rows = _ours(target, drafter, prompts, size, serving.max_new_tokens, stop_ids)
    found = _texts(target, prompts, plain.ids, drafted.ids, [row.ids for row in rows])
    acceptance = None
    if drafted.counts is not None:
        ours = [accepted_of(row, size - 1, serving.max_new_tokens) for row in rows]
        acceptance = compare(drafted.counts, ours)
    results = _facts(serving, drafted.version, size) | found | {"acceptance": acceptance}
    results["ok"] = verdict(results)
    run.folder.storage.replace(f"{SERVE_CHECK}/{RESULTS}", (json.dumps(results, indent=1) + "\n").encode())
    return results


def served_length(n_prompt: int, max_new_tokens: int, block_size: int) -> int:
    """The `--max-model-len` at which a server drafts to the end of every answer.

    vLLM 0.32 (`gpu_model_runner.py`) drafts only while all rows of the last pass, kept or not, and those of the next
    fit; behind that it counts blocks of which nothing is accepted.
    """
    return n_prompt + max_new_tokens + 2 * block_size


def verdict(results: dict[str, Any]) -> bool:
    """Every difference is explained, and every position that was counted lies within its interval."""
    acceptance = results["acceptance"]
    texts = results["identical"] + results["ties"] == results["prompts"]
    return texts and (acceptance is None or all(p["within"] for p in acceptance["positions"]))


def _facts(serving: Serving, version: str | None, block_size: int) -> dict[str, Any]:
    from cache_schema.identity import sha256_file

    return {
        "version": SERVE_CHECK_VERSION, "server_version": version, "dtype": serving.dtype, "block_size": block_size,
        "max_new_tokens": serving.max_new_tokens, "drafter": str(serving.drafter),
        "drafter_sha256": sha256_file(serving.drafter / "model.safetensors"),
    }  # fmt: skip


def _models(run: Run, serving: Serving) -> tuple[Any, Any, frozenset[int]]:
    """Target and drafter, in the servers' type, and what ends a response."""
    from pipeline.evaluate_step import stop_ids_of
    from stages.checkpoint_format import load_drafter
    from stages.device import use_threads, worker_device
    from stages.export_check import require_fit
    from stages.target import load_config, load_target, shape_of

    drafter = load_drafter(serving.drafter)
    require_fit(drafter.spec, shape_of(load_config(run.recipe.target)), str(serving.drafter))
    use_threads(run.recipe.evaluate.threads)
    target = load_target(run.recipe.target, device=worker_device(), dtype=serving.dtype)
    return target, drafter.eval().requires_grad_(False), stop_ids_of(run, target)


def _chosen(run: Run, n_prompts: int) -> list[Any]:
    from pipeline.evaluate_step import evaluation_prompts

    prompts = evaluation_prompts(run)
    if not prompts:
        raise PipelineError(
            "evaluate.sources gave no prompts, so there is nothing to ask a server; name a file with some"
        )
    n = min(n_prompts, len(prompts))
    return [prompts[i * len(prompts) // n] for i in range(n)]


# --- asking a server ---------------------------------------------------------------------------------------------


def _server(
    run: Run, serving: Serving, with_drafter: bool, block_size: int, longest: int, number: int
) -> AbstractContextManager[str]:
    """The URL of a server that runs for as long as the context is open."""
    from stages.target import resolve_model

    if serving.urls is not None:
        return nullcontext(_base(serving.urls[number]))
    if serving.vllm_python is None:
        raise PipelineError("there is no server to check: give --vllm-python, or --plain and --drafted")
    name = "drafted" if with_drafter else "plain"
    port = free_port()
    run.say(f"check-serve: starting vLLM {'with' if with_drafter else 'without'} the drafter")
    command = server_command(
        serving.vllm_python, resolve_model(run.recipe.target), port=port, dtype=serving.dtype, max_model_len=longest,
        drafter=serving.drafter.resolve() if with_drafter else None, block_size=block_size,
    )  # fmt: skip
    return running(command, f"http://127.0.0.1:{port}", run.folder.serve_check / f"{name}.log")


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _met(run: Run, serving: Serving) -> list[Any]:
    """The engines of servers that run already, once both have said that they can be asked; else None for each.

    Raises:
        PipelineError: one does not answer at all, or cannot be used.
    """
    import urllib.error

    from stages.engine import EngineError
    from stages.engine_metrics import read_url

    if serving.urls is None:
        return [None, None]
    engines = []
    for option, url in zip(("--plain", "--drafted"), map(_base, serving.urls), strict=True):
        run.say(f"check-serve: asking {url} for its models")
        try:
            read_url(f"{url}/v1/models", timeout_s=ANSWER_S)
        except EngineError as error:
            if not isinstance(error.__cause__, urllib.error.HTTPError):  # an error is an answer too
                raise PipelineError(f"{option}: {error}") from error
        try:
            engines.append(_engine(run, url, serving))
        except EngineError as error:  # its advice is for generate
            raise PipelineError(f"{option}: {str(error).replace('generate.server_urls', option)}") from error
    return engines


def _engine(run: Run, url: str, serving: Serving) -> Any:
    """What asks the server at a URL."""
    from stages.config import GenerateConfig
    from stages.engines import build_engine

    given = run.recipe.generate
    config = GenerateConfig(
        engine="openai", server_urls=(url,), server_model=given.server_model, api_key_env=given.api_key_env,
        concurrency=1, max_new_tokens=serving.max_new_tokens,
    )  # fmt: skip
    return build_engine(run.recipe.target, config, seed=0, tokenizer=run.tokenizer, target=None)


def _ask(
    run: Run, url: str, engine: Any, prompts: Sequence[Any], stop_ids: frozenset[int], with_drafter: bool
) -> Asked:
    """All prompts, one after the other, so that the counters tell what each one added."""
    from stages.engine_metrics import counters_after, read_counters, settled

    before = settled(partial(read_counters, url)) if with_drafter else None
    if with_drafter and before is None:
        run.say(f"check-serve: {url}/metrics counts no drafts, so acceptance is not compared")
    ids, counts = [], []
    with Progress(len(prompts), "prompts", "with the drafter" if with_drafter else "without") as progress:
        for prompt in prompts:
            ids.append(_answer(engine, prompt, stop_ids))
            if before is not None:
                now = counters_after(url, before, len(ids[-1]))
                counts.append(now.since(before))
                before = now
            progress.update(1)
    return Asked(ids, counts if before is not None else None, _version(url))


def _answer(engine: Any, prompt: Any, stop_ids: frozenset[int]) -> list[int]:
    from stages.engine import Answer, Prompt

    [found] = engine.answer([Prompt(prompt.sample_id, prompt.ids)], engine.config, seed=0, stop_ids=stop_ids)
    if not isinstance(found, Answer):
        raise PipelineError(
            f"the server does not answer prompt {prompt.sample_id!r} of evaluate: {found.reason}: {found.detail}"
        )
    return found.ids


def _version(url: str) -> str | None:
    """What the server calls itself, if it says."""
    from stages.engine import EngineError
    from stages.engine_metrics import read_url

    try:
        found = json.loads(read_url(f"{url}/version"))
    except (EngineError, ValueError):
        return None
    return str(found["version"]) if isinstance(found, dict) and "version" in found else None


# --- comparing ---------------------------------------------------------------------------------------------------


def _ours(
    target: Any, drafter: Any, prompts: Sequence[Any], block_size: int, max_new_tokens: int, stop_ids: frozenset[int]
) -> list[Any]:
    """The same prompts by our own engine."""
    from stages.decode import Request, decode_batch

    rows = []
    with Progress(len(prompts), "prompts", "our own engine") as progress:
        for prompt in prompts:
            request = Request(prompt.sample_id, prompt.ids)
            rows += decode_batch(
                target, [request], drafter=drafter, block_size=block_size, max_new_tokens=max_new_tokens,
                stop_ids=stop_ids,
            ).rows  # fmt: skip
            progress.update(1)
    return rows


def _texts(
    target: Any, prompts: Sequence[Any], plain: Sequence[list[int]], drafted: Sequence[list[int]],
    ours: Sequence[list[int]],
) -> dict[str, Any]:
    """Answers with the drafter against the same server's without it; and how many are ours too."""
    from stages.evaluate import explain_difference, first_difference

    differences = []
    for prompt, a, b in zip(prompts, plain, drafted, strict=True):
        found = first_difference(prompt.sample_id, a, b)
        if found is not None:
            differences.append(found | explain_difference(target, prompt.ids, a, b, found["position"]))
    return {
        "prompts": len(prompts),
        "tokens": sum(map(len, drafted)),
        "identical": len(prompts) - len(differences),
        "ties": sum(d["tie"] for d in differences),
        "differences": differences,
        "identical_to_ours": sum(a == b for a, b in zip(plain, ours, strict=True)),
    }
