"""Sweeps: what a file may say, and many trainings on one cache compared on one page."""

from __future__ import annotations

import json
import math
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from pipeline import sweep as sweeping
from pipeline.errors import PipelineError, RecipeError
from pipeline.sweep import Training, run_sweep
from pipeline.sweep_file import load_sweep
from pipeline.sweep_page import judged, write_sweep_page
from stages.config import DrafterConfig, TargetConfig, TrainConfig
from stages.train import TrainJob
from tests.tiny import make_target, make_tokenizer, response, save_target, start_extraction

RECIPE = """
name: base
target: {model: nowhere}
prompts: {sources: [{path: p.jsonl}]}
evaluate: {sources: [{path: e.jsonl}]}
"""
SWEEP = """
name: small
recipe: base.yaml
seeds: [0, 1]
settings:
  base: {}
  deep: {drafter.n_layers: 7, train.distill: {loss: l1, share: 0.25}}
comparisons:
  - {title: Depth, source: Table 5, expected: deeper is better, order: [base, deep]}
  - {title: Lines, source: ours, expected: up, x: [1, 2], x_label: N, lines: {low: [base, base], high: [base, deep]}}
"""


def write(folder: Path, text: str = SWEEP) -> Path:
    (folder / "base.yaml").write_text(RECIPE)
    (folder / "s.yaml").write_text(text)
    return folder / "s.yaml"


def test_a_sweep_is_recipes_that_differ(tmp_path: Path) -> None:
    sweep = load_sweep(write(tmp_path))
    deep = sweep.recipe("deep", 1)
    assert (deep.seed, deep.drafter.n_layers, deep.run) == (1, 7, sweep.base.run)
    assert deep.train.distill is not None
    assert (deep.train.distill.loss, deep.train.distill.share) == ("l1", 0.25)
    assert sweep.recipe("base", 0) == sweep.base
    assert sweep.comparisons[1].pairs() == [("base", "deep")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("drafter.n_layers", "drafter.layers"), "unknown key drafter.layers"),
        (("drafter.n_layers: 7", "cache.n_layers: 3"), "settings.deep changes cache.n_layers.*one cache"),
        (("n_layers: 7", "n_layers: 0"), "drafter.n_layers is 0"),
        (("seeds: [0, 1]", "seeds: [1, 1]"), "seeds is .1, 1."),
        (("order: [base, deep]", "order: [base, deeper]"), "'Depth' names 'deeper'"),
        (("x: [1, 2]", "x: [1]"), "'Lines' has lines of another length"),
        (("name: small", "nom: small"), "unknown key nom; did you mean name"),
        (("expected: up", "expect: up"), "unknown key comparisons.1.expect; did you mean comparisons.1.expected"),
        (("seeds: [0, 1]", "seeds: [0, -1]"), "settings.base with seed -1: seed is -1"),
        (("seeds: [0, 1]", 'seeds: [0, "1"]'), "seeds.1: .*integer"),
        ((SWEEP, ""), r"s.yaml: found nothing \(null\), expected a mapping with the keys name, recipe"),
        ((SWEEP, "- base"), r"s.yaml: found \['base'\] \(a list\), expected a mapping"),
    ],
)
def test_faults_of_a_sweep_are_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    assert change[0] in SWEEP
    with pytest.raises(RecipeError, match=message):
        load_sweep(write(tmp_path, SWEEP.replace(*change)))


def test_any_run_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "base.yaml").write_text(f'{RECIPE}run: "123: [ü 😀] # a"\n')
    sweep = load_sweep(path)
    assert sweep.recipe("deep", 1).run == sweep.base.run == Path("123: [ü 😀] # a")


def test_verdicts() -> None:
    taus = {"a": {0: 1.0, 1: 2.0}, "b": {0: 1.5, 1: 2.1}, "c": {0: 0.9, 1: 2.3}, "d": {0: 3.0}}
    found = judged("a", "b", taus)
    assert found is not None
    assert (found["verdict"], found["seeds"]) == ("shows", 2)
    assert found["difference"] == pytest.approx(0.3)
    assert found["error"] == pytest.approx(math.sqrt(2 * 0.2**2) / math.sqrt(2))
    for worse, better, verdict in (("b", "a", "the other way"), ("a", "c", "not clear"), ("a", "d", "not clear")):
        row = judged(worse, better, taus)
        assert row is not None
        assert row["verdict"] == verdict
    assert judged("a", "nothing", taus) is None


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> list[Training]:
    """Two settings and two seeds on one small cache; the second setting of seed 1 cannot be trained."""
    folder = tmp_path_factory.mktemp("sweep")
    target = make_target(tokenizer=make_tokenizer(), vocab_size=320)
    save_target(folder / "target", target)
    extraction = start_extraction(folder, target, [response(f"s{i}", 4, 9, vocab=250) for i in range(10)])
    extraction.run()
    made = []
    for setting, layers in (("base", 1), ("deep", 2)):
        for seed in (0, 1):
            out = folder / setting / str(seed)
            out.mkdir(parents=True)
            config = TrainConfig(epochs=1, heldout_share=0.4, bf16=False, trackers=(), batch_samples=4)
            job = TrainJob(
                TargetConfig(model=str(folder / "target"), dtype="float32"),
                DrafterConfig(n_layers=layers, block_size=4), config, extraction.job.identity, seed,
                extraction.job.cache_dir if (setting, seed) != ("deep", 1) else folder / "no-cache", out,
                f"{setting}-{seed}",
            )  # fmt: skip
            made.append(Training(setting, seed, out, job))
    return made


def test_a_crash_ends_one_training_and_not_the_sweep(tmp_path: Path) -> None:
    """The jobs are none, so that each training fails on an error that nobody raised on purpose."""
    both = [Training("base", seed, tmp_path / str(seed), None) for seed in (0, 1)]
    said: list[str] = []
    with pytest.raises(PipelineError, match="2 of 2 trainings failed") as caught:
        run_sweep(both, said.append)
    assert sum("failed: crashed: AttributeError" in line for line in said) == 2
    assert str(tmp_path / "1" / "crash.txt") in str(caught.value)
    assert "Traceback" in (tmp_path / "1" / "crash.txt").read_text()


def test_a_killed_process_is_a_failed_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool(ThreadPoolExecutor):
        def __init__(self, workers: int, mp_context: Any) -> None:
            super().__init__(workers)

        def submit(self, *_: Any, **__: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(BrokenProcessPool("a child process terminated abruptly"))
            return future

    monkeypatch.setattr(sweeping.concurrent.futures, "ProcessPoolExecutor", Pool)
    with pytest.raises(PipelineError, match=r"1 of 1 trainings failed:\n  base, seed 0: a process was killed"):
        run_sweep([Training("base", 0, tmp_path, None)], print, workers=2)


def test_trainings_are_made_once_and_a_failed_one_is_named(
    trainings: list[Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with pytest.raises(PipelineError, match=r"1 of 4 trainings failed:\n  deep, seed 1: .*no-cache"):
        run_sweep(trainings, said.append)
    results = [t.result() for t in trainings]
    assert [r is not None for r in results] == [True, True, True, False]
    assert all(r["tau"] >= 1 and r["steps"] == r["curve"][-1][0] for r in results if r is not None)
    asked: list[str] = []

    def train(training: Training) -> Any:
        asked.append(training.setting)
        raise AssertionError

    monkeypatch.setattr(sweeping, "_train", train)
    with pytest.raises(AssertionError):
        run_sweep(trainings, said.append)
    assert asked == ["deep"]
    page = write_sweep_page(load_sweep(write(tmp_path)), trainings, tmp_path).read_text()
    data = json.loads((tmp_path / "sweep.json").read_text())
    assert data["missing"] == 1
    assert "1 of 4 trainings have no result yet" in page
    assert page.count("<svg") == 2
    assert "Expected: deeper is better (Table 5)" in page
    assert [row["name"] for row in data["settings"]] == ["base", "deep"]
    assert data["comparisons"][0]["pairs"][0]["verdict"] == "not clear"
