"""Reading values that other programs wrote, without trusting their shape: wrong kinds become None or empty."""

from __future__ import annotations

import json
import math
from typing import Any

from cache_schema.storage import Location, read_at


def read_json(path: Location, problems: list[str]) -> Any:
    """The content of a JSON file; None when it is not there, and None with a problem when it is damaged."""
    try:
        return finite(json.loads(read_at(path)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path}: cannot be read as JSON ({error}); what it says is left out")
        return None


def finite(value: Any) -> Any:
    """The value with every NaN and infinity replaced by None: strict JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def as_dict(value: Any) -> dict[str, Any]:
    """The value if it is a dict, else an empty one."""
    return value if isinstance(value, dict) else {}


def dict_rows(value: Any) -> list[dict[str, Any]]:
    """The dicts of a list; anything else gives none."""
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def number(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def numbers(values: Any) -> list[float | None]:
    """The numbers of a list, None where an item is none; anything but a list gives an empty one."""
    return [number(v) for v in values] if isinstance(values, list) else []
