"""Speculative decoding gives plain greedy decoding, whatever is drafted, in batches too."""

from __future__ import annotations

import functools
from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config, Gemma3TextConfig, Lfm2Config, LlamaConfig, MistralConfig

from stages.decode import Decoded, Request, decode_batch, decode_plain, decode_speculative
from stages.drafter import Drafter
from stages.errors import TargetError
from stages.features import capture_features
from stages.sampling import Sampling
from stages.sessions import DraftSession, check_target
from stages.target import Target
from tests.tiny import SIZES, VOCAB, make_drafter, make_target, model_of

TARGETS = [make_target(seed) for seed in (0, 1)]
DRAFTER = make_drafter()
PROMPT = [5, 17, 2, 2, 60, 33]
PROMPTS = [PROMPT, [7], [9, 4, 4, 80, 1, 2, 3, 11, 50, 6, 31], [60, 61, 62]]
LONG = 30
NEVER: frozenset[int] = frozenset()


@functools.cache
def truth_of(target: Target, prompt: tuple[int, ...]) -> list[int]:
    """Plain decoding without an end, and long enough for every test."""
    return decode_plain(target, list(prompt), 2 * LONG, NEVER).ids


def until(ids: list[int], n: int, stop_ids: frozenset[int]) -> list[int]:
    """At most n of these tokens, up to the first that stops."""
    return next((ids[: i + 1] for i, token in enumerate(ids[:n]) if token in stop_ids), ids[:n])


class Oracle:
    """Stands in for the drafter: foresees the target, and errs behind the `right` first drafts of each cycle.

    Rows of a batch take turns in `right`, so they accept different numbers.
    """

    def __init__(self, patch: pytest.MonkeyPatch, target: Target, prompts: list[list[int]], right: list[int]) -> None:
        self.truth = [truth_of(target, tuple(prompt)) for prompt in prompts]
        self.prompts, self.rows = prompts, list(range(len(prompts)))
        self.counts = [cycle(right[i % len(right) :] + right[: i % len(right)]) for i in self.rows]
        self.sessions: list[DraftSession] = []
        forget = DraftSession.select

        def draft(session: DraftSession, anchors_R: torch.Tensor, block_size: int) -> torch.Tensor:
            self.sessions.append(session)
            drafts = [self._drafts(session, row, anchor, block_size) for row, anchor in enumerate(anchors_R.tolist())]
            return torch.nn.functional.one_hot(torch.tensor(drafts), VOCAB).float()

        def select(session: DraftSession, rows: list[int]) -> None:
            self.rows = [self.rows[i] for i in rows]
            forget(session, rows)

        patch.setattr(DraftSession, "draft", draft)
        patch.setattr(DraftSession, "select", select)

    def _drafts(self, session: DraftSession, row: int, anchor: int, block_size: int) -> list[int]:
        origin = self.rows[row]
        truth, place = self.truth[origin], int(session.kv.lengths[row]) - len(self.prompts[origin])
        assert truth[place] == anchor  # the anchor stands right behind the context
        drafts, n = truth[place + 1 : place + block_size], next(self.counts[origin])
        return drafts[:n] + [(token + 1) % VOCAB for token in drafts[n:]]


def speculate(
    target: Target, block_size: int, n: int, stop: frozenset[int] = NEVER, drafter: Drafter = DRAFTER
) -> Decoded:
    return decode_speculative(target, drafter, PROMPT, n, stop, block_size)


def requests(prompts: list[list[int]]) -> list[Request]:
    return [Request(f"p{i}", ids) for i, ids in enumerate(prompts)]


@settings(max_examples=25, deadline=None)
@given(
    which=st.integers(0, 1), block_size=st.sampled_from([2, 4, 8, 16]), n=st.integers(1, 16),
    right=st.lists(st.integers(0, 15), min_size=1, max_size=5), stops=st.sets(st.integers(0, 16), max_size=2),
    drafted=st.booleans(),
)  # fmt: skip
def test_the_output_is_that_of_plain_decoding(
    which: int, block_size: int, n: int, right: list[int], stops: set[int], drafted: bool
) -> None:
    """With drafts of a random drafter, and with drafts that are right for a while; stopped anywhere or never."""
    target = TARGETS[which]
    stop_ids = frozenset(truth_of(target, tuple(PROMPT))[i] for i in stops)
    plain = decode_plain(target, PROMPT, n, stop_ids)
    with pytest.MonkeyPatch.context() as patch:
        if not drafted:
            Oracle(patch, target, [PROMPT], right)
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


@settings(max_examples=12, deadline=None)
@given(
    block_size=st.sampled_from([2, 4, 16]), n=st.integers(1, 12), drafted=st.booleans(),
    right=st.lists(st.integers(0, 15), min_size=1, max_size=5), stops=st.sets(st.integers(0, 12), max_size=3),
    which=st.lists(st.integers(0, 3), min_size=2, max_size=5),
)  # fmt: skip
def test_a_batch_gives_each_row_what_it_gets_alone(
    block_size: int, n: int, drafted: bool, right: list[int], stops: set[int], which: list[int]
) -> None:
    """Rows of different lengths accept different numbers, end at different times, and stay what they are alone."""
    target, prompts = TARGETS[0], [PROMPTS[i] for i in which]
    stop_ids = frozenset(truth_of(target, tuple(PROMPTS[i % 4]))[i] for i in stops)
    plain = [until(truth_of(target, tuple(prompt)), n, stop_ids) for prompt in prompts]
    batch = decode_batch(target, requests(prompts), max_new_tokens=n, stop_ids=stop_ids)
    assert [row.ids for row in batch.rows] == plain
    with pytest.MonkeyPatch.context() as patch:
        if not drafted:
            Oracle(patch, target, prompts, right)
        batch = decode_batch(
            target, requests(prompts), drafter=DRAFTER, block_size=block_size, max_new_tokens=n, stop_ids=stop_ids
        )
    assert [row.ids for row in batch.rows] == plain
    if drafted:
        alone = [decode_speculative(target, DRAFTER, p, n, stop_ids, block_size).cycles for p in prompts]
        assert [row.cycles for row in batch.rows] == alone


@pytest.mark.parametrize("block_size", [2, 4, 8, 16])
def test_a_perfect_drafter_has_every_draft_accepted(monkeypatch: pytest.MonkeyPatch, block_size: int) -> None:
    target = TARGETS[0]
    Oracle(monkeypatch, target, [PROMPT], [99])
    found = speculate(target, block_size, LONG)
    assert set(found.cycles) == {block_size}
    assert found.tau == block_size
    assert found.ids == decode_plain(target, PROMPT, LONG, NEVER).ids


def test_a_hopeless_drafter_has_none_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    Oracle(monkeypatch, TARGETS[0], [PROMPT], [0])
    found = speculate(TARGETS[0], 4, LONG)
    assert set(found.cycles) == {1}
    assert found.ids == decode_plain(TARGETS[0], PROMPT, LONG, NEVER).ids


def test_the_block_size_may_follow_the_number_of_rows_at_work() -> None:
    sizes = {4: 2, 3: 4, 2: 8, 1: 1}
    stop_ids = frozenset({truth_of(TARGETS[0], (7,))[8]})
    batch = decode_batch(TARGETS[0], requests(PROMPTS), drafter=DRAFTER, block_size=sizes.__getitem__,
                         max_new_tokens=12, stop_ids=stop_ids)  # fmt: skip
    assert [row.ids for row in batch.rows] == [until(truth_of(TARGETS[0], tuple(p)), 12, stop_ids) for p in PROMPTS]
    assert {row.blocks[0] for row in batch.rows} == {2}
    assert all(1 <= c <= b for row in batch.rows for c, b in zip(row.cycles, row.blocks, strict=True))


SLIDING = [
    MistralConfig(**SIZES, sliding_window=7),
    Gemma3TextConfig(**SIZES, sliding_window=7, query_pre_attn_scalar=8),
    Gemma2Config(**SIZES, sliding_window=7, query_pre_attn_scalar=8),
    LlamaConfig(**SIZES),
]
NAMES = ["mistral", "gemma3", "gemma2", "llama"]


@pytest.mark.parametrize("config", SLIDING, ids=NAMES)
def test_rejected_drafts_are_forgotten_beyond_a_sliding_window(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(model_of(config), None, "sliding")
    plain = decode_plain(target, PROMPT, 20, NEVER)
    with torch.no_grad():
        whole = target.decoder(input_ids=torch.tensor([PROMPT + plain.ids])).last_hidden_state[0] @ target.head.T
    assert whole.argmax(dim=-1)[len(PROMPT) - 1 : -1].tolist() == plain.ids
    Oracle(monkeypatch, target, [PROMPT], [0, 2, 1, 3])
    assert speculate(target, 4, 20).ids == plain.ids


@pytest.mark.parametrize("config", SLIDING, ids=NAMES)
def test_ragged_batches_of_every_attention_family(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(model_of(config), None, "family")
    check_target(target, sampled=True, ragged=True)
    plain = [decode_plain(target, prompt, 14, NEVER).ids for prompt in PROMPTS]
    Oracle(monkeypatch, target, PROMPTS, [0, 2, 1, 3, 3])
    batch = decode_batch(
        target, requests(PROMPTS), drafter=DRAFTER, block_size=4, max_new_tokens=14, stop_ids=NEVER
    )
    assert [row.ids for row in batch.rows] == plain
    assert len({tuple(row.cycles) for row in batch.rows}) > 1


def test_a_target_that_cannot_forget_is_decoded_alone_and_refused_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Lfm2Config(**SIZES, layer_types=["conv", "full_attention"] * 3, block_auto_adjust_ff_dim=False)
    target = Target(model_of(config), None, "hybrid")
    plain = decode_plain(target, PROMPT, 12, NEVER).ids
    with torch.no_grad():
        whole = target.decoder(input_ids=torch.tensor([PROMPT + plain])).last_hidden_state[0] @ target.head.T
    assert whole.argmax(dim=-1)[len(PROMPT) - 1 : -1].tolist() == plain
    with pytest.raises(TargetError, match=r"cannot forget rejected drafts.*batch_sizes"):
        decode_batch(target, requests(PROMPTS), max_new_tokens=4, stop_ids=NEVER)
    with pytest.raises(TargetError, match="cannot forget rejected drafts"):
        check_target(target, sampled=False, ragged=True)
    check_target(target, sampled=True, ragged=False)
    Oracle(monkeypatch, target, [PROMPT], [0, 2, 1, 3])
    assert speculate(target, 4, 12).ids == plain


@pytest.mark.parametrize(
    ("kind", "more", "limit"),
    [
        ("longrope", {"original_max_position_embeddings": 64, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}, 64),
        ("dynamic", {"factor": 2.0}, 512),
    ],
)
def test_sequences_longer_than_a_rope_keeps_its_rotation_for_are_not_decoded(
    kind: str, more: dict[str, Any], limit: int
) -> None:
    """Beyond the limit keys in the cache would be of another rotation than the tokens that look at them."""
    rope = {"rope_type": kind, "rope_theta": 1e4} | more
    target = Target(model_of(LlamaConfig(**(SIZES | {"rope_parameters": rope}))), None, "roped")
    check_target(target, sampled=True, ragged=True, longest=limit)
    with pytest.raises(TargetError, match=rf"roped has rope type {kind} .*up to {limit + 1} tokens.*at most {limit}"):
        check_target(target, sampled=False, ragged=False, longest=limit + 1)


def test_a_target_that_answers_otherwise_in_a_batch_is_refused() -> None:
    target = make_target()
    target.head = target.head * 1.5  # as a family whose logits are scaled in a way that is not known here
    with pytest.raises(TargetError, match="logits differ"):
        check_target(target, sampled=True, ragged=False)


def test_the_context_holds_exactly_the_verified_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys and values are those of one pass over the final sequence: nothing rejected, nothing missing."""
    oracle = Oracle(monkeypatch, TARGETS[0], [PROMPT], [1, 0, 3])
    found = speculate(TARGETS[0], 4, 20)
    session, truth = oracle.sessions[-1], oracle.truth[0]
    assert session.kv.lengths.tolist() == [len(PROMPT) + sum(found.cycles)]
    sequence = PROMPT + truth[: sum(found.cycles)]
    (features,), _ = capture_features(TARGETS[0], DRAFTER.spec.feature_layer_ids, [sequence])
    with torch.inference_mode():
        expected = DRAFTER.context_kv(DRAFTER.context(features))
    kept = session.kv.context()
    assert sorted(kept) == list(range(DRAFTER.spec.n_layers))
    for layer, whole in enumerate(expected):
        for part_1GTE, reference_TGE in zip(kept[layer], whole, strict=True):
            torch.testing.assert_close(part_1GTE[0].transpose(0, 1), reference_TGE, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_gives_what_the_cpu_gives() -> None:
    target, drafter = make_target(), make_drafter().cuda()
    plain = [decode_plain(target, prompt, 16, NEVER).ids for prompt in PROMPTS]
    target = Target(target.model.cuda(), None, "tiny")
    batch = decode_batch(
        target, requests(PROMPTS), drafter=drafter, block_size=4, max_new_tokens=16, stop_ids=NEVER
    )
    assert [row.ids for row in batch.rows] == plain
    assert batch.decode_s == pytest.approx(sum(batch.parts.values()))
    sampled = decode_batch(target, requests(PROMPTS), drafter=drafter, max_new_tokens=16, stop_ids=NEVER,
                           sampling=Sampling(temperature=1.0, top_p=0.9, drafts="sampled"))  # fmt: skip
    assert all(len(row.ids) == 16 for row in sampled.rows)


def test_times_by_part_add_up() -> None:
    batch = decode_batch(
        TARGETS[0], requests(PROMPTS), drafter=DRAFTER, block_size=4, max_new_tokens=9, stop_ids=NEVER
    )
    assert batch.decode_s == pytest.approx(sum(batch.parts.values()))
    assert set(batch.parts) == {"draft", "verify", "sampling", "cache", "rest"}
    assert all(0 < row.decode_s <= batch.decode_s for row in batch.rows)
    # Two layers of keys and values for each position that was verified, in float32.
    assert batch.drafter_kv_bytes > 0
    assert batch.target_kv_bytes > batch.drafter_kv_bytes
