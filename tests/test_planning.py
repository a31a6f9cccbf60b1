"""What a large run costs its driver, at a fiftieth of the size (all of it: `make bench-planning`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cache_opening import make_large_cache
from benchmarks.planning import make_responses, measured, options

GIVEN = options(["--samples", "20000", "--shards", "400"])
CPU_S = 6.0
"""Five times what a fiftieth of the minute for a million samples would be."""


def test_planning_twenty_thousand_samples_takes_a_moment(tmp_path: Path) -> None:
    make_responses(tmp_path / "responses", GIVEN.samples, GIVEN.tokens)
    found = measured("plan", tmp_path, GIVEN)
    assert found["samples"] == 20_000
    assert found["units"] == pytest.approx(400, rel=0.05)
    assert found["cpu_s"] < CPU_S
    assert measured("plan", tmp_path, GIVEN)["units"] == found["units"]  # a second run goes on with the same plan


def test_a_resume_and_a_training_find_their_way_in_a_moment(tmp_path: Path) -> None:
    make_large_cache(tmp_path / "large", GIVEN.samples, GIVEN.shards)
    scanned = measured("scan", tmp_path, GIVEN)
    assert (scanned["commits"], scanned["markers"]) == (400, 400)
    trained = measured("train", tmp_path, GIVEN)
    assert trained["first"] == 64
    assert scanned["cpu_s"] + trained["cpu_s"] < CPU_S
