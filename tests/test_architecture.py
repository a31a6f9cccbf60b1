"""The shape of the house: which way imports point, and what is never used. See the README's map of folders."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("cache_schema", "stages", "pipeline", "jobs")
HEAVY = ("torch", "transformers", "ray", "datasets", "pyarrow", "zarr", "matplotlib", "pandas")
FILES = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]
SCRIPTS = [*FILES, *sorted((ROOT / "scripts").rglob("*.py"))]


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{named(path)}:{node.lineno}: relative import; write the package's name"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


def test_there_is_something_to_look_at() -> None:
    assert {path.parts[len(ROOT.parts)] for path in FILES} == set(LAYERS)
    assert "pydantic" in tops(ROOT / "pipeline" / "checked_yaml.py")
    assert "ray" in tops(ROOT / "pipeline" / "seats.py")


@pytest.mark.parametrize("path", FILES, ids=named)
def test_imports_point_one_way(path: Path) -> None:
    layer = LAYERS.index(path.relative_to(ROOT).parts[0])
    upwards = tops(path) & {*LAYERS[layer + 1 :], "tests"}
    assert not upwards, f"{named(path)} imports {upwards}, but arrows go {' <- '.join(LAYERS)}"


@pytest.mark.parametrize("path", FILES, ids=named)
def test_layers_know_nothing_of_what_is_not_theirs(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    forbidden = {
        "cache_schema": {"torch", "ray", "transformers", "click", "rich"},
        "stages": {"ray", "click", "rich"},
        "pipeline": set(),
        "jobs": {"torch", "transformers"},
    }[layer]
    if named(path) == "stages/train_ray.py":
        forbidden = forbidden - {"ray"}
    found = tops(path) & forbidden
    assert not found, f"{named(path)} imports {found}, which {layer}/ knows nothing of"


@pytest.mark.parametrize("path", SCRIPTS, ids=named)
def test_nothing_is_pickled_and_no_foreign_code_runs(path: Path) -> None:
    found = tops(path) & {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    assert not found, f"{named(path)} imports {found}: nothing on disk is pickled"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        where = f"{named(path)}:{getattr(node, 'lineno', '?')}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in {("torch", "load"), ("torch", "save")}, f"{where}: use safetensors"
        if isinstance(node, ast.keyword):
            on = isinstance(node.value, ast.Constant) and node.value.value is True
            assert not (node.arg == "trust_remote_code" and on), f"{where}: code of a model runs only if a recipe asks"
            assert not (node.arg == "allow_pickle" and on), f"{where}: nothing on disk is pickled"


def loaded_by(*arguments: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """Run Python with these arguments; also the top-level modules that it imported."""
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return done, {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


@pytest.mark.skipif(not (ROOT / "pipeline" / "cli.py").is_file(), reason="the command line is not written yet")
def test_help_is_instant() -> None:
    done, modules = loaded_by("-c", "from pipeline.cli import main; main()", "--help")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Usage" in done.stdout
    assert "click" in modules  # so the look at what was loaded works
    assert not modules & set(HEAVY)


@pytest.mark.parametrize("module", ["pipeline.recipe", "pipeline.runner", "pipeline.progress", "stages.config"])
def test_light_modules_stay_light(module: str) -> None:
    done, modules = loaded_by("-c", f"import {module}")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "os" in modules or "typing" in modules  # so the look at what was loaded works
    assert not modules & set(HEAVY)


@pytest.mark.parametrize(("given", "then"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_waiting_openmp_threads_sleep_unless_told_otherwise(given: str | None, then: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    environment |= {} if given is None else {"OMP_WAIT_POLICY": given}
    code = "import sys, stages, os; assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    found = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.strip() == then, found.stderr
