"""Packed and padded batches: which samples go together, where their rows lie, and attention that stays inside each."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import GPT2Config, LlamaConfig, OPTConfig

from stages.agreement import disagreement
from stages.capture import Captured, PackedWay, PaddedWay
from stages.errors import TargetError, TargetSettingError
from stages.packed_attention import NotPackable, packed_attention, packed_pass, window_of
from stages.packed_kernel import reach_of
from stages.packing import MIN_SHARED, Ids, pack, packed_batches, padded_batches
from stages.probe import WAYS, choose_way
from stages.target import Target
from stages.target_limits import learned_positions, length_rope, require_divisible
from tests.tiny import SIZES, make_target, model_of


@st.composite
def samples(draw: st.DrawFn) -> list[Ids]:
    """Sequences of which some begin as the one before them."""
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    found: list[Ids] = []
    for n in draw(st.lists(st.integers(1, 90), min_size=1, max_size=12)):
        ids = rng.integers(0, 50, n).astype(np.int32)
        if found and draw(st.booleans()):
            shared = draw(st.integers(0, 90))
            ids = np.concatenate([found[-1][:shared], ids])
        found.append(ids)
    return found


@settings(max_examples=80, deadline=None)
@given(sequences=samples(), batch_tokens=st.integers(1, 200))
def test_packed_batches_are_consecutive_and_hold_every_token_of_every_sample(
    sequences: list[Ids], batch_tokens: int
) -> None:
    batches = list(packed_batches(sequences, batch_tokens))
    assert [i for batch in batches for i in batch] == list(range(len(sequences)))
    for batch in batches:
        packing = pack([sequences[i] for i in batch])
        assert len(batch) == 1 or len(packing.ids_R) <= batch_tokens
        assert [s.stop for s in packing.segments] == [s.start for s in packing.segments[1:]] + [len(packing.ids_R)]
        for i, segment in zip(batch, packing.segments, strict=True):
            # By its rows each sample finds its ids at their positions, whoever computed them.
            assert packing.ids_R[segment.rows].tolist() == sequences[i].tolist()
            assert packing.positions_R[segment.rows].tolist() == list(range(len(sequences[i])))
            assert segment.n_tokens == len(sequences[i])
            assert segment.stop > segment.start


def test_only_long_common_beginnings_are_shared() -> None:
    rng = np.random.default_rng(0)
    first = rng.integers(0, 50, 100)
    for shared, own in [(MIN_SHARED - 1, 10), (MIN_SHARED, 10), (100, 1)]:
        other = np.concatenate([first[:shared], 50 + rng.integers(0, 50, own)])
        saved = shared if shared >= MIN_SHARED else 0
        assert len(pack([first, other]).ids_R) == 100 + len(other) - saved
    assert len(pack([first, first]).ids_R) == 101  # a sample always has a row of its own


@settings(max_examples=80, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), max_size=80), batch_tokens=st.integers(1, 150))
def test_padded_batches_take_every_sample_once_window_by_window(lengths: list[int], batch_tokens: int) -> None:
    batches = list(padded_batches(lengths, batch_tokens))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    waiting: set[int] = set()
    following = most = 0
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= batch_tokens
        waiting |= set(batch)
        while following in waiting:
            waiting.remove(following)
            following += 1
        most = max(most, sum(lengths[i] for i in waiting))
    assert most <= 8 * batch_tokens + 60  # what comes early is held for no longer than a window


# --- masks and attention ----------------------------------------------------------------------------------------


def mask(rule: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda batch, head, q, k: rule(q, k)


def test_a_window_is_read_off_a_mask() -> None:
    assert window_of(mask(lambda q, k: k <= q)) == 0
    assert window_of(mask(lambda q, k: (k <= q) & (k > q - 7))) == 7
    for rule in (
        lambda q, k: k <= q + 1,  # sees ahead
        lambda q, k: k < q,  # not itself
        lambda q, k: (k <= q) & (k // 64 == q // 64),  # chunks
        lambda q, k: (k <= q) & (k % 2 == 0),
        lambda q, k: abs(k - q) < 5,
    ):
        with pytest.raises(NotPackable, match="mask"):
            window_of(mask(rule))


def attend(sequences: list[Ids], seed: int = 0, window: int = 0, **extra: Any) -> tuple[torch.Tensor, Any]:
    """Packed attention on random tensors that depend on the ids' beginning only, as a target's do."""
    packing = pack(sequences)
    n = len(packing.ids_R)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, n, 8, generator=generator) for heads in (4, 2, 2))
    tag = torch.full((1, 1, 1, 1), window)
    with packed_pass(packing.segments, []):
        out, _ = packed_attention(nn.Module(), q, k, v, tag, **extra)
    return out, (packing, q, k, v)


def slow_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, softcap: float | None,
                   sinks: torch.Tensor | None) -> torch.Tensor:
    """[H, T, D] by the definition: token by token, head by head."""
    out = torch.zeros_like(q)
    for head in range(q.shape[0]):
        keys, values = (t[head * t.shape[0] // q.shape[0]] for t in (k, v))
        for i in range(q.shape[1]):
            first = max(0, i - window + 1) if window else 0
            scores = keys[first : i + 1] @ q[head, i] * q.shape[-1] ** -0.5
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp()
            total = weights.sum() + (sinks[head].exp() if sinks is not None else 0)
            out[head, i] = weights @ values[first : i + 1] / total
    return out


@pytest.mark.parametrize("window", [0, 1, 6, 300])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_of_each_sample_is_that_of_a_slow_loop(window: int, softcap: float | None, sinks: bool) -> None:
    rng = np.random.default_rng(1)
    first = rng.integers(0, 50, 60)
    sequences = [rng.integers(0, 50, 9), first, np.concatenate([first[:40], rng.integers(50, 99, 5)])]
    s_aux = torch.randn(4, generator=torch.Generator().manual_seed(5)) if sinks else None
    out, (packing, q, k, v) = attend(sequences, window=window, softcap=softcap, s_aux=s_aux)
    for segment in packing.segments:
        expected = slow_attention(*(t[0][:, segment.rows] for t in (q, k, v)), window, softcap, s_aux)
        own = segment.stop - segment.start
        found = out[0, segment.start : segment.stop].transpose(0, 1)
        torch.testing.assert_close(found, expected[:, -own:], rtol=1e-4, atol=1e-5)


def test_long_sliding_windows_are_worked_off_in_blocks() -> None:
    sequences: list[Ids] = [np.arange(700) % 50]
    out, (_, q, k, v) = attend(sequences, window=300)
    expected = slow_attention(q[0], k[0], v[0], 300, None, None)
    torch.testing.assert_close(out[0].transpose(0, 1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("extra", "words"),
    [({"alibi": torch.ones(4)}, "alibi"), ({"dropout": 0.1}, "dropout 0.1"), ({"is_causal": False}, "is_causal False")],
)
def test_what_is_not_known_is_refused(extra: dict[str, Any], words: str) -> None:
    sequences: list[Ids] = [np.arange(5)]
    attend(sequences, position_ids=torch.arange(5), output_attentions=False, cache=None)
    with pytest.raises(NotPackable, match=words):
        attend(sequences, **extra)


def test_another_mask_than_ours_is_refused() -> None:
    q = torch.randn(1, 2, 5, 8)
    with packed_pass(pack([np.arange(5)]).segments, []):
        for given in (None, torch.zeros(1, 1, 5, 5)):
            with pytest.raises(NotPackable, match="another mask"):
                packed_attention(nn.Module(), q, q, q, given)
    with pytest.raises(NotPackable, match="outside"):
        packed_attention(nn.Module(), q, q, q, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("sinks", [False, True])
def test_the_gpus_kernel_attends_as_the_cpu_does(window: int, sinks: bool) -> None:
    rng = np.random.default_rng(1)
    first = rng.integers(0, 50, 60)
    packing = pack([rng.integers(0, 50, 9), first, np.concatenate([first[:40], rng.integers(50, 99, 5)])])
    n = len(packing.ids_R)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, n, 64, generator=generator).bfloat16() for heads in (4, 2, 2))
    s_aux = torch.randn(4, generator=generator) if sinks else None
    tag = torch.full((1, 1, 1, 1), window)
    found = []
    for device in ("cpu", "cuda"):
        given = [t.to(device) for t in (q, k, v)]
        with packed_pass(packing.segments, []):
            aux = None if s_aux is None else s_aux.to(device)
            found.append(packed_attention(nn.Module().to(device), *given, tag, s_aux=aux)[0].float().cpu())
    torch.testing.assert_close(found[0], found[1], rtol=2e-2, atol=2e-2)


def test_what_the_gpus_kernel_is_told_of_a_batch() -> None:
    rng = np.random.default_rng(1)
    first = rng.integers(0, 50, 60)
    plain = reach_of(pack([first[:9], first[20:]]).segments, torch.device("cpu"))
    assert plain.query_ends.tolist() == plain.key_ends.tolist() == [0, 9, 49]
    assert (len(plain.key_rows), plain.longest_query, plain.longest_key) == (0, 40, 40)
    shared = reach_of(pack([first, np.concatenate([first[:50], [99, 98]])]).segments, torch.device("cpu"))
    assert shared.query_ends.tolist() == [0, 60, 62]
    assert shared.key_ends.tolist() == [0, 60, 112]
    assert shared.key_rows.tolist() == [*range(60), *range(50), 60, 61]
    assert (shared.longest_query, shared.longest_key) == (60, 60)


# --- the choice -------------------------------------------------------------------------------------------------


class Leaky(PackedWay):
    """Packs so that each sample sees the end of the one before it."""

    def capture(self, sequences: Any) -> Captured:
        found = super().capture([np.concatenate(sequences)])
        ends = np.cumsum([0, *map(len, sequences)])
        rows = tuple(slice(int(a), int(b)) for a, b in pairwise(ends))
        return Captured(found.ids_R, found.layers_RD, found.final_RD, rows)


def test_a_way_that_lets_samples_see_each_other_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WAYS, "packed", Leaky)
    choice = choose_way(make_target(), (1, 3), last_hidden=False)
    assert choice.way.name == "padded"
    assert "packed: layer 1: the states differ by" in choice.reason
    with pytest.raises(TargetError, match=r"packed: layer 1.*set extract\.batching to auto"):
        choose_way(make_target(), (1, 3), batching="packed")


@pytest.mark.parametrize("batching", ["packed", "padded", "single"])
def test_the_way_that_a_recipe_names_is_taken(batching: str) -> None:
    assert choose_way(make_target(), (1, 3), batching=batching).way.name == batching


def test_a_target_whose_states_cannot_be_captured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the hook of every way fires on the layer before: the field's most common fault."""
    target = make_target()
    layers = list(target.layers)
    monkeypatch.setattr(target, "layers", nn.ModuleList(layers[-1:] + layers[:-1]))
    with pytest.raises(TargetError, match=r"not those of output_hidden_states.*packed: .*padded: .*single: "):
        choose_way(target, (1, 3))


# --- positions --------------------------------------------------------------------------------------------------

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
GPT2 = GPT2Config(vocab_size=97, n_embd=32, n_layer=6, n_head=4, n_positions=48)


def target_with(rope: dict[str, Any], **changes: Any) -> Target:
    return Target(model_of(LlamaConfig(**(SIZES | {"rope_parameters": dict(rope)} | changes))), None, "roped")


def test_samples_of_a_longrope_target_go_alone_where_one_may_be_long() -> None:
    """Their rotation follows the longest of the pass, which the probe's few tokens cannot show."""
    target = target_with(LONGROPE)
    rng = np.random.default_rng(0)
    samples = [rng.integers(0, 97, n) for n in (43, 43, 110)]
    choice = choose_way(target, (1, 3), max_length=128)
    assert choice.way.name == "single"
    assert "not packed or padded: its rope type longrope" in choice.reason
    assert "64 tokens (original_max_position_embeddings), and cache.max_length is 128" in choice.reason
    alone = choice.way.capture(samples[:1]).features(0)
    together = PackedWay(target, (1, 3), False).capture(samples).features(0)
    assert disagreement(together, alone, torch.float32) is not None  # what would have been committed
    for batching in ("packed", "padded"):
        with pytest.raises(TargetSettingError, match=rf"extract\.batching is '{batching}'.*longrope.*auto or single"):
            choose_way(target, (1, 3), batching=batching, max_length=65)
    assert choose_way(target, (1, 3), max_length=64).way.name == "packed"


def test_a_dynamic_rope_is_refused_beyond_what_it_was_trained_on() -> None:
    target = target_with(DYNAMIC, max_position_embeddings=64)
    for batching in ("auto", "single"):
        with pytest.raises(TargetSettingError, match=r"cache\.max_length is 65, .*rope type dynamic .*at most 64"):
            choose_way(target, (1, 3), batching=batching, max_length=65)
    assert choose_way(target, (1, 3), max_length=64).way.name == "packed"


def test_ropes_that_depend_on_lengths_are_found_in_every_form_of_config() -> None:
    def found(**fields: Any) -> tuple[str, int] | None:
        rope = length_rope(SimpleNamespace(max_position_embeddings=256, **fields))
        return None if rope is None else (rope.kind, rope.threshold)

    plain = {"rope_type": "default", "rope_theta": 1e4}
    assert found() is None
    assert found(rope_parameters=plain | {"rope_type": "yarn", "factor": 2.0}) is None
    assert found(rope_parameters={"full_attention": LONGROPE, "sliding_attention": plain}) == ("longrope", 64)
    assert found(rope_parameters={"full_attention": LONGROPE, "sliding_attention": DYNAMIC}) == ("dynamic", 256)
    assert found(rope_scaling={"type": "dynamic", "factor": 2.0}) == ("dynamic", 256)
    outside = {"type": "longrope", "short_factor": [1.0], "long_factor": [4.0]}
    assert found(rope_scaling=outside, original_max_position_embeddings=32) == ("longrope", 32)


def test_learned_positions_bound_the_samples() -> None:
    target = Target(model_of(GPT2), None, "gpt2")
    with pytest.raises(TargetSettingError, match=r"cache\.max_length is 49, .*gpt2 has a table of 48 learned"):
        choose_way(target, (1, 3), max_length=49)
    assert learned_positions(target) == 48
    opt = OPTConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, ffn_dim=48, num_attention_heads=4, word_embed_proj_dim=32,
        max_position_embeddings=40,
    )  # fmt: skip
    assert learned_positions(Target(model_of(opt), None, "opt")) == 40
    assert learned_positions(make_target()) is None


@pytest.mark.parametrize(("processes", "fits"), [(1, True), (2, True), (3, False), (4, False)])
def test_a_target_is_divided_only_where_every_process_gets_as_many_heads(processes: int, fits: bool) -> None:
    config = make_target().config
    if fits:
        require_divisible(config, "tiny", processes)
        return
    message = rf"extract\.tensor_parallel is {processes}, but target tiny has num_attention_heads 4 and " \
        r"num_key_value_heads 2; it must divide each of them \(1, 2\)"
    with pytest.raises(TargetSettingError, match=message):
        require_divisible(config, "tiny", processes)


# --- tolerance --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_allowed_for_and_nothing_else(dtype: torch.dtype) -> None:
    """Neither too tight nor blind: another batch's rounding passes, any misplaced row or layer does not."""
    target = Target(make_target().model.to(dtype), None, "tiny")
    assert target.dtype == dtype
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 97, n) for n in (60, 45, 80)]
    layer_ids = (1, 3, 4)
    alone = [PaddedWay(target, layer_ids, False).capture([s]).features(0) for s in sequences]
    together = PackedWay(target, layer_ids, False).capture(sequences)
    for i, expected in enumerate(alone):
        found = together.features(i)
        assert disagreement(found, expected, dtype) is None
        shifted = torch.cat([found[1:], found[:1]])
        other = together.features((i + 1) % 3)
        wrong_layer = torch.stack([found[:, 0], together.features(i)[:, 2], found[:, 2]], dim=1)
        late = found.clone()
        late[-10:] = torch.cat([found[-9:], found[-1:]])
        for wrong in (shifted, wrong_layer, late, other[: len(found)] if len(other) >= len(found) else other):
            assert disagreement(wrong, expected, dtype) is not None
    layer, text = disagreement(wrong_layer, expected, dtype) or (0, "")
    assert layer == 1
    assert "expected at most" in text
    broken = alone[0].clone()
    broken[3, 2, 0] = float("nan")
    assert (disagreement(broken, alone[0], dtype) or (0, ""))[0] == 2
