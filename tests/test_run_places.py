"""A run folder in an object store: the same bytes as in a local one, checkpoints carried over, logs that go on."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache_schema.carried import SCRATCH, Carried
from cache_schema.reader import FeatureCache
from cache_schema.responses import ResponsesTable, create_responses, write_part
from cache_schema.storage import open_storage
from pipeline.follow import follow_metrics
from stages import checkpoint
from stages.checkpoint_places import Checkpoints
from tests.cache.builders import RESPONSES_IDENTITY, response
from tests.test_train import N_SAMPLES, Killed, checkpoint_bytes, killed_at, make_cache, make_trainer


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    return f"memory://{secrets.token_hex(6)}/run/train"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return make_cache(tmp_path_factory.mktemp("cache"), {f"s{i}": (3 + i, 6 + 2 * i) for i in range(N_SAMPLES)})


def stored(url: str) -> list[str]:
    return [key for key, _ in open_storage(url).list("checkpoints")]


def rows(url: str) -> list[tuple[str, int]]:
    found = open_storage(url).read("metrics.jsonl").splitlines()
    return [(row["kind"], row["step"]) for row in map(json.loads, found)]


def test_responses_in_a_store_are_those_in_a_folder(tmp_path: Path) -> None:
    places = [tmp_path, f"memory://{secrets.token_hex(6)}/responses"]
    hashes = []
    for place in places:
        create_responses(place, RESPONSES_IDENTITY, n_parts=2, n_samples=3)
        write_part(place, 1, [response("s3")])
        write_part(place, 0, [response("s1"), response("s2")])
        lost = write_part(place, 0, [response("s1"), response("s2")], attempt=2)
        assert lost["attempt"] == 1
        table = ResponsesTable.open(place)
        assert [r.sample_id for r in table] == ["s1", "s2", "s3"]
        hashes.append(table.responses_hash())
        kept = [key for key, _ in open_storage(place).list("parts")]
        assert len(kept) == 2, "what lost was left behind"
    assert hashes[0] == hashes[1]
    first = open_storage(places[0]).list("parts")
    data = [open_storage(places[0]).read(key) for key, _ in first]
    assert data == [open_storage(places[1]).read(key) for key, _ in open_storage(places[1]).list("parts")]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_training_in_a_store_goes_on_and_ends_with_the_same_weights(
    cache: FeatureCache, tmp_path: Path, url: str, elsewhere: bool
) -> None:
    """Killed after the checkpoint of step 4; once its scratch is gone too, as on another machine."""
    whole = make_trainer(cache, tmp_path / "whole").run()
    with pytest.raises(Killed):
        make_trainer(cache, url, on_step=killed_at(5)).run()
    assert [k for k in stored(url) if k.endswith(checkpoint.STATE)] == [
        f"checkpoints/step-00000{step}/state.json" for step in (2, 4)
    ]
    if elsewhere:
        shutil.rmtree(tmp_path / "scratch")
    steps: list[int] = []
    final = make_trainer(cache, url, on_step=lambda row: steps.append(row["step"])).run()
    assert steps[0] == 5
    assert checkpoint_bytes(final) == checkpoint_bytes(whole)
    assert {key: open_storage(url).read(f"checkpoints/step-000006/{key}") for key in checkpoint_bytes(final)} == (
        checkpoint_bytes(whole)
    )
    assert [step for kind, step in rows(url) if kind == "step"] == [1, 2, 3, 4, 5, 6]


def test_a_checkpoint_that_was_not_carried_whole_is_never_picked(
    cache: FeatureCache, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages import checkpoint_places

    real = checkpoint_places.upload

    def cut(path: Path, storage: Any, key: str) -> None:
        if "step-000006" in key and key.endswith(checkpoint.OPTIMIZER):
            raise Killed
        real(path, storage, key)

    monkeypatch.setattr(checkpoint_places, "upload", cut)
    with pytest.raises(Killed):
        make_trainer(cache, url).run()
    monkeypatch.undo()
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    places = Checkpoints(Carried(url))
    assert (places.folder / "step-000006").is_dir()  # whole, but only here
    found = places.newest("f" * 64)
    assert found is not None
    assert found[1].step == 4
    assert not (places.folder / "step-000006").exists()
    whole = make_trainer(cache, tmp_path / "whole").run()
    assert checkpoint_bytes(make_trainer(cache, url).run()) == checkpoint_bytes(whole)


def test_an_altered_checkpoint_in_a_store_makes_way_for_the_one_before(cache: FeatureCache, url: str) -> None:
    final = make_trainer(cache, url).run()
    before = checkpoint_bytes(final)
    storage = open_storage(url)
    data = bytearray(storage.read("checkpoints/step-000006/model.safetensors"))
    data[-1] ^= 1
    storage.replace("checkpoints/step-000006/model.safetensors", bytes(data))
    shutil.rmtree(final.parent)
    found = Checkpoints(Carried(url)).newest("f" * 64)
    assert found is not None
    assert found[1].step == 4
    assert checkpoint_bytes(make_trainer(cache, url).run()) == before
    shutil.rmtree(final.parent)
    again = Checkpoints(Carried(url)).newest("f" * 64)
    assert again is not None
    assert again[1].step == 6


def test_what_scratch_holds_of_a_run_that_was_removed_is_not_taken(
    cache: FeatureCache, tmp_path: Path, url: str
) -> None:
    make_trainer(cache, url).run()
    open_storage(url).delete_tree("checkpoints")
    steps: list[int] = []
    final = make_trainer(cache, url, fingerprint="e" * 64, on_step=lambda row: steps.append(row["step"])).run()
    assert steps[0] in (0, 1)
    assert json.loads((final / checkpoint.STATE).read_text())["fingerprint"] == "e" * 64


@pytest.mark.parametrize("killed", [1, 3, 5])
def test_metrics_are_cut_back_to_the_checkpoint(cache: FeatureCache, tmp_path: Path, killed: int) -> None:
    """Each step has one row after a resume, and a torn last line is gone."""
    with pytest.raises(Killed):
        make_trainer(cache, tmp_path, on_step=killed_at(killed)).run()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    make_trainer(cache, tmp_path).run()
    assert [step for kind, step in rows(str(tmp_path)) if kind == "step"] == [1, 2, 3, 4, 5, 6]


def test_a_look_is_told_once_though_the_file_is_cut_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pipeline import follow

    monkeypatch.setattr(follow, "POLL_S", 0.02)
    look = {"kind": "heldout", "step": 2, "loss": 1.0, "tau": 1.5, "samples": 3}
    step: Callable[[int], dict[str, Any]] = lambda n: {"kind": "step", "step": n}  # noqa: E731
    file = tmp_path / "metrics.jsonl"

    def write(*found: dict[str, Any]) -> None:
        file.write_text("".join(json.dumps(row) + "\n" for row in found))

    rows_of = follow._Rows(open_storage(tmp_path))
    write(step(1), step(2), look, step(3))
    assert [r["kind"] for r in rows_of.new()] == ["step", "step", "heldout", "step"]
    write(step(1))
    assert list(rows_of.new()) == []
    write(step(1), step(2), look, step(3), {**look, "step": 4})
    assert [(r["kind"], r["step"]) for r in rows_of.new() if r["kind"] == "heldout"] == [("heldout", 4)]
    with follow_metrics(tmp_path, 4, 3):
        pass
