"""A sweep: one YAML file that names a recipe, settings that differ from it, seeds, and what is compared with what.

    name: ablations
    recipe: ablations-base.yaml      # whose cache all settings train on; relative to this file
    seeds: [0, 1, 2]
    settings:
      base: {}
      N=3: {drafter.n_layers: 3}
    comparisons:
      - {title: Depth, source: "DFlash, Table 5", expected: deeper is better, order: [N=3, base]}
      - title: Where features enter
        source: control
        expected: injection beats the input alone at every depth
        x: [1, 3]
        x_label: layers N
        lines: {input: [in1, in3], injection: [inj1, inj3]}

`order` and `lines` go from what is expected to be worst to what is expected to be best.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checked_yaml import checked, read_mapping
from pipeline.errors import RecipeError
from pipeline.recipe import Recipe, load_recipe

MAY_DIFFER = ("drafter.", "train.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One picture of the page: settings in the order in which they are expected, or lines of them over `x`."""

    title: str
    source: str
    expected: str
    order: tuple[str, ...] = ()
    lines: dict[str, tuple[str, ...]] | None = None
    x: tuple[float, ...] = ()
    x_label: str = ""

    def pairs(self) -> list[tuple[str, str]]:
        """Settings of which the second is expected to do better: the two ends, then neighbours; of lines, at every `x`
        where they differ."""
        rows = [(name,) for name in self.order] if self.lines is None else list(self.lines.values())
        lines = list(itertools.pairwise(rows))
        if len(lines) > 1:
            lines.insert(0, (rows[0], rows[-1]))
        return [(a, b) for worse, better in lines for a, b in zip(worse, better, strict=True) if a != b]

    def named(self) -> list[str]:
        """Every setting that it needs."""
        return [*self.order, *(name for row in (self.lines or {}).values() for name in row)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    name: str
    recipe: str
    seeds: tuple[int, ...]
    settings: dict[str, dict[str, Any]]
    comparisons: tuple[Comparison, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """A sweep, checked.

    Attributes:
        name: of the sweep.
        base: the recipe whose cache is trained on.
        recipe_file: where that stands.
        seeds: each setting is trained with each.
        settings: overrides by name, as `key=value`.
        comparisons: what the page shows.
    """

    name: str
    base: Recipe
    recipe_file: Path
    seeds: tuple[int, ...]
    settings: dict[str, tuple[str, ...]]
    comparisons: tuple[Comparison, ...]

    def recipe(self, setting: str, seed: int) -> Recipe:
        """The recipe of one training."""
        run = json.dumps(str(self.base.run), ensure_ascii=False)
        return load_recipe(self.recipe_file, [*self.settings[setting], f"seed={seed}", f"run={run}"])


def load_sweep(path: Path, only: tuple[str, ...] = ()) -> Sweep:
    """Read and check a sweep, the recipe of every setting with every seed included.

    Args:
        path: the YAML file.
        only: names of settings; comparisons that need others are left out. Empty takes all.

    Raises:
        RecipeError: the file or one of its recipes does not fit; names file, key and what was expected.
    """
    found = _File(**checked(read_mapping(path, "sweep", _File), _File, where=str(path)))
    _require_sound(path, found)
    unknown = [name for name in only if name not in found.settings]
    if unknown:
        raise RecipeError(f"{path} has no setting {unknown[0]!r}; it has {', '.join(found.settings)}")
    settings = {
        name: tuple(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in changes.items())
        for name, changes in found.settings.items()
        if not only or name in only
    }
    recipe_file = path.parent / found.recipe
    sweep = Sweep(
        name=found.name, base=load_recipe(recipe_file), recipe_file=recipe_file, seeds=found.seeds, settings=settings,
        comparisons=tuple(c for c in found.comparisons if set(c.named()) <= settings.keys()),
    )  # fmt: skip
    for name, seed in itertools.product(settings, found.seeds):
        try:
            sweep.recipe(name, seed)
        except RecipeError as error:
            raise RecipeError(f"{path}: settings.{name} with seed {seed}: {error}") from error
    return sweep


def _require_sound(path: Path, found: _File) -> None:
    if not found.seeds or len(set(found.seeds)) != len(found.seeds):
        raise RecipeError(f"{path}: seeds is {list(found.seeds)}, but it must hold different seeds, at least one")
    if not found.settings:
        raise RecipeError(f"{path}: settings is empty, so there is nothing to train")
    for name, changes in found.settings.items():
        for key in changes:
            if not key.startswith(MAY_DIFFER):
                raise RecipeError(
                    f"{path}: settings.{name} changes {key}, but all settings train on one cache: only drafter.… and "
                    "train.… may differ"
                )
    for comparison in found.comparisons:
        if bool(comparison.order) == (comparison.lines is not None):
            raise RecipeError(f"{path}: comparison {comparison.title!r} needs either order or lines")
        for row in (comparison.lines or {}).values():
            if len(row) != len(comparison.x):
                raise RecipeError(f"{path}: comparison {comparison.title!r} has lines of another length than its x")
        for name in comparison.named():
            if name not in found.settings:
                known = ", ".join(found.settings)
                raise RecipeError(f"{path}: comparison {comparison.title!r} names {name!r}; settings are {known}")
