"""`dflash check-serve` against a server that decodes with our own engine, and is wrong when told to."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pipeline.cli import main
from pipeline.errors import PipelineError
from pipeline.serve_check import served_length
from pipeline.vllm_server import free_port, running, server_command
from stages.acceptance import Accepted, accepted_of, compare, intervals, wilson_interval
from stages.checkpoint_format import save_drafter
from stages.decode import Decoded, Request, decode_batch
from stages.drafter import Drafter
from stages.engine import EngineError
from stages.engine_metrics import parse_counters, read_counters
from stages.sessions import DraftSession
from stages.target import Target
from tests.servers.completions import Change, CompletionServer, Say
from tests.tiny import make_spec, make_target, make_tokenizer, save_target

TOKENS = 16
BLOCK = 4


def other(token: int) -> int:
    return token - 1 if token else 1


NOTHING = Accepted(0, (0,) * (BLOCK - 1))


@dataclass
class Drafting(CompletionServer):
    """Decodes with a drafter, or without one, and counts as vLLM does."""

    target: Target | None = None
    drafter: Drafter | None = None
    wrong_text: bool = False
    wrong_counts: bool = False
    counted: Accepted = NOTHING

    def _completion(self, body: dict[str, Any], prompt_ids: list[int], change: Change) -> dict[str, Any]:
        limit = body["max_tokens"]
        assert self.target is not None
        [row] = decode_batch(self.target, [Request("", prompt_ids)], drafter=self.drafter, max_new_tokens=limit,
                             stop_ids=frozenset(body["stop_token_ids"])).rows  # fmt: skip
        new = accepted_of(row, BLOCK - 1, limit)
        accepted = (new.cycles,) * (BLOCK - 1) if self.wrong_counts else new.by_position
        sums = (a + b for a, b in zip(self.counted.by_position, accepted, strict=True))
        self.counted = Accepted(self.counted.cycles + new.cycles, tuple(sums))
        ids = [*row.ids[:3], other(row.ids[3]), *row.ids[4:]] if self.wrong_text and limit > 3 else row.ids
        choice = {"index": 0, "token_ids": ids, "prompt_token_ids": prompt_ids, "text": "",
                  "finish_reason": "length" if len(ids) == limit else "stop"}  # fmt: skip
        return {"choices": [choice]}

    def metrics(self) -> Say:
        lines = [f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="t}}"}} {self.counted.cycles:.1f}']
        lines += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{k}"}} {n}.0'
                  for k, n in enumerate(self.counted.by_position)]  # fmt: skip
        return Say(200, "# HELP vllm:spec_decode_num_drafts_total x\n" + "\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, a drafter for it, four prompts, and a recipe."""
    folder = tmp_path_factory.mktemp("home")
    save_target(folder / "target", make_target(1, make_tokenizer(), vocab_size=300))
    (folder / "drafter").mkdir()
    spec = make_spec(vocab_size=300, mask_token_id=299, block_size=BLOCK)
    save_drafter(Drafter(spec, seed=0), folder / "drafter")
    rows = [{"id": f"p{i}", "prompt": "go " * (i + 1)} for i in range(4)]
    (folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "name": "tiny",
        "target": {"model": str(folder / "target"), "dtype": "float32"},
        "prompts": {"sources": [{"path": "held.jsonl"}]},
        "evaluate": {"sources": [{"path": "held.jsonl"}], "max_new_tokens": TOKENS, "threads": 1},
    }
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def repeats(session: DraftSession, anchors_R: torch.Tensor, block_size: int) -> torch.Tensor:
    """Drafts of the anchor again and again, which is sometimes right with this target."""
    one_hot = torch.nn.functional.one_hot(anchors_R, session.target.shape.vocab_size).float()
    return one_hot[:, None].expand(-1, block_size - 1, -1)


@pytest.fixture
def servers(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Drafting, Drafting]]:
    """One without the drafter and one with it."""
    from stages.checkpoint_format import load_drafter

    monkeypatch.setattr(DraftSession, "draft", repeats)
    target = make_target(1, make_tokenizer(), vocab_size=300)
    names = {"tokenizer": target.tokenizer, "model": str(home / "target"), "target": target}
    drafter = load_drafter(home / "drafter").float().eval()
    with Drafting(**names).running() as plain, Drafting(**names, drafter=drafter).running() as drafted:
        drafted.pages = {"/metrics": drafted.metrics, "/version": lambda: Say(200, {"version": "1.2"})}
        yield plain, drafted


def check(
    home: Path, run: Path, servers: tuple[Drafting, Drafting], capsys: pytest.CaptureFixture[str], prompts: int = 4
) -> tuple[int, str, dict[str, Any]]:
    """Exit code, what stands on stdout, and what was written."""
    with pytest.raises(SystemExit) as ended:
        main(["check-serve", str(home / "r.yaml"), "--set", f"run={run}", "--drafter", str(home / "drafter"),
              "--plain", servers[0].url, "--drafted", f"{servers[1].url}/v1", "--prompts", str(prompts)])  # fmt: skip
    code = ended.value.code
    assert isinstance(code, int)
    out, err = capsys.readouterr()
    assert (run / "serve-check").is_dir(), err
    return code, out, json.loads((run / "serve-check" / "results.json").read_text())


def test_a_right_server_passes(
    home: Path, tmp_path: Path, servers: tuple[Drafting, Drafting], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, results = check(home, tmp_path, servers, capsys)
    assert code == 0
    assert "vLLM 1.2, float32: 4 of 4 texts with the drafter are equal to those without" in out
    assert (results["identical"], results["identical_to_ours"]) == (4, 4)
    found = results["acceptance"]
    assert found["same_counts"] == 4
    assert found["cycles"]["server"] == found["cycles"]["ours"] == servers[1].counted.cycles - 1  # one for the greeting
    assert [p["position"] for p in found["positions"]] == [1, 2, 3]
    assert all(p["server"] == p["ours"] and p["within"] for p in found["positions"])
    shares = [p["server"] for p in found["positions"]]
    assert 1 > shares[0] > shares[1] > 0


def test_another_text_is_found(
    home: Path, tmp_path: Path, servers: tuple[Drafting, Drafting], capsys: pytest.CaptureFixture[str]
) -> None:
    servers[1].wrong_text = True
    code, out, results = check(home, tmp_path, servers, capsys, prompts=2)
    assert code == 1
    assert (results["prompts"], results["identical"], results["ties"]) == (2, 0, 0)
    assert {d["position"] for d in results["differences"]} == {3}
    assert [d["sample_id"] for d in results["differences"]] == ["p0", "p2"]  # evenly spread
    assert "BAD p0 at token 3" in out


def test_another_acceptance_is_found(
    home: Path, tmp_path: Path, servers: tuple[Drafting, Drafting], capsys: pytest.CaptureFixture[str]
) -> None:
    servers[1].wrong_counts = True
    code, out, results = check(home, tmp_path, servers, capsys, prompts=2)
    assert (code, results["identical"]) == (1, 2)
    assert not any(p["within"] for p in results["acceptance"]["positions"])
    assert "BAD position  3: 1.000 there" in out


def test_a_server_that_counts_nothing_is_compared_by_text(
    home: Path, tmp_path: Path, servers: tuple[Drafting, Drafting], capsys: pytest.CaptureFixture[str]
) -> None:
    servers[1].pages = {"/metrics": lambda: Say(404, "no such page")}
    code, out, results = check(home, tmp_path, servers, capsys, prompts=1)
    assert (code, results["acceptance"]) == (0, None)
    assert "acceptance was not compared" in out


def test_calls_that_name_no_server_are_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given in ([], ["--plain", "http://127.0.0.1:1"]):
        with pytest.raises(SystemExit) as ended:
            main(["check-serve", str(home / "r.yaml"), *given])
        assert ended.value.code == 2
        assert "--vllm-python to start servers, or --plain and --drafted" in capsys.readouterr().err


def test_a_server_of_ours_drafts_to_the_end_of_every_answer() -> None:
    most = served_length(n_prompt=48, max_new_tokens=64, block_size=16)
    drafted = [48 + done for done in range(64) if (48 + done + 16) + 16 <= most]  # vLLM's rule for another block
    assert len(drafted) == 64


def test_a_server_that_is_not_there_is_told_before_anything_is_loaded(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.serve_check._models", lambda *_: pytest.fail("the target was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr("pipeline.serve_check.ANSWER_S", 0.2)
        mute = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for url, code, told in (
            (f"http://127.0.0.1:{free_port()}", 1, "--plain: .*Connection refused.*expected a running server there"),
            (mute, 1, "--plain: .*timed out"),
            ("127.0.0.1:8000", 2, r"--plain is '127.0.0.1:8000', but .*http://host:port"),
            ("http://127.0.0.1:80x", 2, r"--plain is .*http://host:port"),
        ):
            began = time.monotonic()
            with pytest.raises(SystemExit) as ended:
                main(["check-serve", str(home / "r.yaml"), "--set", f"run={tmp_path}", "--drafter",
                      str(home / "drafter"), "--plain", url, "--drafted", url])  # fmt: skip
            assert ended.value.code == code, url
            assert re.search(told, capsys.readouterr().err), url
            assert time.monotonic() - began < 20


def test_only_cycles_that_a_server_runs_are_counted() -> None:
    row = Decoded(ids=list(range(8)), cycles=[4, 1, 3, 2])
    assert accepted_of(row, 3, 9) == Accepted(3, (2, 2, 1))  # 1 + 4 + 1 + 3 tokens are there
    assert accepted_of(row, 3, 10) == Accepted(4, (3, 2, 1))
    assert Accepted(4, (3, 2, 1)).tau == 2.5


def test_counters_of_all_engines_are_added() -> None:
    text = "\n".join(
        [f'vllm:spec_decode_num_drafts_total{{engine="{e}",model_name="a b"}} 1.0e+01' for e in (0, 1)]
        + [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{e}",position="{k}"}} {5 - k}.0'
           for e in (0, 1) for k in (1, 0)]
        + ['vllm:spec_decode_num_accepted_tokens_per_pos_created{position="0"} 1.7e+09']
    )  # fmt: skip
    assert parse_counters(text) == Accepted(20, (10, 8))
    assert parse_counters("vllm:num_requests_running 0.0\n") is None
    with pytest.raises(EngineError, match="expected a running server"):
        read_counters(f"http://127.0.0.1:{free_port()}")


def test_intervals_by_hand() -> None:
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)  # Wilson's formula, z = 1.96
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    # Responses that differ from each other make the interval wider than that many independent cycles would.
    alike = [Accepted(50, (25,)) for _ in range(10)]
    apart = [Accepted(50, (50 * (i % 2),)) for i in range(10)]
    assert intervals(alike) == ([wilson_interval(250, 500)[0]], [wilson_interval(250, 500)[1]])
    low, high = intervals(apart)
    assert low[0] < 0.3
    assert high[0] > 0.7
    found = compare([Accepted(50, (31,))] * 10, alike)
    assert (found["positions"][0]["within"], found["same_counts"]) == (False, 0)
    assert compare([Accepted(50, (26,))] * 10, alike)["positions"][0]["within"]


SERVER = "import sys; from http.server import *; HTTPServer(('127.0.0.1', int(sys.argv[1])), SimpleHTTPRequestHandler)"


def test_a_server_is_started_and_stopped(tmp_path: Path) -> None:
    port = free_port()
    log = tmp_path / "server" / "plain.log"
    log.parent.mkdir()
    (log.parent / "health").write_text("ok")
    command = [sys.executable, "-c", f"{SERVER}.serve_forever()", str(port)]
    with running(command, f"http://127.0.0.1:{port}", log) as url, socket.create_connection(("127.0.0.1", port)):
        assert url.endswith(str(port))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with pytest.raises(KeyboardInterrupt), running(command, f"http://127.0.0.1:{port}", log):
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    log = tmp_path / "plain.log"
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        pytest.raises(PipelineError, match=r"(?s)exit status 1 before it answered.*plain\.log ends.*no such model"),
        running(command, "http://127.0.0.1:9", log),
    ):
        pass
    with pytest.raises(PipelineError, match=r"cannot be started: No such file.*--vllm-python"), \
            running([str(tmp_path / "python")], "http://127.0.0.1:9", log):  # fmt: skip
        pass


def test_the_command_line_names_the_drafter_and_its_tokens() -> None:
    plain = server_command(Path("py"), "m", port=1, dtype="float32", max_model_len=9)
    command = server_command(
        Path("py"), "m", port=1, dtype="float32", max_model_len=9, drafter=Path("/d"), block_size=16
    )
    assert command[: len(plain)] == plain
    assert json.loads(command[command.index("--speculative-config") + 1]) == {
        "method": "dflash", "model": "/d", "num_speculative_tokens": 15,
    }  # fmt: skip
    assert "--speculative-config" not in plain
