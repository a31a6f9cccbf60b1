"""Every form of attention against the dense mask, and the block mask of flex attention against torch's own.

Shapes: H query heads, G key/value heads, R slots that ask, E head width.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from stages import attention_flex, attention_grouped
from stages.attention import AttentionPlan
from stages.layout import KeysValues, Layout, visible_spans
from stages.train_config import AttentionForm
from tests.tiny import make_drafter

WIDTH = 8


@st.composite
def layouts(draw: st.DrawFn, most_tokens: int = 40) -> Layout:
    """One to three samples; contexts that end at the last anchor, before it, or behind it."""
    anchors, contexts, counts = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        n_tokens = draw(st.integers(1, most_tokens))
        own = sorted(draw(st.sets(st.integers(0, n_tokens), min_size=1, max_size=7)))
        anchors += own
        contexts.append(draw(st.sampled_from([own[-1], n_tokens, n_tokens // 2])))
        counts.append(len(own))
    return Layout(torch.tensor(anchors), tuple(contexts), tuple(counts))


windows = st.none() | st.integers(1, 12)


def chosen_rows(n: int, seed: int) -> torch.Tensor | None:
    """A third of the cases ask for all slots."""
    if seed % 3 == 0:
        return None
    share = torch.rand(n, generator=torch.Generator().manual_seed(seed)) < 0.6
    return share.nonzero()[:, 0] if share.any() else torch.tensor([n - 1])


def attend(
    form: AttentionForm, layout: Layout, block_size: int, window: int | None, causal: bool, seed: int,
    heads: tuple[int, int] = (4, 2), size: float = 1.0, dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """The output, then (but for flex, which has none on a CPU) the gradients of queries, keys and values."""
    generator = torch.Generator().manual_seed(seed)
    n_context, n_slots = sum(layout.n_context), block_size * len(layout.anchors_N)
    rows_R = chosen_rows(n_slots, seed)
    n_rows = n_slots if rows_R is None else len(rows_R)

    def states(n: int, n_heads: int) -> torch.Tensor:
        values = torch.randn(n, n_heads, WIDTH, generator=generator) * size
        return values.to(dtype).requires_grad_(form != "flex")

    query = states(n_rows, heads[0])
    context, slots = (KeysValues(states(n, heads[1]), states(n, heads[1])) for n in (n_context, n_slots))
    weights = torch.randn(n_rows, heads[0], WIDTH, generator=generator)
    plan = AttentionPlan(layout, block_size, form=form, causal=causal, rows_R=rows_R)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out = plan.layer(window, last=True)(query, context, slots)
    if form == "flex":
        return [out]
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), [query, *context, *slots])]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(found, expected, strict=False):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@settings(max_examples=80, deadline=None)
@given(
    layout=layouts(), block_size=st.sampled_from([2, 4, 16]), window=windows, causal=st.booleans(),
    seed=st.integers(0, 99), heads=st.sampled_from([(4, 2), (2, 2), (3, 1)]), rows=st.sampled_from([1, 16, 64, 1024]),
)  # fmt: skip
def test_groups_of_blocks_give_what_the_dense_mask_gives(
    layout: Layout, block_size: int, window: int | None, causal: bool, seed: int, heads: tuple[int, int], rows: int
) -> None:
    arguments: Any = (layout, block_size, window, causal, seed, heads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_grouped, "GROUP_ROWS", rows)
        found = attend("grouped", *arguments)
    assert_equal(found, attend("dense", *arguments))


@pytest.mark.parametrize("size", [0.1, 30.0])
def test_scores_far_beyond_the_range_of_exp_are_no_trouble(size: float) -> None:
    """With size 30 they reach some thousands: e to that power is no float32 number."""
    layout = Layout(torch.tensor([0, 3, 9, 2, 5]), (9, 4), (3, 2))
    found, dense = (attend(form, layout, 4, None, True, 3, size=size) for form in ("grouped", "dense"))
    exact = attend("dense", layout, 4, None, True, 3, size=size, dtype=torch.float64)
    for a, b, truth in zip(found, dense, exact, strict=True):
        # Gradients of saturated rows are differences of large terms: float32 itself shows what rounding does to them.
        errors = [float((x - truth).abs().max()) for x in (a, b)]
        assert errors[0] <= 4 * errors[1] + 1e-5 * float(truth.abs().max())


@settings(max_examples=15, deadline=None)
@given(
    layout=layouts(), block_size=st.sampled_from([2, 16]), window=windows, causal=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_flex_attention_gives_what_the_dense_mask_gives(
    layout: Layout, block_size: int, window: int | None, causal: bool, seed: int
) -> None:
    arguments: Any = (layout, block_size, window, causal, seed)
    assert_equal(attend("flex", *arguments), attend("dense", *arguments)[:1])


@settings(max_examples=60, deadline=None)
@given(
    layout=layouts(most_tokens=900), block_size=st.sampled_from([2, 16, 40]), window=st.none() | st.integers(1, 500),
    causal=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_block_mask_is_the_one_that_torch_makes_of_the_mask_function(
    layout: Layout, block_size: int, window: int | None, causal: bool, seed: int
) -> None:
    spans = visible_spans(layout, block_size, window=window, causal=causal)
    rows_R = chosen_rows(len(spans.slot_start), seed)
    asking = spans if rows_R is None else spans.of(rows_R)
    n_context, n_slots = sum(layout.n_context), len(spans.slot_start)
    found = attention_flex.block_mask(asking, n_context, n_slots)
    expected = create_block_mask(found.mask_mod, None, None, *found.seq_lengths, device="cpu")
    assert found.seq_lengths == expected.seq_lengths
    for kind in ("", "full_"):
        counts, indices = (
            [getattr(mask, f"{kind}kv_{what}") for mask in (found, expected)] for what in ("num_blocks", "indices")
        )
        assert torch.equal(*counts)
        for n, own, other in zip(counts[0].flatten(), *(i.flatten(0, -2) for i in indices), strict=True):
            assert own[:n].tolist() == other[:n].tolist()


def test_long_prefixes_are_whole_tiles() -> None:
    """All but the ragged end of the context, and the slots, need no mask function."""
    layout = Layout(torch.arange(1000, 1008), (1007,), (8,))
    mask = attention_flex.block_mask(visible_spans(layout, 16), 1007, 128)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks.tolist() == [[[7]]]
    assert mask.kv_num_blocks.tolist() == [[[2]]]


@pytest.mark.parametrize("form", ["grouped", "dense"])
def test_only_the_chosen_slots_are_computed_and_they_are_the_same(form: AttentionForm) -> None:
    drafter = make_drafter(n_layers=3, layer_types=("full_attention", "sliding_attention", "full_attention"),
                           sliding_window=6)  # fmt: skip
    layout = Layout(torch.tensor([2, 7, 12, 1, 4]), (12, 4), (3, 2))
    generator = torch.Generator().manual_seed(1)
    features, blocks = torch.randn(16, 3, 32, generator=generator), torch.randn(5, 4, 32, generator=generator)
    rows = torch.tensor([1, 2, 6, 13, 19])
    seen: list[int] = []
    drafter.layers[-1].mlp.register_forward_hook(lambda _module, inputs, _out: seen.append(len(inputs[0])))
    some = drafter(features, blocks, layout, rows, form)
    assert seen == [5]
    every = drafter(features, blocks, layout, None, form).flatten(0, 1)
    torch.testing.assert_close(some, every[rows], rtol=1e-5, atol=1e-5)
    names, parameters = zip(*drafter.named_parameters(), strict=True)
    gradients = [torch.autograd.grad(x.square().sum(), parameters) for x in (some, every[rows])]
    for name, found, expected in zip(names, *gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiled flex attention needs CUDA")
def test_flex_attention_on_a_gpu_has_the_dense_gradients_and_compiles_at_most_twice() -> None:
    counters = torch._dynamo.utils.counters  # type: ignore[attr-defined]
    drafter = make_drafter(hidden_size=64, n_heads=4, n_kv_heads=2, head_dim=16).cuda()
    counters.clear()
    for n_tokens in (200, 333, 1000, 90):
        anchors = torch.arange(3, n_tokens, 11)
        layout = Layout(anchors.cuda(), (int(anchors[-1]),), (len(anchors),))
        features = torch.randn(int(anchors[-1]), 3, 64, device="cuda")
        blocks = torch.randn(len(anchors), 4, 64, device="cuda")
        rows = torch.arange(4 * len(anchors), device="cuda")
        rows = rows[rows % 4 > 0]
        forms: tuple[AttentionForm, ...] = ("flex", "dense")
        outs = [drafter(features, blocks, layout, rows, form) for form in forms]
        torch.testing.assert_close(*outs, rtol=1e-2, atol=1e-2)
        grads = [torch.autograd.grad(out.square().sum(), list(drafter.parameters())) for out in outs]
        for found, expected in zip(*grads, strict=True):
            assert float((found - expected).norm() / expected.norm()) < 1e-2
    assert counters["stats"]["unique_graphs"] <= 2
