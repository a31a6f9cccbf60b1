"""What training tells while it runs: the rows of metrics.jsonl, the trackers, the share of the hardware's peak."""

from __future__ import annotations

import dataclasses
import math
import struct
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_schema.reader import FeatureCache
from stages import hardware
from stages.config import TrainConfig
from stages.drafter import Drafter
from stages.errors import TrainingError
from stages.hardware import peak_tflops, step_flops
from stages.objective import Outcome
from stages.step_window import StepFigures, StepWindow, slot_counts
from stages.trackers import flat_numbers, open_trackers
from stages.world import World
from tests.test_train import CONFIG, make_cache, make_trainer, metrics
from tests.tiny import make_spec


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return make_cache(tmp_path_factory.mktemp("cache"), {f"s{i}": (3 + i, 8 + i) for i in range(5)})


def outcome_of(correct: list[list[int]], supervised: list[list[int]]) -> Outcome:
    return Outcome(torch.zeros(()), torch.zeros(()), torch.tensor(correct).bool(), torch.tensor(supervised).bool())


def test_expected_acceptance_by_hand() -> None:
    """Blocks with all three drafts right, with the first right only, and one with two labels, both right.

    Slot 1 is reached in 3 of 3, slot 2 in 2 of 3, slot 3 in 1 of the 2 blocks that have one: 1 + 1 + 2/3 + 1/2.
    """
    outcome = outcome_of([[0, 1, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0]], [[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 0]])
    assert slot_counts(outcome).tolist() == [[3, 2, 2], [3, 3, 2], [3, 2, 1], [3, 3, 2]]
    window = StepWindow(4, peak_tflops=1e-9)
    window.add(outcome)
    window.close_step(StepFigures(2.0, 1.0, 1e-3, 0.25, 100, 5e3))
    window.close_step(StepFigures(4.0, 3.0, 2e-3, 0.75, 100, 5e3))
    row = window.summary(World(), 2, 0, {"a": "no_anchor"}, 7.5)
    assert row["expected_acceptance"] == pytest.approx(1 + 1 + 2 / 3 + 1 / 2, abs=1e-4)
    assert (row["loss"], row["grad_norm"], row["lr"], row["weight_norm"]) == (3.0, 2.0, 2e-3, 7.5)
    assert row["accuracy"] == pytest.approx([1, 2 / 3, 1], abs=1e-4)
    assert row["data_wait_s"] == 0.5
    assert row["skipped_why"] == {"no_anchor": 1}
    assert row["data_wait_share"] * 200 / row["tokens_per_s"] == pytest.approx(1.0, rel=0.05)
    assert row["peak_share"] == pytest.approx(row["tflops"] / 1e-9)


def counted(rows: int, weight: torch.Tensor, *, first: bool = False, frozen: bool = False) -> int:
    """Operations of a product with this weight, forward and backward, as torch counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.randn(rows, weight.shape[1]).requires_grad_(not first)
    with FlopCounterMode(display=False) as counter:
        (x @ weight.detach().requires_grad_(not frozen).T).sum().backward()
    return int(counter.get_total_flops())


def test_operations_are_those_of_the_matrices() -> None:
    spec = make_spec(n_layers=2)
    named = dict(Drafter(spec, seed=0).named_parameters())
    in_layers = [p for name, p in named.items() if name.startswith("layers.") and p.ndim == 2]
    injected = [p for name, p in named.items() if "k_proj" in name or "v_proj" in name]
    assert (len(in_layers), len(injected)) == (14, 4)
    context = counted(7, named["fc.weight"], first=True) + sum(counted(7, p) for p in injected)
    slots = sum(counted(8, p) for p in in_layers)
    found = step_flops(spec, context_rows=7, slots=8, labels=8, visible=11)
    assert found["head"] == counted(8, torch.randn(spec.vocab_size, spec.hidden_size), frozen=True)
    assert found["ctx_projection"] + found["ctx_keys_values"] == context
    assert found["block_linear"] == slots
    # Scores and weighted values of 11 pairs in 2 layers with 4 heads of 8, forward and twice that backward.
    assert found["attention"] == 3 * 2 * (2 * 11 * 8 * 4) * 2
    fewer = step_flops(spec, context_rows=7, slots=8, labels=6, visible=11)
    last = [p for name, p in named.items() if name.startswith("layers.1.") and p.ndim == 2]
    asking = [p for p in last if not any(p is other for other in injected)]
    assert found["block_linear"] - fewer["block_linear"] == sum(counted(8, p) - counted(6, p) for p in asking)
    assert fewer["attention"] == found["attention"] * (1 + 6 / 8) / 2


def test_the_peak_is_given_or_known_or_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert peak_tflops(cpu, None, bf16=True) is None
    assert peak_tflops(cpu, 0.1, bf16=False) == 0.1
    for name, peak in (("NVIDIA H200", 989.0), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA A100-SXM4-80GB", 312.0)):
        monkeypatch.setattr(hardware.torch.cuda, "get_device_name", lambda _device, name=name: name)
        assert peak_tflops(gpu, None, bf16=True) == peak
        assert peak_tflops(gpu, None, bf16=False) is None
    monkeypatch.setattr(hardware.torch.cuda, "get_device_name", lambda _device: "Unheard-of 9000")
    assert peak_tflops(gpu, None, bf16=True) is None


# --- trackers ----------------------------------------------------------------------------------------------------


class Calls(list[tuple[str, Any]]):
    """A stand-in for a tracker's library: notes every call, and returns itself."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Calls:
            self.append((name, args or kwargs))
            return self

        return call


@pytest.mark.parametrize(
    ("kind", "started", "logged", "ended"),
    [
        ("wandb", "init", ("log", ({"train/loss": 2.0},)), "finish"),
        ("trackio", "init", ("log", ({"train/loss": 2.0},)), "finish"),
        ("mlflow", "start_run", ("log_metrics", ({"train/loss": 2.0},)), "end_run"),
    ],
)
def test_the_other_trackers_are_told_everything(
    kind: str, started: str, logged: tuple[str, Any], ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls()
    library = types.ModuleType(kind)
    library.__getattr__ = calls.__getattr__  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, kind, library)
    (tracker,) = open_trackers([kind], tmp_path / "a-run" / "train", {"lr": 1})
    tracker.log(3, {"train/loss": 2.0})
    tracker.close()
    names = [name for name, _ in calls]
    assert started in names
    assert logged in calls
    assert names[-1] == ended


def test_a_tracker_whose_library_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TrainingError, match=r"train\.trackers names wandb.*pip install 'dflash\[wandb\]'"):
        open_trackers(["wandb"], tmp_path, {})


def test_rows_become_flat_numbers() -> None:
    row = {"kind": "heldout", "step": 3, "tau": 2.5, "accuracy": [0.5, 0.25], "peak_share": None, "loss": math.nan,
           "skipped_why": {"no_anchor": 2}}
    assert flat_numbers(row) == {
        "heldout/tau": 2.5, "heldout/accuracy/slot_01": 0.5, "heldout/accuracy/slot_02": 0.25,
        "heldout/skipped_why/no_anchor": 2,
    }  # fmt: skip


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What the event files of a folder hold (TFRecords: length, its checksum, data, its checksum)."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.iterdir()):
        data, place = file.read_bytes(), 0
        while place < len(data):
            (n,) = struct.unpack_from("<Q", data, place)
            event = Event.FromString(data[place + 12 : place + 12 + n])
            place += 16 + n
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_a_training_fills_metrics_and_tensorboard(cache: FeatureCache, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, heldout_share=0.4, heldout_every=2, peak_tflops=1.0)
    trainer = make_trainer(cache, tmp_path, config)
    trainer.run()
    rows, looks = metrics(tmp_path), metrics(tmp_path, "heldout")
    for row in rows:
        for name in ("weight_norm", "tflops", "tokens_per_s", "data_wait_s"):
            assert row[name] > 0, name
        assert 1 <= row["expected_acceptance"] <= 4
        assert 0 <= row["data_wait_share"] <= 1
        assert row["peak_share"] == row["tflops"]
    found = scalars(tmp_path / "tensorboard")
    assert [step for step, _ in found["train/loss"]] == [row["step"] for row in rows]
    assert [value for _, value in found["train/loss"]] == pytest.approx([row["loss"] for row in rows], rel=1e-6)
    assert [value for _, value in found["heldout/tau"]] == pytest.approx([row["tau"] for row in looks], rel=1e-6)
    assert "train/accuracy/slot_03" in found


def test_a_loss_that_is_not_finite_stops_the_run(cache: FeatureCache, tmp_path: Path) -> None:
    """The head makes it so; the gradient alone would be found first otherwise."""
    trainer = make_trainer(cache, tmp_path)
    ids = trainer.plan.step(0).sample_ids
    trainer.ends = dataclasses.replace(trainer.ends, head_VD=trainer.ends.head_VD * float("inf"))
    with pytest.raises(TrainingError, match=r"step 1 \(epoch 0\): the loss is nan; the samples of this step") as error:
        trainer.run()
    assert all(sample_id in str(error.value) for sample_id in ids)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_no_tracker_takes_a_credential() -> None:
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    assert not [name for name in names if "key" in name or "password" in name or "secret" in name]
