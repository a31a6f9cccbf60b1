"""The training benchmark runs, and what it compares computes the same."""

from __future__ import annotations

import pytest

from benchmarks.train import run
from benchmarks.train_cases import Case
from benchmarks.train_steps import compare


def test_the_naive_step_has_the_same_loss_and_gradients() -> None:
    """Half of the anchors are padding in the naive step."""
    found = compare(Case(32, 128, tokens=64, anchors=8, valid=4), rounds=1)
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-6)
    assert found["gradient_distance"] < 1e-5


def test_a_quick_run_has_every_part_that_needs_no_rival() -> None:
    found = run(("naive", "loss", "scaling", "rivals"), {}, quick=True)
    assert found["naive"][0]["gradient_distance"] < 1e-5
    assert found["loss"][0]["gradient_distance"] < 1e-5
    assert [row["gmac"] for row in found["scaling"]] == sorted(row["gmac"] for row in found["scaling"])
    assert found["rivals"][0]["ratio"] is None
