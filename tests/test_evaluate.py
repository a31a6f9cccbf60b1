"""What evaluation counts, and how it explains what differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stages.decode import Decoded, DecodedBatch
from stages.drafter import Drafter
from stages.evaluate import (
    EvalPrompt,
    Variant,
    evaluate_unit,
    explain_difference,
    first_difference,
    unit_record,
    warm_up,
)
from stages.sampling import Sampling
from stages.tally import Tally, acceptance, bucket, memory
from tests.tiny import make_spec, make_target, make_tokenizer

NEVER: frozenset[int] = frozenset()


def decoded(cycles: list[int], ids: list[int], seconds: float) -> DecodedBatch:
    parts = {"draft": seconds / 4, "verify": seconds / 2, "rest": seconds / 4}
    row = Decoded(ids, cycles, [4] * len(cycles), prefill_s=9.0, decode_s=seconds, parts=parts)
    return DecodedBatch([row], 9.0, seconds, parts, 300, 40)


def test_the_tally_by_hand() -> None:
    target = make_target()
    tally = Tally(block_size=4)
    plain = [
        decoded([1, 1, 1, 1, 1, 1], list(range(7)), 6.0),
        decoded([1, 1], [1, 2, 3], 2.0),
        decoded([], [9], 0.0),
    ]
    fast = [
        decoded([4, 2], list(range(7)), 2.0),
        decoded([1, 1], [1, 7, 3], 2.0),
        decoded([], [9], 0.0),
    ]
    for i, (category, p, f) in enumerate(zip(["math", "code", "math"], plain, fast, strict=True)):
        prompt = EvalPrompt(f"p{i}", category, "text", [1] * (100, 31, 1)[i], "hard" if i == 0 else None)
        tally.units.append(unit_record(target, [prompt], p, f, greedy=True))
    found = tally.results()
    assert found["tau"] == (3 + 1) / 2  # the third ended with its first token: no cycle
    assert found["by_category"] == {
        "code": {"tau": 1.0, "responses": 1, "speedup": 1.0},
        "math": {"tau": 3.0, "responses": 1, "speedup": 3.0},
    }
    assert found["by_difficulty"] == {"hard": {"tau": 3.0, "responses": 1, "speedup": 3.0}}
    assert list(found["by_prompt_tokens"].items()) == [
        ("up to 31", {"tau": 1.0, "responses": 1, "speedup": 1.0}),
        ("64–127", {"tau": 3.0, "responses": 1, "speedup": 3.0}),
    ]
    assert found["acceptance_histogram"] == [2, 1, 0, 1]
    assert found["accept_by_slot"] == [0.5, 0.25, 0.25]
    assert found["full_blocks"] == 0.25
    # Means over responses of seconds per output token, the prefill's left out: (2/6 + 2/2) / 2 and (6/6 + 2/2) / 2.
    assert found["tokens_per_s"] == pytest.approx(1.5)
    assert found["plain_tokens_per_s"] == 1.0
    assert found["speedup"] == pytest.approx(1.5)
    assert (found["draft_share"], found["verify_share"]) == (0.25, 0.5)
    assert found["time_split"] == {"draft": 0.25, "verify": 0.5, "sampling": 0.0, "cache": 0.0, "rest": 0.25}
    assert (found["identical"], found["prompts"]) == (2, 3)
    (difference,) = found["differences"]
    assert {k: difference[k] for k in ("sample_id", "position", "plain", "speculative")} == {
        "sample_id": "p1", "position": 1, "plain": [2, 3], "speculative": [7, 3]
    }  # fmt: skip
    assert not difference["tie"]
    assert found["ties"] == 0
    assert [e["sample_id"] for e in found["examples"]] == ["p0", "p1"]
    assert [(r["sample_id"], r["tau"]) for r in found["responses"]] == [("p0", 3.0), ("p1", 1.0)]


def test_prompts_are_grouped_by_powers_of_two() -> None:
    names = [bucket(n) for n in (1, 31, 32, 63, 64, 2047, 2048)]
    assert names == ["up to 31", "up to 31", "32–63", "32–63", "64–127", "1024–2047", "2048–4095"]


def test_a_tally_of_nothing_has_no_division_by_zero() -> None:
    found = Tally(block_size=4).results()
    assert (found["tau"], found["speedup"], found["prompts"]) == (0.0, 0.0, 0)
    assert found["accept_by_slot"] == [0.0, 0.0, 0.0]


def test_slots_that_a_smaller_block_did_not_draft_are_not_counted_against_it() -> None:
    found = acceptance([{"cycles": [2, 2, 4], "blocks": [2, 2, 4]}], 4)
    assert found["acceptance_histogram"] == [0, 2, 0, 1]
    assert found["accept_by_slot"] == [1.0, 1.0, 1.0]
    assert found["full_blocks"] == 1.0


@pytest.mark.parametrize(("plain", "other", "position"), [([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1], 1), ([], [4], 0)])
def test_outputs_of_unequal_length_differ_where_one_ends(plain: list[int], other: list[int], position: int) -> None:
    found = first_difference("s", plain, other)
    assert found is not None
    assert found["position"] == position
    assert first_difference("s", plain, plain) is None
    assert not explain_difference(make_target(), [1], plain, other, position)["tie"]


def test_a_difference_is_a_tie_only_within_rounding() -> None:
    target = make_target()
    with torch.no_grad():
        logits = target.model(input_ids=torch.tensor([[5, 6]])).logits[0, -1]
    best, second = logits.topk(2).indices.tolist()
    found = explain_difference(target, [5, 6], [best], [second], 0)
    assert found["gap"] == pytest.approx(float(logits[best] - logits[second]), abs=1e-4)
    assert not found["tie"]
    with torch.no_grad():  # a head with the same row twice: the two tokens tie exactly
        target.head[second] = target.head[best]
    assert explain_difference(target, [5, 6], [best], [second], 0)["tie"]


def variants(*sizes: int) -> list[Variant]:
    return [Variant(name, size, size) for name in ("trained", "untrained") for size in sizes]


def test_prompts_are_evaluated_with_every_variant() -> None:
    target = make_target(tokenizer=make_tokenizer(), vocab_size=320)
    drafters = {name: Drafter(make_spec(vocab_size=320, mask_token_id=319), seed=i)
                for i, name in enumerate(("trained", "untrained"))}  # fmt: skip
    prompts = [EvalPrompt(f"p{i}", "math", "1+1", [10, 20, 30][: i + 1]) for i in range(3)]
    warm_up(target, drafters, prompts[0], NEVER)
    units = evaluate_unit(target, drafters, variants(4, 2), prompts, max_new_tokens=12, stop_ids=NEVER)
    assert list(units) == ["trained@4", "trained@2", "untrained@4", "untrained@2"]
    for unit in units.values():
        assert unit["tokens"] == unit["plain_tokens"] == 33
        for row in unit["responses"]:
            assert row["difference"] is None
            pieces = row["example"]["pieces"]
            assert any(p["text"] for p in pieces)
            assert pieces[0]["accepted"] == 0
            assert sum(p["accepted"] + 1 for p in pieces) == 12
    found = Tally(4, [units["trained@4"]]).results()
    assert found["identical"] == 3
    assert "speedup" not in found["by_category"]["math"]  # three prompts shared the time
    sizes = memory(target, drafters["trained"], [units["trained@4"]])
    assert sizes["target_weights"] == 4 * sum(p.numel() for p in target.model.parameters())  # type: ignore[misc]
    assert sizes["target_kv"] > sizes["drafter_kv"] > 0


def test_sampled_outputs_are_not_compared() -> None:
    target = make_target()
    drafters = {"trained": Drafter(make_spec(), seed=0)}
    prompt = EvalPrompt("p", "math", "1+1", [10, 20])
    settings: dict[str, Any] = {"max_new_tokens": 8, "stop_ids": NEVER, "sampling": Sampling(temperature=1.0)}
    units = evaluate_unit(target, drafters, [Variant("trained", 4, 4)], [prompt], **settings)
    found = Tally(4, list(units.values())).results()
    assert found["identical"] is None
    assert found["differences"] == []
    assert found["tau"] >= 1
