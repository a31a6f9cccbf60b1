"""`dflash simulate`: against cases that can be worked out by hand, and the rules of the real pool."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline import simulate_clock
from pipeline.cli import dflash
from pipeline.errors import PipelineError, RecipeError
from pipeline.pool_loop import NODE_LOSSES
from pipeline.simulate import play
from pipeline.simulate_clock import Clock, Link
from pipeline.simulate_file import ClusterRates, PoolRates, Simulation, StoreRates, TrainRates, load_simulation

ROOT = Path(__file__).parents[1]
POOL = PoolRates(workers=1, tokens_per_s=100, unit_tokens=1000, token_bytes=10, start_s=7, dispatch_s=0.0)
ONE = ClusterRates(nodes=1, gpus_per_node=1)


def run(pool: PoolRates = POOL, cluster: ClusterRates = ONE, n_units: float = 20, **more: Any) -> dict[str, Any]:
    """A run that only extracts units of 10 s."""
    sim = Simulation(name="t", samples=1, tokens_per_sample=1000 * n_units, cluster=cluster, extract=pool, **more)
    return play(sim)


def stage(result: dict[str, Any], name: str = "extract") -> dict[str, Any]:
    return next(s for s in result["stages"] if s["name"] == name)


# --- the clock and the links --------------------------------------------------------------------------


def test_flows_share_a_link_evenly_and_none_passes_its_own_limit() -> None:
    clock, ends = Clock(), dict[str, float]()
    link = Link(clock, total=30.0, each=20.0)
    for name, size in (("small", 30.0), ("large", 60.0)):
        link.send(size, lambda name=name: ends.setdefault(name, clock.now_s))
    late = []
    clock.after(1.0, lambda: late.append(link.send(1000.0, lambda: None)))
    clock.after(3.0, lambda: late.append(link.cancel(late[0])))
    clock.run(lambda: len(ends) == 2)
    # 1 s at 15, 15 left: 1.5 s at 10; the large one then has 30 left, 0.5 s at 15 and the rest at 20.
    assert ends["small"] == pytest.approx(2.5)
    assert ends["large"] == pytest.approx(3 + 22.5 / 20)
    assert late[1] == pytest.approx(1.5 * 10 + 0.5 * 15)


# --- pools --------------------------------------------------------------------------------------------


def test_one_worker_takes_as_long_as_its_units() -> None:
    store = StoreRates(node_write_bytes_per_s=5000)
    dispatched = dataclasses.replace(POOL, dispatch_s=0.5)
    assert run(dispatched, store=store)["wall_s"] == pytest.approx(7 + 20 * (0.5 + 10 + 2))
    two = dataclasses.replace(POOL, in_flight=2)
    assert run(two, store=store)["wall_s"] == pytest.approx(7 + 20 * 10 + 2)  # written while the next is computed
    assert run(n_units=19.5)["wall_s"] == pytest.approx(7 + 195)  # the last unit is smaller


def test_a_store_that_is_too_slow_decides() -> None:
    pool, cluster = dataclasses.replace(POOL, workers=4, in_flight=2), ClusterRates(nodes=4, gpus_per_node=1)
    slow = stage(run(pool, cluster, 200, store=StoreRates(write_bytes_per_s=2000)))
    assert slow["wall_s"] == pytest.approx(200 * 10_000 / 2000, rel=0.03)
    assert slow["busy_share"] == pytest.approx(200 * 10 / (4 * slow["wall_s"]))
    assert slow["idle_share"] > 0.45


def test_a_driver_that_is_too_slow_decides() -> None:
    pool = dataclasses.replace(POOL, workers=100, dispatch_s=1.0)
    assert run(pool, ClusterRates(nodes=100, gpus_per_node=1), 1000)["wall_s"] == pytest.approx(1000, rel=0.03)


def test_the_same_seed_gives_the_same_run() -> None:
    cluster = ClusterRates(nodes=4, gpus_per_node=2, node_mtbf_h=0.05, worker_mtbf_h=0.1, replace_s=20, detect_s=5)
    pool = dataclasses.replace(POOL, workers=8, unit_spread=0.3)
    first, again, other = (run(pool, cluster, 100, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first["wall_s"] != other["wall_s"]
    found = stage(first)
    assert found["node_losses"] > 0
    assert found["worker_deaths"] > 0
    assert found["units"] + found["failed_units"] == 100
    assert found["busy_share"] + found["lost_share"] + found["starting_share"] + found["waiting_share"] <= 1 + 1e-9


def test_deaths_cost_half_a_unit_and_a_start_on_average() -> None:
    cluster = dataclasses.replace(ONE, worker_mtbf_h=200 / 3600)
    found = [run(cluster=cluster, n_units=100, seed=seed) for seed in range(40)]
    deaths = sum(stage(r)["worker_deaths"] for r in found)
    lost = sum(stage(r)["lost_gpu_s"] for r in found)
    assert deaths / 40 == pytest.approx(5.3, abs=1)
    assert lost / deaths == pytest.approx(5, abs=0.7)
    assert sum(r["wall_s"] for r in found) == pytest.approx(40 * 1007 + lost + 7 * deaths, rel=0.001)


def test_a_unit_is_given_up_after_its_attempts_and_a_lost_node_is_not_one() -> None:
    dying = stage(run(cluster=dataclasses.replace(ONE, worker_mtbf_h=1 / 3600), n_units=3))
    assert (dying["failed_units"], dying["worker_deaths"], dying["again"]) == (3, 9, 6)
    going = ClusterRates(nodes=1, gpus_per_node=1, node_mtbf_h=1 / 3600, replace_s=1, detect_s=0)
    lost = stage(run(cluster=going, n_units=1))
    assert lost["failed_units"] == 1
    assert lost["node_losses"] >= NODE_LOSSES


def test_several_open_units_are_not_charged_but_tried_alone() -> None:
    pool = dataclasses.replace(POOL, in_flight=2, max_attempts=1)
    found = stage(run(pool, dataclasses.replace(ONE, worker_mtbf_h=60 / 3600), n_units=6, seed=1))
    assert found["worker_deaths"] > 0
    assert found["units"] > 0
    assert found["failed_units"] < found["worker_deaths"] * 2


# --- training -----------------------------------------------------------------------------------------

TRAIN = TrainRates(ranks=4, tokens_per_s=100, epochs=2, batch_samples=4, start_s=10, checkpoint_every=10,
                   checkpoint_s=5, window_shards=4)  # fmt: skip
"""200 steps of 10 s and a checkpoint every 10 of them."""


def train(cluster: ClusterRates, rates: TrainRates = TRAIN, **more: Any) -> dict[str, Any]:
    """A run of 400 samples; its cache has 40 shards of 10 samples each."""
    nodes = dataclasses.replace(cluster, gpus_per_node=1)
    extract = PoolRates(workers=1, tokens_per_s=1e6, unit_tokens=10_000, token_bytes=1)
    sim = Simulation(name="t", samples=400, tokens_per_sample=1000, cluster=nodes, train=rates,
                     **{"extract": extract, **more})  # fmt: skip
    return play(sim)


def test_a_training_takes_its_steps_its_checkpoints_or_its_reads() -> None:
    assert stage(train(ClusterRates(nodes=4)), "train")["wall_s"] == pytest.approx(10 + 200 * 10.5)
    slow = StoreRates(read_bytes_per_s=200)
    found = stage(train(ClusterRates(nodes=4), store=slow), "train")
    assert found["wall_s"] == pytest.approx(10 + 200 * 20.5)
    assert found["busy_share"] == pytest.approx(2000 / found["wall_s"])


def test_a_lost_node_costs_the_steps_since_the_checkpoint_unless_it_was_announced() -> None:
    cluster = ClusterRates(nodes=4, node_mtbf_h=0.8, replace_s=60, detect_s=30)
    hard = stage(train(cluster, seed=5), "train")
    assert 0 < hard["again"] <= 10 * hard["node_losses"]
    assert hard["lost_share"] > 0
    gentle = stage(train(dataclasses.replace(cluster, announced_share=1.0), seed=5), "train")
    assert gentle["node_losses"] > 0
    assert gentle["again"] <= gentle["node_losses"]  # only the step that was under way
    elastic = stage(train(cluster, dataclasses.replace(TRAIN, min_ranks=2), seed=5), "train")
    assert elastic["tokens_per_s"] > 0


ROLLING = dataclasses.replace(TRAIN, epochs=4, passes_per_window=2)


def rolling(max_bytes: float, **cluster: Any) -> dict[str, Any]:
    extract = PoolRates(workers=2, tokens_per_s=1000, unit_tokens=10_000, token_bytes=1)
    return train(ClusterRates(nodes=6, **cluster), ROLLING, extract=extract, max_bytes=max_bytes)


def test_a_rolling_run_stays_under_its_limit_and_makes_every_shard_once_per_round() -> None:
    found = rolling(100_000)
    stored = found["peak_bytes"] - 400 * 1000 * 9
    assert 60_000 <= stored <= 100_000
    assert stage(found)["units"] == 80  # 40 shards, two rounds of two passes each
    assert found["shards_made_again"] == 40
    assert stage(found, "train")["wall_s"] == pytest.approx(stage(found)["wall_s"])
    assert stage(found, "train")["wall_s"] > 400 * 10.5
    roomy, tight = rolling(400_000 - 1)["wall_s"], rolling(60_000)["wall_s"]
    assert roomy <= found["wall_s"] <= tight


def test_a_rolling_run_survives_losses_and_makes_again_what_it_needs() -> None:
    found = rolling(80_000, node_mtbf_h=0.5, replace_s=30, detect_s=10)
    assert stage(found, "train")["node_losses"] > 3
    assert stage(found)["units"] >= 80
    assert found["peak_bytes"] - 400 * 1000 * 9 <= 80_000 + stage(found)["garbage_bytes"]


def test_a_limit_below_a_window_is_refused() -> None:
    with pytest.raises(PipelineError, match=r"a window of 4 shards and one for each of 2 extract workers take 60"):
        rolling(50_000)


# --- the file and the command -------------------------------------------------------------------------


HEAD = "name: x\nsamples: 1\ntokens_per_sample: 1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x", "samples is missing"),
        (HEAD + "cluster: {nodes: 1, gpus: 3}", r"unknown key cluster\.gpus; known keys here are nodes, gpus_per_node"),
        (HEAD + "cluster: {nodes: 0}", r"cluster\.nodes is 0"),
        (HEAD + "cluster: {nodes: 1}", "at least one stage"),
        (HEAD + "cluster: {nodes: 1}\nextract: {workers: 9, tokens_per_s: 1, "
         "unit_tokens: 1}", "1 nodes of 8 GPUs have room for 8 of 1 GPUs each"),
        (HEAD + "cluster: {nodes: 1000000}", r"cluster\.nodes is 1000000, but it must be at most 100,000"),
        (HEAD + "cluster: {nodes: 1}\ngenerate: {workers: 1, tokens_per_s: 1, unit_tokens: 0.5}",
         r"generate\.unit_tokens is 0\.5, but it must be at least 1"),
        (HEAD + "cluster: {nodes: 1}\ngenerate: {workers: 1, tokens_per_s: 1, unit_tokens: 1, start_s: 1e300}",
         r"generate\.start_s is 1e\+300, but it must be 0 or above, and at most 1e\+18"),
        (HEAD.replace("samples: 1", "samples: 10_000_000") + "cluster: {nodes: 1}\n"
         "generate: {workers: 1, tokens_per_s: 1, unit_tokens: 1}", r"10,000,000 units would be played"),
        ("[]", r"found \[\] \(a list\), expected a mapping"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "rates.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError, match=message):
        load_simulation(file)


def test_a_thousand_gpus_are_played_in_seconds() -> None:
    sim = load_simulation(ROOT / "recipes" / "simulate-1000.yaml")
    began_s = time.process_time()
    found = play(sim)
    assert found["gpus"] == 1000
    assert found["shards"] > 20_000
    assert found["rolling"]
    assert time.process_time() - began_s < 20


def test_the_command_prints_a_table_json_and_a_page(tmp_path: Path) -> None:
    rates, page = ROOT / "recipes" / "simulate-64.yaml", tmp_path / "page.html"
    told = CliRunner().invoke(dflash, ["simulate", str(rates), "--page", str(page)])
    assert told.exit_code == 0, told.output
    assert "GPU hours lost" in told.output
    as_json = CliRunner().invoke(dflash, ["simulate", str(rates), "--json", "--seed", "0"])
    found = json.loads(as_json.output)
    assert {s["name"] for s in found["stages"]} == {"generate", "extract", "train"}
    text = page.read_text()
    assert text.count("<svg") == 2
    assert "Workers at work" in text


def test_a_run_without_an_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that never live through the start of their workers."""
    monkeypatch.setattr(simulate_clock, "MOST_EVENTS", 10_000)
    cluster = ClusterRates(nodes=2, node_mtbf_h=0.001)
    rates = PoolRates(workers=2, tokens_per_s=1, unit_tokens=1, start_s=1e6)
    with pytest.raises(PipelineError, match=r"after 10,000 events.*node_mtbf_h"):
        play(Simulation(name="x", samples=10, tokens_per_sample=10, cluster=cluster, generate=rates))


def test_a_page_needs_a_folder(tmp_path: Path) -> None:
    arguments = ["simulate", str(ROOT / "recipes" / "simulate-64.yaml"), "--page", str(tmp_path / "none" / "x.html")]
    done = CliRunner().invoke(dflash, arguments)
    assert done.exit_code == 2
    assert "is no folder" in done.output
