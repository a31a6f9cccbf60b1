"""What the driver of the extract stage does with the receipts of its workers."""

from __future__ import annotations

import pytest

from pipeline.errors import PipelineError
from pipeline.extract_step import QuarantineGuard


def test_a_run_stops_once_more_samples_are_quarantined_than_the_recipe_allows() -> None:
    guard = QuarantineGuard(n_samples=100, max_share=0.02, where="the/cache")
    guard.take("shard-00000", {"quarantined": 1})
    guard.take("shard-00001", {"quarantined": 1})  # exactly the share that is allowed
    with pytest.raises(PipelineError, match=r"3 samples had NaN or infinite states, more than .*2\.0%.*the/cache"):
        guard.take("shard-00002", {"quarantined": 1})
