"""The Kubernetes manifests: against the operator's schema, the recipes and modules that they name, and secrets."""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pipeline.recipe import load_recipe

ROOT = Path(__file__).parents[1]
MANIFESTS = sorted((ROOT / "jobs" / "kubernetes").glob("*.yaml"))
SCHEMA = yaml.safe_load((Path(__file__).parent / "kubernetes" / "rayjob.schema.yaml").read_text())


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def pods(manifest: Any) -> list[Any]:
    cluster = manifest["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def named(path: Path) -> str:
    return path.name


def test_there_is_one_for_every_stage_and_a_smoke_test() -> None:
    names = {path.stem for path in MANIFESTS}
    assert names == {"generate", "extract", "train", "evaluate", "pipeline", "smoke"}


@pytest.mark.parametrize("path", MANIFESTS, ids=named)
def test_the_operator_takes_it(path: Path) -> None:
    manifest = loaded(path)
    jsonschema.validate(manifest, SCHEMA)
    broken = copy.deepcopy(manifest)
    broken["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["minReplica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="minReplica"):
        jsonschema.validate(broken, SCHEMA)


@pytest.mark.parametrize("path", MANIFESTS, ids=named)
def test_its_entrypoint_runs_a_module_on_a_recipe_that_takes_its_settings(path: Path) -> None:
    python, minus_m, module, *rest = shlex.split(loaded(path)["spec"]["entrypoint"])
    assert (python, minus_m, rest[0]) == ("python", "-m", "--recipe")
    assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file()
    assert rest[2::2] == ["--set"] * len(rest[3::2])
    recipe = load_recipe(ROOT / Path(rest[1]).relative_to("/app"), rest[3::2])
    assert str(recipe.run).startswith("/shared/")  # every pod mounts it
    for pod in pods(loaded(path)):
        assert [m["mountPath"] for m in pod["containers"][0]["volumeMounts"]] == ["/shared"]


@pytest.mark.parametrize("path", MANIFESTS, ids=named)
def test_what_a_recipe_asks_for_some_group_has(path: Path) -> None:
    manifest = loaded(path)
    _, _, _, _, recipe_file, *rest = shlex.split(manifest["spec"]["entrypoint"])
    recipe = load_recipe(ROOT / Path(recipe_file).relative_to("/app"), rest[1::2])
    groups = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    offered = [json.loads(json.loads(group["rayStartParams"]["resources"])) for group in groups]
    for stage in (recipe.generate, recipe.extract, recipe.train):
        for name in stage.resources:
            assert any(name in resources for resources in offered), f"no group has {name}"
    for group, resources in zip(groups, offered, strict=True):
        spot = any(t.get("value") == "spot" for t in group["template"]["spec"].get("tolerations", []))
        assert ("spot" in resources) == spot == ("spot" in group["groupName"])


@pytest.mark.parametrize("path", MANIFESTS, ids=named)
def test_the_head_does_no_work_tokens_are_on_and_the_cluster_goes(path: Path) -> None:
    spec = loaded(path)["spec"]
    assert spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    assert spec["shutdownAfterJobFinishes"]
    assert spec["ttlSecondsAfterFinished"] > 0


@pytest.mark.parametrize("path", MANIFESTS, ids=named)
def test_secrets_are_named_and_never_there(path: Path) -> None:
    for pod in pods(loaded(path)):
        for container in pod["containers"]:
            assert container["envFrom"] == [{"secretRef": {"name": "dflash", "optional": True}}]
            assert "env" not in container


def test_the_image_has_all_that_an_entrypoint_needs() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = [line.split()[1:-1] for line in (ROOT / "jobs/kubernetes/Dockerfile").read_text().splitlines()
              if line.startswith("COPY ")]  # fmt: skip
    names = {name for row in copied for name in row}
    assert {"cache_schema", "stages", "pipeline", "jobs", "recipes", "pyproject.toml", "constraints.txt"} <= names
    for name in names:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored
