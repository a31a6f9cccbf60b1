"""The whole pipeline by its command line, on a tiny target: end to end, again, killed, and misused."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from click.testing import CliRunner

from cache_schema.identity import sha256_bytes, sha256_file
from cache_schema.marker import committed_shards
from cache_schema.responses import ResponsesTable
from cache_schema.storage import open_storage
from cache_schema.verify import describe_cache, equal_caches, verify_cache
from pipeline import cli
from pipeline.exits import Exit
from pipeline.run import Run
from pipeline.steps import STEPS
from stages.checkpoint_format import load_drafter
from tests.conftest import MadeOnce
from tests.tiny import make_target, make_tokenizer, save_target
from tests.tiny_run import make_home

REPO = Path(__file__).parent.parent
KILLS = 2
"""How often each stage is killed before it is left alone."""


@pytest.fixture(scope="module")
def home(made_once: MadeOnce) -> Path:
    """A folder with a tiny target, prompts, and a recipe."""
    return made_once("home", lambda folder: make_home(folder, 48, 3))


def dflash(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with a Ray of its own."""
    command = [sys.executable, "-m", "pipeline.cli", *map(str, args)]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False, timeout=280)


def dflash_here(*args: str | Path, ray: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command in this process, which saves its imports; on the Ray at that address, or one of its own."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Ray, about its own settings
        if ray:
            patch.setenv("RAY_ADDRESS", ray)
        try:
            code = cli.guarded(lambda: cli.dflash.main([*map(str, args)], prog_name="dflash", standalone_mode=False))
        except SystemExit as left:  # what `verify` does where it has found something
            code = int(left.code or 0)
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def undisturbed(home: Path, made_once: MadeOnce) -> Path:
    """The run folder of a run that nothing disturbed, on a Ray of its own."""

    def make(folder: Path) -> None:
        done = dflash("run", home / "r.yaml", "--set", f"run={folder}")
        assert done.returncode == 0, done.stderr
        assert "Identical  3 of 3" in done.stdout

    return made_once("undisturbed", make)


def final_weights(run: Path) -> list[str]:
    newest = max((run / "train" / "checkpoints").glob("step-*"))
    return [newest.name, sha256_file(newest / "model.safetensors"), sha256_file(newest / "optimizer.safetensors")]


@pytest.mark.ray
def test_end_to_end_leaves_what_the_readme_says(undisturbed: Path) -> None:
    run = undisturbed
    assert len(ResponsesTable.open(run / "responses")) == 48
    assert verify_cache(run / "cache").ok
    assert load_drafter(run / "export").spec.block_size == 4
    results = json.loads((run / "evaluate" / "results.json").read_text())["drafters"]
    assert results["trained"]["identical"] == results["untrained"]["identical"] == 3
    assert results["trained"]["tau"] > results["untrained"]["tau"] >= 1
    assert "<svg" in (run / "report.html").read_text()
    assert "τ" in (run / "export" / "README.md").read_text()


@pytest.mark.ray
def test_second_run_does_nothing_and_says_so(home: Path, undisturbed: Path) -> None:
    before = {
        p: p.stat().st_mtime_ns
        for p in undisturbed.rglob("*")
        if p.is_file() and p.suffix in (".parquet", ".safetensors")
    }
    lines: list[str] = []
    from pipeline.recipe import load_recipe

    run = Run(
        load_recipe(home / "r.yaml", [f"run={undisturbed}", "train.workers=1", "generate.workers=2"]), lines.append
    )
    for stage in STEPS.values():
        stage(run)
    assert [line.split(":")[0] for line in lines if "already done" in line] == list(STEPS)
    job = [sys.executable, "-m", "jobs.pipeline", "--recipe", str(home / "r.yaml"), "--set", f"run={undisturbed}"]
    done = subprocess.run(job, cwd=REPO, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("already done") == len(STEPS)
    assert before == {p: p.stat().st_mtime_ns for p in before}


@pytest.mark.ray
def test_a_cache_in_an_object_store_trains_the_same_drafter(home: Path, undisturbed: Path, s3_url: str) -> None:
    """The stages that touch the cache, with `cache.path` on a real S3 server and the features as they are.

    On a Ray of their own: its workers need the server's credentials in their environment.
    """
    run = home / "on-s3"
    shutil.copytree(undisturbed / "responses", run / "responses")
    for stage in ("extract", "train"):
        done = dflash_here(stage, home / "r.yaml", "--set", f"run={run}", "--set", f"cache.path={s3_url}")
        assert done.returncode == 0, done.stderr
    assert not (run / "cache").exists()
    assert equal_caches(undisturbed / "cache", s3_url) == []
    assert verify_cache(s3_url).ok
    assert final_weights(run) == final_weights(undisturbed)
    report = dflash_here("report", home / "r.yaml", "--set", f"run={run}", "--set", f"cache.path={s3_url}")
    assert report.returncode == 0, report.stderr
    assert json.loads((run / "report.json").read_text())["cache"]["samples"] == 48


@pytest.mark.ray
def test_a_compact_cache_is_smaller_and_trains(home: Path, undisturbed: Path, ray_address: str) -> None:
    run = home / "compact"
    shutil.copytree(undisturbed / "responses", run / "responses")
    for stage in ("extract", "train"):
        done = dflash_here(stage, home / "r.yaml", "--set", f"run={run}", "--set", "cache.profile=compact",
                           ray=ray_address)
        assert done.returncode == 0, done.stderr
    assert verify_cache(run / "cache").ok
    sizes = [describe_cache(folder / "cache")["bytes"] for folder in (undisturbed, run)]
    assert sizes[1] < sizes[0]
    losses = [json.loads((folder / "train" / "metrics.jsonl").read_text().splitlines()[-1])["loss"] for folder in
              (undisturbed, run)]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    again = dflash_here("extract", home / "r.yaml", "--set", f"run={run}")
    assert again.returncode == Exit.MISMATCH
    assert "feature_dtype: found 'float8_e4m3fn', expected 'bfloat16'" in again.stderr


def first_commit(folder: str, pattern: str) -> Callable[[Path], bool]:
    return lambda run: any((run / folder).glob(pattern))


WATCHED: dict[str, Callable[[Path], bool]] = {
    "generate": first_commit("responses/commits", "part-*.json"),
    "extract": first_commit("cache/commits", "shard-*.json"),
    "train": first_commit("train/checkpoints", "step-*"),
    "evaluate": first_commit("evaluate/prompts", "*.json"),
    "export": first_commit(".", "export"),
}


def run_and_kill(command: list[str], run: Path, begun: Callable[[Path], bool], delay_s: float, ray: str) -> bool:
    """Start a stage, wait until it has committed something, `kill -9` it a moment later; False if it ended first."""
    quiet, environment = subprocess.DEVNULL, {**os.environ, "RAY_ADDRESS": ray}
    with subprocess.Popen(command, cwd=REPO, stdout=quiet, stderr=quiet, env=environment) as process:
        deadline = time.monotonic() + 120
        while process.poll() is None and not begun(run) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(delay_s)
        if process.poll() is not None:
            return False
        os.kill(process.pid, signal.SIGKILL)
        return True


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("killed")
def test_killed_stages_end_like_an_undisturbed_run(home: Path, undisturbed: Path, ray_address: str) -> None:
    chance = random.Random(os.environ.get("DFLASH_KILL_SEED", "7"))
    run = home / "killed"
    killed = dict.fromkeys(STEPS, 0)
    for stage in STEPS:
        command = [sys.executable, "-m", "pipeline.cli", stage, str(home / "r.yaml"), "--set", f"run={run}"]
        # The first kill comes at any moment of the stage, start-up included, the second in the middle of its work.
        killed[stage] += run_and_kill(command, run, lambda _: True, chance.uniform(0.5, 6), ray_address)
        killed[stage] += run_and_kill(command, run, WATCHED[stage], chance.uniform(0, 0.3), ray_address)
        done = dflash_here(stage, home / "r.yaml", "--set", f"run={run}", ray=ray_address)
        assert done.returncode == 0, done.stderr
    assert all(killed[s] == KILLS for s in ("generate", "extract", "train")), killed
    ours, theirs = ResponsesTable.open(run / "responses"), ResponsesTable.open(undisturbed / "responses")
    ids = [r.sample_id for r in ours]
    assert len(ids) == len(set(ids)) == 48
    assert ours.responses_hash() == theirs.responses_hash()
    assert equal_caches(run / "cache", undisturbed / "cache") == []
    assert verify_cache(run / "cache").ok
    assert final_weights(run) == final_weights(undisturbed)
    exported = [sha256_file(r / "export" / "model.safetensors") for r in (run, undisturbed)]
    assert exported[0] == exported[1]


@pytest.mark.ray
def test_other_settings_in_the_same_folder_are_refused_by_name(home: Path, undisturbed: Path) -> None:
    for setting, found, wanted in (
        ("generate.max_new_tokens=13", "12", "13"),
        ("cache.max_length=40", "3072", "40"),
        ("train.lr=3e-4", "0.0006", "0.0003"),
    ):
        stage = {"generate": "generate", "cache": "extract", "train": "train"}[setting.split(".")[0]]
        done = dflash_here(stage, home / "r.yaml", "--set", f"run={undisturbed}", "--set", setting)
        assert done.returncode == Exit.MISMATCH, done.stderr
        key = setting.split("=")[0].split(".")[1]
        assert key in done.stderr
        assert found in done.stderr
        assert wanted in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.ray
def test_recipe_for_another_target_than_the_cache(home: Path, undisturbed: Path) -> None:
    save_target(home / "other", make_target(1, make_tokenizer(), vocab_size=300))
    other = f"target.model={home / 'other'}"
    done = dflash_here("train", home / "r.yaml", "--set", f"run={undisturbed}", "--set", other)
    assert done.returncode == Exit.MISMATCH
    assert "weights" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        (["target.model=no/such-model"], 1, "no/such-model"),
        (["cache.layer_ids=[1,99]"], 2, "99"),
        (["train.lrr=1"], 2, "train.lr"),
        (["drafter.block_size=1"], 2, "block_size"),
        (["prompts.sources.0.path=nothing.jsonl"], 1, "nothing.jsonl"),
        (["prompts.sources.0.path=empty.jsonl"], 1, "empty"),
    ],
)
def test_bad_input_is_one_clear_message(
    home: Path,
    tmp_path: Path,
    settings: list[str],
    code: int,
    words: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (home / "empty.jsonl").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    stage = "extract" if "layer_ids" in settings[0] else "generate"
    command = [stage, str(home / "r.yaml"), "--set", f"run={tmp_path / 'run'}"]
    for setting in settings:
        command += ["--set", setting]
    if stage == "extract":
        shutil.copytree(request.getfixturevalue("undisturbed") / "responses", tmp_path / "run" / "responses")
    done = dflash_here(*command)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "status" / f"{stage}.json").exists()


@pytest.mark.ray
def test_cache_commands(home: Path, undisturbed: Path) -> None:
    cache, runner = str(undisturbed / "cache"), CliRunner()
    listed = json.loads(runner.invoke(cli.dflash, ["cache", "ls", cache, "--json"]).output)
    assert listed["cache"]["samples"] == 48
    assert "shard-00000" in runner.invoke(cli.dflash, ["cache", "ls", cache]).output
    shard = json.loads(runner.invoke(cli.dflash, ["cache", "show", cache, "shard-00000", "--json"]).output)
    sample_id = shard["stored"][0]["sample_id"]
    assert sample_id in runner.invoke(cli.dflash, ["cache", "show", cache, "shard-00000"]).output
    sample = json.loads(runner.invoke(cli.dflash, ["cache", "show", cache, "shard-00000", sample_id, "--json"]).output)
    assert sample["tokens"] == len(sample["input_ids"]) == shard["stored"][0]["tokens"]
    assert sample["supervised"] == sum(sample["loss_mask"])
    assert sample_id in runner.invoke(cli.dflash, ["cache", "show", cache, "shard-00000", sample_id]).output
    assert dflash_here("cache", "verify", cache).returncode == 0


@pytest.mark.ray
def test_flipped_byte_is_found_stops_training_and_is_repaired(
    home: Path, undisturbed: Path, tmp_path: Path, ray_address: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    victim = next((run / "cache" / "shards").glob("shard-00001.*")) / "features" / "c" / "0" / "0" / "0"
    data = bytearray(victim.read_bytes())
    data[len(data) // 3] ^= 1
    victim.write_bytes(data)
    found = dflash_here("cache", "verify", run / "cache")
    assert found.returncode == 1
    assert "shard-00001" in found.stdout
    shutil.rmtree(run / "train")
    (run / "status" / "train.json").unlink()
    trained = dflash_here("train", home / "r.yaml", "--set", f"run={run}", ray=ray_address)
    assert trained.returncode == 1
    assert "shard-00001" in trained.stderr
    assert "Traceback" not in trained.stderr
    repaired = dflash_here("cache", "repair", home / "r.yaml", "--set", f"run={run}", "--json", ray=ray_address)
    assert repaired.returncode == 0, repaired.stderr
    assert json.loads(repaired.stdout)["made"] == ["shard-00001"]
    assert equal_caches(run / "cache", undisturbed / "cache") == []
    assert verify_cache(run / "cache").ok
    again = dflash_here("cache", "verify", run / "cache", "--recompute", "3", "--json")
    assert again.returncode == 0, again.stderr
    assert all(layer["largest"] < 1e-2 for layer in json.loads(again.stdout)["recompute"]["layers"])


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_a_run_folder_in_an_object_store_holds_the_same(
    home: Path, undisturbed: Path, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the store outlives a stage: each has a scratch folder of its own."""
    for stage in STEPS:
        monkeypatch.setenv("DFLASH_SCRATCH", str(tmp_path / stage))
        done = dflash(stage, home / "r.yaml", "--set", f"run={s3_url}")
        assert done.returncode == 0, done.stderr
    store = open_storage(s3_url)
    assert ResponsesTable.open(f"{s3_url}/responses").responses_hash() == (
        ResponsesTable.open(undisturbed / "responses").responses_hash()
    )
    assert equal_caches(undisturbed / "cache", f"{s3_url}/cache") == []
    newest, *hashes = final_weights(undisturbed)
    kept = [f"train/checkpoints/{newest}/{name}.safetensors" for name in ("model", "optimizer")]
    assert [sha256_bytes(store.read(key)) for key in kept] == hashes
    exported = "export/model.safetensors"
    assert store.read(exported) == (undisturbed / exported).read_bytes()
    tau = [json.loads(open_storage(run).read("evaluate/results.json"))["drafters"]["trained"]["tau"]
           for run in (s3_url, str(undisturbed))]  # fmt: skip
    assert tau[0] == tau[1]
    rows = [json.loads(line) for line in store.read("train/metrics.jsonl").splitlines()]
    steps = [row["step"] for row in rows if row["kind"] == "step"]
    assert steps == sorted(set(steps))
    monkeypatch.setenv("DFLASH_SCRATCH", str(tmp_path / "fresh"))
    again = dflash("run", home / "r.yaml", "--set", f"run={s3_url}")
    assert again.stderr.count("already done") == len(STEPS), again.stderr
    assert b"<svg" in store.read("report.html")
    told = dflash_here("status", s3_url, "--json")
    assert [s["state"] for s in json.loads(told.stdout)["stages"]] == ["done"] * len(STEPS)


def test_a_second_driver_is_refused(home: Path, tmp_path: Path) -> None:
    from pipeline.folder import RunFolder

    with RunFolder(tmp_path / "run").locked():
        done = dflash_here("generate", home / "r.yaml", "--set", f"run={tmp_path / 'run'}")
    assert done.returncode == Exit.IN_USE
    assert f"process {os.getpid()}" in done.stderr


@pytest.mark.ray
def test_training_on_an_evaluation_prompt_is_refused(home: Path, undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    shutil.rmtree(run / "evaluate")
    (run / "status" / "evaluate.json").unlink()
    same = "evaluate.sources.0.path=train.jsonl"
    done = dflash_here("evaluate", home / "r.yaml", "--set", f"run={run}", "--set", same)
    assert done.returncode == 1
    assert "trained on" in done.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that is really full before long: a small tmpfs."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root on Linux")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder)], check=False)
    if mounted.returncode != 0:
        pytest.skip("this machine does not allow mounting a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.ray
def test_extract_onto_a_full_disk(home: Path, undisturbed: Path, small_disk: Path, ray_address: str) -> None:
    run = small_disk / "run"
    run.mkdir()
    shutil.copytree(undisturbed / "responses", run / "responses")
    done = dflash_here("extract", home / "r.yaml", "--set", f"run={run}", ray=ray_address)
    assert done.returncode == Exit.STORAGE, done.stderr
    assert "No space left on device" in done.stderr
    assert "run the same command again" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (run / "status" / "extract.json").exists()
    committed = committed_shards(open_storage(run / "cache"))
    report = verify_cache(run / "cache", committed)
    assert [s.status for s in report.shards] == ["ok"] * len(committed)
    groups = {p.name.split(".")[0] for p in (run / "cache" / "shards").iterdir()}
    assert groups <= set(committed), "an attempt that failed left its files"
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    again = dflash_here("extract", home / "r.yaml", "--set", f"run={run}", ray=ray_address)
    assert again.returncode == 0, again.stderr
    assert verify_cache(run / "cache").ok


def damage(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_finished_stage_whose_output_has_gone_makes_it_again(
    home: Path, undisturbed: Path, tmp_path: Path, ray_address: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    (folder / "responses" / "commits" / "part-00003.json").unlink()
    (folder / "cache" / "commits" / "shard-00002.json").unlink()
    damage(max((folder / "train" / "checkpoints").glob("step-*")) / "model.safetensors")
    (folder / "evaluate" / "results.json").unlink()
    next((folder / "evaluate" / "prompts").iterdir()).write_text("{}")
    damage(folder / "export" / "model.safetensors")
    refused = dflash_here("export", home / "r.yaml", "--set", f"run={folder}")
    assert refused.returncode == 1  # no earlier state is a stand-in for the finished one
    done = dflash_here("run", home / "r.yaml", "--set", f"run={folder}", ray=ray_address)
    assert done.returncode == 0, done.stderr
    again = [line.split(":")[0] for line in done.stderr.splitlines() if "making that again" in line]
    assert again == list(STEPS)
    assert equal_caches(folder / "cache", undisturbed / "cache") == []
    assert final_weights(folder) == final_weights(undisturbed)
    results = json.loads((folder / "evaluate" / "results.json").read_text())["drafters"]["trained"]
    assert results["prompts"] == results["identical"] == 3
    exported = [sha256_file(r / "export" / "model.safetensors") for r in (folder, undisturbed)]
    assert exported[0] == exported[1]


@pytest.mark.ray
@pytest.mark.parametrize(
    ("file", "content", "stage"),
    [
        ("train/identity.json", "", "train"),
        ("evaluate/identity.json", "{", "evaluate"),
        ("status/train.json", "[]", "train"),
        ("status/export.json", "5", "export"),
    ],
)
def test_damaged_small_files_are_named(
    home: Path, undisturbed: Path, tmp_path: Path, file: str, content: str, stage: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    (run / file).write_text(content)
    done = dflash_here(stage, home / "r.yaml", "--set", f"run={run}")
    assert done.returncode == 1, done.stderr
    assert file in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_where_the_run_folder_belongs(home: Path) -> None:
    done = dflash_here("generate", home / "r.yaml", "--set", f"run={home / 'train.jsonl'}")
    assert done.returncode == 1
    assert "train.jsonl" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("setting", ["extract.threads=0", "seed=99999999999999999999999", "evaluate.threads=-1"])
def test_settings_that_no_run_could_use(home: Path, setting: str) -> None:
    done = dflash_here("plan", home / "r.yaml", "--set", setting)
    assert done.returncode == 2, done.stderr
    assert setting.split("=")[0] in done.stderr
