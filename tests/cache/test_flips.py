"""A few single-byte flips over all files of a cache; `make bench-flips` does a thousand of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.flips import KINDS, flips, kind_of_file


@pytest.mark.parametrize("kind", list(KINDS))
def test_each_flipped_byte_is_found_and_no_read_is_wrong(tmp_path: Path, kind: str) -> None:
    found = flips(tmp_path / "cache", kind, 30, seed=1)
    assert len(found) == 30
    assert [f for f in found if not f.found] == []
    assert [f for f in found if f.reads == "WRONG"] == []
    assert any(f.reads == "raises" for f in found)
    assert len({kind_of_file(f.file) for f in found}) > 5
