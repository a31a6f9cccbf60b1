"""YAML as people mean it: `3e-4` is a number, a key stands once, a date is a text.

PyYAML follows YAML 1.1, where `3e-4` is a string (no dot), `1:30` is 90 and `010` is 8. This loader takes
numbers from YAML 1.2 and keeps 1.1's `yes/no/on/off` as booleans, because a template switch that silently
became the text "off" would count as true.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import yaml

from pipeline.errors import RecipeError


class _Loader(yaml.SafeLoader):
    """SafeLoader with the changes that the module's docstring names."""


_REPLACED = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag not in _REPLACED]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9][0-9_]*$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


def _mark(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(node.value.replace("_", ""))


def _float(loader: _Loader, node: yaml.ScalarNode) -> float:
    value = float(node.value.lower().replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))
    if not math.isfinite(value):
        text = f"found {node.value}, expected a finite number"
        raise yaml.constructor.ConstructorError(None, None, text, node.start_mark)
    return value


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    seen: dict[str, yaml.Node] = {}
    for key, _ in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        if key.tag != "tag:yaml.org,2002:str":
            text = f"found {getattr(key, 'value', 'a collection')!r} as a key, expected a text (quote it)"
            raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
        if key.value in seen:
            text = f"the key {key.value!r} stands twice, first on {_mark(seen[key.value])}; expected once"
            raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
        seen[key.value] = key
    loader.flatten_mapping(node)
    return {str(loader.construct_object(k, deep=True)): loader.construct_object(v, deep=True) for k, v in node.value}


_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse_yaml(text: str, *, where: str) -> Any:
    """The value of a YAML text, made of dicts, lists, strings, numbers, booleans and None only.

    Args:
        where: file or option the text comes from, for messages.

    Raises:
        RecipeError: the text is no YAML, a key stands twice or is no text, or a number is not finite.
    """
    try:
        value = yaml.load(text, Loader=_Loader)  # a SafeLoader: builds plain values only
        json.dumps(value)  # refuses what JSON has no word for: !!set, !!binary, a list that holds itself
        return value
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise RecipeError(f"{where}: {line}{error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
        raise RecipeError(f"{where}: this is not readable as YAML: {error}") from error
