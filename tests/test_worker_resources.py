"""What a recipe says about GPUs, memory, custom resources and labels, and what Ray makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.runner_cluster import cluster
from pipeline.errors import PipelineError
from pipeline.pool import worker_resources
from pipeline.ray_session import require_room
from pipeline.runner import run_pool
from pipeline.seats import amounts_of
from stages.config import ConfigError, ExtractConfig, GenerateConfig, TrainConfig
from stages.group import Member

SPOT: dict[str, Any] = {"resources": {"spot": 0.001}, "label_selector": {"ray.io/market-type": "spot"}}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"gpus": -1}, "gpus is -1"),
        ({"gpus": 1.5}, r"gpus is 1\.5, but it must be a whole number, a part of one GPU"),
        ({"memory_bytes": 0}, "memory_bytes is 0"),
        ({"resources": {"spot": 0}}, r"resources\.spot is 0"),
        ({"resources": {"GPU": 1}}, r"resources\.GPU is 1, but .* settings of their own"),
        ({"label_selector": {"": "spot"}}, "label_selector: a label is '', but"),
        ({"label_selector": {"zone": "in(a, b"}}, r"label_selector.zone is 'in\(a, b', but Ray selects by `value`"),
    ],
)
def test_what_no_run_could_use_is_refused(settings: dict[str, Any], text: str) -> None:
    for kind, stage in ((GenerateConfig, "generate"), (ExtractConfig, "extract"), (TrainConfig, "train")):
        with pytest.raises(ConfigError, match=rf"{stage}\.{text}"):
            kind(**settings)


LABELS = [("zone", "a"), ("ray.io/market-type", "!spot"), ("zone", "in(a,b)"), ("zone", "!in(a, b.c-d_e)"), ("z", "9"),
          ("zone", "-a"), ("zone", "!!a"), ("zone", "in()"), ("zone", "in(a,"), ("zone", "in(a,  b)"), ("zone", "a b"),
          ("zone", "a" * 63), ("zone", "a" * 64), ("zone", "in(a, !b)"), ("-zone", "a"), ("a_b/zone", "a"),
          ("zo ne", "a"), ("zone", "notin(a)"), ("zone", "a\n")]  # fmt: skip


@pytest.mark.parametrize(("label", "wanted"), LABELS)
def test_a_recipe_takes_the_label_selectors_that_ray_takes(label: str, wanted: str) -> None:
    from ray._private.label_utils import validate_label_selector

    try:
        ExtractConfig(label_selector={label: wanted})
        taken = True
    except ConfigError:
        taken = False
    assert taken == (validate_label_selector({label: wanted}) is None)


def test_the_recipe_decides_what_each_process_takes() -> None:
    config = ExtractConfig(gpus=2, memory_bytes=10**9, **SPOT)
    options = worker_resources(config, None)
    assert options == {"num_cpus": 1, "num_gpus": 2, "memory": 10**9, **SPOT}
    assert amounts_of(options) == {"CPU": 1, "GPU": 2, "memory": 10**9, "spot": 0.001}
    assert worker_resources(config, 3, gpu=False) == {"num_cpus": 3.0, "memory": 10**9, **SPOT}
    assert worker_resources(ExtractConfig(gpus=0), 3) == {"num_cpus": 3.0}


def test_gpus_of_the_cluster_count_where_the_driver_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 4.0})
    assert worker_resources(ExtractConfig(), None) == {"num_cpus": 1, "num_gpus": 1.0}


def test_a_training_takes_the_same_settings() -> None:
    from stages.train_ray import _scaling

    scaling = _scaling(TrainConfig(threads=2, memory_bytes=10**9, **SPOT), 0.5)
    assert scaling.resources_per_worker == {"CPU": 2, "GPU": 0.5, "memory": 10**9, "spot": 0.001}
    assert scaling.label_selector == SPOT["label_selector"]
    assert scaling.use_gpu


def test_one_machine_that_lacks_them_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "memory": 100.0})
    with pytest.raises(PipelineError, match=r"needs 0\.001 spot, but this machine offers Ray 0: .* recipe's resources"):
        require_room({"CPU": 1, "spot": 0.001})
    with pytest.raises(PipelineError, match=r"needs 200 memory.*memory_bytes"):
        require_room({"memory": 100}, 2)
    with pytest.raises(PipelineError, match=r"labels .*market-type.*leave the recipe's label_selector out"):
        require_room({"CPU": 1}, label_selector=SPOT["label_selector"])


class WhereWorker:
    """Tells its node."""

    def __init__(self, member: Member | None = None) -> None:
        self.member = member

    def run(self, unit: int, attempt: int) -> dict[str, Any]:
        import ray

        return {"node": ray.get_runtime_context().get_node_id()}


@pytest.mark.ray
@pytest.mark.cluster
@pytest.mark.slow
def test_workers_and_groups_go_to_the_nodes_that_the_recipe_names() -> None:
    def places(**options: Any) -> set[str]:
        resources = worker_resources(ExtractConfig(threads=1, **SPOT), 1)
        return {r["node"] for r in run_pool(range(4), WhereWorker, n_workers=2, resources=resources, **options)}

    with cluster() as nodes:
        nodes.add()
        spot = nodes.add(num_cpus=2, resources={"spot": 1}, labels={"ray.io/market-type": "spot"})
        assert places() == {spot}
        assert places(group_size=2) == {spot}
