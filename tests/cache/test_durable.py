from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cache_schema.durable import create_once, make_dirs, write_atomic

REPO = Path(__file__).parents[2]

# Runs `step()` in forked children; child k is killed just before its k-th durable step (fsync, link, rename,
# unlink), so each state that a kill can leave lies in a folder of its own. The last child runs to its end.
KILL_AT_EACH_STEP = """
import os, signal, sys
from pathlib import Path

import pyarrow.dataset  # else imported by each child at its first read of Parquet

def survey(root, step, before=lambda folder: None):
    k = 0
    while True:
        folder = Path(root, f"{k:03d}")
        folder.mkdir()
        before(folder)
        pid = os.fork()
        if pid == 0:
            try:
                arm(k)
                step(folder)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(3)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            print(k)
            return
        assert os.WTERMSIG(status) == signal.SIGKILL
        k += 1

def arm(k):
    left = [k]
    def wrap(call):
        def counted(*args, **kwargs):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return call(*args, **kwargs)
        return counted
    os.fsync = wrap(lambda descriptor: None)  # a kill, unlike a power cut, loses nothing that was written
    for name in ("link", "rename", "unlink"):
        setattr(os, name, wrap(getattr(os, name)))
"""


def survey_kills(tmp_path: Path, script: str) -> list[Path]:
    """Folders of the killed children, and last that of the one which finished."""
    command = [sys.executable, "-c", KILL_AT_EACH_STEP + script, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [tmp_path / f"{k:03d}" for k in range(int(done.stdout.split()[-1]) + 1)]


def visible(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if not p.name.startswith(".")]


def test_create_once_killed_at_each_step_shows_nothing_or_all(tmp_path: Path) -> None:
    script = """
from cache_schema.durable import create_once
survey(sys.argv[1], lambda folder: create_once(folder / "marker.json", b"whole" * 1000))
"""
    folders = survey_kills(tmp_path, script)
    states = [visible(f) for f in folders]
    assert len(folders) > 4
    assert states[0] == []
    assert states[-1] == ["marker.json"]
    for folder, names in zip(folders, states, strict=True):
        assert names in ([], ["marker.json"])
        # Whatever the kill left, the next run ends with the whole file.
        assert create_once(folder / "marker.json", b"whole" * 1000) is (names == [])
        assert (folder / "marker.json").read_bytes() == b"whole" * 1000


def test_write_atomic_killed_at_each_step_shows_old_or_new(tmp_path: Path) -> None:
    script = """
from cache_schema.durable import write_atomic
survey(sys.argv[1], lambda f: write_atomic(f / "x", b"new"), lambda f: (f / "x").write_bytes(b"older"))
"""
    contents = [(f / "x").read_bytes() for f in survey_kills(tmp_path, script)]
    assert contents[0] == b"older"
    assert contents[-1] == b"new"
    assert set(contents) == {b"older", b"new"}


def test_create_once_keeps_the_first_content(tmp_path: Path) -> None:
    assert create_once(tmp_path / "m", b"first")
    assert not create_once(tmp_path / "m", b"second")
    assert (tmp_path / "m").read_bytes() == b"first"
    assert visible(tmp_path) == ["m"]
    assert len(list(tmp_path.iterdir())) == 1


def test_create_once_has_one_winner_among_processes(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from cache_schema.durable import create_once\n"
        "sys.stdin.read(1); print(create_once(Path(sys.argv[1]), sys.argv[2].encode() * 5000))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "m"), str(i)],
            cwd=REPO,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(6)
    ]
    for p in processes:
        assert p.stdin is not None
        p.stdin.write("x")
        p.stdin.flush()
    answers = [p.communicate()[0].strip() for p in processes]
    assert sorted(answers) == ["False"] * 5 + ["True"]
    winner = answers.index("True")
    assert (tmp_path / "m").read_bytes() == str(winner).encode() * 5000
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("write", [write_atomic, create_once])
def test_full_disk_leaves_nothing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: object) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert callable(write)
    with pytest.raises(OSError, match="No space left") as caught:
        write(tmp_path / "file", b"data")
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_full_disk_keeps_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"older")

    def full(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(tmp_path / "file", b"new")
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"older"]


def test_make_dirs_makes_parents_and_is_repeatable(tmp_path: Path) -> None:
    make_dirs(tmp_path / "a" / "b")
    make_dirs(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    """A device, for one: `--page /dev/full` of root's."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError, match="no regular file"):
        write_atomic(tmp_path / "pipe", b"data")
    assert (tmp_path / "pipe").is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
