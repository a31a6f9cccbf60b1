"""A few random interruptions of a writer; `make bench-interruptions` does 200, of runners and object stores too."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.interruption_check import differences
from benchmarks.interruption_kinds import ANY_MOMENT, AT_A_CALL, FULL_DISK, OF_TWO, WriterKinds
from benchmarks.interruptions import run
from tests.cache.builders import flip_byte, make_cache


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_interrupted_writers_end_like_an_undisturbed_one(tmp_path: Path) -> None:
    kinds = [ANY_MOMENT, AT_A_CALL, OF_TWO]
    if FULL_DISK in WriterKinds(tmp_path, 0).kinds:
        kinds.append(FULL_DISK)
    outcomes = run(tmp_path, 12, 1, kinds)
    assert [(o.kind, o.what, o.problems) for o in outcomes if o.problems] == []
    assert sum(o.interrupted for o in outcomes) >= 10
    assert {o.kind for o in outcomes} == set(kinds)


def test_the_comparison_sees_a_difference(tmp_path: Path) -> None:
    make_cache(tmp_path / "a")
    make_cache(tmp_path / "b")
    assert differences(tmp_path / "a", tmp_path / "b") == ([], 0)
    flip_byte(next((tmp_path / "a" / "shards").glob("shard-00001.*/offsets/c/0")), 3)
    problems, _ = differences(tmp_path / "a", tmp_path / "b")
    assert any("shard-00001/offsets/c/0 has other bytes" in p for p in problems)
    (tmp_path / "a" / "commits" / "shard-00000.json").unlink()
    problems, garbage = differences(tmp_path / "a", tmp_path / "b")
    assert any("committed only in" in p for p in problems)
    assert garbage == 1
