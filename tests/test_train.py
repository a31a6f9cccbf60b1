"""Training: exact resume, fp32 masters, and that eight samples can be learnt by heart."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cache_schema.errors import FingerprintMismatch
from cache_schema.reader import FeatureCache
from stages import checkpoint
from stages.batch import TrainingSample, make_batch
from stages.checkpoint_format import save_drafter
from stages.config import DrafterConfig, TargetConfig, TrainConfig
from stages.dataset import SampleReader
from stages.drafter import Drafter
from stages.errors import TrainingError
from stages.objective import heldout_tau
from stages.order import StepPlan
from stages.replicas import Replicas
from stages.target import Target
from stages.train import FrozenEnds, Trainer, TrainJob, learning_rate, train_rank, trained_spec
from stages.train_ray import train_with_ray
from stages.world import World
from tests.tiny import make_spec, make_target, make_tokenizer, response, save_target, start_extraction

TARGET = make_target()
N_SAMPLES = 7
CONFIG = TrainConfig(
    anchors=4, epochs=2, batch_samples=3, micro_samples=2, heldout_share=0.0, checkpoint_every=2, log_every=1,
    keep_checkpoints=9, lr=1e-2, bf16=False,
)  # fmt: skip


class Killed(Exception):
    """Stands for a `kill -9`: nothing of the trainer runs after it."""


def make_cache(folder: Path, lengths: dict[str, tuple[int, int]], target: Target = TARGET) -> FeatureCache:
    responses = [response(name, *length, vocab=target.shape.vocab_size - 1) for name, length in lengths.items()]
    return start_extraction(folder, target, responses, shard_bytes=20_000).run()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    lengths = {f"s{i}": (3 + i, 6 + 2 * i) for i in range(N_SAMPLES)}
    return make_cache(tmp_path_factory.mktemp("cache"), lengths)


def make_trainer(
    cache: FeatureCache,
    folder: Path,
    config: TrainConfig = CONFIG,
    fingerprint: str = "f" * 64,
    world: World | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    target: Target = TARGET,
    **spec: Any,
) -> Trainer:
    drafter = Drafter(make_spec(**spec), seed=1)
    plan, reader = StepPlan(cache.plan, config, 1), SampleReader(cache, config, 1)
    ends = FrozenEnds(target.embed, target.head)
    return Trainer(drafter, ends, plan, reader, config, folder, fingerprint, world, on_step)


def killed_at(step: int) -> Callable[[dict[str, Any]], None]:
    def on_step(row: dict[str, Any]) -> None:
        if row["kind"] == "step" and row["step"] == step:
            raise Killed

    return on_step


def checkpoint_bytes(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in (checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.STATE)}


def metrics(folder: Path, kind: str = "step") -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def test_the_learning_rate_rises_then_falls_to_nearly_nothing() -> None:
    config = TrainConfig(lr=1.0, warmup_share=0.1)
    rates = [learning_rate(i, 100, config) for i in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 1e-3
    assert rates[55] == pytest.approx(0.5)
    assert learning_rate(0, 1, config) == 1.0


# --- checkpoints and resume --------------------------------------------------------------------------------------


@pytest.mark.parametrize("killed", [1, 3, 5, 6])
def test_a_killed_and_resumed_run_ends_with_the_same_weights(cache: FeatureCache, tmp_path: Path, killed: int) -> None:
    """6 steps, a checkpoint every second one. Killed before the first, between two, and in the last step."""
    whole = make_trainer(cache, tmp_path / "whole").run()
    assert whole.name == "step-000006"
    with pytest.raises(Killed):
        make_trainer(cache, tmp_path / "cut", on_step=killed_at(killed)).run()
    kept = sorted(p.name for p in (tmp_path / "cut" / "checkpoints").glob("*"))
    assert kept == [f"step-{s:06d}" for s in (2, 4) if s < killed]
    resumed = make_trainer(cache, tmp_path / "cut", on_step=lambda row: steps.append(row["step"]))
    steps: list[int] = []
    final = resumed.run()
    assert steps[0] == killed - (killed - 1) % 2  # goes on right behind the checkpoint
    assert checkpoint_bytes(final) == checkpoint_bytes(whole)


def test_a_finished_run_has_nothing_left_to_do(cache: FeatureCache, tmp_path: Path) -> None:
    final = make_trainer(cache, tmp_path).run()
    before = checkpoint_bytes(final)
    steps: list[int] = []
    again = make_trainer(cache, tmp_path, on_step=lambda row: steps.append(row["step"])).run()
    assert again == final
    assert steps == []
    assert checkpoint_bytes(final) == before


@pytest.mark.parametrize("spoil", ["model", "optimizer", "no-state", "state", "no-model"])
def test_a_torn_checkpoint_is_never_picked(cache: FeatureCache, tmp_path: Path, spoil: str) -> None:
    whole = make_trainer(cache, tmp_path).run()
    before = checkpoint_bytes(whole)
    newest, folder = whole, tmp_path / "checkpoints"
    if spoil.startswith("no-"):
        (newest / {"no-state": checkpoint.STATE, "no-model": checkpoint.MODEL}[spoil]).unlink()
    else:
        file = newest / {"model": checkpoint.MODEL, "optimizer": checkpoint.OPTIMIZER, "state": checkpoint.STATE}[spoil]
        file.write_bytes(file.read_bytes()[:-20])
    found = checkpoint.newest_checkpoint(folder, "f" * 64)
    assert found is not None
    assert found[0].name == "step-000004"
    assert found[1].step == 4
    # The steps behind it are done again, and the torn one is replaced.
    assert checkpoint_bytes(make_trainer(cache, tmp_path).run()) == before


@pytest.mark.parametrize(
    "change",
    [
        {"step": 5}, {"fingerprint": "g" * 64}, {"skipped": {"s1": "no_anchor"}}, {"order": {"seed": 1}}, {"more": 1},
        {"best": {"step": 4, "tau": 1.5}}, {"state_sha256": None},
    ],
)  # fmt: skip
def test_an_altered_state_is_never_picked(tmp_path: Path, change: dict[str, Any]) -> None:
    older = saved_checkpoint(tmp_path, 4)
    file = saved_checkpoint(tmp_path, 6) / checkpoint.STATE
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    found = checkpoint.newest_checkpoint(tmp_path, "f")
    assert found is not None
    assert found[0] == older


@pytest.mark.parametrize(
    "change",
    [
        {"step": True}, {"step": "6"}, {"skipped": []}, {"skipped": {"s": 1}}, {"order": None}, {"fingerprint": 3},
        {"sha256": []}, {"best": {"step": 1}}, {"best": [1, 2.0]}, {"best": {"step": 1, "tau": "high"}},
    ],
)  # fmt: skip
def test_a_state_of_other_types_is_never_picked(tmp_path: Path, change: dict[str, Any]) -> None:
    """Though its hash is that of what it says."""
    file = saved_checkpoint(tmp_path, 6) / checkpoint.STATE
    state = json.loads(file.read_text()) | change
    state["state_sha256"] = checkpoint._state_sha256(state)
    file.write_text(json.dumps(state))
    assert checkpoint.newest_checkpoint(tmp_path, "f") is None


def test_a_checkpoint_under_the_name_of_another_step_is_never_picked(tmp_path: Path) -> None:
    older = saved_checkpoint(tmp_path, 3)
    saved_checkpoint(tmp_path, 6).rename(tmp_path / "step-000009")
    found = checkpoint.newest_checkpoint(tmp_path, "f")
    assert found is not None
    assert found[0] == older


def saved_checkpoint(folder: Path, step: int) -> Path:
    drafter = Drafter(make_spec(), seed=0)
    optimizer = torch.optim.AdamW(drafter.parameters())
    return checkpoint.save_checkpoint(folder, checkpoint.Progress(step, "f"), Replicas(drafter, World()), optimizer)


def test_a_changed_weight_is_noticed(cache: FeatureCache, tmp_path: Path) -> None:
    final = make_trainer(cache, tmp_path).run()
    raw = bytearray((final / checkpoint.MODEL).read_bytes())
    raw[-1] ^= 1
    (final / checkpoint.MODEL).write_bytes(raw)
    found = checkpoint.newest_checkpoint(tmp_path / "checkpoints", "f" * 64)
    assert found is not None
    assert found[1].step == 4


def test_the_checkpoint_of_another_training_is_refused(cache: FeatureCache, tmp_path: Path) -> None:
    make_trainer(cache, tmp_path).run()
    with pytest.raises(FingerprintMismatch, match=r"step-000006 belongs to another training \(fingerprint ffff.*gggg"):
        make_trainer(cache, tmp_path, fingerprint="g" * 64).run()


def test_old_checkpoints_and_leftovers_are_removed(cache: FeatureCache, tmp_path: Path) -> None:
    leftover = tmp_path / "checkpoints" / ".step-000001.abcd"
    leftover.mkdir(parents=True)
    make_trainer(cache, tmp_path, dataclasses.replace(CONFIG, keep_checkpoints=2)).run()
    assert sorted(p.name for p in leftover.parent.iterdir()) == ["step-000004", "step-000006"]


def test_checkpoints_are_ordered_by_step_and_not_by_name(tmp_path: Path) -> None:
    drafter = Drafter(make_spec(), seed=0)
    optimizer = torch.optim.AdamW(drafter.parameters())
    for step in (999_998, 999_999, 1_000_000):
        checkpoint.save_checkpoint(tmp_path, checkpoint.Progress(step, "f"), Replicas(drafter, World()), optimizer)
    checkpoint.rotate(tmp_path, 2)
    found = checkpoint.newest_checkpoint(tmp_path, "f")
    assert found is not None
    assert found[1].step == 1_000_000
    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "fsync_tree", full)
    drafter = Drafter(make_spec(), seed=0)
    optimizer = torch.optim.AdamW(drafter.parameters())
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save_checkpoint(tmp_path, checkpoint.Progress(1, "f"), Replicas(drafter, World()), optimizer)
    assert list(tmp_path.iterdir()) == []


def test_flex_attention_is_refused_without_a_gpu(cache: FeatureCache, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"train\.attention is flex, which needs a GPU.*on cpu.*grouped"):
        make_trainer(cache, tmp_path, dataclasses.replace(CONFIG, attention="flex"))


# --- what a step does --------------------------------------------------------------------------------------------


def test_non_finite_gradients_stop_the_run_and_name_the_samples(
    cache: FeatureCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = StepPlan(cache.plan, CONFIG, 1)
    poisoned = plan.step(2).sample_ids[0]
    read = SampleReader.read

    def spoilt(reader: SampleReader, sample_id: str, *args: Any) -> TrainingSample | None:
        sample = read(reader, sample_id, *args)
        if sample is not None and sample_id == poisoned:
            return dataclasses.replace(sample, features_TLD=torch.full_like(sample.features_TLD, float("nan")))
        return sample

    monkeypatch.setattr(SampleReader, "read", spoilt)
    trainer = make_trainer(cache, tmp_path, dataclasses.replace(CONFIG, checkpoint_every=1))
    first = next(i for i in range(plan.n_steps) if poisoned in plan.step(i).sample_ids)
    with pytest.raises(TrainingError, match=rf"step {first + 1} \(epoch 0\).*{poisoned}.*Nothing was updated") as error:
        trainer.run()
    assert all(sample_id in str(error.value) for sample_id in plan.step(first).sample_ids)
    newest = checkpoint.newest_checkpoint(tmp_path / "checkpoints", "f" * 64)
    if first == 0:
        assert newest is None
        before = Drafter(make_spec(), seed=1).state_dict()
    else:
        assert newest is not None
        assert newest[1].step == first
        before = load_file(newest[0] / checkpoint.MODEL)
    assert all(torch.equal(p.detach(), before[name]) for name, p in trainer.drafter.named_parameters())


def test_weights_and_moments_stay_float32_and_small_updates_do_not_vanish(cache: FeatureCache, tmp_path: Path) -> None:
    """Case 16. A norm weight of 1 has a spacing of 2⁻⁷ in bfloat16; these updates are far below it."""
    final = make_trainer(cache, tmp_path, dataclasses.replace(CONFIG, bf16=True, lr=1e-5)).run()
    for file in (checkpoint.MODEL, checkpoint.OPTIMIZER):
        assert {t.dtype for t in load_file(final / file).values()} == {torch.float32}
    weights = load_file(final / checkpoint.MODEL)
    assert len(weights) == 11 * 2 + 3
    for name, weight in weights.items():
        assert torch.isfinite(weight).all()
        if name.endswith("norm.weight"):
            moved = (weight - 1).abs()
            assert 0 < float(moved.max()) < 1e-4
            assert torch.equal(weight.bfloat16().float(), torch.ones_like(weight))


def test_samples_without_an_anchor_are_skipped_and_counted(tmp_path: Path) -> None:
    cache = make_cache(tmp_path, {"one-token": (5, 1), "a": (4, 8), "b": (3, 9)})
    config = dataclasses.replace(CONFIG, batch_samples=1)
    final = make_trainer(cache, tmp_path / "train", config).run()
    rows = metrics(tmp_path / "train")
    assert rows[-1]["skipped"] == 1
    assert rows[-1]["skipped_why"] == {"no_anchor": 1}
    assert json.loads((final / checkpoint.STATE).read_text())["skipped"] == {"one-token": "no_anchor"}
    assert len(rows) == 6
    resumed = make_trainer(cache, tmp_path / "train", config)
    resumed.run()
    assert resumed.reader.skipped == {"one-token": "no_anchor"}


def test_what_is_logged(cache: FeatureCache, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, heldout_share=0.3, heldout_every=2)
    trainer = make_trainer(cache, tmp_path, config)
    assert trainer.plan.heldout
    trainer.run()
    rows, looks = metrics(tmp_path), metrics(tmp_path, "heldout")
    assert [row["step"] for row in rows] == list(range(1, trainer.plan.n_steps + 1))
    assert [row["lr"] for row in rows] == [learning_rate(i, trainer.plan.n_steps, config) for i in range(len(rows))]
    assert all(len(row["accuracy"]) == 3 and row["loss"] > 0 and row["grad_norm"] > 0 for row in rows)
    assert [row["step"] for row in looks] == [0, *range(2, trainer.plan.n_steps + 1, 2)]
    assert all(1 <= row["tau"] <= 4 and row["samples"] == len(trainer.plan.heldout) for row in looks)


# --- one step however it is divided ------------------------------------------------------------------------------

SPLIT = dataclasses.replace(CONFIG, batch_samples=4, micro_samples=4, checkpoint_every=100, epochs=1)
"""7 samples: a step of 4 and one of 3, so that two ranks have unequal numbers of micro-batches."""


def final_weights(cache: FeatureCache, folder: Path, config: TrainConfig) -> dict[str, torch.Tensor]:
    return load_file(make_trainer(cache, folder, config).run() / checkpoint.MODEL)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    start = Drafter(make_spec(), seed=1).state_dict()
    for name, weight in expected.items():
        assert not torch.equal(weight, start[name])
        torch.testing.assert_close(found[name], weight, rtol=0, atol=2e-4, msg=name)


@pytest.mark.parametrize("micro", [1, 3])
def test_micro_batches_do_not_change_the_step(cache: FeatureCache, tmp_path: Path, micro: int) -> None:
    whole = final_weights(cache, tmp_path / "whole", SPLIT)
    assert_same(final_weights(cache, tmp_path / "parts", dataclasses.replace(SPLIT, micro_samples=micro)), whole)
    losses = [[row["loss"] for row in metrics(tmp_path / name)] for name in ("whole", "parts")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def first_checkpoint_of(source: Path, folder: Path) -> None:
    """A training as it was after its first checkpoint."""
    shutil.copytree(source / "checkpoints", folder / "checkpoints")
    for newer in sorted((folder / "checkpoints").iterdir())[1:]:
        shutil.rmtree(newer)


def run_rank(rank: int, cache: FeatureCache, folder: Path, configs: dict[str, TrainConfig]) -> None:
    """Body of a spawned process: several trainings, one after the other."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        for name, config in configs.items():
            make_trainer(cache, folder / name, config, world=World(rank, 2)).run()
        if rank == 0:
            first_checkpoint_of(folder / "eight", folder / "resumed")
        torch.distributed.barrier()
        make_trainer(cache, folder / "resumed", configs["eight"], world=World(rank, 2)).run()
    finally:
        torch.distributed.destroy_process_group()


RANKS = {
    "four-and-one": dataclasses.replace(SPLIT, micro_samples=1),
    "six": dataclasses.replace(SPLIT, batch_samples=6, micro_samples=2),
    "shared": dataclasses.replace(SPLIT, batch_samples=6, micro_samples=2, shard=True),
    "dpace": dataclasses.replace(SPLIT, slot_weights="dpace", micro_samples=2),
    "eight": dataclasses.replace(
        SPLIT, batch_samples=8, micro_samples=4, epochs=4, heldout_share=0.2, shard=True, checkpoint_every=1
    ),
}
"""With batches of 6 the last step has one sample, so that rank 1 has none."""


@pytest.fixture(scope="module")
def two_ranks(cache: FeatureCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every training of `RANKS`, made by two processes."""
    import torch.multiprocessing

    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(run_rank, args=(cache, folder, RANKS), nprocs=2)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_ranks_do_not_change_the_step(cache: FeatureCache, tmp_path: Path, two_ranks: Path, name: str) -> None:
    """Figure 4: the same loss to 1e-5 at every step, replicated or divided by `fully_shard`."""
    alone = dataclasses.replace(RANKS[name], micro_samples=RANKS[name].batch_samples, shard=False)
    whole = make_trainer(cache, tmp_path, alone).run()
    final = two_ranks / name / "checkpoints" / whole.name
    assert_same(load_file(final / checkpoint.MODEL), load_file(whole / checkpoint.MODEL))
    two, one = metrics(two_ranks / name), metrics(tmp_path)
    assert len(one) == len(two) > 0
    for field in ("loss", "grad_norm", "weight_norm"):
        assert [row[field] for row in two] == pytest.approx([row[field] for row in one], rel=1e-5), field
    assert [row["accuracy"] for row in two] == [row["accuracy"] for row in one]
    looks = [[row["tau"] for row in metrics(folder, "heldout")] for folder in (two_ranks / name, tmp_path)]
    assert looks[0] == looks[1]
    assert (final / checkpoint.OPTIMIZER).stat().st_size == (whole / checkpoint.OPTIMIZER).stat().st_size


@pytest.mark.slow
def test_one_rank_goes_on_where_two_stopped(cache: FeatureCache, tmp_path: Path, two_ranks: Path) -> None:
    """From a checkpoint that a divided drafter wrote."""
    config = dataclasses.replace(RANKS["eight"], shard=False)
    whole = make_trainer(cache, tmp_path / "whole", config).run()
    first_checkpoint_of(two_ranks / "eight", tmp_path / "train")
    steps: list[int] = []
    final = make_trainer(cache, tmp_path / "train", config, on_step=lambda row: steps.append(row["step"])).run()
    assert steps[0] > 1
    assert_same(load_file(final / checkpoint.MODEL), load_file(whole / checkpoint.MODEL))


@pytest.mark.slow
def test_a_divided_drafter_goes_on_bit_for_bit(two_ranks: Path) -> None:
    whole, resumed = (two_ranks / name / "checkpoints" / "step-000004" for name in ("eight", "resumed"))
    assert checkpoint_bytes(resumed) == checkpoint_bytes(whole)
    assert min(row["step"] for row in metrics(two_ranks / "resumed")) == 2


# --- from files, and by heart ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    """A target folder, a cache of it, and a drafter shaped by the target."""
    folder = tmp_path_factory.mktemp("job")
    target = make_target(tokenizer=make_tokenizer(), vocab_size=320)
    save_target(folder / "target", target)
    responses = [response(f"s{i}", 4, 9, vocab=250) for i in range(4)]
    extraction = start_extraction(folder, target, responses)
    extraction.run()
    return TrainJob(
        target=TargetConfig(model=str(folder / "target"), dtype="float32"),
        drafter=DrafterConfig(n_layers=1, block_size=4),
        train=dataclasses.replace(CONFIG, epochs=1),
        identity=extraction.job.identity,
        seed=1,
        cache_dir=extraction.job.cache_dir,
        folder=folder / "train",
        fingerprint="f",
    )


def test_a_rank_starts_from_files_alone(job: TrainJob) -> None:
    final = train_rank(job, World())
    assert final.name == "step-000002"
    assert len(load_file(final / checkpoint.MODEL)) == 11 + 3


def test_a_rank_goes_on_from_a_drafter_with_its_windows(job: TrainJob, tmp_path: Path) -> None:
    windows: dict[str, Any] = {"layer_types": ("sliding_attention",), "sliding_window": 2}
    given = Drafter(dataclasses.replace(trained_spec(job), **windows), seed=9)
    (tmp_path / "given").mkdir()
    save_drafter(given, tmp_path / "given")
    train = dataclasses.replace(job.train, init_from=str(tmp_path / "given"), lr=1e-9)
    from_it = dataclasses.replace(job, train=train, folder=tmp_path / "train")
    assert trained_spec(from_it) == given.spec
    final = load_file(train_rank(from_it, World()) / checkpoint.MODEL)
    for name, parameter in given.named_parameters():
        torch.testing.assert_close(final[name], parameter.detach().bfloat16().float(), rtol=0, atol=1e-6)


def test_a_cache_of_another_identity_is_refused(job: TrainJob) -> None:
    other = dataclasses.replace(job.identity, layer_ids=(0, 2, 5), max_length=99)
    with pytest.raises(FingerprintMismatch) as error:
        train_rank(dataclasses.replace(job, identity=other), World())
    for words in ("layer_ids: found [1, 3, 4], expected [0, 2, 5]", "max_length: found 512, expected 99"):
        assert words in str(error.value)


def test_eight_samples_are_learnt_by_heart(tmp_path: Path) -> None:
    """Simulated τ above 0.9·B on what was trained on (figure 3). Responses of random tokens leave nothing to guess;
    blocks that the response's end cuts short count as they are, so that B itself is out of reach."""
    block_size, names = 8, [f"s{i}" for i in range(8)]
    target = make_target(hidden_size=64, num_hidden_layers=6)
    cache = make_cache(tmp_path, dict.fromkeys(names, (4, 60)), target)
    config = TrainConfig(
        anchors=16, epochs=250, batch_samples=8, micro_samples=8, heldout_share=0.0, lr=4e-3, bf16=False,
        checkpoint_every=10_000, log_every=50,
    )  # fmt: skip
    trainer = make_trainer(
        cache, tmp_path / "train", config, target=target, hidden_size=64, intermediate_size=128, block_size=block_size,
        initializer_range=0.05,
    )  # fmt: skip
    untrained = tau_on(trainer, names)
    trainer.run()
    trained = tau_on(trainer, names)
    assert untrained < 1.2
    assert trained > 0.9 * block_size


@torch.no_grad()
def tau_on(trainer: Trainer, names: list[str]) -> float:
    """Over every eligible anchor."""
    spec = trainer.drafter.spec
    reader = SampleReader(trainer.reader.cache, dataclasses.replace(trainer.config, anchors=512), 0)
    samples = [s for s in (reader.read(name, 0) for name in names) if s is not None]
    batch = make_batch(samples, spec.block_size, spec.mask_token_id)
    tau, n = heldout_tau([trainer._forward(batch)], [batch])
    assert n == len(names)
    return tau


def test_ctrl_c_after_a_training_is_an_ordinary_one(
    job: TrainJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's trainer puts a handler of its own in the place, which later asks a controller that has gone."""

    class Trainer:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def fit(self) -> None:
            signal.signal(signal.SIGINT, lambda *_: None)

    monkeypatch.setattr("ray.train.torch.TorchTrainer", Trainer)
    before = signal.getsignal(signal.SIGINT)
    train_with_ray(job, storage=tmp_path)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("deaths", "goes_on"), [(2, True), (3, False)])
def test_the_death_of_rays_controller_is_one_of_the_failures_that_max_restarts_allows(
    job: TrainJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: int, goes_on: bool
) -> None:
    from ray.exceptions import ActorDiedError

    names: list[str] = []

    class Trainer:
        def __init__(self, *_: Any, run_config: Any, **__: Any) -> None:
            names.append(run_config.name)

        def fit(self) -> None:
            if len(names) <= deaths:
                raise ActorDiedError

    monkeypatch.setattr("ray.train.torch.TorchTrainer", Trainer)
    job = dataclasses.replace(job, train=dataclasses.replace(job.train, max_restarts=2))
    if goes_on:
        train_with_ray(job, storage=tmp_path)
    else:
        with pytest.raises(TrainingError, match="controller of the training died, 3 times"):
            train_with_ray(job, storage=tmp_path)
    assert len(set(names)) == len(names) == 3, "Ray takes up a training of the same name"
