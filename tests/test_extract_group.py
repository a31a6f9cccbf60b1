"""A target that two processes hold together (tensor parallelism): for real, over gloo."""

from __future__ import annotations

import dataclasses
import multiprocessing
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_schema.reader import FeatureCache
from stages.config import ConfigError, ExtractConfig, TargetConfig
from stages.extract import ExtractJob, ShardUnit, group_member
from stages.group import Member
from tests.tiny import make_target, response, save_target, start_extraction

RESPONSES = [response(f"s{i}", 5 + i, 9) for i in range(8)]
DEADLINE_S = 240


def work(job: ExtractJob, units: list[ShardUnit], member: Member, receipts: Any) -> None:
    """One process of the group."""
    worker = group_member(job, member)
    weight = next(p for name, p in worker.target.layers[0].named_parameters() if "q_proj" in name)
    receipts.put((member.rank, weight.to_local().numel(), [worker.run(unit, 1) for unit in units]))  # type: ignore[attr-defined]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.slow
def test_two_processes_make_the_cache_that_one_makes(tmp_path: Path) -> None:
    target = make_target()
    folder = save_target(tmp_path / "target", target)
    config = TargetConfig(model=str(folder), dtype="float32")
    one, two = (start_extraction(tmp_path / name, target, RESPONSES, shard_bytes=12_000, last_hidden=True,
                                 feature_dtype="float16") for name in ("one", "two"))  # fmt: skip
    expected = one.run()
    job = dataclasses.replace(two.job, target=config, extract=ExtractConfig(tensor_parallel=2, threads=1))
    context, port = multiprocessing.get_context("spawn"), free_port()
    receipts = context.Queue()
    processes = [context.Process(target=work, args=(job, two.units, Member(rank, 2, "127.0.0.1", port), receipts))
                 for rank in (0, 1)]  # fmt: skip
    for process in processes:
        process.start()
    try:
        found = {rank: (held, done) for rank, held, done in (receipts.get(timeout=DEADLINE_S) for _ in processes)}
    finally:
        for process in processes:
            process.join(30)
            process.kill()
    assert [found[rank][0] for rank in (0, 1)] == [32 * 32 // 2] * 2  # each holds half
    assert len(two.units) > 1
    assert sum(r["samples"] for r in found[0][1]) == len(RESPONSES)
    assert found[0][1][0]["batching"] == "packed"
    assert found[1][1] == [{"shard": unit.name} for unit in two.units]  # the second writes nothing
    cache = FeatureCache.open(job.cache_dir, job.identity, require_complete=True)
    for r in RESPONSES:
        ours, alone = cache.read(r.sample_id), expected.read(r.sample_id)
        np.testing.assert_allclose(ours.features.astype(float), alone.features.astype(float), rtol=3e-3, atol=1e-3)
        assert ours.last_hidden is not None
        assert alone.last_hidden is not None
        np.testing.assert_allclose(ours.last_hidden.astype(float), alone.last_hidden.astype(float), atol=5e-3)


def test_a_group_of_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"extract\.tensor_parallel is 0"):
        ExtractConfig(tensor_parallel=0)
