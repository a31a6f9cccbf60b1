"""Parts of the responses table from conversations of many turns, with a real (tiny) target that answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_schema.responses import KEPT_REASONS, Response, ResponsesTable, conversation_id, create_responses
from stages.answers import GenerateJob, GenerateWorker, plan_parts
from stages.chat import render_prompt
from stages.config import GenerateConfig, TargetConfig
from stages.conversation import Conversation, Reason
from stages.decode import decode_plain
from stages.prompts import answers_of
from tests.templates import talk
from tests.tiny import RESPONSES_IDENTITY, make_target, make_tokenizer

TARGET = make_target(tokenizer=make_tokenizer(), vocab_size=259)
decode = TARGET.tokenizer.decode
CONVERSATIONS = [
    Conversation("three", talk("one", "eins", "two", "zwei", "three", system="Count."), "talk"),
    Conversation("two", talk("hello", "x", "bye", "y"), "talk"),
    Conversation("single", talk("alone"), None),
    Conversation("control", talk("a <|im_end|> b", "x"), None),
]


def make(folder: Path, conversations: list[Conversation], *, part_samples: int = 2, max_prompt_tokens: int = 400,
         too_long: Any = "drop", order: int = 1, **settings: Any) -> ResponsesTable:  # fmt: skip
    """A table, its parts made in or against their order."""
    config = GenerateConfig(**({"max_new_tokens": 8, "batch_size": 3} | settings))
    asked = answers_of(conversations, config.answers_per_prompt)
    units = plan_parts(asked, part_samples)
    create_responses(folder, RESPONSES_IDENTITY, len(units), len(asked))
    job = GenerateJob(TargetConfig(model="tiny"), config, max_prompt_tokens, 0, folder, too_long)
    worker = GenerateWorker(job, TARGET)
    for unit in units[::order]:
        worker.run(unit, 1)
    return ResponsesTable.open(folder)


def answers_in(row: Response) -> list[tuple[list[int], list[int]]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.loss_mask, [0]]))).tolist()
    ids = row.input_ids.tolist()
    return [(ids[:a], ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def reasons(table: ResponsesTable) -> list[tuple[str, str]]:
    return [(row["sample_id"], row["reason"]) for row in table.ledger]


def test_every_turn_is_answered_anew_as_plain_decoding_would(tmp_path: Path) -> None:
    table = make(tmp_path, CONVERSATIONS)
    assert reasons(table) == [("control", "special_token_text")]
    rows = list(table)
    found: dict[str, list[tuple[list[int], list[int]]]] = {}
    for row in rows:
        found.setdefault(conversation_id(row.sample_id), []).extend(answers_in(row))
    assert {name: len(turns) for name, turns in found.items()} == {"three": 3, "two": 2, "single": 1}
    for conversation in CONVERSATIONS[:3]:
        history: list[dict[str, Any]] = []
        turns = iter(found[conversation.sample_id])
        for message in [m for m in conversation.messages if m["role"] != "assistant"]:
            history.append(message)
            if message["role"] == "system":
                continue
            context, answer = next(turns)
            assert context == render_prompt(TARGET.tokenizer, history)
            plain = decode_plain(TARGET, context, 8, frozenset({2}))
            assert answer == plain.ids
            history.append({"role": "assistant", "content": decode([i for i in answer if i != 2])})
    # The messages of a row are what the target saw when it gave the row's last answer.
    assert all(row.prompt_ids.tolist() == render_prompt(TARGET.tokenizer, row.messages) for row in rows
               if len(answers_in(row)) == 1)  # fmt: skip
    assert all("eins" not in str(row.messages) for row in rows)


def test_parts_in_any_order_and_size_give_the_same_samples(tmp_path: Path) -> None:
    first = make(tmp_path / "a", CONVERSATIONS, order=1, temperature=1.0)
    second = make(tmp_path / "b", CONVERSATIONS, order=-1, temperature=1.0)
    assert first.responses_hash() == second.responses_hash()
    third = make(tmp_path / "c", CONVERSATIONS, part_samples=1, batch_size=1, temperature=1.0)
    assert [(r.sample_id, r.input_ids.tolist()) for r in third] == [(r.sample_id, r.input_ids.tolist()) for r in first]


def test_several_answers_to_a_prompt_differ_and_are_the_same_in_every_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"answers_per_prompt": 3, "temperature": 1.5}
    table = make(tmp_path / "a", CONVERSATIONS[:3], **settings)
    again = make(tmp_path / "b", CONVERSATIONS[:3], order=-1, **settings)
    assert table.responses_hash() == again.responses_hash()
    singles = {r.sample_id: r.response_ids.tolist() for r in table if r.sample_id.startswith("single")}
    assert list(singles) == ["single~1", "single~2", "single~3"]
    assert len({tuple(ids) for ids in singles.values()}) == 3
    assert {conversation_id(r.sample_id) for r in table} == {f"{c.sample_id}~{k}" for c in CONVERSATIONS[:3]
                                                             for k in (1, 2, 3)}  # fmt: skip
    assert table.n_planned == 9


@pytest.mark.parametrize("mode", ["regenerate", "keep"])
def test_long_conversations_are_dropped_or_shortened_and_counted(tmp_path: Path, mode: Any) -> None:
    long = Conversation("long", talk("first " * 9, "eins", "second " * 9, "zwei", "third", "drei", system="S"))
    asked = [long, Conversation("hopeless", talk("word " * 50, "x"))]
    dropped = make(tmp_path / "drop", asked, max_prompt_tokens=140, mode=mode)
    lost = ["long#turn-2", "long#turn-3", "hopeless"] if mode == "keep" else ["long#turn-2", "hopeless"]
    assert reasons(dropped) == [(sample_id, "prompt_too_long") for sample_id in lost]
    assert [r.sample_id for r in dropped] == ["long"]
    short = make(tmp_path / "shorten", asked, max_prompt_tokens=140, too_long="shorten", mode=mode)
    assert reasons(short) == [("long#turn-2", "prompt_shortened"), ("long#turn-3", "prompt_shortened"),
                              ("hopeless", "prompt_too_long")]  # fmt: skip
    assert [row["sample_id"] for row in short.ledger if row["reason"] not in KEPT_REASONS] == ["hopeless"]
    for row in short:
        assert len(row.prompt_ids) <= 140
        assert row.messages[0] == {"role": "system", "content": "S"}
    assert sum(len(answers_in(row)) for row in short) == 3


def test_what_is_kept_is_told_by_its_reason() -> None:
    assert {Reason.PROMPT_SHORTENED, Reason.UNANSWERED_TURN} == KEPT_REASONS


def test_a_question_behind_the_last_given_answer_is_noted(tmp_path: Path) -> None:
    table = make(tmp_path, CONVERSATIONS[:2], mode="keep")
    assert reasons(table) == [("three#turn-3", "unanswered_turn")]
    said = [decode(answer) for row in table for _, answer in answers_in(row)]
    assert said == [f"{text}<|im_end|>" for text in ("eins", "zwei", "x", "y")]


def test_given_answers_that_are_too_short_are_in_the_ledger(tmp_path: Path) -> None:
    table = make(tmp_path, CONVERSATIONS[:2], mode="keep", min_response_tokens=3)
    assert reasons(table) == [("three#turn-3", "unanswered_turn"), ("two", "answer_too_short")]
    assert [r.sample_id for r in table] == ["three"]
