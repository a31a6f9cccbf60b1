"""`dflash plan`: layer ids, counts against real modules, sizes against arithmetic done by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cache_schema.errors import DFlashError
from pipeline.costs import drafter_parameters, frozen_parameters, prefill_flops, sample_flops, token_bytes
from pipeline.errors import PipelineError
from pipeline.recipe import Recipe, load_recipe
from pipeline.sample_counts import count_samples
from pipeline.sizing import flops_text, plan_run, render_plan
from pipeline.sizing_rates import read_rates
from stages.config import ConfigError
from stages.drafter import Drafter, DrafterSpec
from stages.errors import TargetError
from stages.hardware import step_flops
from stages.layers import check_layer_ids, feature_layer_ids

ROOT = Path(__file__).parents[1]

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288,
    "vocab_size": 151936, "rope_theta": 1000000, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960,
    "tie_word_embeddings": False, "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip

SPEC = DrafterSpec(
    hidden_size=32, intermediate_size=48, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, vocab_size=100,
    block_size=4, n_target_layers=8, feature_layer_ids=(1, 3, 5), mask_token_id=99, rope_theta=10000.0,
)  # fmt: skip


# --- layer ids ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_target_layers", "n", "ids"),
    [
        (28, 5, (1, 7, 13, 19, 25)),
        (32, 5, (1, 8, 15, 22, 29)),
        (36, 5, (1, 9, 17, 25, 33)),
        (48, 5, (1, 12, 23, 34, 45)),
        (64, 5, (1, 16, 31, 46, 61)),
        (36, 1, (18,)),
        (36, 3, (1, 17, 33)),
        (30, 5, (1, 8, 14, 20, 27)),  # 7.5 and 20.5: halves go to the even neighbour
        (8, 5, (1, 2, 3, 4, 5)),
    ],
)
def test_feature_layer_ids(n_target_layers: int, n: int, ids: tuple[int, ...]) -> None:
    assert feature_layer_ids(n_target_layers, n) == ids


@pytest.mark.parametrize(("n_target_layers", "n"), [(4, 5), (7, 5), (2, 3), (36, 0), (0, 1)])
def test_too_few_layers_is_an_error(n_target_layers: int, n: int) -> None:
    with pytest.raises(ConfigError, match=r"cache\.n_layers"):
        feature_layer_ids(n_target_layers, n)


@pytest.mark.parametrize("ids", [(), (3, 3), (4, 2), (-1, 2), (0, 8)])
def test_layer_ids_that_do_not_fit(ids: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="target of 8 layers"):
        check_layer_ids(ids, 8)


# --- formulas -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_layers", [1, 3])
def test_parameters_are_those_of_the_module(n_layers: int) -> None:
    spec = dataclasses.replace(SPEC, n_layers=n_layers)
    parameters = list(Drafter(spec).parameters())
    assert drafter_parameters(spec) == sum(p.numel() for p in parameters)
    assert len(parameters) == 11 * n_layers + 3


def test_a_tied_head_is_counted_once() -> None:
    assert frozen_parameters(SPEC) == 2 * 100 * 32
    assert frozen_parameters(dataclasses.replace(SPEC, tie_word_embeddings=True)) == 100 * 32


def test_flops_of_a_sample_are_those_of_its_step() -> None:
    """3 blocks of B slots, all but the first of each with a label; each slot sees 5 context rows and its own block."""
    block = SPEC.block_size
    parts = sample_flops(SPEC, tokens=24, anchors=3, visible=5)
    pairs = 3 * block * (5 + block)
    assert parts == step_flops(SPEC, context_rows=24, slots=3 * block, labels=3 * (block - 1), visible=pairs)
    assert all(value > 0 for value in parts.values())


def test_prefill_flops_are_those_that_torch_counts() -> None:
    from transformers import Qwen3Config, Qwen3Model

    config = Qwen3Config(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=48, vocab_size=50, attn_implementation="eager",
    )  # fmt: skip
    model, tokens = Qwen3Model(config), 40
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    causal_half = 3 * 2 * tokens**2 * 4 * 16
    assert counter.get_total_flops() - causal_half == prefill_flops(config, n_layers=3, tokens=tokens)


def test_bytes_of_a_token() -> None:
    assert sum(token_bytes(4096, 5, "bfloat16", last_hidden=False).values()) == 5 * 4096 * 2 + 5
    assert sum(token_bytes(4096, 5, "float16", last_hidden=True).values()) == 6 * 4096 * 2 + 5
    assert sum(token_bytes(4096, 5, "int8", last_hidden=False).values()) == 5 * 4096 + 5 * 4 + 5
    assert sum(token_bytes(64, 5, "float8_e4m3fn", last_hidden=True, groups=2).values()) == 5 * 64 + 40 + 128 + 5


@pytest.mark.parametrize(
    ("flops", "text"), [(0, "0 FLOP"), (999, "999 FLOP"), (1.5e12, "1.5 TFLOP"), (3e30, "3e+06 YFLOP")]
)
def test_flops_text(flops: float, text: str) -> None:
    assert flops_text(flops) == text


# --- a plan -------------------------------------------------------------------------------------------


def recipe_at(folder: Path, *overrides: str, **config: Any) -> Recipe:
    """A recipe whose target is a folder with a config.json and nothing else."""
    target = folder / "target"
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(QWEN3_8B | config))
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n{"prompt": "c"}')
    path = folder / "r.yaml"
    path.write_text(
        "name: big\nprompts: {sources: [{path: prompts.jsonl}]}\nevaluate: {sources: [{path: prompts.jsonl}]}\n"
    )
    return load_recipe(path, [f"target.model={target}", f"run={folder / 'run'}", *overrides])


def test_plan_of_a_config_alone(tmp_path: Path) -> None:
    plan = plan_run(recipe_at(tmp_path), n_samples=800_000, mean_tokens=1000)
    assert json.loads(json.dumps(plan)) == plan
    assert plan["target"]["feature_layer_ids"] == [1, 9, 17, 25, 33]
    assert plan["target"]["mask_token_id"] is None
    assert plan["target"]["mask_token_source"] == "unknown without tokenizer"
    assert plan["samples"]["n_tokens"] == 800_000_000
    assert plan["cache"]["bytes"] == 800_000_000 * (5 * 4096 * 2 + 5)
    assert plan["cache"]["n_shards"] == -(-800_000_000 * 5 * 4096 * 2 // (1 << 30))
    assert plan["cache"]["by_dtype"]["int8"]["bytes"] < 0.51 * plan["cache"]["bytes"]
    layer = 4096 * 128 * (32 + 8 + 8 + 32) + 2 * 128 + 3 * 4096 * 12288 + 2 * 4096
    assert plan["drafter"]["parameters"] == 5 * 4096 * 4096 + 2 * 4096 + 5 * layer
    assert plan["drafter"]["frozen_parameters"] == 2 * 151936 * 4096
    assert plan["extract"]["layers_run"] == 34
    assert plan["train"]["steps_per_epoch"] == 784_000 // 8
    assert plan["train"]["flops_per_step"] == pytest.approx(8 * sum(plan["train"]["flops_per_sample"].values()))
    assert not plan["disk"]["fits"]


def test_what_does_not_fit_is_said_loudly(tmp_path: Path) -> None:
    recipe = recipe_at(tmp_path)
    big, small = (plan_run(recipe, n, 10) for n in (10**12, 1))
    small["disk"]["fits"] = True
    assert "DOES NOT FIT: this run needs" in render_plan(big)
    text = render_plan(small)
    assert "DOES NOT FIT" not in text
    for part in ("1, 9, 17, 25, 33", "unknown without tokenizer", "as int8", "per epoch", str(tmp_path)[:20]):
        assert part in text
    assert max(map(len, text.splitlines())) <= 110


def test_a_given_mask_id_is_shown_unchecked(tmp_path: Path) -> None:
    plan = plan_run(recipe_at(tmp_path, "target.mask_token_id=151669"), 10, 100)
    assert plan["target"]["mask_token_id"] == 151669
    assert "unchecked" in plan["target"]["mask_token_source"]


def test_the_mask_id_comes_from_the_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    recipe = recipe_at(tmp_path, "cache.layer_ids=[3, 30]", vocab_size=8)
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<eos>": 2}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(tmp_path / "target")
    plan = plan_run(recipe, 10, 100)
    assert plan["target"]["mask_token_id"] == 3
    assert "past the tokenizer's last id" in plan["target"]["mask_token_source"]
    assert plan["target"]["feature_layer_ids"] == [3, 30]


def test_bad_targets_are_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="/nowhere"):
        plan_run(recipe_at(tmp_path, "target.model=/nowhere"), 10, 100)
    with pytest.raises(DFlashError, match=r"cache\.layer_ids"):
        plan_run(recipe_at(tmp_path, "cache.layer_ids=[1, 36]"), 10, 100)
    with pytest.raises(ConfigError, match="target of 5 layers"):
        plan_run(recipe_at(tmp_path, num_hidden_layers=5), 10, 100)


# --- counting -----------------------------------------------------------------------------------------


def test_samples_of_local_files_are_counted(tmp_path: Path) -> None:
    recipe = recipe_at(tmp_path)
    counts = count_samples(recipe)
    assert (counts.n_samples, counts.n_samples_source) == (3, "rows of the sources")
    assert counts.mean_tokens == 256 + 1024
    assert "assumed: 256 prompt tokens and every answer at its limit of 1024" in counts.mean_tokens_source
    pq.write_table(pa.table({"prompt": ["x"] * 11}), tmp_path / "more.parquet")
    sources = "prompts.sources=[{path: prompts.jsonl, limit: 2}, {path: more.parquet}]"
    assert count_samples(recipe_at(tmp_path, sources)).n_samples == 13


def test_mixes_and_several_answers_are_counted(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["x"] * 40}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"prompt": ["x"] * 10}), tmp_path / "b.parquet")
    for sources, settings, n in [
        ("{path: a.parquet, cap: 7}, {path: b.parquet}", (), 17),
        ("{path: a.parquet, weight: 3}, {path: b.parquet, weight: 1}", (), 40),
        ("{path: a.parquet, weight: 3}, {path: b.parquet, weight: 1}", ("prompts.max_samples=8",), 8),
        ("{path: a.parquet}, {path: b.parquet}", ("prompts.max_samples=45",), 45),
        ("{path: a.parquet}", ("generate.answers_per_prompt=3", "generate.temperature=1"), 120),
    ]:
        counts = count_samples(recipe_at(tmp_path, f"prompts.sources=[{sources}]", *settings))
        assert counts.n_samples == n
    assert counts.n_samples_source == "rows of the sources, 3 answers each"
    capped = recipe_at(tmp_path, "prompts.sources=[{path: some/dataset, cap: 50}]")
    assert count_samples(capped).n_samples == 50


def test_a_hub_source_needs_a_limit_or_a_number(tmp_path: Path) -> None:
    limited = recipe_at(tmp_path, "prompts.sources=[{path: some/dataset, limit: 500}]")
    assert count_samples(limited).n_samples == 500
    assert "limits" in count_samples(limited).n_samples_source
    unlimited = recipe_at(tmp_path, "prompts.sources=[{path: some/dataset}]")
    with pytest.raises(PipelineError, match=r"some/dataset.*--samples"):
        count_samples(unlimited)
    assert count_samples(unlimited, 7).n_samples == 7


def test_lengths_are_measured_where_responses_exist(tmp_path: Path) -> None:
    recipe = recipe_at(tmp_path, "cache.max_length=12")
    responses = recipe.run / "responses"
    (responses / "parts").mkdir(parents=True)
    (responses / "commits").mkdir()
    (responses / "responses.json").write_text('{"n_samples": 40}')
    masks = [[0] * 4 + [1] * 2, [0] * 6 + [1] * 10]
    table = pa.table({"prompt_ids": [[1] * 4, [1] * 6], "response_ids": [[2] * 2, [2] * 10], "loss_mask": masks})
    pq.write_table(table, responses / "parts" / "part-00000.ab.parquet")
    (responses / "commits" / "part-00000.json").write_text('{"file": "part-00000.ab.parquet", "rows": 2}')
    counts = count_samples(recipe)
    assert (counts.n_samples, counts.n_samples_source) == (40, "responses of this run")
    assert (counts.mean_tokens, counts.mean_response_tokens) == ((6 + 12) / 2, (2 + 6) / 2)
    assert counts.mean_tokens_source == "measured on 2 responses of this run"
    assert count_samples(recipe, 5, 8).mean_tokens == 8


def test_samples_are_counted_from_what_the_conversations_became(tmp_path: Path) -> None:
    """Conversations of many turns become several samples, others none; questions between answers are no answers."""
    recipe = recipe_at(tmp_path, "cache.max_length=100")
    responses = recipe.run / "responses"
    (responses / "parts").mkdir(parents=True)
    (responses / "commits").mkdir()
    (responses / "responses.json").write_text('{"n_samples": 40}')
    mask = [0] * 4 + [1] * 3 + [0] * 5 + [1] * 2
    table = pa.table({"prompt_ids": [[1] * 4] * 6, "response_ids": [[2] * 10] * 6, "loss_mask": [mask] * 6})
    pq.write_table(table, responses / "parts" / "p.parquet")
    for part, rows, planned in ((0, 6, 4), (1, 0, 4)):
        marker = {"file": "p.parquet", "rows": rows, "planned": planned}
        (responses / "commits" / f"part-{part:05d}.json").write_text(json.dumps(marker))
    counts = count_samples(recipe)
    assert counts.n_samples == 30
    assert (counts.mean_tokens, counts.mean_response_tokens) == (14, 5)


@pytest.mark.parametrize("text", ["[]", "7", "{", '{"n_samples": null}'])
def test_a_damaged_table_is_not_counted(tmp_path: Path, text: str) -> None:
    recipe = recipe_at(tmp_path)
    (recipe.run / "responses" / "commits").mkdir(parents=True)
    (recipe.run / "responses" / "responses.json").write_text(text)
    assert count_samples(recipe).n_samples_source == "rows of the sources"


# --- GPU hours, traffic and the table in the docs -----------------------------------------------------

PUBLISHED = {"qwen3-4b": (4.0e9, 4.0e9), "qwen3-8b": (8.2e9, 8.2e9), "qwen3-32b": (32.8e9, 32.8e9),
             "qwen3-30b-a3b": (30.5e9, 3.3e9)}  # fmt: skip
"""Parameters, and those that a token visits, as the model cards on the hub give them."""


@pytest.mark.parametrize("folder", PUBLISHED)
def test_the_shapes_give_the_published_parameters(folder: str) -> None:
    c = json.loads((ROOT / "recipes" / "sizing" / folder / "config.json").read_text())
    attention = 2 * c["hidden_size"] * c["head_dim"] * (c["num_attention_heads"] + c["num_key_value_heads"])
    widths = [c.get("moe_intermediate_size", c["intermediate_size"]) * n
              for n in (c.get("num_experts", 1), c.get("num_experts_per_tok", 1))]  # fmt: skip
    embedding = c["vocab_size"] * c["hidden_size"] * (1 if c["tie_word_embeddings"] else 2)
    for width, published in zip(widths, PUBLISHED[folder], strict=True):
        found = c["num_hidden_layers"] * (attention + 3 * c["hidden_size"] * width) + embedding
        assert found == pytest.approx(published, rel=0.02)


def test_the_table_in_the_docs_is_what_the_command_prints() -> None:
    from benchmarks.sizing import table

    text = (ROOT / "docs" / "operations.md").read_text()
    printed = table(ROOT)
    assert f"<!-- sizing -->\n{printed}\n<!-- /sizing -->" in text


def test_gpu_hours_and_traffic_follow_from_flops_and_bytes(tmp_path: Path) -> None:
    rates = read_rates(["peak_tflops=100", "extract_share=0.5", "store_bytes_per_s=1e9"])
    plan = plan_run(recipe_at(tmp_path), 1000, 500, rates)
    costs, stages = plan["costs"], plan["costs"]["stages"]
    assert stages["extract"]["gpu_hours"] == pytest.approx(plan["extract"]["prefill_flops"] / 0.5e14 / 3600)
    assert stages["train"]["gpu_hours"] == pytest.approx(plan["train"]["flops"] / 0.3e14 / 3600)
    assert costs["gpu_hours"] == pytest.approx(sum(s["gpu_hours"] for s in stages.values()))
    assert stages["extract"]["network_bytes"]["written"] == plan["cache"]["bytes"]
    assert stages["train"]["network_bytes"]["read"] == plan["cache"]["bytes"] * plan["train"]["epochs"]
    assert stages["train"]["store_s"] == pytest.approx(sum(stages["train"]["network_bytes"].values()) / 1e9)
    assert plan["generate"]["flops"] > plan["extract"]["prefill_flops"]
    assert "GPU hours at 50% of the peak" in render_plan(plan)
    small = recipe_at(tmp_path, "cache.max_bytes=1000", "train.epochs=6", "train.passes_per_window=2")
    assert plan_run(small, 1000, 500)["costs"]["cache_made"] == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [("speed=1", "NAME=NUMBER with one of peak_tflops"), ("train_share", "'' is no number"),
     ("train_share=2", "share of train is 2.0"), ("peak_tflops=inf", "must be finite")],
)  # fmt: skip
def test_rates_that_are_none_are_named(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_rates([given])
