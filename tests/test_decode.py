"""Speculative decoding gives plain greedy decoding, whatever is drafted; and what evaluation counts."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma3TextConfig, MistralConfig

from stages.decode import Decoded, DraftSession, decode_plain, decode_speculative
from stages.drafter import Drafter
from stages.evaluate import EvalPrompt, Tally, evaluate_prompt, first_difference, record, warm_up
from stages.features import capture_features
from stages.target import Target
from tests.tiny import SIZES, VOCAB, make_drafter, make_spec, make_target, make_tokenizer, model_of

TARGETS = [make_target(seed) for seed in (0, 1)]
DRAFTER = make_drafter()
PROMPT = [5, 17, 2, 2, 60, 33]
LONG = 60
NEVER: frozenset[int] = frozenset()


def oracle(target: Target, prompt: list[int], right: list[int]) -> Any:
    """A `DraftSession.draft` that foresees the target, and errs behind the `right` first drafts of each cycle."""
    truth = decode_plain(target, prompt, 2 * LONG, NEVER).ids
    counts = cycle(right)

    def draft(session: DraftSession, anchor: int, block_size: int) -> list[int]:
        place = session.n_context - len(prompt)
        assert truth[place] == anchor  # the anchor stands right behind the context
        drafts, n = truth[place + 1 : place + block_size], next(counts)
        return drafts[:n] + [(token + 1) % VOCAB for token in drafts[n:]]

    return draft


def speculate(
    target: Target, block_size: int, n: int, stop: frozenset[int] = NEVER, drafter: Drafter = DRAFTER
) -> Decoded:
    return decode_speculative(target, drafter, PROMPT, n, stop, block_size)


@settings(max_examples=40, deadline=None)
@given(
    which=st.integers(0, 1), block_size=st.sampled_from([2, 4, 8, 16]), n=st.integers(1, 24),
    right=st.lists(st.integers(0, 15), min_size=1, max_size=5), stops=st.sets(st.integers(0, 23), max_size=2),
    drafted=st.booleans(),
)  # fmt: skip
def test_the_output_is_that_of_plain_decoding(
    which: int, block_size: int, n: int, right: list[int], stops: set[int], drafted: bool
) -> None:
    """With drafts of a random drafter, and with drafts that are right for a while; stopped anywhere or never."""
    target = TARGETS[which]
    free = decode_plain(target, PROMPT, 24, NEVER)
    stop_ids = frozenset(free.ids[i] for i in stops)
    plain = decode_plain(target, PROMPT, n, stop_ids)
    with pytest.MonkeyPatch.context() as patch:
        if not drafted:
            patch.setattr(DraftSession, "draft", oracle(target, PROMPT, right))
        found = speculate(target, block_size, n, stop_ids)
    assert found.ids == plain.ids
    assert len(plain.ids) <= n
    assert not stop_ids.intersection(plain.ids[:-1])
    assert all(1 <= length <= block_size for length in found.cycles)
    if not drafted and found.cycles:
        expected = cycle(min(r, block_size - 1) + 1 for r in right)
        assert found.cycles == [next(expected) for _ in found.cycles]
    made = 1 + sum(found.cycles)
    assert made >= len(found.ids)
    assert made - (found.cycles or [0])[-1] <= n  # no cycle was begun with all tokens there


@pytest.mark.parametrize("block_size", [2, 4, 8, 16])
def test_a_perfect_drafter_has_every_draft_accepted(monkeypatch: pytest.MonkeyPatch, block_size: int) -> None:
    target = TARGETS[0]
    monkeypatch.setattr(DraftSession, "draft", oracle(target, PROMPT, [99]))
    found = speculate(target, block_size, LONG)
    assert set(found.cycles) == {block_size}
    assert found.tau == block_size
    assert found.ids == decode_plain(target, PROMPT, LONG, NEVER).ids


def test_a_hopeless_drafter_has_none_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftSession, "draft", oracle(TARGETS[0], PROMPT, [0]))
    found = speculate(TARGETS[0], 4, LONG)
    assert set(found.cycles) == {1}
    assert found.ids == decode_plain(TARGETS[0], PROMPT, LONG, NEVER).ids


@pytest.mark.parametrize("config", [
    MistralConfig(**SIZES, sliding_window=7),
    Gemma3TextConfig(**SIZES, sliding_window=7, query_pre_attn_scalar=8),
], ids=["mistral", "gemma3"])  # fmt: skip
def test_rejected_drafts_are_forgotten_beyond_a_sliding_window(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(model_of(config), None, "sliding")
    plain = decode_plain(target, PROMPT, 40, NEVER)
    with torch.no_grad():
        whole = target.decoder(input_ids=torch.tensor([PROMPT + plain.ids])).last_hidden_state[0] @ target.head.T
    assert whole.argmax(dim=-1)[len(PROMPT) - 1 : -1].tolist() == plain.ids
    monkeypatch.setattr(DraftSession, "draft", oracle(target, PROMPT, [0, 2, 1, 3]))
    assert speculate(target, 4, 40).ids == plain.ids


def test_the_context_holds_exactly_the_verified_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys and values are those of one pass over the final sequence: nothing rejected, nothing missing."""
    sessions: list[DraftSession] = []
    draft = oracle(TARGETS[0], PROMPT, [1, 0, 3])

    def spied(session: DraftSession, anchor: int, block_size: int) -> list[int]:
        sessions.append(session)
        drafts: list[int] = draft(session, anchor, block_size)
        return drafts

    monkeypatch.setattr(DraftSession, "draft", spied)
    found = speculate(TARGETS[0], 4, 20)
    session = sessions[-1]
    truth = decode_plain(TARGETS[0], PROMPT, LONG, NEVER).ids
    assert session.n_context == len(PROMPT) + sum(found.cycles)
    sequence = PROMPT + truth[: sum(found.cycles)]
    (features,), _ = capture_features(TARGETS[0], DRAFTER.spec.feature_layer_ids, [sequence])
    with torch.inference_mode():
        expected = DRAFTER.context_kv(DRAFTER.context(features))
    for pair, whole in zip(session.kv, expected, strict=True):
        for part, reference in zip(pair, whole, strict=True):
            torch.testing.assert_close(part, reference, rtol=1e-4, atol=1e-4)


# --- what evaluation counts --------------------------------------------------------------------------------------


def decoded(cycles: list[int], ids: list[int], seconds: float) -> Decoded:
    return Decoded(ids=ids, cycles=cycles, prefill_s=9.0, decode_s=seconds, draft_s=seconds / 4, verify_s=seconds / 2)


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
        tally.rows.append(record(target, EvalPrompt(f"p{i}", category, "text", [1]), p, f))
    found = tally.results()
    assert found["tau"] == (3 + 1) / 2  # the third ended with its first token: no cycle
    assert found["by_category"] == {"code": {"tau": 1.0, "responses": 1}, "math": {"tau": 3.0, "responses": 1}}
    assert found["acceptance_histogram"] == [2, 1, 0, 1]
    assert found["accept_by_slot"] == [0.5, 0.25, 0.25]
    # Means over responses of seconds per output token, the prefill's left out: (2/6 + 2/2) / 2 and (6/6 + 2/2) / 2.
    assert found["tokens_per_s"] == pytest.approx(1.5)
    assert found["plain_tokens_per_s"] == 1.0
    assert found["speedup"] == pytest.approx(1.5)
    assert (found["draft_share"], found["verify_share"]) == (0.25, 0.5)
    assert (found["identical"], found["prompts"]) == (2, 3)
    assert found["differences"] == [
        {"sample_id": "p1", "position": 1, "plain": [2, 3], "speculative": [7, 3]}
    ]
    assert [e["sample_id"] for e in found["examples"]] == ["p0", "p1"]


def test_a_tally_of_nothing_has_no_division_by_zero() -> None:
    found = Tally(block_size=4).results()
    assert (found["tau"], found["speedup"], found["prompts"]) == (0.0, 0.0, 0)
    assert found["accept_by_slot"] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("plain", "other", "position"), [([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1], 1), ([], [4], 0)])
def test_outputs_of_unequal_length_differ_where_one_ends(plain: list[int], other: list[int], position: int) -> None:
    found = first_difference("s", plain, other)
    assert found is not None
    assert found["position"] == position
    assert first_difference("s", plain, plain) is None


def test_a_prompt_is_evaluated_with_every_drafter() -> None:
    target = make_target(tokenizer=make_tokenizer(), vocab_size=320)
    drafters = {name: Drafter(make_spec(vocab_size=320, mask_token_id=319), seed=i)
                for i, name in enumerate(("trained", "untrained"))}  # fmt: skip
    prompt = EvalPrompt("p", "math", "1+1", [10, 20, 30])
    warm_up(target, drafters, prompt, NEVER)
    rows = evaluate_prompt(target, drafters, prompt, max_new_tokens=12, stop_ids=NEVER)
    assert list(rows) == ["trained", "untrained"]
    for row in rows.values():
        assert row["difference"] is None
        assert row["tokens"] == row["plain_tokens"] == 12
        pieces = row["example"]["pieces"]
        assert all(p["text"] for p in pieces)
        assert pieces[0]["accepted"] == 0
        assert sum(p["accepted"] + 1 for p in pieces) == 12
