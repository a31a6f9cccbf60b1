"""The benchmark of the cache runs, and says what it measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.timing import Cost

pytest.importorskip("zarrs")
pytest.importorskip("tensorstore")


@pytest.mark.slow
def test_a_quick_run_has_every_way_and_no_leftovers(tmp_path: Path) -> None:
    from benchmarks.cache import run

    result = run(tmp_path, quick=True, rounds=1, hidden=[64])
    (speed,) = result["speed"]
    assert {"raw", "ours", "zarrs, in one go"} <= {row["way"] for row in speed["write"]}
    assert {"raw", "ours", "ours, stop", "zarrs", "TensorStore", ".pt"} <= {row["way"] for row in speed["read_cached"]}
    assert all(row["mb_per_s"] > 0 for row in speed["write"] + speed["read_cached"])
    assert result["memory"][0]["extra_mb"] < result["limits"]["memory_mb"]
    assert result["opening"][0]["first_batch_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_the_least_of_two_costs_takes_each_number() -> None:
    assert Cost(10, 2.0, 1.0).least(Cost(10, 1.0, 3.0)) == Cost(10, 1.0, 1.0)
    assert Cost(2_000_000, 0.5, 0.25).mb_per_s == 4
