"""The benchmark of extraction runs, and its parts say what they measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.extract_data import MAX_TOKENS, MEAN_TOKENS, lengths


def test_lengths_are_those_that_the_issue_names() -> None:
    found = lengths(20_000)
    assert abs(found.mean() / MEAN_TOKENS - 1) < 0.05
    assert found.max() == MAX_TOKENS
    assert np.array_equal(found, lengths(20_000))
    assert np.median(found) < found.mean()  # log-normal: skewed


@pytest.mark.slow
def test_a_quick_run_measures_every_way_and_leaves_nothing(tmp_path: Path) -> None:
    from benchmarks.extract import run

    result = run(tmp_path, quick=True, rounds=1, targets=["tiny"], only=["speed", "idle", "sharing"], samples=6)
    ways = result["tiny"]["speed"]["ways"]
    assert set(ways) == {"ours 2048", "padded", "rivals", "single", "padded with head", "rivals with head",
                         "single with head"}  # fmt: skip
    assert len({way["tokens"] for way in ways.values()}) == 1
    assert all(way["cpu_s"] > 0 for way in ways.values())
    assert 0 <= result["tiny"]["idle"]["in_flight_2"]["idle_share"] < 1
    assert result["tiny"]["sharing"]["four answers"]["times"] > 0
    assert list(tmp_path.iterdir()) == []
