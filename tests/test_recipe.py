"""Recipes: what is read, what is refused and in which words, overrides, and what enters an identity."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import RecipeError
from pipeline.recipe import STAGES, Recipe, load_recipe
from pipeline.simulate_file import load_simulation
from pipeline.sweep_file import load_sweep
from pipeline.yaml_text import parse_yaml
from stages.config import PROFILES, CacheConfig, ConfigError, identity_fields

ROOT = Path(__file__).parents[1]

SMALL = """
name: small
target: {model: some/model}
prompts:
  sources:
    - path: a.jsonl
    - path: b.jsonl
      limit: 5
evaluate:
  sources:
    - path: c.jsonl
"""


def write(folder: Path, text: str = SMALL) -> Path:
    path = folder / "r.yaml"
    path.write_text(text)
    return path


def fault(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(folder, text), overrides)
    return str(caught.value)


# --- reading ------------------------------------------------------------------------------------------


def test_defaults_are_filled_in(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path))
    assert (recipe.name, recipe.run, recipe.seed, recipe.base) == ("small", Path("runs/small"), 0, tmp_path)
    assert recipe.train.lr == 6e-4
    assert recipe.drafter.block_size == 16
    assert [s.limit for s in recipe.prompts.sources] == [None, 5]


def test_an_empty_section_means_its_defaults(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, SMALL + "train:\n  # lr: 1\n")).train.epochs == 6


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4), ("6E-4", 6e-4), ("1e5", 1e5), ("-2.5", -2.5), (".5", 0.5), ("1.", 1.0), ("+7", 7),
        ("800_000", 800_000), ("010", 10), ("true", True), ("off", False), ("null", None), ("", None),
        ("1:30", "1:30"), ("2024-01-02", "2024-01-02"), ("1.2.3", "1.2.3"), ("1e", "1e"), ("e5", "e5"),
        ("'3'", "3"), ("[1, 2]", [1, 2]), ("{a: 1e-2}", {"a": 0.01}), ("a=b", "a=b"),
    ],
)  # fmt: skip
def test_yaml_values(text: str, value: Any) -> None:
    found = parse_yaml(text, where="test")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "test: line 3: the key 'a' stands twice, first on line 1"),
        ("a: .inf", "test: line 1: found .inf, expected a finite number"),
        ("a: .NaN", "finite"),
        ("1: x", "found '1' as a key"),
        ("a: [1", "test: line 1"),
        ("a: &x [*x]", "recursive"),
        ("a: !!set {b}", "not readable"),
        ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("a: \x00", "not readable"),
    ],
)
def test_yaml_that_is_refused(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_yaml(text, where="test")
    assert message in str(caught.value)


# --- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("addition", "message"),
    [
        ("trian: {lr: 1.0}", "unknown key trian; did you mean train?"),
        ("train: {learning_rate: 1.0}", "unknown key train.learning_rate; known keys here are anchors, gamma, lr,"),
        ("train: {epoch: 1}", "unknown key train.epoch; did you mean train.epochs?"),
        ("train: {block_size: 8}", "unknown key train.block_size; did you mean drafter.block_size?"),
        ("base: /x", "unknown key base"),
        ("train: {lr: '3e-4'}", "train.lr: found '3e-4' (a text), expected a number"),
        ("train: {epochs: 2.5}", "train.epochs: found 2.5 (a number), expected an integer"),
        ("train: {epochs: true}", "train.epochs: found true (a boolean), expected an integer"),
        ("train: {lr: true}", "train.lr: found true (a boolean), expected a number"),
        ("train: {bf16: 1}", "train.bf16: found 1 (an integer), expected true or false"),
        ("train: {epochs: null}", "train.epochs: found nothing (null), expected an integer"),
        ("cache: {dtype: bf16}", "cache.dtype: found 'bf16' (a text), expected 'bfloat16', 'float16', 'float8_e4m3f"),
        ("cache: {layer_ids: 3}", "cache.layer_ids: found 3 (an integer), expected a list"),
        ("cache: {layer_ids: [1, x]}", "cache.layer_ids.1: found 'x' (a text), expected an integer"),
        ("cache: {layer_ids: [2, 1]}", "cache.layer_ids is (2, 1), but the ids must be strictly increasing"),
        ("train: [1]", "train: found [1] (a list), expected a mapping"),
        ("train: {epochs: 0}", "train.epochs is 0, but it must be above 0"),
        ("seed: a", "seed: found 'a' (a text), expected an integer"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, addition: str, message: str) -> None:
    text = fault(tmp_path, SMALL + addition)
    assert text.startswith(str(tmp_path / "r.yaml"))
    assert message in text


def test_an_integer_is_a_fit_number(tmp_path: Path) -> None:
    lr = load_recipe(write(tmp_path, SMALL + "train: {lr: 1}")).train.lr
    assert (lr, type(lr)) == (1.0, float)


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    text = fault(tmp_path, "name: 3\ntarget: {modle: x}\nprompts: {sources: [{path: 1, limt: 2}]}\n")
    lines = text.splitlines()
    assert all(line.startswith(str(tmp_path / "r.yaml")) for line in lines)
    for message in (
        "unknown key target.modle; did you mean target.model?",
        "unknown key prompts.sources.0.limt; did you mean prompts.sources.0.limit?",
        "name: found 3 (an integer), expected a text",
        "target.model is missing; it has no default",
        "prompts.sources.0.path: found 1",
        "evaluate is missing; expected a section with at least sources",
    ):
        assert any(message in line for line in lines), message


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    assert "expected a mapping with the keys name, run, seed" in fault(tmp_path, "")
    assert "found 'hello' (a text), expected a mapping" in fault(tmp_path, "hello")
    with pytest.raises(RecipeError, match=r"nowhere\.yaml: the recipe cannot be read"):
        load_recipe(tmp_path / "nowhere.yaml")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe4\n")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path / "latin.yaml")


# --- overrides ----------------------------------------------------------------------------------------


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path, SMALL + "train: {lr: 1.0}"),
        [
            "train.lr=3e-4",
            "prompts.sources.0.limit=10",
            "cache.layer_ids=[1, 8]",
            "target.chat_template_kwargs.enable_thinking=false",
            "name=other",
            "train.lr=2e-4",
        ],
    )
    assert recipe.train.lr == 2e-4
    assert recipe.prompts.sources[0].limit == 10
    assert recipe.cache.layer_ids == (1, 8)
    assert recipe.target.chat_template_kwargs == {"enable_thinking": False}
    assert recipe.run == Path("runs/other")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr", "--set train.lr: expected dotted.key=value"),
        ("=3", "expected dotted.key=value"),
        ("train..lr=3", "expected dotted.key=value"),
        ("trian.lr=1.0", "--set trian.lr=1.0: unknown key trian; did you mean train?"),
        ("train.lrr=1.0", "unknown key train.lrr; did you mean train.lr?"),
        ("prompts.sources.0.lmit=1", "unknown key prompts.sources.0.lmit; did you mean prompts.sources.0.limit?"),
        ("prompts.sources.7.limit=1", "prompts.sources has 2 items, expected an index below that, not '7'"),
        ("prompts.sources.x.limit=1", "not 'x'"),
        ("train.lr.x=1", "train.lr is a single value and has no 'x' in it"),
        ("train.lr=abc", "train.lr: found 'abc' (a text), expected a number"),
        ("train.lr={a: 1, a: 2}", "--set train.lr={a: 1, a: 2}: line 1: the key 'a' stands twice"),
        ("train.epochs=0", "--set train.epochs=0: train.epochs is 0"),
    ],
)
def test_bad_overrides_are_named(tmp_path: Path, override: str, message: str) -> None:
    assert message in fault(tmp_path, SMALL, override)


# --- identity -----------------------------------------------------------------------------------------


def config_classes(cls: type = Recipe) -> set[type]:
    """Every config that a recipe is made of, itself included."""
    found: set[type] = {cls}
    for hint in typing.get_type_hints(cls).values():
        for kind in (hint, *typing.get_args(hint)):
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                found |= config_classes(kind)
    return found


def test_every_setting_is_tagged() -> None:
    classes = config_classes()
    assert len(classes) == 12
    for cls in classes:
        for f in dataclasses.fields(cls):
            assert f.metadata.get("kind") in ("identity", "execution"), f"{cls.__name__}.{f.name} has no tag"


def other_value(value: Any) -> Any:
    """A value of the same kind that differs; execution fields are of few kinds."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2
    if isinstance(value, Path):
        return value / "elsewhere"
    if isinstance(value, tuple):
        return (*value, "http://other:8000")
    if isinstance(value, dict):
        return {**value, "other": 1}
    return f"{value}x" if isinstance(value, str) else 3


def test_execution_settings_never_enter_an_identity(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path))
    changed = 0
    for section in dataclasses.fields(Recipe):
        config = getattr(recipe, section.name)
        if section.metadata["kind"] == "execution":
            other = dataclasses.replace(recipe, **{section.name: other_value(config)})
            changed += 1
        elif dataclasses.is_dataclass(config) and not isinstance(config, type):
            names = [f.name for f in dataclasses.fields(config) if f.metadata["kind"] == "execution"]
            values = {name: other_value(getattr(config, name)) for name in names}
            if "api_key_env" in values:
                values["api_key_env"] = "OTHER_KEY"
            if "label_selector" in values:
                values["label_selector"] = {"other": "x"}
            if section.name == "cache":
                values["path"] = "elsewhere"
            if section.name == "train":
                values |= {"min_workers": 1, "trackers": ("wandb",)}
            other = dataclasses.replace(recipe, **{section.name: dataclasses.replace(config, **values)})
            changed += len(names)
            assert not set(names) & set(identity_fields(config))
        else:
            continue
        for stage in STAGES:
            assert other.identity(stage) == recipe.identity(stage), (stage, section.name)
    assert changed > 15


@pytest.mark.parametrize(
    ("override", "stages"),
    [
        ("seed=1", STAGES),
        ("target.model=x", STAGES),
        ("prompts.sources.1.limit=6", STAGES),
        ("generate.temperature=0.5", STAGES),
        ("cache.max_length=100", STAGES[1:]),
        ("drafter.block_size=8", STAGES[2:]),
        ("train.lr=1", STAGES[2:]),
        ("evaluate.max_new_tokens=9", ("evaluate",)),
        ("export.license=mit", ()),
        ("name=x", ()),
    ],
)
def test_identity_settings_enter_the_stages_that_read_them(
    tmp_path: Path, override: str, stages: tuple[str, ...]
) -> None:
    path = write(tmp_path)
    before, after = load_recipe(path), load_recipe(path, [override])
    assert tuple(s for s in STAGES if before.identity(s) != after.identity(s)) == stages


def test_identity_is_json_and_knows_its_stages(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path))
    assert json.loads(json.dumps(recipe.identity("evaluate"))) == recipe.identity("evaluate")
    with pytest.raises(RecipeError, match="unknown stage 'tain'"):
        recipe.identity("tain")


def test_to_json_has_every_setting(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path))
    out = recipe.to_json()
    assert json.loads(json.dumps(out)) == out
    assert list(out) == [f.name for f in dataclasses.fields(Recipe)]
    assert out["run"] == "runs/small"
    assert out["prompts"]["sources"][1] == {
        "path": "b.jsonl", "subset": None, "split": "train", "category": None, "limit": 5,
        "cap": None, "weight": None,
    }  # fmt: skip


# --- the recipes that come with the project -------------------------------------------------------------


OTHERS = {"ablations.yaml": load_sweep, "simulate-64.yaml": load_simulation, "simulate-1000.yaml": load_simulation}


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.name)
def test_recipes_load(path: Path) -> None:
    assert OTHERS.get(path.name, load_recipe)(path).name == path.stem


def test_the_real_recipe_has_the_settings_of_the_paper() -> None:
    recipe = load_recipe(ROOT / "recipes" / "qwen3-8b.yaml")
    train = recipe.train
    assert (recipe.drafter.block_size, recipe.drafter.n_layers, recipe.cache.n_layers) == (16, 5, 5)
    assert (train.anchors, train.gamma, train.lr, train.warmup_share, train.clip) == (512, 7.0, 6e-4, 0.04, 1.0)
    assert (train.epochs, recipe.cache.max_length) == (6, 3072)
    assert recipe.target.chat_template_kwargs == {"enable_thinking": False}
    assert sum(s.limit or 0 for s in recipe.prompts.sources) == 800_000


@pytest.mark.parametrize("profile", ["exact", "compact", "tiny"])
def test_a_profile_is_short_for_its_settings(profile: str) -> None:
    chosen = PROFILES[profile]
    by_name, one_by_one = CacheConfig(profile=profile), CacheConfig(**chosen)  # type: ignore[arg-type]
    assert by_name == one_by_one == CacheConfig(profile=profile, **chosen)  # type: ignore[arg-type]
    assert dataclasses.replace(by_name, max_length=99).dtype == chosen["dtype"]
    with pytest.raises(ConfigError, match=r"cache\.dtype is 'float16', but cache\.profile .* stands for"):
        CacheConfig(profile=profile, dtype="float16")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "bfloat16", "bits": 5}, "bfloat16 features have bits 5"),
        ({"dtype": "int8", "bits": 3}, "bits 3; it must be 4 to 8"),
        ({"dtype": "float16", "group": 32}, "have a group of 32"),
        ({"dtype": "int8", "group": 0}, "a group of 0 channels"),
        ({"max_bytes": 0}, "cache.max_bytes is 0"),
    ],
)
def test_impossible_feature_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**settings)


@pytest.mark.parametrize("override", ["run=s3://K:hush@b/c", "cache.path=s3:/K:hush@b/x", 'cache.path=""'])
def test_a_place_that_is_neither_folder_nor_url_is_refused_unseen(tmp_path: Path, override: str) -> None:
    with pytest.raises((RecipeError, ConfigError)) as caught:
        load_recipe(write(tmp_path), [override])
    assert "not shown" in str(caught.value) or "cache.path" in str(caught.value)


@pytest.mark.parametrize(
    "override", ["cache.path=s3://K:hush@b/c", "cache.pth=s3://K:hush@b/c", "cache.path=[s3://K:hush@b/c]"]
)
def test_no_message_of_the_command_line_shows_a_password(tmp_path: Path, override: str) -> None:
    command = ["plan", str(write(tmp_path)), "--set", override, "--set", "train.epochs=0"]
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *command], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 2
    assert "error:" in done.stderr
    assert "hush" not in done.stdout + done.stderr
