"""Which checkpoint is evaluated and exported: the last, or the best on held-out samples; both the same one."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from cache_schema.reader import FeatureCache
from pipeline import export_step
from pipeline.errors import PipelineError
from pipeline.export_step import run_export
from pipeline.recipe import load_recipe
from pipeline.run import Run
from pipeline.train_step import Trained, trained_drafter
from stages import checkpoint
from stages.checkpoint_format import load_drafter
from tests.test_resume import LOOKS, best_of
from tests.test_train import make_cache, make_trainer
from tests.tiny import make_spec

JOB: Any = SimpleNamespace(
    fingerprint="f" * 64, identity=SimpleNamespace(target_weights_sha256="w", fingerprint=lambda: "c")
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return make_cache(tmp_path_factory.mktemp("cache"), {f"s{i}": (3 + i, 6 + 2 * i) for i in range(7)})


@pytest.fixture
def home(cache: FeatureCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe whose training is done and was best before its last step."""
    final = make_trainer(cache, tmp_path / "run" / "train", dataclasses.replace(LOOKS, lr=0.3)).run()
    recipe = {
        "name": "r",
        "target": {"model": "m"},
        "prompts": {"sources": [{"path": "a"}]},
        "evaluate": {"sources": [{"path": "b"}]},
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    state = json.loads((final / checkpoint.STATE).read_text())
    make_run(tmp_path).folder.finish("train", "f", 1.0, {"steps": state["step"]})
    monkeypatch.setattr("stages.train.trained_spec", lambda job: make_spec())
    monkeypatch.setattr(export_step, "train_job", lambda run: JOB)
    return tmp_path


def make_run(home: Path, *overrides: str) -> Run:
    return Run(load_recipe(home / "r.yaml", [f"run={home / 'run'}", *overrides]), lambda line: None)


def chosen(home: Path, which: str) -> Trained:
    return trained_drafter(make_run(home, f"evaluate.checkpoint={which}"), JOB)


def test_best_and_last_are_different_weights(home: Path) -> None:
    last, best = chosen(home, "last"), chosen(home, "best")
    assert best.step == best_of(home / "run" / "train")[0] < last.step == last.steps == best.steps
    assert best.weights_sha256 != last.weights_sha256
    assert not torch.equal(best.drafter.fc.weight, last.drafter.fc.weight)
    assert trained_drafter(make_run(home), JOB).step == last.step


def test_a_best_checkpoint_that_is_gone_is_named(home: Path) -> None:
    step = chosen(home, "best").step
    shutil.rmtree(checkpoint.step_folder(home / "run" / "train" / "checkpoints", step))
    with pytest.raises(PipelineError, match=rf"the checkpoint of step {step} in .*train, of the best .* is gone"):
        chosen(home, "best")
    assert chosen(home, "last").steps == chosen(home, "last").step


def test_without_looks_there_is_no_best(home: Path, cache: FeatureCache) -> None:
    shutil.rmtree(home / "run" / "train")
    make_trainer(cache, home / "run" / "train", dataclasses.replace(LOOKS, keep_best=False)).run()
    with pytest.raises(PipelineError, match=r"knows of none.*train\.keep_best"):
        chosen(home, "best")


def test_what_was_evaluated_is_what_is_exported(home: Path) -> None:
    best = chosen(home, "best")
    results = {"made_of": best.made, "drafters": {"trained": {
        "prompts": 3, "tau": 2.5, "by_category": {}, "identical": None}}}  # fmt: skip
    (home / "run" / "evaluate").mkdir()
    (home / "run" / "evaluate" / "results.json").write_text(json.dumps(results))
    with pytest.raises(PipelineError, match=rf"is of step {best.step}, but export would write step {best.steps} "):
        run_export(make_run(home))
    run_export(make_run(home, "evaluate.checkpoint=best"))
    card = (home / "run" / "export" / "README.md").read_text()
    assert f"| step | {best.step} of {best.steps}, the best on held-out samples |" in card
    assert "| τ (greedy, 3 held-out prompts) | 2.50 |" in card
    exported = load_drafter(home / "run" / "export")
    assert torch.equal(exported.fc.weight, best.drafter.fc.weight.to(torch.bfloat16))


def test_numbers_of_another_drafter_are_not_in_the_card(home: Path) -> None:
    (home / "run" / "evaluate").mkdir()
    (home / "run" / "evaluate" / "results.json").write_text(json.dumps({"made_of": None, "drafters": {}}))
    run_export(make_run(home))
    assert "not evaluated yet" in (home / "run" / "export" / "README.md").read_text()
