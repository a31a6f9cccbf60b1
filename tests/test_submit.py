"""`make submit-…`: the command that it prints and runs, and what Ray would upload with it."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
UPLOAD_BYTES = 3_000_000


def make(venv: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make in the repository, with an environment whose `ray` only says how it was called."""
    (venv / "bin").mkdir(parents=True, exist_ok=True)
    for name, does in (("ray", 'for a in "$@"; do echo "<$a>"; done'), ("python", f'exec {sys.executable} "$@"')):
        (venv / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (venv / "bin" / name).chmod(0o755)
    (venv / ".installed").touch()
    command = ["make", "--no-print-directory", f"VENV={venv}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    """The address of something that answers as a cluster does that asks for a token."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(401)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("job", ["generate", "extract", "train", "evaluate", "export", "pipeline"])
def test_a_job_is_submitted_and_the_command_printed(tmp_path: Path, job: str, dashboard: str) -> None:
    done = make(tmp_path, f"submit-{job}", f"ADDRESS={dashboard}", "RECIPE=recipes/demo.yaml",
                "SET=train.lr=3e-4 cache.layer_ids=[1,2]", "SUBMIT_ARGS=--no-wait")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/bin/ray job submit --address '{dashboard}' --working-dir ." in done.stdout  # printed
    assert (ROOT / "jobs" / f"{job}.py").is_file()
    given = [line[1:-1] for line in done.stdout.splitlines() if line.startswith("<")]
    assert given == [
        "job", "submit", "--address", dashboard, "--working-dir", ".", "--no-wait", "--", "python", "-m",
        f"jobs.{job}", "--recipe", "recipes/demo.yaml", "--set", "train.lr=3e-4", "--set", "cache.layer_ids=[1,2]",
    ]  # fmt: skip


def test_a_job_without_an_address_is_a_clear_error(tmp_path: Path) -> None:
    done = make(tmp_path, "submit-extract", "ADDRESS=")
    assert done.returncode == 2
    assert "ADDRESS is missing" in done.stderr
    assert "<job>" not in done.stdout


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("http://127.0.0.1:9", "error: ADDRESS http://127.0.0.1:9 does not answer ([Errno 111] Connection refused): "),
        ("127.0.0.1:8265", "error: ADDRESS is '127.0.0.1:8265', but a server's URL is like http://host:port; nothing"),
    ],
)
def test_nothing_is_submitted_to_an_address_where_nobody_is(tmp_path: Path, address: str, told: str) -> None:
    done = make(tmp_path, "submit-extract", f"ADDRESS={address}")
    assert done.returncode == 2  # make's own
    assert done.stderr.startswith(told)
    assert "Traceback" not in done.stderr
    assert "<job>" not in done.stdout


def uploaded(root: Path) -> list[Path]:
    """The files that Ray's own packaging takes of a working directory."""
    from ray._private.ray_constants import get_runtime_env_default_excludes
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    found: list[Path] = []
    excludes = [_get_excludes(root, get_runtime_env_default_excludes())]
    _dir_travel(root, excludes, found.append, include_gitignore=True)
    return [path.relative_to(root) for path in found if path.is_file()]


def test_the_upload_is_the_code_and_the_recipes_and_small() -> None:
    files = uploaded(ROOT)
    assert {Path("jobs/extract.py"), Path("pipeline/report.html.j2"), Path("recipes/demo.yaml")} <= set(files)
    assert {p.parts[0] for p in files if len(p.parts) > 1} == {"cache_schema", "jobs", "pipeline", "recipes", "stages"}
    size = sum((ROOT / path).stat().st_size for path in files)
    assert size < UPLOAD_BYTES, f"{size:,} bytes: {sorted(files, key=lambda p: -(ROOT / p).stat().st_size)[:5]}"


def test_what_is_large_stays_behind(tmp_path: Path) -> None:
    for name in ("runs/x/cache/a.bin", "tests/t.py", "pipeline/__pycache__/a.pyc", ".venv/bin/python", "stages/s.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".rayignore").write_text((ROOT / ".rayignore").read_text())
    assert {p.as_posix() for p in uploaded(tmp_path)} == {".rayignore", "stages/s.py"}
