"""Training data: the same steps for any number of ranks and workers, from any place on, and nothing left hanging."""

from __future__ import annotations

import dataclasses
import hashlib
import multiprocessing
import pickle
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cache_schema import names
from cache_schema.errors import ShardNotCommitted
from cache_schema.layout import feature_format
from cache_schema.quantized import dequantize
from cache_schema.reader import FeatureCache
from stages.config import TrainConfig
from stages.dataset import SampleReader, StartMethod, StepData, StepDataset, TrainingStream
from stages.errors import TrainingError
from stages.order import Step, StepPlan
from tests.tiny import MASK_ID, make_target, response, start_extraction

CONFIG = TrainConfig(anchors=4, epochs=2, batch_samples=4, micro_samples=2, heldout_share=0.0, window_shards=2)
BLOCK = 4
START_METHODS = [m for m in ("fork", "spawn") if m in multiprocessing.get_all_start_methods()]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    """11 samples in several shards; one has no anchor, one is in the ledger."""
    responses = [response(f"s{i}", 3 + i, 6 + i) for i in range(9)] + [response("one", 5, 1), response("cut", 60, 4)]
    folder = tmp_path_factory.mktemp("cache")
    made = start_extraction(folder, make_target(), responses, shard_bytes=8_000, max_length=60).run()
    assert len(made.markers) > 3
    return made


def dataset(cache: FeatureCache, config: TrainConfig = CONFIG, rank: int = 0, world: int = 1) -> StepDataset:
    plan, reader = StepPlan(cache.plan, config, 1), SampleReader(cache, config, 1)
    return StepDataset(plan, reader, BLOCK, MASK_ID, rank, world)


def digest(data: StepData) -> str:
    """Of everything that training sees of a step."""
    found = hashlib.sha256(repr((data.step, data.n_tokens, sorted(data.skipped.items()))).encode())
    for batch in data.batches:
        layout = dataclasses.astuple(batch.layout)
        for tensor in (*layout, *(getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name != "layout")):
            plain = tensor.view(torch.int16) if getattr(tensor, "dtype", None) == torch.bfloat16 else tensor
            found.update(plain.numpy().tobytes() if isinstance(plain, torch.Tensor) else repr(plain).encode())
    return found.hexdigest()


def anchors_of(data: StepData) -> dict[str, list[int]]:
    return {
        s: row.tolist()
        for batch in data.batches
        for s, row in zip(batch.sample_ids, batch.layout.anchors_N.split(batch.layout.n_blocks), strict=True)
    }


def used(cache: FeatureCache, world: int) -> list[list[str]]:
    """Per step, the samples that the ranks of this world used, all together and sorted."""
    ranks = [dataset(cache, rank=r, world=world) for r in range(world)]
    steps = range(len(ranks[0]))
    return [sorted(s for d in ranks for batch in d[i].batches for s in batch.sample_ids) for i in steps]


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_any_number_of_ranks_sees_the_same_batches(cache: FeatureCache, world: int) -> None:
    assert used(cache, world) == used(cache, 1)
    one, several = (
        {s: row for rank in range(w) for s, row in anchors_of(dataset(cache, rank=rank, world=w)[1]).items()}
        for w in (1, world)
    )
    assert one == several


@pytest.mark.parametrize("start_method", START_METHODS)
def test_worker_processes_give_what_a_thread_gives(cache: FeatureCache, start_method: StartMethod) -> None:
    expected = [digest(d) for d in TrainingStream(dataset(cache, rank=1, world=2))]
    stream = TrainingStream(dataset(cache, rank=1, world=2), workers=2, start_method=start_method)
    assert [digest(d) for d in stream] == expected
    assert stream.position == len(expected) == 6


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_where_another_stood(cache: FeatureCache, workers: int) -> None:
    """Taken with two ranks, taken up by three."""
    first = TrainingStream(dataset(cache, rank=0, world=2))
    list(islice(first, 2))
    state = first.state_dict()
    assert state["position"] == 2
    whole = [digest(d) for d in TrainingStream(dataset(cache, rank=2, world=3))]
    rest = TrainingStream(dataset(cache, rank=2, world=3), workers=workers, start_method="fork")
    rest.load_state_dict(state)
    assert [digest(d) for d in rest] == whole[2:]
    assert list(rest) == []  # at the end


def test_the_state_of_another_order_is_refused_by_name(cache: FeatureCache) -> None:
    state = TrainingStream(dataset(cache)).state_dict()
    other = TrainingStream(dataset(cache, dataclasses.replace(CONFIG, batch_samples=3, window_shards=9)))
    with pytest.raises(TrainingError) as error:
        other.load_state_dict(state)
    for words in ("batch_samples: the state has 4, this run 3", "window_shards: the state has 2, this run 9"):
        assert words in str(error.value)
    assert "seed" not in str(error.value)
    with pytest.raises(TrainingError, match="stood at step 7, this run has 6"):
        TrainingStream(dataset(cache)).load_state_dict(state | {"position": 7})


def test_samples_that_cannot_be_used_are_named_with_the_reason(cache: FeatureCache) -> None:
    found: dict[str, str] = {}
    for data in TrainingStream(dataset(cache)):
        assert set(data.skipped) <= set(data.step.sample_ids)
        found |= data.skipped
        assert {s for b in data.batches for s in b.sample_ids} == set(data.step.sample_ids) - set(data.skipped)
    assert found == {"one": "no_anchor", "cut": "no_supervised_token"}


def test_passes_have_other_anchors(cache: FeatureCache) -> None:
    config = dataclasses.replace(CONFIG, passes_per_window=2, window_shards=99, batch_samples=11, anchors=2)
    data = dataset(cache, config)
    rows = [anchors_of(data[step]) for step in range(2)]
    assert rows[0].keys() == rows[1].keys()
    assert rows[0] != rows[1]


@pytest.mark.parametrize(("workers", "start_method"), [(0, "fork"), *((2, m) for m in START_METHODS)])
def test_errors_arrive_as_they_are(
    cache: FeatureCache, tmp_path: Path, workers: int, start_method: StartMethod
) -> None:
    torn = pickle.loads(pickle.dumps(cache))  # noqa: S301  another copy, as a worker gets it
    del torn.markers["shard-00002"]
    stream = TrainingStream(dataset(torn), workers=workers, start_method=start_method)
    with pytest.raises(ShardNotCommitted, match="shard-00002"):
        list(stream)


def test_an_iterator_that_is_given_up_waits_for_nobody(cache: FeatureCache) -> None:
    """It may be finalized in the very thread that the reading thread waits for."""
    go_on = threading.Event()

    class Slow(SampleReader):
        def read(self, *args: Any) -> None:
            if reading.is_set():
                go_on.wait(30)
            self.skipped[args[0]] = "slow"

    reading = threading.Event()
    data = dataclasses.replace(dataset(cache), reader=Slow(cache, CONFIG, 0))
    steps = iter(TrainingStream(data))
    next(steps)
    reading.set()
    began = time.monotonic()
    steps.close()
    assert time.monotonic() - began < 5
    go_on.set()


def test_worker_processes_end_with_the_stream(cache: FeatureCache) -> None:
    steps = iter(TrainingStream(dataset(cache), workers=2, start_method="fork"))
    next(steps)
    assert len(multiprocessing.active_children()) == 2
    steps.close()
    deadline = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert multiprocessing.active_children() == []


def test_plan_and_reader_can_be_sent(cache: FeatureCache) -> None:
    data = dataset(cache)
    expected = digest(data[3])
    again = pickle.loads(pickle.dumps(data))  # noqa: S301
    assert digest(again[3]) == expected
    assert isinstance(again.plan.step(0), Step)
    assert names.shard_name(0) in again.reader.cache.markers


@pytest.mark.parametrize(("dtype", "bits", "group"), [("int8", 8, None), ("int8", 5, 10), ("float8_e4m3fn", None, 16)])
def test_quantised_features_are_the_values_of_their_codes(
    tmp_path: Path, dtype: str, bits: int | None, group: int | None
) -> None:
    responses = [response(f"s{i}", 3 + i, 6 + i) for i in range(4)]
    kind = {"feature_dtype": dtype, "feature_bits": bits, "feature_group": group}
    stored = start_extraction(tmp_path, make_target(), responses, **kind).run()
    for data in TrainingStream(dataset(stored), workers=2, start_method="fork"):
        for batch in data.batches:
            assert batch.features_CLD.element_size() == 1
            found = batch.to(torch.device("cpu")).features(torch.float32)
            n_rows = batch.layout.n_context
            for sample_id, n, rows in zip(batch.sample_ids, n_rows, found.split(n_rows), strict=True):
                whole = stored.read(sample_id)
                expected = dequantize(whole.features, whole.scale, feature_format(stored.identity))
                np.testing.assert_array_equal(rows.numpy(), expected[:n])
                assert torch.equal(batch.context_ids_C.split(n_rows)[batch.sample_ids.index(sample_id)].int(),
                                   torch.from_numpy(whole.input_ids[:n]))
            rounded = batch.features(torch.bfloat16)
            assert torch.equal(rounded, found.bfloat16())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs CUDA")
def test_pinned_memory(cache: FeatureCache) -> None:
    data = next(iter(TrainingStream(dataset(cache), pin=True)))
    assert all(b.features_CLD.is_pinned() and b.layout.anchors_N.is_pinned() for b in data.batches)
