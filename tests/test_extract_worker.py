"""The worker that makes shards: gates before the commit, two shards at once, and errors in the writing thread."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from cache_schema.errors import CacheError, ResponsesError, ShardRefused
from cache_schema.marker import committed_shards
from cache_schema.reader import FeatureCache
from cache_schema.response_format import Response
from cache_schema.storage import open_storage
from cache_schema.verify import equal_caches
from cache_schema.writer import ShardWriter
from pipeline.extract_step import drive_extract
from stages.capture import Captured, Way
from stages.config import ExtractConfig, TargetConfig
from stages.errors import TargetSettingError
from stages.packing import Ids
from stages.spot_check import chosen_sample
from stages.target import Target
from tests.tiny import SIZES, VOCAB, Extraction, make_target, model_of, response, start_extraction

TARGET = make_target()
RNG = np.random.default_rng(0)
LENGTHS = [(int(p), int(r)) for p, r in zip(RNG.integers(1, 30, 24), RNG.integers(1, 30, 24), strict=True)]
RESPONSES = [response(f"s{i:02d}", *pair) for i, pair in enumerate(LENGTHS)]
WAYS = ["packed", "padded", "single"]


def start(folder: Path, **settings: Any) -> Extraction:
    return start_extraction(folder, TARGET, RESPONSES, **({"shard_bytes": 40_000, "batch_tokens": 100} | settings))


class Altered:
    """A way of batching whose outcome is altered."""

    def __init__(self, way: Way, change: Callable[[Captured], Captured]) -> None:
        self.name, self.batches, self._way, self._change = way.name, way.batches, way, change

    def capture(self, sequences: Sequence[Ids]) -> Captured:
        return self._change(self._way.capture(sequences))


def alter(extraction: Extraction, change: Callable[[Captured], Captured]) -> None:
    worker = extraction.worker
    worker.choice = dataclasses.replace(worker.choice, way=Altered(worker.choice.way, change))


def files_of(extraction: Extraction) -> list[str]:
    """What lies in the cache beside its description and plan."""
    found = [p.name for p in Path(extraction.job.cache_dir).rglob("*") if p.is_file()]
    return sorted(set(found) - {"cache.json", "plan.parquet", "plan.sha256"})


# --- ways -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batching", WAYS)
@pytest.mark.parametrize("last_hidden", [False, True])
def test_every_way_of_batching_makes_the_same_cache_up_to_rounding(
    tmp_path: Path, batching: str, last_hidden: bool
) -> None:
    """Samples come to the writer in the plan's order, also where batches are made by length."""
    extraction = start(tmp_path / "a", batching=batching, last_hidden=last_hidden, feature_dtype="float16")
    other = start(tmp_path / "b", batching="single", last_hidden=last_hidden, feature_dtype="float16")
    cache, expected = extraction.run(), other.run()
    assert cache.sample_ids == [r.sample_id for r in RESPONSES]
    for r in RESPONSES:
        found, alone = cache.read(r.sample_id), expected.read(r.sample_id)
        assert found.input_ids.tolist() == alone.input_ids.tolist() == r.input_ids.tolist()
        np.testing.assert_allclose(found.features.astype(float), alone.features.astype(float), rtol=3e-3, atol=1e-3)
        if last_hidden:
            assert found.last_hidden is not None
            assert alone.last_hidden is not None
            np.testing.assert_allclose(found.last_hidden.astype(float), alone.last_hidden.astype(float), atol=5e-3)


def test_answers_to_one_prompt_get_the_states_that_each_has_alone(tmp_path: Path) -> None:
    """Their prompt goes through the target once."""
    prompt = RNG.integers(3, VOCAB, 70).astype(np.int32)
    answers = [response(f"a{i}", 0, 9 + i) for i in range(6)]
    responses = [
        Response(a.sample_id, a.messages, prompt, a.response_ids, np.r_[np.zeros(70, np.uint8), a.loss_mask], "stop",
                 None, {})
        for a in answers
    ]  # fmt: skip
    shared, alone = (
        start_extraction(tmp_path / way, TARGET, responses, batching=way, batch_tokens=1000, feature_dtype="float16")
        for way in ("packed", "single")
    )
    rows: list[int] = []

    def count(captured: Captured) -> Captured:
        rows.append(len(captured.ids_R))
        return captured

    alter(shared, count)
    first, second = shared.run(), alone.run()
    assert sum(rows) == 70 + sum(9 + i for i in range(6))
    for r in responses:
        a, b = (c.read(r.sample_id).features.astype(float) for c in (first, second))
        np.testing.assert_allclose(a, b, rtol=3e-3, atol=1e-3)


def test_receipts_tell_how_batches_were_made_and_how_long_the_device_waited(tmp_path: Path) -> None:
    extraction = start(tmp_path)
    receipts = [extraction.worker.run(unit, 1) for unit in extraction.units]
    assert {r["batching"] for r in receipts} == {"packed"}
    assert sum(r["samples"] for r in receipts) == len(RESPONSES)
    assert sum(r["tokens"] for r in receipts) == sum(map(sum, LENGTHS))
    for r in receipts:
        assert 0 < r["device_busy_s"] <= r["seconds"]
    assert receipts[0]["device_wait_s"] < receipts[0]["seconds"]
    assert all(r["device_wait_s"] > 0 for r in receipts[1:])  # for reading and committing: one shard at a time


@pytest.mark.parametrize("wrong", [VOCAB, -1])
def test_token_ids_that_the_target_lacks_are_named(tmp_path: Path, wrong: int) -> None:
    bad = response("bad", 4, 6)
    bad.response_ids[3] = wrong
    extraction = start_extraction(tmp_path, TARGET, [response("good", 4, 6), bad])
    message = rf"sample bad has token id {wrong} at position 7, but target tiny has ids 0…{VOCAB - 1}"
    with pytest.raises(ResponsesError, match=message):
        extraction.run()
    assert files_of(extraction) == []


def test_a_worker_looks_at_the_caches_longest_sample_not_at_its_own(tmp_path: Path) -> None:
    """So all workers of a run batch alike."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}  # fmt: skip
    target = Target(model_of(LlamaConfig(**(SIZES | {"rope_parameters": rope}))), None, "roped")
    short = [response("a", 5, 5)]
    found = [start_extraction(tmp_path / str(n), target, short, max_length=n).worker.choice.way.name for n in (64, 65)]
    assert found == ["packed", "single"]


def test_heads_that_do_not_divide_end_the_run_before_any_process_starts(tmp_path: Path) -> None:
    extraction = start(tmp_path / "run")
    TARGET.config.save_pretrained(tmp_path / "target")
    job = dataclasses.replace(
        extraction.job, target=TargetConfig(model=str(tmp_path / "target")), extract=ExtractConfig(tensor_parallel=3)
    )
    with pytest.raises(TargetSettingError, match=r"extract\.tensor_parallel is 3.*num_key_value_heads 2"):
        drive_extract(None, [], job, 0, None)  # type: ignore[arg-type]


def test_a_run_that_is_stopped_and_resumed_has_each_id_once(tmp_path: Path) -> None:
    """Case 1: shards finish out of order, the run ends at 60 %, and what lacks a marker is done by a second one."""
    extraction, undisturbed = start(tmp_path / "a"), start(tmp_path / "b")
    units = [extraction.units[i] for i in np.random.default_rng(2).permutation(len(extraction.units))]
    for unit in units[: len(units) * 6 // 10]:
        extraction.worker.run(unit, 1)
    have = set(committed_shards(open_storage(extraction.job.cache_dir)))
    assert 0 < len(have) < len(units)
    extraction.units = [unit for unit in extraction.units if unit.name not in have]
    cache = extraction.run()
    assert sorted(cache.sample_ids) == [r.sample_id for r in RESPONSES]
    undisturbed.run()
    assert equal_caches(extraction.job.cache_dir, undisturbed.job.cache_dir) == []


# --- gates ------------------------------------------------------------------------------------------------------


def rolled(captured: Captured) -> Captured:
    return dataclasses.replace(captured, layers_RD=tuple(layer.roll(1, 0) for layer in captured.layers_RD))


def swapped_samples(captured: Captured) -> Captured:
    """Each sample gets the states of the batch's other end, as far as they reach."""
    return dataclasses.replace(captured, layers_RD=tuple(layer.flip(0) for layer in captured.layers_RD))


def other_layer(captured: Captured) -> Captured:
    first, _, third = captured.layers_RD
    return dataclasses.replace(captured, layers_RD=(first, third + 0.01 * third.roll(1, 1), third))


@pytest.mark.parametrize(
    ("change", "layer"), [(rolled, r"\d"), (swapped_samples, r"\d"), (other_layer, "3")], ids=lambda v: str(v)[:20]
)
@pytest.mark.parametrize("batching", ["packed", "padded"])
def test_a_batch_that_gives_a_sample_other_states_is_refused(
    tmp_path: Path, change: Callable[[Captured], Captured], layer: str, batching: str
) -> None:
    """Case 15, seen while it happens: a shifted row, another sample's rows, a wrong layer."""
    extraction = start(tmp_path, batching=batching)
    alter(extraction, change)
    unit = extraction.units[0]
    chosen = chosen_sample(unit.name, len(unit.sample_ids))
    assert chosen is not None
    words = rf"shard-00000, sample '{unit.sample_ids[chosen]}': layer {layer} is not .*Batches were {batching}; set"
    with pytest.raises(ShardRefused, match=words):
        extraction.worker.run(unit, 1)
    assert files_of(extraction) == []


def test_states_of_other_ids_than_the_tables_are_refused(tmp_path: Path) -> None:
    """Case 18: what the target was given is compared with the responses table before anything is stored."""

    def change(captured: Captured) -> Captured:
        ids = captured.ids_R.copy()
        ids[3] += 1
        return dataclasses.replace(captured, ids_R=ids)

    extraction = start(tmp_path)
    alter(extraction, change)
    with pytest.raises(CacheError, match=r"sample 's00' differ from the responses table at position 3"):
        extraction.worker.run(extraction.units[0], 1)
    assert files_of(extraction) == []


def test_the_sample_that_is_looked_at_depends_on_the_shards_name_alone() -> None:
    assert chosen_sample("shard-00000", 0) is None
    found = [chosen_sample(f"shard-{i:05d}", 50) for i in range(200)]
    assert found == [chosen_sample(f"shard-{i:05d}", 50) for i in range(200)]
    assert len(set(found)) > 30


# --- two shards at once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batching", WAYS)
def test_two_shards_at_once_give_the_same_bits(tmp_path: Path, batching: str) -> None:
    one, two = (start(tmp_path / name, batching=batching) for name in ("one", "two"))
    one.run()
    assert len(two.units) > 3
    with ThreadPoolExecutor(2) as threads:
        receipts = list(threads.map(lambda unit: two.worker.run(unit, 1), reversed(two.units)))
    assert len(receipts) == len(two.units)
    assert equal_caches(one.job.cache_dir, two.job.cache_dir) == []


def test_a_shard_is_committed_while_the_next_one_has_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extraction = start(tmp_path)
    second_began = threading.Event()
    commit = ShardWriter.commit

    def slow_commit(writer: ShardWriter) -> Any:
        if not second_began.is_set():
            assert second_began.wait(60), "the second shard did not begin while the first was being committed"
        return commit(writer)

    def began(captured: Captured) -> Captured:
        passes.append(threading.get_ident())
        if len(set(passes)) == 2:
            second_began.set()
        return captured

    passes: list[int] = []
    monkeypatch.setattr(ShardWriter, "commit", slow_commit)
    alter(extraction, began)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda unit: extraction.worker.run(unit, 1), extraction.units[:2]))
    changes = sum(a != b for a, b in pairwise(passes))
    assert changes == 1  # no pass of one shard comes between those of another


# --- errors -----------------------------------------------------------------------------------------------------


def no_writers_left() -> bool:
    return not [t for t in threading.enumerate() if t.name == "shard-writer"]


def test_an_error_while_writing_surfaces_with_its_sample_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = ShardWriter.append

    def full(writer: ShardWriter, sample_id: str, *args: Any) -> bool:
        if sample_id == "s02":
            raise OSError(28, "No space left on device")
        return append(writer, sample_id, *args)

    monkeypatch.setattr(ShardWriter, "append", full)
    extraction = start(tmp_path, shard_bytes=1 << 20, batch_tokens=20)  # many batches are to come
    with pytest.raises(OSError, match="No space left") as raised:
        extraction.worker.run(extraction.units[0], 1)
    assert raised.value.errno == 28
    assert raised.value.__notes__ == ["while sample 's02' was being written"]
    assert files_of(extraction) == []
    assert no_writers_left()
    monkeypatch.undo()
    extraction.run()  # the worker is as good as before


def test_an_error_in_a_pass_ends_the_writing_too(tmp_path: Path) -> None:
    extraction = start(tmp_path, shard_bytes=1 << 20, batch_tokens=50)
    passes: list[int] = []

    def fail(captured: Captured) -> Captured:
        passes.append(0)
        if len(passes) == 3:
            raise RuntimeError("out of memory")
        return captured

    alter(extraction, fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        extraction.worker.run(extraction.units[0], 1)
    assert files_of(extraction) == []
    assert no_writers_left()
    FeatureCache.open(extraction.job.cache_dir, extraction.job.identity)
    extraction.run()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize("batching", WAYS)
def test_a_gpu_makes_the_same_cache_up_to_rounding(tmp_path: Path, batching: str) -> None:
    from stages.target import Target

    there = Target(make_target().model.to("cuda", torch.bfloat16), None, "tiny")
    cache = start_extraction(tmp_path / "gpu", there, RESPONSES, batching=batching, last_hidden=True).run()
    here = Target(make_target().model.to(torch.bfloat16), None, "tiny")
    expected = start_extraction(tmp_path / "cpu", here, RESPONSES, batching="single", last_hidden=True).run()
    for r in RESPONSES:
        found, alone = (torch.from_numpy(c.read(r.sample_id).features.view(np.int16)).view(torch.bfloat16).float()
                        for c in (cache, expected))
        assert float((found - alone).norm() / alone.norm()) < 0.05
