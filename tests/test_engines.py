"""Engines behind the generate stage: which one is built, what reaches the table, and runs that are cut off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from cache_schema.responses import ResponsesTable, committed_parts, create_responses
from stages.answers import GenerateJob, GenerateWorker, plan_parts
from stages.config import GenerateConfig, TargetConfig
from stages.conversation import Conversation
from stages.engine import Answer, EngineError, Prompt, Refusal
from stages.engine_vllm import VllmEngine
from stages.generate import TransformersEngine
from tests.servers.completions import Change, CompletionServer, Drop, Request, Say
from tests.tiny import RESPONSES_IDENTITY, make_target, make_tokenizer, save_target

REPO = Path(__file__).parent.parent
TOKENIZER = make_tokenizer()
TARGET = make_target(tokenizer=TOKENIZER, vocab_size=300)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"), TARGET)


@pytest.fixture
def server(target_folder: Path) -> Iterator[CompletionServer]:
    with CompletionServer(TOKENIZER, model=str(target_folder)).running() as running:
        yield running


def conversations(n: int) -> list[Conversation]:
    return [Conversation(f"s{i}", [{"role": "user", "content": f"word {i}"}]) for i in range(n)]


def make_worker(
    folder: Path, model: Path | str, n: int, part_samples: int = 4, **settings: Any
) -> tuple[GenerateWorker, list[Any]]:
    units = plan_parts(conversations(n), part_samples)
    create_responses(folder, RESPONSES_IDENTITY, len(units), n)
    config = GenerateConfig(max_new_tokens=20, part_samples=part_samples, **settings)
    return GenerateWorker(GenerateJob(TargetConfig(model=str(model)), config, 60, 0, folder)), units


# --- which engine ------------------------------------------------------------------------------------------------


def test_the_recipes_engine_is_built_with_weights_only_where_it_needs_them(
    tmp_path: Path, target_folder: Path, server: CompletionServer
) -> None:
    (target_folder / "model.safetensors").rename(tmp_path / "weights")
    try:
        worker, units = make_worker(tmp_path / "a", target_folder, 4, engine="openai", server_urls=(server.url,))
        worker.run(units[0], 1)
        row = next(iter(ResponsesTable.open(tmp_path / "a")))
        assert row.response_ids.tolist() == server.answer_ids(row.prompt_ids.tolist())
        assert (row.sampling["engine"], row.sampling["tokens"]) == ("openai", "server")
        make_worker(tmp_path / "b", target_folder, 4, mode="keep")  # asks nobody
    finally:
        (tmp_path / "weights").rename(target_folder / "model.safetensors")
    worker, units = make_worker(tmp_path / "c", target_folder, 4)
    worker.run(units[0], 1)
    assert next(iter(ResponsesTable.open(tmp_path / "c"))).sampling["engine"] == "transformers"


def test_refused_samples_are_in_the_ledger_and_cost_no_other(
    tmp_path: Path, target_folder: Path, server: CompletionServer
) -> None:
    worker, units = make_worker(tmp_path, target_folder, 4, engine="openai", server_urls=(server.url,))
    bad = TOKENIZER("word 2", add_special_tokens=False)["input_ids"]

    def behave(request: Request) -> Say | None:
        is_bad = bytes(bad) in bytes(i % 256 for i in request.prompt_ids)
        return Say(400, {"error": {"message": "maximum context length"}}) if is_bad else None

    server.behave = behave
    receipt = worker.run(units[0], 1)
    assert (receipt["rows"], receipt["dropped"]) == (3, 1)
    (row,) = ResponsesTable.open(tmp_path).ledger
    assert (row["sample_id"], row["reason"]) == ("s2", "context_length")


# --- vLLM in this process, as far as a stand-in can tell ----------------------------------------------------------


class FakeLLM:
    """Answers like `vllm.LLM`: ids in, ids out, in order."""

    def __init__(self, **arguments: Any) -> None:
        if arguments["model"] == "broken":
            raise ValueError("no such architecture")
        self.arguments = arguments
        self.model_config = SimpleNamespace(max_model_len=40)
        self.sampling: list[Any] = []

    def generate(self, prompts: list[dict[str, Any]], sampling: list[Any], use_tqdm: bool) -> list[Any]:
        self.sampling = sampling
        out = []
        for prompt, settings in zip(prompts, sampling, strict=True):
            ids = prompt["prompt_token_ids"]
            stop = settings.stop_token_ids[0]
            whole = [*[ids[0] + k for k in range(ids[0] % 30)], stop][: settings.max_tokens]
            completion = SimpleNamespace(token_ids=whole, finish_reason="stop" if whole[-1] == stop else "length")
            if ids[0] == 50:
                completion.finish_reason = "abort"
            out.append(SimpleNamespace(prompt_token_ids=ids, outputs=[completion]))
        return out


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = SimpleNamespace(LLM=FakeLLM, SamplingParams=lambda **s: SimpleNamespace(**s), __version__="0")
    monkeypatch.setitem(sys.modules, "vllm", module)
    return module


def test_vllm_answers_in_order_with_reasons_for_what_does_not_fit(vllm: SimpleNamespace) -> None:
    config = GenerateConfig(engine="vllm", max_new_tokens=20, temperature=0.5, vllm_args={"max_model_len": 40})
    engine = VllmEngine(TargetConfig(model="x", dtype="float32"), config, 7)
    prompts = [Prompt("long", [5] * 21), Prompt("a", [35, 1]), Prompt("b", [59]), Prompt("odd", [50])]
    long, a, b, odd = engine.answer(prompts, config, seed=7, stop_ids=frozenset({2}))
    assert isinstance(long, Refusal)
    assert long.reason == "context_length"
    facts = {"tokens": "server", "server_build": "vllm-0"}
    assert a == Answer("a", [35, 36, 37, 38, 39, 2], "stop", facts)
    assert b == Answer("b", list(range(59, 79)), "length", facts)
    assert isinstance(odd, Refusal)
    assert odd.reason == "unfinished"
    said = engine._model.sampling[0]
    assert (said.temperature, said.top_k, said.max_tokens, said.stop_token_ids) == (0.5, -1, 20, [2])
    assert len({s.seed for s in engine._model.sampling}) == 3
    assert engine._model.arguments["dtype"] == "float32"


def test_vllm_that_is_missing_or_fails_is_said(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match=r"cannot load 'broken'.*no such architecture"):
        VllmEngine(TargetConfig(model="broken"), GenerateConfig(engine="vllm"), 0)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineError, match=r"dflash\[vllm\]"):
        VllmEngine(TargetConfig(model="x"), GenerateConfig(engine="vllm"), 0)


# --- runs that are cut off ---------------------------------------------------------------------------------------


def test_a_server_that_dies_in_a_part_costs_only_that_part(tmp_path: Path, target_folder: Path) -> None:
    server = CompletionServer(TOKENIZER, model=str(target_folder))
    with server.running():
        worker, units = make_worker(
            tmp_path, target_folder, 12, engine="openai", server_urls=(server.url,), retries=1, concurrency=2
        )
        worker.run(units[0], 1)
        server.behave = lambda request: Drop()
        server.models = Drop()
        with pytest.raises(EngineError, match="down"):
            worker.run(units[1], 1)
        assert committed_parts(tmp_path) == {0}
        server.behave, server.models = (lambda request: None), None
        for unit in units[1:]:
            worker.run(unit, 2)
    table = ResponsesTable.open(tmp_path)
    assert [r.sample_id for r in table] == [f"s{i}" for i in range(12)]


@pytest.fixture
def recipe(tmp_path: Path, target_folder: Path) -> Path:
    rows = [{"id": f"s{i}", "prompt": f"Count from {i} up."} for i in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    values = {
        "name": "served", "target": {"model": str(target_folder), "dtype": "float32"},
        "prompts": {"sources": [{"path": "train.jsonl"}]},
        "generate": {"max_new_tokens": 20, "part_samples": 4, "engine": "openai", "threads": 1, "concurrency": 4},
        "evaluate": {"sources": [{"path": "train.jsonl"}]},
    }  # fmt: skip
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "r.yaml"


def generate(recipe: Path, run: Path, *settings: str) -> list[str]:
    command = [sys.executable, "-m", "pipeline.cli", "generate", str(recipe), "--set", f"run={run}"]
    return [*command, *(part for s in settings for part in ("--set", s))]


@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was_without_duplicates(
    recipe: Path, server: CompletionServer, tmp_path: Path, ray_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    urls = f"generate.server_urls=[{server.url}]"
    server.behave = lambda request: Change(delay_s=0.1)
    run = tmp_path / "killed"
    with subprocess.Popen(generate(recipe, run, urls), cwd=REPO, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and len(list((run / "responses" / "commits").glob("part-*.json"))) < 3:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    time.sleep(2)  # until the killed run's worker is gone, too
    before, n_before = committed_parts(run / "responses"), len(server.prompt_requests())
    assert 3 <= len(before) < 10
    done = subprocess.run(generate(recipe, run, urls), cwd=REPO, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert f"{len(before)} of 10 parts are committed" in done.stderr
    assert len(server.prompt_requests()) - n_before == 40 - 4 * len(before)
    table = ResponsesTable.open(run / "responses")
    assert sorted(r.sample_id for r in table) == sorted(f"s{i}" for i in range(40))
    for row in table:
        assert row.response_ids.tolist() == server.answer_ids(row.prompt_ids.tolist())


@pytest.mark.ray
def test_a_server_that_is_not_there_is_one_clear_message(
    recipe: Path, tmp_path: Path, ray_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    urls = "generate.server_urls=[http://127.0.0.1:9]"
    command = generate(recipe, tmp_path / "run", urls, "generate.retries=0")
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "the server is down: http://127.0.0.1:9: cannot be reached (Connection refused)" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24,
                              "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}}, "longrope"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
          "max_position_embeddings": 24}, "dynamic"),
    ],
)  # fmt: skip
def test_a_prompt_that_may_outgrow_the_rotation_is_refused_alone(changes: dict[str, Any], why: str) -> None:
    """Else its length would decide what the other prompts of its batch are answered."""
    target = make_target(**changes)
    config = GenerateConfig(max_new_tokens=8, batch_size=4)
    short, long = Prompt("short", list(range(5, 21))), Prompt("long", list(range(5, 22)))

    def answered(prompts: list[Prompt]) -> list[Answer | Refusal]:
        return TransformersEngine(target).answer(prompts, config, seed=0, stop_ids=frozenset())

    refusal, answer = answered([long, short])
    assert isinstance(refusal, Refusal)
    assert (refusal.sample_id, refusal.reason) == ("long", "context_length")
    assert why in refusal.detail
    assert "prompt of 17 tokens and generate.max_new_tokens 8 are 25" in refusal.detail
    assert [answer] == answered([short])
