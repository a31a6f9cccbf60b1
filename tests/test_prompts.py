"""Prompt sources: every form, every way a row can be bad, and what makes a whole source unfit."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_schema.rejects import read_rejects, write_rejects
from stages.config import PromptsConfig, SourceConfig
from stages.errors import PromptError, SampleRefused
from stages.prompts import Conversation, PromptImport, Reason, import_prompts, prompts_sha256, to_prompt

# ../shared/cases/prompts.jsonl (case 20), written out so that a clone without shared/ still tests it.
CASES = [
    '{"id": "a1", "messages": [{"role": "user", "content": "What is 17 + 25?"}]}',
    '{"id": "a2", "conversations": [{"from": "human", "value": "Name three fruits."}, {"from": "gpt", "value": '
    '"Apple, pear, plum."}, {"from": "human", "value": "Now three vegetables."}]}',
    '{"id": "a3", "prompt": "Write a Python function that reverses a string."}',
    '{"id": "a4", "messages": [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Why?"}]}',
    '{"id": "a5", "conversations": [{"role": "user", "content": "Übersetze: \'Guten Morgen\' 🌅"}]}',
    '{"id": "a1", "messages": [{"role": "user", "content": "A second row with the first row\'s id."}]}',
    '{"id": "b1", "messages": []}',
    '{"id": "b2", "messages": [{"role": "user", "content": ""}]}',
    "",
    '{"id": "b3", "messages": [{"role": "assistant", "content": "I speak first."}]}',
    '{"id": "b4", "messages": [{"role": "narrator", "content": "Unknown role."}]}',
    '{"id": "b8", "messages": [{"role": "user", "content": "cut off',
    '{"id": "b5", "messages": "not a list"}',
    '{"id": "b6", "text_only": "no known field"}',
    '{"id": "a6", "messages": [{"role": "user", "content": "Call the weather tool for Oslo."}, {"role": "assistant", '
    '"content": null, "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": '
    '"{\\"city\\": \\"Oslo\\"}"}}]}, {"role": "tool", "content": "{\\"temp_c\\": 3}"}]}',
    '{"id": "a7", "messages": [{"role": "user", "content": [{"type": "text", "text": "Plain text in a list."}]}]}',
    '{"id": "b7", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x.png"}}]}]}',
    '{"id": "a8", "messages": [{"role": "user", "content": "' + "word " * 5000 + '"}]}',
]
EXPECTED_REJECTS = [
    (6, "a1", "duplicate_id"),
    (7, "b1", "no_messages"),
    (8, "b2", "empty_content"),
    (10, "b3", "first_turn_not_user"),
    (11, "b4", "unknown_role"),
    (12, None, "bad_json"),
    (13, "b5", "messages_not_a_list"),
    (14, "b6", "no_known_field"),
    (17, "b7", "unsupported_content"),
]
SHARED = Path(__file__).parents[2] / "shared" / "cases" / "prompts.jsonl"


def write(folder: Path, lines: Iterable[str | bytes | dict[str, Any]], name: str = "p.jsonl") -> SourceConfig:
    raw = [x if isinstance(x, bytes) else (x if isinstance(x, str) else json.dumps(x)).encode() for x in lines]
    (folder / name).write_bytes(b"\n".join(raw) + b"\n")
    return SourceConfig(path=name)


def load(folder: Path, lines: Iterable[str | bytes | dict[str, Any]], max_bad_share: float = 1.0) -> PromptImport:
    source = write(folder, lines)
    return import_prompts(PromptsConfig(sources=(source,), max_bad_share=max_bad_share), folder)


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def check_cases(found: PromptImport) -> None:
    assert [c.sample_id for c in found.conversations] == ["a1", "a2", "a3", "a4", "a5", "a6", "a7", "a8"]
    assert [(r.line, r.sample_id, r.reason) for r in found.rejects] == EXPECTED_REJECTS
    assert (found.n_rows, found.n_blank, found.duplicate_content) == (17, 1, 0)
    assert all("expected" in r.detail for r in found.rejects)
    by_id = {c.sample_id: c for c in found.conversations}
    assert [m["role"] for m in by_id["a2"].messages] == ["user", "assistant", "user"]
    assert by_id["a6"].messages[1]["content"] is None
    assert by_id["a6"].messages[1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
    assert by_id["a7"].messages[0]["content"].startswith("Plain text in")


def test_case_20_good_rows_pass_and_bad_ones_are_named_by_line(tmp_path: Path) -> None:
    source = write(tmp_path, CASES)
    check_cases(import_prompts(PromptsConfig(sources=(source,)), tmp_path))


@pytest.mark.skipif(not SHARED.is_file(), reason="the shared folder is not beside this checkout")
def test_case_20_on_the_shared_file() -> None:
    check_cases(import_prompts([SourceConfig(path=SHARED.name)], SHARED.parent))


def test_rejects_fit_the_rejects_table(tmp_path: Path) -> None:
    lines = [*CASES, b'{"id": "u", "prompt": "\xff"}', '{"\\ud800": 1}', '{"id": "\\ud800", "prompt": "x"}']
    found = load(tmp_path, lines)
    write_rejects(tmp_path / "rejects.parquet", found.rejects)
    assert read_rejects(tmp_path / "rejects.parquet") == found.rejects
    assert len(found.rejects) == len(EXPECTED_REJECTS) + 3


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"id": "x", "prompt": "\xff\xfe"}', "bad_utf8"),
        (b'{"id": "x", "prompt": "a"} trailing', "bad_json"),
        (b'{"id": "x", "prompt": "a", "tools": [{"n": NaN}]}', "bad_json"),
        (b"[" * 20_000, "bad_json"),
        (b'{"n": ' + b"9" * 5_000 + b"}", "bad_json"),
        (b'["a"]', "not_an_object"),
        (b"null", "not_an_object"),
        (b'{"prompt": null}', "no_known_field"),
        (b"{}", "no_known_field"),
        (b'{"prompt": 3}', "messages_not_a_list"),
        (b'{"prompt": "  "}', "empty_content"),
        (b'{"messages": ["a"]}', "bad_message"),
        (b'{"messages": [{"content": "a"}]}', "unknown_role"),
        (b'{"messages": [{"role": ["user"], "content": "a"}]}', "unknown_role"),
        (b'{"messages": [{"role": "user"}]}', "empty_content"),
        (b'{"messages": [{"role": "user", "content": []}]}', "empty_content"),
        (b'{"messages": [{"role": "user", "content": 7}]}', "unsupported_content"),
        (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "unsupported_content"),
        (b'{"messages": [{"role": "system", "content": "a"}]}', "no_user_turn"),
        (b'{"messages": [{"role": "tool", "content": "a"}, {"role": "user", "content": "a"}]}', "first_turn_not_user"),
        (b'{"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}', "bad_tool_calls"),
        (b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": 3}]}', "bad_tool_calls"),
        (b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": []}]}', "empty_content"),
        (
            b'{"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "f"}]}',
            "bad_tool_calls",
        ),
        (b'{"prompt": "a", "tools": "{"}', "bad_tools"),
        (b'{"prompt": "a", "tools": {"name": "f"}}', "bad_tools"),
        (b'{"prompt": "a", "id": true}', "bad_id"),
        (b'{"prompt": "a", "id": 1.5}', "bad_id"),
        (b'{"prompt": "a", "id": "x\\u0000"}', "bad_id"),
        (b'{"prompt": "a", "id": "' + b"x" * 300 + b'"}', "bad_id"),
        (b'{"prompt": "\\ud800"}', "bad_value"),
        (b'{"prompt": "a", "category": "\\ud800"}', "bad_value"),
    ],
)
def test_a_bad_row_costs_only_itself(tmp_path: Path, line: bytes, reason: str) -> None:
    found = load(tmp_path, [said("before"), line, said("after")])
    assert [c.messages[0]["content"] for c in found.conversations] == ["before", "after"]
    assert [(r.source, r.line, r.reason) for r in found.rejects] == [("p.jsonl", 2, reason)]
    assert reason in set(Reason)
    assert len(found.rejects[0].detail) < 600


def test_the_forms_agree(tmp_path: Path) -> None:
    turns = [("system", "s"), ("user", "q"), ("assistant", "a"), ("tool", "t"), ("user", "q2")]
    spelled = {"user": "human", "assistant": "gpt", "tool": "observation", "system": "system"}
    openai = [{"role": r, "content": c} for r, c in turns]
    found = load(
        tmp_path,
        [
            {"id": 1, "messages": openai},
            {"id": 2, "conversations": openai},
            {"id": 3, "conversations": [{"from": spelled[r], "value": c} for r, c in turns]},
            {"id": 4, "prompt": openai},
        ],
    )
    assert [c.messages for c in found.conversations] == [openai] * 4
    assert [c.sample_id for c in found.conversations] == ["1", "2", "3", "4"]
    assert found.duplicate_content == 3
    assert found.rejects == []


def test_sharegpt_calls_become_tool_calls(tmp_path: Path) -> None:
    call = json.dumps({"name": "f", "arguments": {"x": 1}})
    row = {
        "conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": call}],
        "tools": json.dumps([{"name": "f"}]),
    }
    (conversation,) = load(tmp_path, [row]).conversations
    expected = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
    }
    assert conversation.messages[1] == expected
    assert conversation.tools == [{"name": "f"}]


def test_ids_come_from_the_row_or_from_its_content(tmp_path: Path) -> None:
    rows = [said("a", id="", sample_id=7), said("b", uuid="u"), said("c", prompt_id=3.0), said("d"), said("d ")]
    ids = [c.sample_id for c in load(tmp_path, rows).conversations]
    assert ids[:3] == ["7", "u", "3"]
    assert len(ids[3]) == 16
    assert ids[3] != ids[4]
    (same,) = load(tmp_path, [{"prompt": "d", "other": 1}]).conversations
    assert same.sample_id == ids[3]


def test_a_repeated_id_names_the_first_row(tmp_path: Path) -> None:
    write(tmp_path, [said("x", id=1), said("y")], "one.jsonl")
    write(tmp_path, [said("z", id="1"), said("w"), said("w"), said("v")], "two.jsonl")
    found = import_prompts([SourceConfig(path="one.jsonl"), SourceConfig(path="two.jsonl")], tmp_path)
    assert [(r.source, r.line, r.reason) for r in found.rejects] == [
        ("two.jsonl", 1, "duplicate_id"), ("two.jsonl", 3, "duplicate_id"),
    ]  # fmt: skip
    assert "line 1 of one.jsonl" in found.rejects[0].detail
    assert "line 2 already" in found.rejects[1].detail
    assert found.reasons() == {"duplicate_id": 2}


def test_blank_lines_bom_and_crlf_are_no_rows(tmp_path: Path) -> None:
    lines = [b"\xef\xbb\xbf" + json.dumps(said("a")).encode() + b"\r", b"\r", b"  ", json.dumps(said("b")).encode()]
    found = load(tmp_path, lines)
    assert [c.messages[0]["content"] for c in found.conversations] == ["a", "b"]
    assert (found.n_rows, found.n_blank, found.rejects) == (2, 2, [])


def test_category_and_limit(tmp_path: Path) -> None:
    write(tmp_path, [said("a", category="math"), "", said("b"), said("c")])
    found = import_prompts([SourceConfig(path="p.jsonl", category="chat", limit=2)], tmp_path)
    assert [c.category for c in found.conversations] == ["math", "chat"]
    assert found.n_rows == 2


def test_parquet_and_saved_datasets_give_the_same_as_jsonl(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [json.loads(line) for line in (CASES[0], CASES[3], CASES[14])]
    table = pa.Table.from_pylist([{**r, "unread": b"\x00"} for r in rows])
    pq.write_table(table, tmp_path / "p.parquet")
    dataset = datasets.Dataset.from_list(rows)
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": dataset, "test": dataset.select([0])}).save_to_disk(tmp_path / "many")
    expected = load(tmp_path, rows).conversations
    for name in ("p.parquet", "one", "many"):
        found = import_prompts([SourceConfig(path=name)], tmp_path)
        assert found.conversations == expected, name
        assert prompts_sha256(found.conversations) == prompts_sha256(expected)
    assert len(import_prompts([SourceConfig(path="many", split="test")], tmp_path).conversations) == 1
    with pytest.raises(PromptError, match="set split to one of train, test"):
        import_prompts([SourceConfig(path="many", split="dev")], tmp_path)


def test_a_parquet_row_with_bad_utf8_costs_only_itself(tmp_path: Path) -> None:
    texts = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.array([0, 1, 2, 3], pa.int32()).buffers()[1], pa.py_buffer(b"a\xffc")]
    )
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "p.parquet")
    found = import_prompts([SourceConfig(path="p.parquet")], tmp_path)
    assert [c.messages[0]["content"] for c in found.conversations] == ["a", "c"]
    assert [(r.line, r.reason) for r in found.rejects] == [(2, "bad_utf8")]


def test_unfit_sources_are_one_clear_error(tmp_path: Path) -> None:
    write(tmp_path, ["", "  "], "blank.jsonl")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and no more")
    write(tmp_path, ["{", said("a")], "half.jsonl")
    write(tmp_path, ["{"] * 5, "none.jsonl")
    write(tmp_path, [said("a", id="same"), said("b", id="same"), said("c", id="same")], "same.jsonl")
    for name, words in {
        "absent.jsonl": "no file or folder",
        "../absent": "no file or folder",
        "empty.jsonl": "is empty",
        "blank.jsonl": "is empty",
        "cut.parquet": "cannot be read",
        "none.jsonl": "none of its 5 rows can be used",
        "same.jsonl": "0 of its 3 rows are bad and 2 repeat an id",
    }.items():
        with pytest.raises(PromptError, match=words) as caught:
            import_prompts([SourceConfig(path=name)], tmp_path)
        assert name.removeprefix("../") in str(caught.value)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301
    half = (SourceConfig(path="half.jsonl"),)
    assert len(import_prompts(PromptsConfig(sources=half, max_bad_share=0.5), tmp_path).conversations) == 1
    with pytest.raises(PromptError, match=r"1 of its 2 rows are bad[\s\S]*line 1: bad_json"):
        import_prompts(PromptsConfig(sources=half, max_bad_share=0.4), tmp_path)


def test_a_hub_id_that_cannot_be_reached_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(PromptError, match=r"org/name: .* cannot be loaded .*'train'.*Couldn't reach the Hub; give"):
        import_prompts([SourceConfig(path="org/name")], tmp_path)


def test_a_hub_id_is_loaded_with_subset_and_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[Any] = []

    def load_dataset(path: str, **kwargs: Any) -> Any:
        asked.append((path, kwargs))
        return datasets.Dataset.from_list([said("a"), said("b")])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = import_prompts([SourceConfig(path="org/name", subset="s", split="dev", limit=1)], tmp_path)
    assert asked == [("org/name", {"name": "s", "split": "dev"})]
    assert [c.messages[0]["content"] for c in found.conversations] == ["a"]


def test_to_prompt_cuts_the_last_answers_only() -> None:
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    tool = {"role": "tool", "content": "t"}
    for messages, kept in [
        ([user], 1), ([user, answer], 1), ([user, answer, answer], 1), ([user, answer, user], 3),
        ([user, answer, user, answer], 3), ([user, answer, tool], 3),
    ]:  # fmt: skip
        conversation = Conversation("id", messages, "c", [{"name": "f"}])
        assert to_prompt(conversation) == Conversation("id", messages[:kept], "c", [{"name": "f"}])
        assert conversation.messages == messages


def test_the_hash_of_prompts_covers_every_field_and_the_order() -> None:
    a, b = (Conversation(i, [{"role": "user", "content": i}]) for i in "ab")
    variants = [
        [a, b], [b, a], [a], [],
        [a, Conversation("b", b.messages, "math")],
        [a, Conversation("b", b.messages, None, [{"name": "f"}])],
        [a, Conversation("c", b.messages)],
        [a, Conversation("b", a.messages)],
    ]  # fmt: skip
    assert len({prompts_sha256(v) for v in variants}) == len(variants)
    assert prompts_sha256([a, b]) == prompts_sha256([a, Conversation("b", [{"content": "b", "role": "user"}])])


def test_every_reason_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[1] / "docs" / "data.md").read_text()
    assert [reason for reason in Reason if f"`{reason}`" not in text] == []


def test_a_refusal_survives_pickling() -> None:
    error = SampleRefused("bad_json", "found x")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (copy.reason, copy.detail, str(copy)) == ("bad_json", "found x", "bad_json: found x")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["id", "messages", "role", "content", "from", "type", "text"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
LINES = (
    st.binary(max_size=30).filter(lambda b: b"\n" not in b)
    | JSON.map(lambda v: json.dumps(v).encode())
    | JSON.map(lambda v: json.dumps({"messages": [{"role": "user", "content": v}]}).encode())
)


@given(st.lists(LINES, max_size=8))
def test_every_line_ends_in_exactly_one_place(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("any")
    found = load(folder, [b'{"id": "first", "prompt": "ok"}', *lines])
    assert found.n_rows + found.n_blank == len(lines) + 1
    assert len(found.conversations) + len(found.rejects) == found.n_rows
    ids = [c.sample_id for c in found.conversations]
    assert len(set(ids)) == len(ids)
    assert all(r.reason in set(Reason) and r.detail for r in found.rejects)
    prompts_sha256(found.conversations)
