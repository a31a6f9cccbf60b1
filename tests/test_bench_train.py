"""The training benchmark runs, and what it compares computes the same."""

from __future__ import annotations

import pytest
import torch

from benchmarks.train import run
from benchmarks.train_cases import Case
from benchmarks.train_parts import ProductTimes, products
from benchmarks.train_steps import compare


def test_the_naive_step_has_the_same_loss_and_gradients() -> None:
    """Half of the anchors are padding in the naive step."""
    found = compare(Case(32, 128, tokens=64, anchors=8, valid=4), rounds=1)
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-6)
    assert found["gradient_distance"] < 1e-5


def test_a_quick_run_has_every_part_that_needs_no_rival() -> None:
    found = run(("naive", "loss", "scaling", "rivals", "share"), {}, quick=True)
    assert found["naive"][0]["gradient_distance"] < 1e-5
    assert found["loss"][0]["gradient_distance"] < 1e-5
    fewer, more, short, long = found["scaling"]
    assert more["others_gmac"] > fewer["others_gmac"]
    assert long["attention_gmac"] > 1.2 * short["attention_gmac"]
    assert all(row["line"] == pytest.approx(row["seconds"]) for row in found["scaling"])  # two points make a line
    assert found["rivals"][0]["ratio"] is None
    assert all(0 < row["share"] < 1 for row in found["share"])


def test_products_of_attention_are_told_from_the_others() -> None:
    a_23, b_34, c_523 = torch.ones(2, 3), torch.ones(3, 4), torch.ones(5, 2, 3)

    def work() -> None:
        torch.bmm(c_523, b_34.expand(5, 3, 4))
        torch.ones(2, 4).addmm_(a_23, b_34)
        a_23 @ b_34

    assert products(work) == pytest.approx((2 * 24e-9, 5 * 24e-9))
    with ProductTimes() as times:
        work()
        c_523.exp()
    assert len(times.seconds) == 3
