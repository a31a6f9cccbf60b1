"""Nobody else gets in, and nothing secret gets out: open ports, Ray's token, and credentials in what a run writes."""

from __future__ import annotations

import io
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from pipeline import cli
from pipeline.credentials import carries_credential, redacted
from tests.servers.completions import CompletionServer
from tests.tiny import make_tokenizer
from tests.tiny_run import make_home

REPO = Path(__file__).parent.parent
PLANTED = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "MY_SERVERS_KEY",
)  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target, prompts, and a recipe."""
    folder = tmp_path_factory.mktemp("security")
    make_home(
        folder, 12, 1, drafter={"n_layers": 1}, evaluate={"max_new_tokens": 4},
        generate={"engine": "openai", "server_urls": ["http://127.0.0.1:9"], "server_model": "tiny",
                  "api_key_env": "MY_SERVERS_KEY"},
        train={"epochs": 2, "anchors": 2, "workers": 2, "trackers": ["tensorboard"]},
    )  # fmt: skip
    return folder


@dataclass
class WholeRun:
    """A run that is over.

    Attributes:
        folders: all that it could write to.
        said: on stdout and stderr.
        planted: the secrets in its environment, by name.
        listened: addresses that any of its processes listened at, with the process's title.
    """

    folders: list[Path]
    said: str
    planted: dict[str, str]
    listened: dict[str, str] = field(default_factory=dict)

    @property
    def token(self) -> Path:
        """Where Ray's token is."""
        return self.folders[1] / ".ray" / "auth_token"


def listeners(process: psutil.Process) -> Iterator[tuple[str, str]]:
    """Addresses that a process and its descendants listen at, over the network."""
    with suppress(psutil.Error):
        for one in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                for connection in one.net_connections("inet"):
                    if connection.status == psutil.CONN_LISTEN:
                        yield connection.laddr.ip, " ".join(one.cmdline())[:80]


def environment_without(home: Path, ray: Path) -> dict[str, str]:
    """Of a user whose home is empty, with secrets planted."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "AWS_", "HF_"))}
    planted = {name: f"planted{secrets.token_hex(16)}" for name in PLANTED}
    return plain | planted | {"HOME": str(home), "RAY_TMPDIR": str(ray), "RAY_worker_niceness": "0"}


@pytest.fixture(scope="module")
def whole_run(home: Path) -> Iterator[WholeRun]:
    """All stages by the command line on a Ray of their own, with two ranks; watched all the time."""
    user = Path(tempfile.mkdtemp(prefix="sec-"))  # short: the names of Ray's sockets have a limit
    (user / "ray").mkdir()
    environment, run = environment_without(user, user / "ray"), home / "run"
    with CompletionServer(make_tokenizer(), root=str(home / "target")).running() as server:
        command = [sys.executable, "-m", "pipeline.cli", "run", str(home / "r.yaml"), "--set", f"run={run}", "--set",
                   f"generate.server_urls=[{server.url}]"]  # fmt: skip
        with (user / "said.txt").open("w") as said:
            process = subprocess.Popen(command, cwd=REPO, stdout=said, stderr=said, env=environment)
        listened: dict[str, str] = {}
        while process.poll() is None:
            listened |= dict(listeners(psutil.Process(process.pid)))
            time.sleep(0.5)
        asked = [request.authorization for request in server.requests]
    try:
        text = (user / "said.txt").read_text()
        assert process.returncode == 0, text
        assert asked[0] == f"Bearer {environment['MY_SERVERS_KEY']}", "the key did not reach the server"
        yield WholeRun([home, user], text, {name: environment[name] for name in PLANTED}, listened)
    finally:
        shutil.rmtree(user)


@pytest.mark.ray
def test_nothing_listens_beyond_this_machine(whole_run: WholeRun) -> None:
    assert len(whole_run.listened) >= 1, "nothing was seen listening, so nothing was looked at"
    beyond = {ip: who for ip, who in whole_run.listened.items() if not ip.removeprefix("::ffff:").startswith("127.")}
    assert not beyond


@pytest.mark.ray
def test_a_ray_of_our_own_asks_for_a_token_that_no_one_else_can_read(whole_run: WholeRun) -> None:
    assert len(whole_run.token.read_text()) >= 32
    assert whole_run.token.stat().st_mode & 0o077 == 0


@pytest.mark.ray
def test_no_credential_is_in_anything_that_a_run_writes(whole_run: WholeRun) -> None:
    secret = whole_run.planted | {"Ray's token": whole_run.token.read_text()}
    files = [p for folder in whole_run.folders for p in folder.rglob("*") if p.is_file() and p != whole_run.token]
    names = {p.name for p in files}
    assert {"recipe.json", "report.html", "model.safetensors", "raylet.out", "metrics.jsonl"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    found = [f"{name} in {p}" for p in files for name, value in secret.items() if value.encode() in p.read_bytes()]
    assert not found
    assert not [name for name, value in secret.items() if value in whole_run.said]


SECRET = "hunter2hunter2"


@pytest.mark.parametrize(
    "setting",
    [
        f"cache.path=s3://AKIAKEY:{SECRET}@bucket/cache",
        f"cache.path=s3://bucket/cache?X-Amz-Signature={SECRET}",
        f"run=s3://AKIAKEY:{SECRET}@bucket/run",
        f"run=s3:/AKIAKEY:{SECRET}@bucket/run",
        f"run=s3://bucket/run?X-Amz-Credential=AKIA&X-Amz-Signature={SECRET}",
        f"generate.server_urls=['https://user:{SECRET}@host/v1']",
        f"generate.server_urls=['https://host/v1?api_key={SECRET}']",
        f"prompts.sources.0.path=https://user:{SECRET}@host/prompts.jsonl",
        f"prompts.sources.0.path=https://host/prompts.jsonl?sig={SECRET}",
        f"target.model=https://user:{SECRET}@host/model",
        f"train.init_from=https://user:{SECRET}@host/drafter",
        f"evaluate.drafter=https://host/drafter?token={SECRET}",
        f"name=https://user:{SECRET}@host",
        f"generate.vllm_args.hf_token={SECRET}",
        f"hf_token={SECRET}",
        f"extract.api_key={SECRET}",
        f"https://user:{SECRET}@host/=1",
        f"seed=https://user:{SECRET}@host",
    ],
)
@pytest.mark.parametrize("command", ["generate", "plan"])
def test_a_credential_in_a_recipe_is_refused_and_shown_nowhere(
    home: Path, tmp_path: Path, command: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        arguments = [command, str(home / "r.yaml"), "--set", f"run={tmp_path / 'run'}", "--set", setting]
        code = cli.guarded(lambda: cli.dflash.main(arguments, prog_name="dflash", standalone_mode=False))
    assert code == 2, said.getvalue()
    assert "error: " in said.getvalue()
    assert SECRET not in said.getvalue()
    assert not list(tmp_path.rglob("*"))


def test_a_credential_in_the_recipe_file_is_not_in_the_error_object(home: Path, tmp_path: Path) -> None:
    from pipeline.errors import RecipeError
    from pipeline.recipe import load_recipe

    recipe: dict[str, Any] = yaml.safe_load((home / "r.yaml").read_text())
    recipe["cache"]["path"] = f"s3://AKIAKEY:{SECRET}@bucket/cache"
    recipe["cahce"] = {"path": recipe["cache"]["path"]}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(RecipeError, match=r"cache\.path \(not shown\)") as raised:
        load_recipe(tmp_path / "r.yaml")
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    "plain",
    [
        "s3://bucket/path", "abfss://container@account.dfs.core.windows.net/path", "http://127.0.0.1:8000/v1",
        "hf://datasets/owner/name@main", "Qwen/Qwen3-8B", "C:/models/x", "owner/name@refs", "see https://x.org/?q=1",
    ],
)  # fmt: skip
def test_what_is_no_credential(plain: str) -> None:
    assert not carries_credential(plain)


def test_a_message_keeps_all_but_the_secret() -> None:
    text = f"s3://k:{SECRET}@b/p is no place, nor is https://h/x?X-Amz-Signature={SECRET}; see 'az://c/d'"
    assert redacted(text) == "s3://…@b/p is no place, nor is https://h/x?… see 'az://c/d'"
