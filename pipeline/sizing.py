"""`dflash plan`: what a run will need, from the target's config alone, before any accelerator is used.

No weights are loaded. The formulas are in `pipeline.costs`; what is assumed is said beside each number.
"""

from __future__ import annotations

import dataclasses
import io
import math
import shutil
from typing import TYPE_CHECKING, Any

from pipeline.costs import (
    CACHE_DTYPES,
    PROFILE_SHARE,
    drafter_parameters,
    frozen_parameters,
    prefill_flops,
    sample_flops,
    token_bytes,
)
from pipeline.recipe import Recipe
from pipeline.report_text import bytes_text, count_text
from pipeline.sample_counts import SampleCounts, count_samples
from stages.config import PROFILES

if TYPE_CHECKING:
    from stages.drafter import DrafterSpec

_FP32 = 4
_STATES = 3  # master weights and the two moments of AdamW
_BF16 = 2
_RESPONSE_TOKEN = 9  # two int32 ids' worth and a mask byte, before compression: an upper bound


def plan_run(recipe: Recipe, n_samples: int | None = None, mean_tokens: float | None = None) -> dict[str, Any]:
    """Sizes and costs of a run, as JSON-able values.

    Args:
        recipe: the run.
        n_samples: how many samples to plan for; None counts responses or sources.
        mean_tokens: mean tokens of a sample; None measures responses, or assumes an upper bound.

    Raises:
        TargetError: there is no such target, or it lacks the wanted layers.
        PipelineError: the number of samples is not known.
    """
    from stages.drafter import spec_for_target
    from stages.target import load_config, shape_of

    config = load_config(recipe.target)
    shape = shape_of(config)
    layer_ids = shape.layer_ids(recipe.cache.n_layers, recipe.cache.layer_ids)
    mask_id, mask_source = _mask(recipe, shape.vocab_size)
    # The MASK id changes no size; -1 stands in where it is not known yet.
    used = recipe.drafter.feature_layers or layer_ids
    mask = -1 if mask_id is None else mask_id
    spec = spec_for_target(recipe.drafter, config, feature_layer_ids=used, mask_token_id=mask)
    counts = count_samples(recipe, n_samples, mean_tokens)
    cache = _cache(recipe, spec, counts)
    return {
        "recipe": recipe.name,
        "run": str(recipe.run),
        "target": {
            "model": recipe.target.model,
            "n_layers": shape.n_layers,
            "hidden_size": shape.hidden_size,
            "vocab_size": shape.vocab_size,
            "feature_layer_ids": list(layer_ids),
            "mask_token_id": mask_id,
            "mask_token_source": mask_source,
        },
        "samples": dataclasses.asdict(counts) | {"n_tokens": round(counts.n_samples * counts.mean_tokens)},
        "cache": cache,
        "drafter": {
            "n_layers": spec.n_layers,
            "block_size": spec.block_size,
            "parameters": drafter_parameters(spec),
            "tensors": 11 * spec.n_layers + 3,
            "frozen_parameters": frozen_parameters(spec),
        },
        "extract": {
            "layers_run": layer_ids[-1] + 1,
            "prefill_flops": counts.n_samples
            * prefill_flops(config.get_text_config(), n_layers=layer_ids[-1] + 1, tokens=counts.mean_tokens),
        },
        "train": _train(recipe, spec, counts),
        "disk": _disk(recipe, spec, counts, cache["bytes"]),
    }


def _mask(recipe: Recipe, embedding_rows: int) -> tuple[int | None, str]:
    """The MASK id and the rule that chose it; None where there is no tokenizer to ask."""
    from stages.errors import TargetError
    from stages.target import choose_mask_token, load_tokenizer

    given = recipe.target.mask_token_id
    unknown = given, "unknown without tokenizer" if given is None else "target.mask_token_id, unchecked: no tokenizer"
    try:
        tokenizer = load_tokenizer(recipe.target)
    except TargetError:
        return unknown
    # For a bare config.json transformers makes up a tokenizer that knows special tokens only.
    if len(tokenizer.get_vocab()) <= len(tokenizer.added_tokens_decoder):
        return unknown
    mask = choose_mask_token(tokenizer, embedding_rows, recipe.target.mask_token_id)
    return mask.id, mask.source


def _cache(recipe: Recipe, spec: DrafterSpec, counts: SampleCounts) -> dict[str, Any]:
    n, D = len(spec.feature_layer_ids), spec.hidden_size
    tokens = counts.n_samples * counts.mean_tokens

    def total(dtype: str, last_hidden: bool) -> int:
        return round(tokens * sum(token_bytes(D, n, dtype, last_hidden=last_hidden).values()))

    form = recipe.cache.format
    own = token_bytes(D, n, form.dtype, last_hidden=recipe.cache.last_hidden, groups=form.n_groups(D))
    by_profile = {name: total("bfloat16", False) * share for name, share in PROFILE_SHARE.items()}
    settings = {name: getattr(recipe.cache, name) for name in PROFILES["exact"]}
    profile = next((name for name, chosen in PROFILES.items() if chosen == settings), None)
    last_hidden = round(tokens * own.get("last_hidden", 0))
    stored = round(by_profile[profile]) + last_hidden if profile in ("compact", "tiny") else None
    return {
        "dtype": form.dtype,
        "profile": profile,
        "last_hidden": recipe.cache.last_hidden,
        "token_bytes": sum(own.values()),
        "bytes": stored or round(tokens * sum(own.values())),
        "shard_bytes": recipe.cache.shard_bytes,
        "n_shards": math.ceil(tokens * own["features"] / recipe.cache.shard_bytes),
        "by_profile": {name: round(size) for name, size in by_profile.items()},
        "by_dtype": {
            dtype: {"bytes": total(dtype, False), "bytes_with_last_hidden": total(dtype, True)}
            for dtype in CACHE_DTYPES
        },
    }


def _train(recipe: Recipe, spec: DrafterSpec, counts: SampleCounts) -> dict[str, Any]:
    train = recipe.train
    n_train = round(counts.n_samples * (1 - train.heldout_share))
    # An anchor needs a supervised successor, so the last token of a response is none.
    anchors = min(train.anchors, max(counts.mean_response_tokens - 1, 0))
    visible = counts.mean_tokens - counts.mean_response_tokens / 2
    parts = sample_flops(spec, tokens=counts.mean_tokens, anchors=anchors, visible=visible)
    steps = math.ceil(n_train / train.batch_samples)
    return {
        "samples": n_train,
        "anchors_per_sample": anchors,
        "steps_per_epoch": steps,
        "epochs": train.epochs,
        "flops_per_sample": parts,
        "flops_per_step": sum(parts.values()) * train.batch_samples,
        "flops_per_epoch": sum(parts.values()) * n_train,
        "flops": sum(parts.values()) * n_train * train.epochs,
    }


def _disk(recipe: Recipe, spec: DrafterSpec, counts: SampleCounts, cache_bytes: int) -> dict[str, Any]:
    parameters = drafter_parameters(spec)
    parts = {
        "responses": round(counts.n_samples * counts.mean_tokens * _RESPONSE_TOKEN),
        "cache": min(cache_bytes, recipe.cache.max_bytes or cache_bytes),
        # One more than is kept: a new checkpoint is complete before an old one goes.
        "checkpoints": (recipe.train.keep_checkpoints + 1) * parameters * _STATES * _FP32,
        "export": parameters * _BF16,
    }
    need = sum(parts.values())
    if isinstance(recipe.run, str):  # an object store, which does not tell
        return {"folder": recipe.run, "need_by_part": parts, "need_bytes": need, "free_bytes": None, "fits": True}
    folder = recipe.run.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    return {"folder": str(folder), "need_by_part": parts, "need_bytes": need, "free_bytes": free, "fits": need <= free}


# --- as text ------------------------------------------------------------------------------------------


def flops_text(flops: float) -> str:
    """FLOPs in decimal units: 3.2 TFLOP, 1.4 EFLOP."""
    units = ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP", "YFLOP"]
    step = 0
    while flops >= 999.5 and step < len(units) - 1:
        flops, step = flops / 1000, step + 1
    return f"{flops:.3g} {units[step]}"


def render_plan(plan: dict[str, Any], width: int = 110) -> str:
    """The plan as a table for people, and a loud line when the disk is too small."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    text = io.StringIO()
    console = Console(file=text, width=width, highlight=False)
    table = Table(title=f"Plan of {plan['recipe']}, run folder {plan['run']}", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(plan):
        table.add_row(Text(name), Text(value))
    console.print(table)
    disk = plan["disk"]
    if not disk["fits"]:
        need, free = bytes_text(disk["need_bytes"]), bytes_text(disk["free_bytes"])
        console.print(Text(f"DOES NOT FIT: this run needs {need}, but {disk['folder']} has {free} free."))
        console.print(Text("Fewer samples, fewer feature layers, another run folder (--set run=…), or a cache that is"))
        console.print(Text("never there as a whole (--set cache.max_bytes=…, see docs/cache.md) would help."))
    return text.getvalue()


def _cache_text(cache: dict[str, Any]) -> str:
    kind = f"{cache['profile']}: {cache['dtype']}" if cache["profile"] else cache["dtype"]
    return f"{kind}, {cache['token_bytes']:,} B per token before compression"


def _rows(plan: dict[str, Any]) -> list[tuple[str, str]]:
    target, samples, cache, drafter = plan["target"], plan["samples"], plan["cache"], plan["drafter"]
    train, extract, disk = plan["train"], plan["extract"], plan["disk"]
    free = f"{bytes_text(disk['free_bytes'])} free" if disk["free_bytes"] is not None else "room unknown"
    mask = "?" if target["mask_token_id"] is None else target["mask_token_id"]
    by_dtype = [
        (f"  as {dtype}", f"{bytes_text(b['bytes'])}; {bytes_text(b['bytes_with_last_hidden'])} with last_hidden")
        for dtype, b in cache["by_dtype"].items()
    ]
    by_profile = [
        (f"  profile {name}", f"about {bytes_text(size)} ({PROFILE_SHARE[name]:.2f} of bfloat16, as with SmolLM2)")
        for name, size in cache["by_profile"].items()
    ]
    shards = f"{count_text(cache['n_shards'])} shards of {bytes_text(cache['shard_bytes'])}"
    steps = f"{count_text(train['steps_per_epoch'])} per epoch, {train['epochs']} epochs, {train['samples']:,} samples"
    return [
        ("target", f"{target['model']}: {target['n_layers']} layers, hidden {target['hidden_size']}"),
        ("feature layers", ", ".join(map(str, target["feature_layer_ids"]))),
        ("MASK id", f"{mask} ({target['mask_token_source']})"),
        ("samples", f"{count_text(samples['n_samples'])} ({samples['n_samples_source']})"),
        ("tokens per sample", f"{samples['mean_tokens']:.0f} ({samples['mean_tokens_source']})"),
        ("tokens", count_text(samples["n_tokens"])),
        ("cache", f"{bytes_text(cache['bytes'])} ({_cache_text(cache)}), {shards}"),
        *by_dtype,
        *by_profile,
        ("drafter", f"{count_text(drafter['parameters'])} parameters in {drafter['tensors']} tensors"),
        ("frozen beside it", f"{count_text(drafter['frozen_parameters'])} parameters (embedding and head)"),
        ("target prefill", f"{flops_text(extract['prefill_flops'])}, {extract['layers_run']} layers"),
        ("training steps", steps),
        (
            "training cost",
            f"{flops_text(train['flops_per_step'])} per step, {flops_text(train['flops_per_epoch'])} per "
            f"epoch, {flops_text(train['flops'])} in all",
        ),
        ("disk", f"needs {bytes_text(disk['need_bytes'])}, {free} at {disk['folder']}"),
    ]
