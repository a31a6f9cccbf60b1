"""The loss against slow, obvious loops (figure 3), and what is supervised (cases 7 and 8).

Shapes: S samples, A anchors, B block size, R supervised rows, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stages import loss
from stages.anchors import default_gamma, eligible_anchors, sample_anchors, slot_weights, supervised_slots
from stages.batch import Batch, TrainingSample, make_batch
from stages.drafter import Drafter
from stages.layout import Layout
from stages.loss import head_losses
from stages.objective import Outcome, heldout_tau, run_objective
from stages.weighting import SlotWeights
from tests.tiny import FEATURE_LAYERS, HIDDEN, MASK_ID, VOCAB, make_drafter, make_target

TARGET = make_target()
GAMMA = 4.0
masks = st.lists(st.integers(0, 1), min_size=1, max_size=40).map(lambda bits: np.array(bits, np.uint8))


def multi_turn_sample(seed: int, n_tokens: int = 24, n_anchors: int = 6) -> TrainingSample:
    """Two answers, the second at the very end, so that some blocks are cut by a turn and some by the sequence."""
    rng = np.random.default_rng(seed)
    mask = np.zeros(n_tokens, np.uint8)
    mask[4:11] = mask[15:] = 1
    anchors = sample_anchors(mask, n_anchors, seed=seed, epoch=0, sample_id=str(seed))
    features = torch.randn(n_tokens, len(FEATURE_LAYERS), HIDDEN, generator=torch.Generator().manual_seed(seed))
    ids = rng.integers(0, VOCAB - 1, n_tokens).astype(np.int32)
    return TrainingSample(str(seed), features, ids, mask, anchors)


def batch_of(samples: list[TrainingSample], block_size: int = 4) -> Batch:
    return make_batch(samples, block_size, MASK_ID)


def slow_objective(drafter: Drafter, samples: list[TrainingSample], gamma: float) -> tuple[torch.Tensor, float]:
    """`Σ w·CE` and `Σ w`, block by block and slot by slot."""
    size = drafter.spec.block_size
    total, weight_sum = torch.zeros(()), 0.0
    for sample in samples:
        for a in sample.anchors.tolist():
            block = torch.full((1, size), MASK_ID)
            block[0, 0] = int(sample.input_ids[a])
            layout = Layout(torch.tensor([a]), (a,), (1,))
            hidden = drafter(sample.features_TLD[:a].float(), TARGET.embed(block), layout, attention="dense")[0]
            for k in range(1, size):
                if a + k >= len(sample.input_ids) or sample.loss_mask[a + k] == 0:
                    break
                weight = math.exp(-(k - 1) / gamma)
                label = torch.tensor(int(sample.input_ids[a + k]))
                total = total + weight * F.cross_entropy(hidden[k] @ TARGET.head.T, label)
                weight_sum += weight
    return total, weight_sum


def gradients(drafter: Drafter, value: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*drafter.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(value, parameters), strict=True))


def objective(drafter: Drafter, batch: Batch, gamma: float = GAMMA, *, bf16: bool = False) -> Outcome:
    weights = SlotWeights(torch.from_numpy(slot_weights(drafter.spec.block_size, gamma)))
    return run_objective(drafter, TARGET.embed, TARGET.head, batch, weights, bf16=bf16)


@pytest.mark.parametrize("tile", [(1, VOCAB), (3, 10), (1 << 20, 1), (1 << 20, 1 << 20)])
def test_loss_and_gradients_are_those_of_a_double_loop(monkeypatch: pytest.MonkeyPatch, tile: tuple[int, int]) -> None:
    monkeypatch.setitem(loss.TILE, "cpu", tile)
    drafter = make_drafter()
    samples = [multi_turn_sample(1), multi_turn_sample(2, n_tokens=19, n_anchors=3)]
    batch = batch_of(samples)
    outcome = objective(drafter, batch)
    expected, weight_sum = slow_objective(drafter, samples, GAMMA)
    torch.testing.assert_close(outcome.loss_sum, expected, rtol=1e-5, atol=1e-5)
    assert float(outcome.weight_sum) == pytest.approx(weight_sum, rel=1e-6)
    weights = SlotWeights(torch.from_numpy(slot_weights(drafter.spec.block_size, GAMMA)))
    assert float(weights.divide_by(batch)) == pytest.approx(weight_sum, rel=1e-6)
    found, slow = gradients(drafter, outcome.loss_sum / weight_sum), gradients(drafter, expected / weight_sum)
    for name, gradient in slow.items():
        assert float(gradient.abs().max()) > 0, name
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_bfloat16_stays_near_float32() -> None:
    drafter, samples = make_drafter(initializer_range=0.1), [multi_turn_sample(3), multi_turn_sample(4)]
    wide, narrow = (objective(drafter, batch_of(samples), bf16=bf16) for bf16 in (False, True))
    assert narrow.loss_sum.item() == pytest.approx(wide.loss_sum.item(), rel=0.03)
    exact, rounded = (gradients(drafter, o.loss_sum) for o in (wide, narrow))
    for name, gradient in exact.items():
        assert rounded[name].dtype == torch.float32
        assert float((rounded[name] - gradient).norm() / gradient.norm()) < 0.1, name


def test_cross_entropy_of_plain_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loss.TILE, "cpu", (2, 17))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, HIDDEN, generator=generator).requires_grad_()
    labels = torch.randint(VOCAB, (7,), generator=generator)
    weights = torch.rand(7, generator=generator)
    losses = head_losses(hidden, TARGET.head, labels)
    value = (losses.loss_R * weights).sum()
    logits = hidden @ TARGET.head.T
    each = F.cross_entropy(logits, labels, reduction="none")
    expected = (each * weights).sum()
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(losses.cross_entropy_R, each.detach())
    assert torch.equal(losses.predictions_R, logits.argmax(dim=-1))
    for scale in (1.0, 0.25):
        (found,) = torch.autograd.grad(value * scale, hidden, retain_graph=True)
        (slow,) = torch.autograd.grad(expected * scale, hidden, retain_graph=True)
        torch.testing.assert_close(found, slow, rtol=1e-4, atol=1e-6)


def test_no_rows_give_no_loss() -> None:
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    losses = head_losses(hidden, TARGET.head, torch.zeros(0, dtype=torch.long))
    losses.loss_R.sum().backward()
    assert losses.loss_R.shape == losses.predictions_R.shape == (0,)


def test_exactly_one_eligible_anchor_counts() -> None:
    """Case 7."""
    mask = np.array([0, 0, 0, 1, 1], np.uint8)
    anchors = sample_anchors(mask, 512, seed=0, epoch=0, sample_id="s")
    assert anchors.tolist() == [3]
    sample = multi_turn_sample(5, n_tokens=5)
    sample = TrainingSample("s", sample.features_TLD, sample.input_ids, mask, anchors)
    outcome = objective(make_drafter(), batch_of([sample]))
    assert outcome.supervised_NB.tolist() == [[False, True, False, False]]
    assert float(outcome.weight_sum) == 1.0
    assert outcome.loss_sum.item() > 0


def test_a_response_shorter_than_a_block_at_the_end_keeps_its_slots() -> None:
    """Case 8: anchors up to the last response token but one, only the slots inside are supervised."""
    mask = np.array([0, 0, 0, 0, 1, 1, 1, 1], np.uint8)
    anchors = eligible_anchors(mask)
    assert anchors.tolist() == [4, 5, 6]
    slots = supervised_slots(mask, anchors, 16)
    assert slots.shape == (3, 16)
    assert [np.flatnonzero(row).tolist() for row in slots] == [[1, 2, 3], [1, 2], [1]]
    sample = multi_turn_sample(6, n_tokens=8)
    batch = batch_of([TrainingSample("s", sample.features_TLD, sample.input_ids, mask, anchors)], 16)
    assert batch.rows_R.tolist() == [1, 2, 3, 16 + 1, 16 + 2, 32 + 1]
    assert batch.labels_R[:3].tolist() == sample.input_ids[5:8].tolist()
    assert len(batch.features_CLD) == 6  # rows at or after the last anchor are seen by no block


@settings(max_examples=200, deadline=None)
@given(mask=masks, block_size=st.integers(2, 9))
def test_anchors_and_slots_are_those_of_a_slow_loop(mask: np.ndarray[Any, Any], block_size: int) -> None:
    n_tokens = len(mask)
    anchors = [a for a in range(n_tokens - 1) if mask[a] and mask[a + 1]]
    assert eligible_anchors(mask).tolist() == anchors
    found = supervised_slots(mask, np.array(anchors, np.int64), block_size)
    for a, row in zip(anchors, found, strict=True):
        expected = [False]
        for k in range(1, block_size):
            expected.append(all(a + j < n_tokens and mask[a + j] for j in range(1, k + 1)))
        assert row.tolist() == expected
        assert row[1]


@settings(max_examples=100, deadline=None)
@given(mask=masks, n=st.integers(1, 20), seed=st.integers(0, 3), epoch=st.integers(0, 3), sample_id=st.text(max_size=5))
def test_sampled_anchors_are_eligible_distinct_and_reproducible(
    mask: np.ndarray[Any, Any], n: int, seed: int, epoch: int, sample_id: str
) -> None:
    eligible = eligible_anchors(mask).tolist()
    found = sample_anchors(mask, n, seed=seed, epoch=epoch, sample_id=sample_id).tolist()
    assert len(found) == min(n, len(eligible))
    assert found == sorted(set(found))
    assert set(found) <= set(eligible)
    assert found == sample_anchors(mask, n, seed=seed, epoch=epoch, sample_id=sample_id).tolist()


def test_anchors_change_with_seed_epoch_and_sample_and_cover_all() -> None:
    mask = np.ones(101, np.uint8)
    draws = {
        (seed, epoch, name): tuple(sample_anchors(mask, 10, seed=seed, epoch=epoch, sample_id=name).tolist())
        for seed in range(3) for epoch in range(10) for name in "abcd"
    }  # fmt: skip
    assert len(set(draws.values())) == len(draws)
    counts = np.bincount(np.concatenate([np.array(d) for d in draws.values()]), minlength=100)
    assert len(counts) == 100  # of 101 positions, the last has no successor
    assert counts.min() > 0
    assert counts.max() < 4 * counts.mean()


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_weights_are_those_of_the_paper(block_size: int, gamma: float) -> None:
    assert default_gamma(block_size) == gamma
    found = slot_weights(block_size, gamma)
    assert found[0] == 0
    assert found[1:].tolist() == pytest.approx([math.exp(-(k - 1) / gamma) for k in range(1, block_size)], rel=1e-6)


def test_simulated_tau_by_hand() -> None:
    """Two samples, of three blocks and of one."""
    correct = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0]], dtype=torch.bool)
    outcome = Outcome(torch.zeros(()), torch.zeros(()), correct, torch.ones_like(correct))
    samples = [multi_turn_sample(i, n_anchors=n) for i, n in enumerate((3, 1))]
    tau, n = heldout_tau([outcome], [batch_of(samples)])
    assert n == 2
    assert tau == pytest.approx(((4 + 1 + 2) / 3 + 3) / 2)
    assert outcome.slot_counts()[0].tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("parts", [[1, 1, 1, 1], [3, 1]])
def test_the_loss_is_normalised_over_all_micro_batches(parts: list[int]) -> None:
    """Samples with very different numbers of slots: a mean of means would be something else."""
    drafter = make_drafter()
    samples = [multi_turn_sample(i, n_tokens=16 + 3 * i, n_anchors=1 + 3 * i) for i in range(4)]
    whole = objective(drafter, batch_of(samples))
    expected = gradients(drafter, whole.loss_sum / whole.weight_sum)
    outcomes, start = [], 0
    for n in parts:
        outcomes.append(objective(drafter, batch_of(samples[start : start + n])))
        start += n
    weight = torch.stack([o.weight_sum for o in outcomes]).sum()
    found = [gradients(drafter, o.loss_sum / weight) for o in outcomes]
    for name, gradient in expected.items():
        torch.testing.assert_close(sum(g[name] for g in found), gradient, rtol=1e-4, atol=1e-6, msg=name)
