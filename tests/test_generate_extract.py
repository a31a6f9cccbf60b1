"""Answers that depend on nothing but their sample (cases 1 and 19), and shards that hold what the target computes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_schema.checks import require_same_ids
from cache_schema.errors import CacheError, ShardRefused
from cache_schema.layout import feature_format
from cache_schema.reader import CachedSample, FeatureCache
from cache_schema.responses import Response, ResponsesTable, create_responses
from cache_schema.verify import equal_caches, verify_cache
from stages.answers import GenerateJob, GenerateWorker, plan_parts
from stages.capture import Captured, Way
from stages.chat import render_prompt
from stages.config import GenerateConfig, TargetConfig
from stages.conversation import Conversation
from stages.decode import decode_plain
from stages.features import capture_features
from stages.generate import Answer, Prompt, answer_batch, truncated_distribution
from stages.packing import Ids
from stages.quantize import from_stored
from tests.tiny import (
    FEATURE_LAYERS,
    RESPONSES_IDENTITY,
    VOCAB,
    Extraction,
    make_target,
    make_tokenizer,
    response,
    start_extraction,
)

TARGET = make_target()
GREEDY = GenerateConfig(max_new_tokens=12)
SAMPLED = GenerateConfig(max_new_tokens=12, temperature=1.3, top_p=0.9, top_k=40)
EOS = 2
STOP = frozenset({EOS, *range(10, 16)})
PROMPT_LENGTHS = [1, 9, 4, 30, 4, 2, 17, 8]
PROMPTS = [Prompt(f"p{i}", [(7 * i + 13 * j) % VOCAB for j in range(n)]) for i, n in enumerate(PROMPT_LENGTHS)]
"""Unequal lengths; ids 0 (what batches are padded with) and 2 (eos, pad) stand inside some of them."""
SPECIAL = [Prompt("zeros", [0, 0, 0, 5]), Prompt("eos", [EOS, EOS, 40, EOS]), Prompt("end", [EOS])]


def answers(
    prompts: list[Prompt], config: GenerateConfig, seed: int = 0, stop: frozenset[int] = STOP
) -> dict[str, Answer]:
    return {a.sample_id: a for a in answer_batch(TARGET, prompts, config, seed=seed, stop_ids=stop)}


# --- answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_an_answer_does_not_depend_on_its_batch(config: GenerateConfig) -> None:
    together = answers(PROMPTS, config)
    assert list(together) == [p.sample_id for p in PROMPTS]
    assert answers(PROMPTS[::-1], config) == together
    for prompt in PROMPTS:
        assert answers([prompt], config)[prompt.sample_id] == together[prompt.sample_id]
    assert {a.finish_reason for a in together.values()} == {"stop", "length"}


def test_a_sampled_answer_depends_on_seed_and_sample_id() -> None:
    prompts = [Prompt(name, PROMPTS[1].ids) for name in ("a", "b")]
    first, again, other = (answers(prompts, SAMPLED, seed) for seed in (0, 0, 1))
    assert first == again
    assert first["a"].ids != first["b"].ids
    assert first["a"].ids != other["a"].ids


def test_greedy_answers_are_those_of_plain_decoding_whatever_ids_stand_in_the_prompt() -> None:
    """Case 19: masks come from lengths, so neither pad nor eos ids hide a token."""
    prompts = [*PROMPTS, *SPECIAL]
    found = answers(prompts, GREEDY)
    for prompt in prompts:
        plain = decode_plain(TARGET, prompt.ids, GREEDY.max_new_tokens, STOP)
        assert found[prompt.sample_id].ids == plain.ids


def test_answers_end_with_the_first_stop_token_or_at_the_limit() -> None:
    free = answers(PROMPTS, GREEDY, stop=frozenset())
    assert all(len(a.ids) == 12 and a.finish_reason == "length" for a in free.values())
    for prompt in PROMPTS:
        ids = free[prompt.sample_id].ids
        stop = ids[len(ids) // 2]
        found = answers([prompt], GREEDY, stop=frozenset({stop}))[prompt.sample_id]
        assert found.ids == ids[: ids.index(stop) + 1]
        assert found.finish_reason == "stop"


def slow_distribution(logits: list[float], temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """Token by token: sort, cut at k, cut where the sum reaches p, normalise."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    kept = order[:top_k] if top_k else order
    weights = [math.exp((logits[i] - logits[kept[0]]) / temperature) for i in kept]
    total, reached, chosen = sum(weights), 0.0, {}
    for token, weight in zip(kept, weights, strict=True):
        chosen[token] = weight
        reached += weight / total
        if reached >= top_p:
            break
    return {token: weight / sum(chosen.values()) for token, weight in chosen.items()}


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.floats(-8, 8, width=16), min_size=1, max_size=12),
    temperature=st.sampled_from([0.3, 1.0, 2.0]), top_k=st.integers(0, 14), top_p=st.floats(0.05, 1.0),
)  # fmt: skip
def test_truncation_is_that_of_a_slow_loop(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    expected = slow_distribution(logits, temperature, top_k, top_p)
    sums = np.cumsum(sorted(slow_distribution(logits, temperature, top_k, 1.0).values(), reverse=True))
    if (np.abs(sums - top_p) < 1e-9).any():
        return  # which side of the cut a token falls on is then a matter of rounding
    config = GenerateConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    probabilities, order = truncated_distribution(torch.tensor([logits], dtype=torch.float32), config)
    found = {i: p for i, p in zip(order[0].tolist(), probabilities[0].tolist(), strict=True) if p > 0}
    assert list(found) == list(expected)
    assert list(found.values()) == pytest.approx(list(expected.values()))


def test_tokens_are_drawn_with_the_probabilities_of_the_target() -> None:
    config = GenerateConfig(max_new_tokens=2, temperature=1.5, top_k=5)
    prompts = [Prompt(f"draw-{i}", [5, 9, 30]) for i in range(600)]
    drawn = np.bincount([a.ids[0] for a in answers(prompts, config, stop=frozenset()).values()], minlength=VOCAB) / 600
    with torch.no_grad():
        logits = TARGET.model(input_ids=torch.tensor([[5, 9, 30]])).logits[:, -1].float()
    probabilities, order = truncated_distribution(logits, config)
    expected = torch.zeros(VOCAB, dtype=torch.float64).scatter(0, order[0], probabilities[0]).numpy()
    assert ((drawn > 0) <= (expected > 0)).all()
    assert 0.5 * np.abs(drawn - expected).sum() < 0.08


# --- parts of the responses table --------------------------------------------------------------------------------

CHAT_TARGET = make_target(tokenizer=make_tokenizer(), vocab_size=259)


def asked(sample_id: str, text: str) -> Conversation:
    return Conversation(sample_id, [{"role": "user", "content": text}], category="talk")


def make_worker(folder: Path, n_parts: int, n_samples: int, **settings_: Any) -> GenerateWorker:
    create_responses(folder, RESPONSES_IDENTITY, n_parts, n_samples)
    config = GenerateConfig(**({"max_new_tokens": 10, "batch_size": 3, "part_samples": 4} | settings_))
    job = GenerateJob(TargetConfig(model="tiny"), config, 60, 0, folder)
    return GenerateWorker(job, CHAT_TARGET)


def test_parts_hold_what_was_asked_and_answered(tmp_path: Path) -> None:
    conversations = [asked(f"s{i}", "word " * (i % 4 + 1)) for i in range(9)] + [asked("long", "word " * 20)]
    units = plan_parts(conversations, 4)
    assert [[c.sample_id for c in u.conversations] for u in units][2] == ["s8", "long"]
    assert [u.name for u in units] == ["part-00000", "part-00001", "part-00002"]
    worker = make_worker(tmp_path, 3, 10)
    receipts = [worker.run(unit, 1) for unit in reversed(units)]  # finished out of order
    table = ResponsesTable.open(tmp_path)
    assert sum(r["rows"] for r in receipts) == len(table) == 9
    assert [r.sample_id for r in table] == [c.sample_id for c in conversations[:9]]
    assert [(row["sample_id"], row["reason"]) for row in table.ledger] == [("long", "prompt_too_long")]
    for row, conversation in zip(table, conversations, strict=False):
        prompt = render_prompt(CHAT_TARGET.tokenizer, conversation.messages)
        plain = decode_plain(CHAT_TARGET, prompt, 10, worker.stop_ids)
        assert row.prompt_ids.tolist() == prompt
        assert row.response_ids.tolist() == plain.ids
        assert row.loss_mask.tolist() == [0] * len(prompt) + [1] * len(plain.ids)
        assert row.finish_reason == ("stop" if plain.ids[-1] in worker.stop_ids else "length")
        assert (row.category, row.messages) == ("talk", conversation.messages)
        assert row.sampling["max_new_tokens"] == 10


def test_answers_that_are_too_short_are_in_the_ledger(tmp_path: Path) -> None:
    conversations = tuple(asked(f"s{i}", f"word {i}") for i in range(4))
    worker = make_worker(tmp_path, 1, 4, min_response_tokens=5)
    free = [decode_plain(CHAT_TARGET, render_prompt(CHAT_TARGET.tokenizer, c.messages), 10, frozenset()).ids
            for c in conversations]  # fmt: skip
    worker.stop_ids = frozenset({free[1][2]})
    short = {c.sample_id for c, ids in zip(conversations, free, strict=True) if worker.stop_ids & set(ids[:4])}
    worker.run(plan_parts(conversations, 4)[0], 1)
    table = ResponsesTable.open(tmp_path)
    assert "s1" in short
    assert {row["sample_id"] for row in table.ledger} == short
    assert {row["reason"] for row in table.ledger} == {"answer_too_short"}
    assert {r.sample_id for r in table} == {"s0", "s1", "s2", "s3"} - short


def test_given_answers_are_kept_as_they_are(tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "one"}, {"role": "assistant", "content": "eins"},
        {"role": "user", "content": "two"}, {"role": "assistant", "content": "zwei"},
    ]  # fmt: skip
    conversations = (Conversation("given", talk), asked("unanswered", "three"))
    worker = make_worker(tmp_path, 1, 2, mode="keep")
    worker.run(plan_parts(conversations, 4)[0], 1)
    table = ResponsesTable.open(tmp_path)
    (row,) = table
    assert row.sample_id == "given"
    assert row.finish_reason == "given"
    decode = CHAT_TARGET.tokenizer.decode
    supervised = row.input_ids[row.loss_mask.astype(bool)]
    assert decode(supervised.tolist()) == "eins<|im_end|>zwei<|im_end|>"
    assert [r["sample_id"] for r in table.ledger] == ["unanswered"]


# --- shards ------------------------------------------------------------------------------------------------------

LENGTHS = {"a": (4, 9), "b": (2, 3), "c": (20, 5), "d": (1, 1), "e": (7, 7), "f": (3, 14)}
RESPONSES = [response(name, *lengths) for name, lengths in LENGTHS.items()]


def values(stored: Any, dtype: str = "bfloat16") -> torch.Tensor:
    """Stored bits as float32."""
    array = np.array(stored)
    return (torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if dtype == "bfloat16"
            else torch.from_numpy(array)).float()  # fmt: skip


def assert_holds(sample: CachedSample, expected: Response, tokens: int, layers: tuple[int, ...]) -> None:
    """What is stored is what the target computes for this sample alone."""
    ids = expected.input_ids[:tokens]
    require_same_ids(sample.sample_id, sample.input_ids, ids, "cache")
    assert sample.loss_mask.tolist() == expected.loss_mask[:tokens].tolist()
    (alone,), final = capture_features(TARGET, layers, [ids.tolist()], last_hidden=True)
    dtype = sample.features_dtype
    # Twice the spacing of the type: a batch may round to the other neighbour.
    tolerance = {"bfloat16": 2**-7, "float16": 2**-10}[dtype]
    torch.testing.assert_close(values(sample.features, dtype), alone, rtol=tolerance, atol=1e-4)
    if sample.last_hidden is not None:
        assert final is not None
        torch.testing.assert_close(values(sample.last_hidden, dtype), final[0], rtol=tolerance, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("last_hidden", [False, True])
def test_a_cache_holds_what_the_target_computes(tmp_path: Path, dtype: str, last_hidden: bool) -> None:
    extraction = start_extraction(
        tmp_path, TARGET, RESPONSES, shard_bytes=6000, batch_tokens=30, feature_dtype=dtype, last_hidden=last_hidden
    )
    cache = extraction.run()
    assert len(extraction.units) > 1
    assert cache.ledger() == []
    assert verify_cache(extraction.job.cache_dir).ok
    assert cache.sample_ids == list(LENGTHS)  # case 18: ids and masks are those of the table
    for expected in RESPONSES:
        sample = cache.read(expected.sample_id)
        assert (sample.last_hidden is not None) == last_hidden
        assert_holds(sample, expected, len(expected.input_ids), FEATURE_LAYERS)
    read, _ = from_stored(sample.features, sample.scale, feature_format(cache.identity))
    assert torch.equal(read.float(), values(sample.features, dtype))


def test_ids_of_another_table_are_noticed(tmp_path: Path) -> None:
    """Case 18."""
    sample = start_extraction(tmp_path, TARGET, RESPONSES).run().read("a")
    other = RESPONSES[0].input_ids.copy()
    other[5] += 1
    with pytest.raises(CacheError, match=r"sample 'a' differ .* at position 5"):
        require_same_ids("a", sample.input_ids, other, "cache")


def test_the_same_bits_whoever_does_it_and_in_which_order(tmp_path: Path) -> None:
    first, second = (
        start_extraction(tmp_path / name, TARGET, RESPONSES, shard_bytes=6000, batch_tokens=40) for name in ("a", "b")
    )
    first.run()
    second.units.reverse()
    second.run()
    assert equal_caches(first.job.cache_dir, second.job.cache_dir) == []


def test_a_shard_that_is_done_twice_is_committed_once(tmp_path: Path) -> None:
    extraction = start_extraction(tmp_path, TARGET, RESPONSES)
    receipts = [extraction.worker.run(extraction.units[0], attempt) for attempt in (1, 2)]
    assert receipts[0]["tokens"] == receipts[1]["tokens"] == sum(map(sum, LENGTHS.values()))
    assert len(list((extraction.job.cache_dir / "shards").iterdir())) == 1


def test_long_samples_are_cut_and_hopeless_ones_left_out_each_with_a_ledger_row(tmp_path: Path) -> None:
    cache = start_extraction(tmp_path, TARGET, RESPONSES, max_length=12).run()
    rows = {row["sample_id"]: row for row in cache.ledger()}
    assert {name: (row["reason"], row["kept"]) for name, row in rows.items()} == {
        "a": ("shortened", True), "c": ("no_supervised_token", False), "e": ("shortened", True),
        "f": ("shortened", True),
    }  # fmt: skip
    assert "from 13 to 12 tokens" in rows["a"]["detail"]
    assert set(cache.sample_ids) == set(LENGTHS) - {"c"}
    for expected in RESPONSES:
        if expected.sample_id != "c":
            assert_holds(cache.read(expected.sample_id), expected, min(12, len(expected.input_ids)), FEATURE_LAYERS)


class Spoiled:
    """A way of batching whose states are altered by `change`, given ids and states [T, L, D] of each sample."""

    def __init__(self, way: Way, change: Callable[[list[int], torch.Tensor], torch.Tensor]) -> None:
        self.name, self.batches, self._way, self._change = way.name, way.batches, way, change

    def capture(self, sequences: Sequence[Ids]) -> Captured:
        found = self._way.capture(sequences)
        parts = [self._change(s.tolist(), found.features(i).clone()) for i, s in enumerate(sequences)]
        ends = np.cumsum([0, *map(len, parts)])
        rows = tuple(slice(int(a), int(b)) for a, b in pairwise(ends))
        ids = np.concatenate([found.ids(i) for i in range(len(sequences))])
        return Captured(ids, torch.cat(parts).unbind(1), None, rows)


def spoil(extraction: Extraction, change: Callable[[list[int], torch.Tensor], torch.Tensor]) -> None:
    """Let `change` alter what is captured for each sequence in its batch."""
    worker = extraction.worker
    worker.choice = dataclasses.replace(worker.choice, way=Spoiled(worker.choice.way, change))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("feature", [{}, {"feature_dtype": "int8", "feature_bits": 6}], ids=["bfloat16", "int8"])
def test_a_sample_with_non_finite_states_is_quarantined(
    tmp_path: Path, value: float, feature: dict[str, Any]
) -> None:
    """Case 5."""
    bad = RESPONSES[2].input_ids.tolist()

    def change(ids: list[int], features: torch.Tensor) -> torch.Tensor:
        if ids == bad:
            features[3, 1, 7] = value
        return features

    extraction = start_extraction(tmp_path, TARGET, RESPONSES, **feature)
    spoil(extraction, change)
    assert extraction.worker.run(extraction.units[0], 1)["quarantined"] == 1
    cache = FeatureCache.open(extraction.job.cache_dir, extraction.job.identity, require_complete=True)
    assert [(row["sample_id"], row["reason"]) for row in cache.ledger()] == [("c", "non_finite")]
    for expected in RESPONSES:
        if expected.sample_id != "c" and not feature:
            assert_holds(cache.read(expected.sample_id), expected, len(expected.input_ids), FEATURE_LAYERS)


@pytest.mark.parametrize(("kind", "words"), [("zero", "layer 3 is zero"), ("equal", "layers 1 and 4 are identical")])
def test_a_layer_that_was_captured_wrongly_is_refused(tmp_path: Path, kind: str, words: str) -> None:
    """Cases 3 and 4: the shard is refused, naming layer and sample, and nothing of it stays."""

    def change(_ids: list[int], features: torch.Tensor) -> torch.Tensor:
        if kind == "zero":
            features[:, 1] = 0
        else:
            features[:, 2] = features[:, 0]
        return features

    extraction = start_extraction(tmp_path, TARGET, RESPONSES)
    spoil(extraction, change)
    with pytest.raises(ShardRefused, match=rf"shard-00000, sample 'a'.*{words}"):
        extraction.worker.run(extraction.units[0], 1)
    cache_dir = extraction.job.cache_dir
    left = [p for p in cache_dir.rglob("*") if p.is_file()]
    assert sorted(p.name for p in left) == ["cache.json", "plan.parquet", "plan.sha256"]


def test_a_thousand_samples_are_all_there(tmp_path: Path) -> None:
    """Case 2: no last, smaller batch is dropped, of 8 and more shards and at a batch of 32 sequences."""
    rng = np.random.default_rng(0)
    lengths = {f"sample-{i}": (int(rng.integers(1, 5)), int(rng.integers(2, 5))) for i in range(1000)}
    small = make_target(num_hidden_layers=4)
    responses = [response(name, *pair) for name, pair in lengths.items()]
    extraction = start_extraction(
        tmp_path, small, responses, layer_ids=(0, 2), shard_bytes=100_000, batch_tokens=32 * 8, max_length=8
    )
    cache = extraction.run()
    assert len(extraction.units) >= 8
    dropped = {row["sample_id"] for row in cache.ledger() if not row["kept"]}
    assert set(cache.sample_ids) | dropped == set(lengths)
    assert len(cache) == 1000
    for name in ("sample-0", "sample-499", "sample-999"):
        assert cache.n_tokens(name) == sum(lengths[name])
