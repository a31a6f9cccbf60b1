"""The order of training: every sample once per epoch, in windows of shards, a pure function of plan and seed."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_schema import names
from cache_schema.identity import canonical_json
from cache_schema.plan import ShardPlan
from stages.anchors import stable_key
from stages.config import ConfigError, TrainConfig
from stages.errors import TrainingError
from stages.order import Step, StepPlan, heldout_mask, is_heldout, shuffle_keys


def shard_plan(n_samples: int, per_shard: int = 3) -> ShardPlan:
    ids = [f"s{i}" for i in range(n_samples)]
    return ShardPlan(ids, [5 + i % 7 for i in range(n_samples)], range(0, n_samples, per_shard))


def all_steps(plan: StepPlan) -> list[Step]:
    return [plan.step(i) for i in range(plan.n_steps)]


def visits(steps: list[Step]) -> list[tuple[int, str]]:
    return [visit for step in steps for visit in zip(step.epochs, step.sample_ids, strict=True)]


orders = st.fixed_dictionaries(
    {
        "samples": st.integers(1, 60),
        "per_shard": st.integers(1, 9),
        "batch": st.integers(1, 9),
        "window": st.integers(1, 6),
        "passes": st.integers(1, 3),
        "rounds": st.integers(1, 2),
        "seed": st.integers(0, 9),
    }
)


def make_plan(o: dict[str, Any], share: float = 0.0) -> StepPlan:
    config = TrainConfig(
        batch_samples=o["batch"], epochs=o["passes"] * o["rounds"], passes_per_window=o["passes"],
        window_shards=o["window"], heldout_share=share,
    )  # fmt: skip
    return StepPlan(shard_plan(o["samples"], o["per_shard"]), config, o["seed"])


@settings(max_examples=80, deadline=None)
@given(o=orders)
def test_every_sample_is_in_every_epoch_once(o: dict[str, Any]) -> None:
    plan = make_plan(o)
    steps = all_steps(plan)
    epochs = o["passes"] * o["rounds"]
    assert plan.n_steps == o["rounds"] * math.ceil(o["samples"] * o["passes"] / o["batch"])
    assert sorted(visits(steps)) == sorted((e, f"s{i}") for e in range(epochs) for i in range(o["samples"]))
    assert all(0 < len(step.sample_ids) <= o["batch"] for step in steps)  # the last, smaller step is there
    again = make_plan(o)
    assert [again.step(i) for i in reversed(range(plan.n_steps))] == steps[::-1]  # by index alone, in any order


@settings(max_examples=80, deadline=None)
@given(o=orders)
def test_shards_come_in_windows_and_a_window_is_done_before_the_next(o: dict[str, Any]) -> None:
    plan = make_plan(o)
    per_round = o["samples"] * o["passes"]
    order = visits(all_steps(plan))
    for number in range(o["rounds"]):
        windows = plan.windows(number)
        assert sorted(s for w in windows for s in w.shards) == list(range(plan.shard_plan.n_shards))
        assert all(len(w.shards) <= o["window"] for w in windows)
        assert [w.start for w in windows] == [0, *(w.stop for w in windows[:-1])]
        assert windows[-1].stop == per_round
        for window in windows:
            part = order[number * per_round + window.start : number * per_round + window.stop]
            inside = {names.shard_index(plan.shard_plan.shard_of(s)) for _, s in part}
            assert inside == set(window.shards)
            # Pass after pass: the epoch numbers rise, each with all samples of the window.
            epochs = [e for e, _ in part]
            assert epochs == sorted(epochs)
            assert set(Counter(epochs).values()) == {len(part) // o["passes"]}


def test_a_step_reads_at_most_its_window_and_the_begin_of_the_next() -> None:
    plan = StepPlan(shard_plan(300, 3), TrainConfig(epochs=1, batch_samples=4, window_shards=8, heldout_share=0.1), 3)
    windows = plan.windows(0)
    for index in range(plan.n_steps):
        at = next(i for i, w in enumerate(windows) if w.stop > index * 4)
        near = {s for w in windows[at : at + 2] for s in w.shards}
        assert plan.shards_of_step(index) <= near
    shards, steps = plan.visits(0)
    assert len(shards) == plan.n_training
    for index in range(plan.n_steps):
        assert set(shards[steps == index].tolist()) == plan.shards_of_step(index)


def test_one_window_for_all_shuffles_everything() -> None:
    plan = StepPlan(shard_plan(200, 5), TrainConfig(epochs=1, batch_samples=10, heldout_share=0.0), 0)
    first = plan.step(0).sample_ids
    assert len({plan.shard_plan.shard_of(s) for s in first}) > 6


@settings(max_examples=60, deadline=None)
@given(o=orders, world=st.integers(1, 5))
def test_ranks_share_a_step_without_loss_or_repetition(o: dict[str, Any], world: int) -> None:
    for step in all_steps(make_plan(o)):
        shares = [step.sample_ids[rank::world] for rank in range(world)]
        assert sorted(s for share in shares for s in share) == sorted(step.sample_ids)


def test_the_order_changes_with_seed_and_epoch() -> None:
    config = TrainConfig(batch_samples=30, epochs=2, heldout_share=0.0)
    found = {StepPlan(shard_plan(30), config, seed).step(epoch).sample_ids for seed in (0, 1) for epoch in (0, 1)}
    assert len(found) == 4
    twice = StepPlan(shard_plan(30), dataclasses.replace(config, passes_per_window=2), 0)
    assert twice.step(0).sample_ids != twice.step(1).sample_ids
    assert (twice.step(0).epochs, twice.step(1).epochs) == ((0,) * 30, (1,) * 30)


def test_the_order_is_what_it_always_was() -> None:
    """Pinned: a release of numpy, another machine or a careless change must not move it."""
    config = TrainConfig(epochs=4, passes_per_window=2, batch_samples=4, window_shards=3, heldout_share=0.1)
    plan = StepPlan(shard_plan(40, 3), config, 11)
    text = canonical_json([[list(s.sample_ids), list(s.epochs)] for s in all_steps(plan)])
    assert hashlib.sha256(text.encode()).hexdigest() == GOLDEN
    assert shuffle_keys(3, "order", 0, 0).tolist() == splitmix64(stable_key("order", 0, 0) % 2**64, 3)


GOLDEN = "eaeadbbd4f6d5751ebb8ff4756a0833a095a72bda29331c72bcacdd7ccd24b91"


def splitmix64(state: int, n: int) -> list[int]:
    """The published generator, in plain integers."""
    found = []
    for _ in range(n):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        found.append(z ^ (z >> 31))
    return found


def test_splitmix64_gives_its_published_numbers() -> None:
    assert splitmix64(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_keys_are_distinct_and_the_shuffle_is_fair() -> None:
    assert len(np.unique(shuffle_keys(200_000, "a"))) == 200_000
    # Where 20 things end up over 4,000 shuffles: each place is as likely, within five standard deviations.
    places = np.zeros((20, 20))
    for i in range(4000):
        places[np.arange(20), np.argsort(shuffle_keys(20, "fair", i))] += 1
    assert np.abs(places - 200).max() < 5 * math.sqrt(200)


def test_held_out_samples_are_chosen_by_id() -> None:
    config = TrainConfig(heldout_share=0.2, heldout_max=1000)
    few, many = (StepPlan(shard_plan(n), config, 0) for n in (200, 400))
    assert not set(few.heldout) & set(few.training)
    assert len(few.heldout) + len(few.training) == 200
    assert 20 <= len(few.heldout) <= 60
    assert set(few.heldout) <= set(many.heldout)
    capped = StepPlan(shard_plan(200), dataclasses.replace(config, heldout_max=5), 0)
    assert capped.heldout == few.heldout[:5]
    assert capped.training == few.training  # those beyond the cap are not trained on either
    assert not {s for step in all_steps(few) for s in step.sample_ids} & set(few.heldout)


def test_held_out_is_a_function_of_one_id() -> None:
    ids = [f"sample {i} ✓" for i in range(500)]
    mask = heldout_mask(ids, 3, 0.3)
    assert mask.tolist() == [is_heldout(s, 3, 0.3) for s in ids]
    assert mask.tolist() == [stable_key("heldout", 3, s) / 2**128 < 0.3 for s in ids]
    assert not heldout_mask(ids, 3, 0.0).any()


def test_nothing_to_train_on_is_an_error() -> None:
    for plan, share in ((ShardPlan([], [], []), 0.0), (shard_plan(1), 0.9999999)):
        with pytest.raises(TrainingError, match="none is left to train on"):
            StepPlan(plan, TrainConfig(heldout_share=share), 0)


def test_epochs_that_passes_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.epochs is 5, but .* multiple of train.passes_per_window \(2\)"):
        TrainConfig(epochs=5, passes_per_window=2)


def test_a_step_beyond_the_end_is_no_step() -> None:
    plan = StepPlan(shard_plan(5), TrainConfig(epochs=1, heldout_share=0.0), 0)
    for index in (-1, plan.n_steps):
        with pytest.raises(IndexError, match="is none of this run's"):
            plan.step(index)


def test_a_million_samples_are_no_matter() -> None:
    plan = shard_plan(1_000_000, 100)
    began = time.process_time()
    order = StepPlan(plan, TrainConfig(epochs=1, window_shards=32, heldout_share=0.01), 0)
    made = time.process_time() - began
    order.step(0)
    order.step(order.n_steps - 1)
    assert time.process_time() - began - made < 3
    began = time.process_time()
    heldout_mask(plan.sample_ids[:100_000], 0, 0.01)
    assert time.process_time() - began < 0.5
    assert made < 6


def test_what_goes_back_to_one_prompt_is_held_out_together() -> None:
    ids = [f"row-{i}" for i in range(300)]
    plain = heldout_mask(ids, 3, 0.2)
    assert 20 < plain.sum() < 110
    for suffix in ("~2", "#turn-2", "~3#turn-1"):
        np.testing.assert_array_equal(heldout_mask([f"{s}{suffix}" for s in ids], 3, 0.2), plain)
