"""What a part of the responses table looks like: columns, the `Response` of a row, and the checks on one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache_schema import names
from cache_schema.errors import ResponsesError
from cache_schema.identity import canonical_json

SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("messages", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("category", pa.string()),
        pa.field("sampling", pa.string(), nullable=False),
    ]
)
"""Columns of a part. `messages` and `sampling` are canonical JSON."""
FINISH_REASONS = ("stop", "length", "given")
KEPT_REASONS = frozenset({"prompt_shortened", "unanswered_turn"})
"""Reasons in a part's ledger that tell of a change to a sample that is there, and not of a loss."""


@dataclass(frozen=True, slots=True)
class Response:
    """One sample: a conversation as the target saw it, and its answer."""

    sample_id: str
    messages: list[dict[str, Any]]
    prompt_ids: NDArray[np.int32]
    """[prompt tokens] int32."""
    response_ids: NDArray[np.int32]
    """[response tokens] int32."""
    loss_mask: NDArray[np.uint8]
    """[prompt + response tokens] uint8; 1 marks a supervised token."""
    finish_reason: str
    """`stop`, `length` or `given`."""
    category: str | None
    sampling: dict[str, Any]
    """Settings of the answer, for the record."""

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """Prompt and response end to end, [prompt + response tokens] int32."""
        return np.concatenate([self.prompt_ids, self.response_ids])


def conversation_id(sample_id: str) -> str:
    """The conversation that a sample was made of: the id without the `#turn-2` of a later turn's sample."""
    base, mark, number = sample_id.rpartition("#turn-")
    return base if mark and number.isdecimal() else sample_id


def prompt_id(sample_id: str) -> str:
    """The row of the prompts that a sample goes back to: the conversation's id without the `~2` of a second answer."""
    conversation = conversation_id(sample_id)
    base, mark, number = conversation.rpartition("~")
    return base if mark and number.isdecimal() else conversation


def to_table(responses: Sequence[Response], where: str) -> pa.Table:
    seen: set[str] = set()
    for r in responses:
        names.require_sample_id(r.sample_id)
        _require_well_formed(r, where)
        if r.sample_id in seen:
            raise ResponsesError(f"{where}: sample {r.sample_id!r} occurs twice; ids must be unique")
        seen.add(r.sample_id)
    columns = {
        "sample_id": [r.sample_id for r in responses],
        "messages": [canonical_json(r.messages) for r in responses],
        "prompt_ids": [r.prompt_ids for r in responses],
        "response_ids": [r.response_ids for r in responses],
        "loss_mask": [r.loss_mask for r in responses],
        "finish_reason": [r.finish_reason for r in responses],
        "category": [r.category for r in responses],
        "sampling": [canonical_json(r.sampling) for r in responses],
    }
    return pa.table({f.name: pa.array(columns[f.name], type=f.type) for f in SCHEMA}, schema=SCHEMA)


def _require_well_formed(r: Response, where: str) -> None:
    for field, dtype in (("prompt_ids", np.int32), ("response_ids", np.int32), ("loss_mask", np.uint8)):
        value = getattr(r, field)
        if value.ndim != 1 or value.dtype != dtype:
            raise ResponsesError(
                f"{where}: {field} of sample {r.sample_id!r} is {value.dtype}{list(value.shape)}, expected one axis "
                f"of {np.dtype(dtype)}"
            )
    expected = len(r.prompt_ids) + len(r.response_ids)
    if len(r.loss_mask) != expected or (r.loss_mask > 1).any():
        raise ResponsesError(
            f"{where}: loss_mask of sample {r.sample_id!r} has {len(r.loss_mask)} values, largest "
            f"{r.loss_mask.max(initial=0)}; "
            f"expected {expected} (prompt and response tokens), each 0 or 1"
        )
    if r.finish_reason not in FINISH_REASONS:
        raise ResponsesError(
            f"{where}: finish_reason of sample {r.sample_id!r} is {r.finish_reason!r}, expected one of {FINISH_REASONS}"
        )


def list_offsets(column: pa.ChunkedArray) -> NDArray[np.int64]:
    return np.asarray(column.combine_chunks().offsets, np.int64)


def list_values(column: pa.ChunkedArray, dtype: str) -> list[NDArray[Any]]:
    flat = column.combine_chunks().values.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    bounds = list_offsets(column).tolist()
    return [flat[a:b] for a, b in pairwise(bounds)]


def to_response(row: dict[str, Any]) -> Response:
    try:
        messages, sampling = json.loads(row["messages"]), json.loads(row["sampling"])
    except ValueError as error:
        raise ResponsesError(f"sample {row['sample_id']!r}: messages or sampling is not JSON: {error}") from error
    return Response(
        sample_id=row["sample_id"],
        messages=messages,
        prompt_ids=np.asarray(row["prompt_ids"], np.int32),
        response_ids=np.asarray(row["response_ids"], np.int32),
        loss_mask=np.asarray(row["loss_mask"], np.uint8),
        finish_reason=row["finish_reason"],
        category=row["category"],
        sampling=sampling,
    )
