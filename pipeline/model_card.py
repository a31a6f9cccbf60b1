"""The README.md of an exported drafter."""

from __future__ import annotations

import json
from typing import Any

from pipeline.folder import EVALUATE, RESULTS, RunFolder
from pipeline.recipe import Recipe
from stages.drafter import DrafterSpec


def model_card(recipe: Recipe, spec: DrafterSpec, job: Any, folder: RunFolder) -> str:
    """What the drafter is for, what it was trained on, how good it is, how to serve it."""
    speculative = {"method": "dflash", "model": "<this folder>", "num_speculative_tokens": spec.block_size - 1}
    layers = ", ".join(map(str, spec.feature_layer_ids))
    header = f"---\nlicense: {recipe.export.license}\n---\n" if recipe.export.license else ""
    return f"""{header}# DFlash drafter for {recipe.target.model}

Block size {spec.block_size}, {spec.n_layers} layers, features of target layers {layers}
of {spec.n_target_layers}, MASK id {spec.mask_token_id}. It is of use with exactly this target: weights SHA-256
`{job.identity.target_weights_sha256}`.

| what | value |
|---|---|
| recipe | {recipe.name} |
| cache fingerprint | `{job.identity.fingerprint()}` |
| training fingerprint | `{job.fingerprint}` |
{_results(folder)}
## Serving

    vllm serve {recipe.target.model} --speculative-config '{json.dumps(speculative)}'
    python -m sglang.launch_server --model-path {recipe.target.model} --speculative-algorithm DFLASH \\
        --speculative-draft-model-path <this folder> --speculative-num-draft-tokens {spec.block_size}
"""


def _results(folder: RunFolder) -> str:
    try:
        results = json.loads(folder.storage.read(f"{EVALUATE}/{RESULTS}"))
    except FileNotFoundError:
        return "| τ | not evaluated yet |\n"
    trained = results["drafters"]["trained"]
    rows = [f"| τ (greedy, {trained['prompts']} held-out prompts) | {trained['tau']:.2f} |"]
    rows += [f"| τ, {category} | {r['tau']:.2f} |" for category, r in trained["by_category"].items()]
    if trained["identical"] is not None:  # sampled outputs are not compared
        rows.append(f"| output equal to plain decoding | {trained['identical']} of {trained['prompts']} |")
    return "\n".join(rows) + "\n"
