"""`dflash cache`: what each command prints, finds, mends and writes, on tiny caches."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cache_schema import copying, names
from cache_schema.identity import CacheIdentity
from cache_schema.layout import feature_format
from cache_schema.marker import committed_shards, discard, evict, read_marker
from cache_schema.plan import plan_shards
from cache_schema.reader import FeatureCache, create_cache
from cache_schema.responses import create_responses, write_part
from cache_schema.storage import open_storage
from cache_schema.verify import equal_caches, verify_cache
from cache_schema.writer import ShardWriter
from pipeline import cli, extract_step, rolling_train, steps
from pipeline.exits import Exit
from stages.config import TargetConfig
from stages.quantize import dequantize, from_stored, to_stored
from stages.target import hash_target, load_tokenizer
from tests import tiny
from tests.cache.builders import (
    IDENTITY,
    RESPONSES_IDENTITY,
    flip_byte,
    make_cache,
    mask,
    response,
    token_ids,
    write_shard,
)
from tests.test_architecture import HEAVY, loaded_by

COMMANDS = ("ls", "info", "show", "stats", "verify", "diff", "repair", "gc", "copy", "export")
HIDDEN = 64
LENGTHS = {"a": 70, "b": 3, "späte-✓": 129, "d": 64, "e": 90}
SHARD = "shard-00000"
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs `dflash cache …` in this process: exit code, stdout, stderr."""
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as done:
            cli.main(["cache", *map(str, arguments)])
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return int(done.value.code or 0), printed.out, printed.err

    return run


def strict_json(text: str) -> Any:
    """JSON as other languages read it: without NaN and infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def states(sample_id: str, n_tokens: int, seed: int = 0) -> torch.Tensor:
    """[T, 3, 64] float32: layers that resemble their neighbours, with two outlier channels."""
    rng = np.random.default_rng([seed, *sample_id.encode()])
    values = rng.normal(size=(n_tokens, 3, HIDDEN)).cumsum(1)
    values[..., [5, 40]] *= 30
    return torch.from_numpy(values).float()


def value_cache(path: Path, seed: int = 0, compression: str = "none", **identity: Any) -> CacheIdentity:
    """A cache whose values are like states: three layers, five samples in three shards, one of them in the ledger."""
    made_of = dataclasses.replace(IDENTITY, **identity)
    plan = create_cache(path, made_of, plan_shards([*LENGTHS, "lost"], [*LENGTHS.values(), 9], 1, 170))
    for shard in plan.shards():
        with ShardWriter(path, shard, made_of, HIDDEN, compression=compression) as writer:
            for sample_id in plan.samples(shard):
                if sample_id == "lost":
                    writer.drop("lost", "non_finite", "features has NaN or infinite values")
                    continue
                n = LENGTHS[sample_id]
                codes, scale = to_stored(states(sample_id, n, seed), feature_format(made_of))
                ids = (token_ids(sample_id, n) % 250).astype(np.int32)
                writer.append(sample_id, codes, ids, mask(n), scale_TLG=scale)
            writer.commit()
    return made_of


INT8 = {"feature_dtype": "int8", "feature_bits": 8, "feature_group": 24}


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exact") / "cache"
    value_cache(path)
    return path


@pytest.fixture(scope="module")
def compact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compact") / "cache"
    value_cache(path, compression="zstd", **INT8)
    return path


@pytest.fixture
def damaged(exact: Path, tmp_path: Path) -> Path:
    """A copy of the exact cache with a flipped byte in the features of its second shard."""
    path = tmp_path / "run" / "cache"
    shutil.copytree(exact, path)
    flip_byte(features_of(path, "shard-00001"), 1000)
    return path


def features_of(cache: Path, shard: str) -> Path:
    (path,) = (cache / "shards").glob(f"{shard}.*/features/c/0/0/0")
    return path


# --- help -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_json(call: Call, command: str) -> None:
    code, text, _ = call(command, "--help")
    assert code == 0
    assert f"dflash cache {command}" in text[text.index("Example") :]
    assert "--json" in text


def test_help_lists_every_command_and_loads_nothing_heavy() -> None:
    done, modules = loaded_by("-c", "from pipeline.cli import main; main()", "cache", "--help")
    assert done.returncode == 0
    assert all(f"  {command} " in done.stdout for command in COMMANDS)
    assert not modules & set(HEAVY)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ("repair", "copy", "diff", "show", "export")])
def test_no_cache_is_bad_data_and_no_option_is_a_wrong_call(call: Call, command: str, tmp_path: Path) -> None:
    code, out, err = call(command, tmp_path / "nothing")
    assert code == 1
    assert "no feature cache here" in out + err
    assert call(command, tmp_path, "--no-such-option")[0] == 2
    assert not (tmp_path / "nothing").exists()


# --- ls, info -------------------------------------------------------------------------------------------


def test_ls_tells_state_and_sizes(call: Call, exact: Path) -> None:
    code, text, _ = call("ls", exact)
    assert code == 0
    assert SHARD in text
    found = strict_json(call("ls", exact, "--json")[1])
    assert [s["samples"] for s in found["shards"]] == [2, 1, 2]
    assert found["cache"]["dropped"] == 1
    assert sum(s["bytes"] for s in found["shards"]) == found["cache"]["bytes"]


def test_info_adds_up(call: Call, compact: Path) -> None:
    code, out, _ = call("info", compact, "--json")
    found = strict_json(out)
    assert code == 0
    assert found["identity"]["feature_bits"] == 8
    tokens = sum(LENGTHS.values())
    assert found["stored"] | {"bytes": 0} == {"shards": 3, "samples": 5, "tokens": tokens, "bytes": 0}
    assert found["planned"] == {"shards": 3, "samples": 6, "tokens": tokens + 9}
    assert found["stored"]["bytes"] == sum(p.stat().st_size for p in (compact / "shards").rglob("*") if p.is_file())
    assert found["lengths"] == {"min": 3, "mean": 71.2, "p50": 70.0, "p95": 121.2, "max": 129}
    assert found["ledger"] == {"non_finite": {"dropped": 1, "changed": 0}}
    states_bytes = sum(found["arrays"][a]["bytes"] for a in ("features", "feature_scale"))
    assert found["compression"]["ratio"] == pytest.approx(states_bytes / (tokens * 3 * HIDDEN * 2))
    assert found["arrays"]["features"]["plain_bytes"] == tokens * 3 * HIDDEN
    assert found["timings"]["writer_mb_per_s"] > 0
    text = call("info", compact)[1]
    assert all(word in text for word in ("zstd", "of bfloat16", "non_finite: 1 dropped", "feature_group", "95 % 121"))


def test_info_tells_missing_evicted_damaged_and_garbage(call: Call, exact: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    shutil.copytree(exact, path)
    storage = open_storage(path)
    evict(storage, "shard-00000")
    storage.delete(names.commit_key("shard-00001"))
    flip_byte(path / "commits" / "shard-00002.json", 40)
    code, out, _ = call("info", path, "--json")
    found = strict_json(out)
    assert code == 1
    assert (found["evicted"], found["missing"]) == (["shard-00000"], ["shard-00001"])
    assert "shard-00002" in found["damaged"]["shard-00002"]
    assert found["garbage"]["items"] == 2  # a group whose marker is gone, and one whose marker cannot be read
    assert found["lengths"] is None
    code, out, _ = call("ls", path, "--json")
    assert code == 1
    assert [row["status"] for row in strict_json(out)["shards"]] == ["evicted", "missing", "corrupt"]
    text = call("info", path)[1]
    assert all(word in text for word in ("1 missing (shard-00001)", "1 evicted (shard-00000)", "1 DAMAGED"))


@pytest.mark.parametrize("kind", ["folder", "binary", "nested"])
def test_what_is_no_marker_is_a_damaged_shard_in_a_short_line(
    call: Call, damaged: Path, tmp_path: Path, kind: str
) -> None:
    marker = damaged / "commits" / "shard-00001.json"
    marker.unlink()
    if kind == "folder":
        (marker / "inside").mkdir(parents=True)
    else:
        marker.write_bytes(b"\x80" * 50_000 if kind == "binary" else b"[" * 200_000)
    code, out, _ = call("ls", damaged, "--json")
    row = strict_json(out)["shards"][1]
    assert (code, row["status"]) == (1, "corrupt")
    assert len(row["problem"]) < len(str(marker)) + 300
    assert "shard-00001" in strict_json(call("info", damaged, "--json")[1])["damaged"]
    assert strict_json(call("verify", damaged, "--json")[1])["corrupt"] == ["shard-00001"]
    assert "the marker of shard-00001 is damaged" in call("gc", damaged)[1]
    for command in (["copy", damaged, tmp_path / "far"], ["export", damaged, tmp_path / "out", "--format", "arrow"]):
        code, _, err = call(*command)
        assert code == 1
        assert "shard-00001.json is" in err
        assert len(err) < 1000
    assert discard(open_storage(damaged), "shard-00001") is None
    assert strict_json(call("ls", damaged, "--json")[1])["shards"][1]["status"] == "missing"


# --- show -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with its tokenizer, as a checkpoint folder."""
    target = tiny.make_target(0, tiny.make_tokenizer(), vocab_size=300)
    return tiny.save_target(tmp_path_factory.mktemp("model") / "target", target)


@pytest.fixture(scope="module")
def texts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of one sample of text, made for the tokenizer of `model`."""
    path, tokenizer = tmp_path_factory.mktemp("texts") / "cache", load_tokenizer(TargetConfig(model=str(model)))
    hashes = hash_target(TargetConfig(model=str(model)), tokenizer)
    made_of = dataclasses.replace(IDENTITY, tokenizer_sha256=hashes.tokenizer, target_name=str(model))
    prompt, answer = (
        tokenizer("<|im_start|>user\nGrüße?\x1b[31m")["input_ids"],
        tokenizer("Ja ✓<|im_end|>")["input_ids"],
    )
    ids = np.array(prompt + answer, np.int32)
    create_cache(path, made_of, plan_shards(["s"], [len(ids)], 1, 1))
    with ShardWriter(path, SHARD, made_of, HIDDEN) as writer:
        codes, _ = to_stored(states("s", len(ids)), feature_format(made_of))
        writer.append("s", codes, ids, (np.arange(len(ids)) >= len(prompt)).astype(np.uint8))
        writer.commit()
    return path


def test_show_gives_text_with_the_mask_in_brackets(call: Call, texts: Path) -> None:
    code, text, _ = call("show", texts, SHARD, "s")
    assert code == 0
    assert "<|im_start|>user\nGrüße?\ufffd[31m⟦Ja ✓<|im_end|>⟧" in text
    assert "\x1b" not in text  # another's text does not steer the terminal
    assert "mean norm" in text


def test_show_colours_the_mask_on_a_terminal(call: Call, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    text = call("show", texts, SHARD, "s")[1]
    assert "\x1b[32mJa ✓<|im_end|>\x1b[0m" in text
    assert "⟦" not in text
    monkeypatch.setenv("NO_COLOR", "1")
    assert "⟦Ja ✓<|im_end|>⟧" in call("show", texts, SHARD, "s")[1]


def test_show_without_the_tokenizer_gives_ids_and_says_why(call: Call, texts: Path, exact: Path, model: Path) -> None:
    code, text, _ = call("show", exact, SHARD, "b")
    ids = (token_ids("b", 3) % 250).tolist()
    assert code == 0
    assert f"{ids[0]} ⟦{ids[1]} {ids[2]}⟧" in text
    assert "'tiny' is not on this machine; give --tokenizer" in text
    code, out, err = call("show", exact, SHARD, "b", "--tokenizer", model)
    assert (code, out) == (1, "")
    found = strict_json(call("show", texts, SHARD, "s", "--tokenizer", model, "--json")[1])
    assert hash_of_tokenizer(model) in err  # names both hashes
    assert "t" * 64 in err
    assert "".join(r["text"] for r in found["runs"] if r["supervised"]) == "Ja ✓<|im_end|>"
    assert found["token_texts"][-1] == "<|im_end|>"
    assert len(found["token_texts"]) == len(found["input_ids"]) == len(found["loss_mask"]) == found["tokens"]


def hash_of_tokenizer(model: Path) -> str:
    return hash_target(TargetConfig(model=str(model)), load_tokenizer(TargetConfig(model=str(model)))).tokenizer


@pytest.mark.parametrize("kind", ["exact", "compact"])
def test_show_gives_norms_and_values_of_the_states(call: Call, kind: str, request: pytest.FixtureRequest) -> None:
    found = strict_json(call("show", request.getfixturevalue(kind), SHARD, "a", "--json")[1])
    expected = states("a", 70).numpy()
    tolerance = 0.005 if kind == "exact" else 0.03
    for i, row in enumerate(found["layers"]):
        norms = np.linalg.norm(expected[:, i], axis=-1)
        assert row["mean_norm"] == pytest.approx(norms.mean(), rel=tolerance)
        assert row["max_norm"] == pytest.approx(norms.max(), rel=tolerance)
        assert row["max_norm_token"] == norms.argmax()
        scale = float(np.abs(expected[0, i]).max())
        assert row["head"] == pytest.approx(expected[0, i, :6].tolist(), abs=scale * tolerance)
    assert [row["layer"] for row in found["layers"]] == list(IDENTITY.layer_ids)


def test_show_shard_lists_samples_and_ledger(call: Call, exact: Path) -> None:
    text = call("show", exact, "shard-00002")[1]
    assert all(word in text for word in ("e", "lost", "non_finite", "bfloat16", "timings"))
    assert call("show", exact, "shard-00002", "a")[0] == 2
    assert call("show", exact, "shard-00007")[0] == 2


# --- stats ----------------------------------------------------------------------------------------------


def test_stats_finds_the_outliers(call: Call, exact: Path, compact: Path, tmp_path: Path) -> None:
    found = strict_json(call("stats", exact, "--json")[1])
    values = np.concatenate([states(s, n).bfloat16().float().numpy() for s, n in LENGTHS.items()])
    assert found["measured_tokens"] == len(values)
    for i, row in enumerate(found["layers"]):
        norms = np.linalg.norm(values[:, i], axis=-1)
        assert row["norm"]["p50"] == pytest.approx(np.median(norms), rel=1e-4)
        assert row["norm"]["max"] == pytest.approx(norms.max(), rel=1e-4)
        assert {c["channel"] for c in row["largest_channels"][:2]} == {5, 40}
        assert row["peak"]["max"] <= np.sqrt(HIDDEN) * 1.0001
        assert row["kurtosis"]["p50"] > 10
    cosine = (values[:, 0] * values[:, 1]).sum(-1) / np.linalg.norm(values[:, 0], axis=-1)
    assert found["layers"][0]["cosine_next"]["mean"] == pytest.approx(
        (cosine / np.linalg.norm(values[:, 1], axis=-1)).mean(), rel=1e-4
    )
    assert found["layers"][-1]["cosine_next"] is None
    quantised = strict_json(call("stats", compact, "--json")[1])
    assert quantised["layers"][0]["norm"]["mean"] == pytest.approx(found["layers"][0]["norm"]["mean"], rel=0.01)


def test_stats_choice_of_samples_is_a_function_of_the_seed(call: Call, exact: Path) -> None:
    one, two, other = (
        strict_json(call("stats", exact, "--samples", "2", "--seed", str(seed), "--json")[1]) for seed in (0, 0, 3)
    )
    assert one == two
    assert one["layers"] != other["layers"]
    assert one["lengths"] == other["lengths"]  # of all samples
    assert one["measured_samples"] == 2


def test_stats_are_drawn(call: Call, exact: Path, tmp_path: Path) -> None:
    code, _, err = call("stats", exact, "--plot", tmp_path / "stats.png")
    assert code == 0
    assert "drew" in err
    assert (tmp_path / "stats.png").read_bytes().startswith(b"\x89PNG")
    assert call("stats", exact, "--plot", tmp_path / "stats.xyz")[0] == 2


# --- verify ---------------------------------------------------------------------------------------------


def test_verify_in_several_processes_finds_the_same(call: Call, damaged: Path) -> None:
    one, two = call("verify", damaged, "--json"), call("verify", damaged, "--json", "--workers", "2")
    assert one[0] == two[0] == 1
    assert strict_json(one[1])["problems"] == strict_json(two[1])["problems"] != []


def test_verify_finds_a_flipped_byte(call: Call, exact: Path, damaged: Path) -> None:
    assert call("verify", exact)[0] == 0
    code, text, err = call("verify", damaged)
    assert code == 1
    assert "DAMAGED: 2 ok, 0 missing, 1 corrupt" in text
    assert "shard-00001: corrupt: shard-00001: features" in text
    assert "B/s" in err
    found = strict_json(call("verify", damaged, "--json")[1])
    assert (found["ok"], found["corrupt"]) == (False, ["shard-00001"])


def test_verify_of_some_shards(call: Call, damaged: Path) -> None:
    assert call("verify", damaged, "--shard", "0", "--shard", "shard-00002")[0] == 0
    assert call("verify", damaged, "--shards", "0-1")[0] == 1
    code, _, err = call("verify", damaged, "--shard", "0-7")
    assert code == 2
    assert "the plan has 3 shards" in err
    assert "names no shard" in call("verify", damaged, "--shard", "first")[2]


def test_verify_tells_missing_from_evicted(call: Call, exact: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    shutil.copytree(exact, path)
    evict(open_storage(path), "shard-00000")
    code, text, _ = call("verify", path)
    assert code == 0
    assert "ok: 2 ok, 0 missing, 0 corrupt, 1 evicted" in text
    open_storage(path).delete(names.commit_key("shard-00001"))
    code, text, _ = call("verify", path)
    assert code == 1
    assert "INCOMPLETE: 1 ok, 1 missing, 0 corrupt, 1 evicted" in text


@pytest.mark.parametrize("name", ["cache.json", "plan.parquet", "plan.sha256"])
def test_verify_says_that_the_cache_itself_is_damaged(call: Call, damaged: Path, name: str) -> None:
    flip_byte(damaged / name, 20)
    code, text, _ = call("verify", damaged)
    assert code == 1
    assert "DAMAGED" in text
    assert str(damaged) in text
    assert not strict_json(call("verify", damaged, "--json")[1])["ok"]
    # An altered identity may also read as another one.
    assert {call(command, damaged)[0] for command in ("ls", "info", "stats")} <= {Exit.BAD, Exit.MISMATCH}


def test_verify_compares_ids_with_the_responses(call: Call, tmp_path: Path) -> None:
    plan = make_cache(tmp_path / "cache", lengths={"a": 10, "b": 10})
    responses = [response("a"), response("b")]
    create_responses(tmp_path / "responses", RESPONSES_IDENTITY, 1, 2)
    write_part(tmp_path / "responses", 0, responses)
    code, text, _ = call("verify", tmp_path / "cache")
    assert "compared with" in text
    assert code == 1  # the masks of the two builders differ
    assert "loss mask" in text
    assert "token ids of sample" in text or "'a'" in text
    assert len(plan) == 2
    assert call("verify", tmp_path / "cache", "--responses", tmp_path / "none")[0] == 1


def test_verify_finds_a_marker_that_is_not_planned(call: Call, damaged: Path) -> None:
    shutil.copy(damaged / "commits" / "shard-00000.json", damaged / "commits" / "shard-00042.json")
    text = call("verify", damaged, "--json")[1]
    assert any("shard-00042 has a commit marker, but is not in the plan" in p for p in strict_json(text)["problems"])


# --- verify --recompute -----------------------------------------------------------------------------------


def extraction(folder: Path, model: Path, **identity: Any) -> Path:
    """A cache of the tiny target's own states."""
    config = TargetConfig(model=str(model), dtype="float32")
    target = tiny.make_target(0, None, vocab_size=300)
    weights = hash_target(config, load_tokenizer(config)).weights
    samples = [tiny.response(f"s{i}", 5, 20 + 7 * i, 290) for i in range(4)]
    made_of = {"target_name": str(model), "target_weights_sha256": weights, "target_dtype": "float32"} | identity
    tiny.start_extraction(folder, target, samples, **made_of).run()
    return folder / "cache"


@pytest.mark.parametrize(
    ("kind", "equal"),
    [({}, 0.99), ({"feature_dtype": "int8", "feature_bits": 6}, 0.9), ({"feature_dtype": "float8_e4m3fn"}, 0.9)],
)
def test_recomputed_states_are_the_stored_ones(
    call: Call, model: Path, tmp_path: Path, kind: dict[str, Any], equal: float
) -> None:
    cache = extraction(tmp_path, model, **kind)
    code, out, err = call("verify", cache, "--recompute", "3", "--json")
    found = strict_json(out)["recompute"]
    assert code == 0
    assert "seed 0" in err
    assert len(found["samples"]) == 3
    for row in found["layers"]:
        assert row["equal_share"] >= equal
        assert row["mean"] <= row["allowed_mean"]
        assert row["largest"] < 0.5
    assert "expected: all values equal" in call("verify", cache, "--recompute", "1")[1]


def test_recompute_finds_states_of_another_layer(call: Call, model: Path, tmp_path: Path) -> None:
    """All checksums are right, but the identity says layers (1, 3, 5) and the states are those of (1, 3, 4)."""
    cache = extraction(tmp_path, model)
    other = dataclasses.replace(FeatureCache.open(cache).identity, layer_ids=(1, 3, 5))
    moved = tmp_path / "moved"
    opened = FeatureCache.open(cache)
    plan = create_cache(moved, other, opened.plan)
    for shard in plan.shards():
        with ShardWriter(moved, shard, other, tiny.HIDDEN) as writer:
            for s in plan.samples(shard):
                found = opened.read(s)
                writer.append(s, found.features, found.input_ids, found.loss_mask)
            writer.commit()
    assert call("verify", moved)[0] == 0
    code, text, _ = call("verify", moved, "--recompute", "2")
    assert code == 1
    assert text.count("BEYOND THE LIMIT") == 1


def test_recompute_refuses_another_target(call: Call, model: Path, tmp_path: Path) -> None:
    cache = extraction(tmp_path, model)
    other = tiny.save_target(tmp_path / "other", tiny.make_target(1, tiny.make_tokenizer(), vocab_size=300))
    code, out, err = call("verify", cache, "--recompute", "1", "--target", other)
    assert (code, out) == (Exit.MISMATCH, "")
    assert FeatureCache.open(cache).identity.target_weights_sha256 in err
    assert "--target" in err


# --- diff -----------------------------------------------------------------------------------------------


def test_equal_caches_have_no_difference(call: Call, exact: Path, tmp_path: Path) -> None:
    value_cache(tmp_path / "again")
    code, text, _ = call("diff", exact, tmp_path / "again", "--data")
    assert code == 0
    assert "equal: 3 shards have equal content" in text
    assert "equal by their markers: 3 shards have equal content" in call("diff", exact, tmp_path / "again")[1]


def test_diff_names_fields_with_both_values_and_compares_values(call: Call, exact: Path, compact: Path) -> None:
    code, text, _ = call("diff", exact, compact)
    assert code == 1
    assert "identity: feature_dtype is 'bfloat16' in A and 'int8' in B" in text
    found = strict_json(call("diff", exact, compact, "--data", "--json")[1])
    assert found["identity"]["feature_group"] == [None, 24]
    assert (found["equal"], found["data"]["equal"], found["data"]["samples"]) == (False, False, 5)
    for row in found["data"]["layers"]:
        assert 1e-4 < row["relative"] < 0.02
        assert row["relative"] <= row["worst_token"]
    assert call("diff", exact, compact, "--data", "--samples", "2")[0] == 1


def test_diff_names_shards_ledgers_and_plans(call: Call, exact: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    shutil.copytree(exact, path)
    storage, made_of = open_storage(path), FeatureCache.open(exact).identity
    (path / "commits" / "shard-00000.json").unlink()
    marker = read_marker(storage, "shard-00002")
    shutil.rmtree(path / "shards" / marker.group)
    (path / "commits" / "shard-00002.json").unlink()
    with ShardWriter(path, "shard-00002", made_of, HIDDEN) as writer:
        for s in ("d", "e"):
            codes, _ = to_stored(states(s, LENGTHS[s], seed=int(s == "e")), feature_format(made_of))
            writer.append(s, codes, (token_ids(s, LENGTHS[s]) % 250).astype(np.int32), mask(LENGTHS[s]))
        writer.drop("lost", "other", "reason")
        writer.commit()
    code, text, _ = call("diff", exact, path, "--data")
    assert code == 1
    assert "shard-00000: committed only in A" in text
    assert "the values of features differ" in text
    assert "the ledgers differ (1 and 1 rows) about 'lost'" in text
    value_cache(tmp_path / "other", responses_sha256="q" * 64)
    assert "responses_sha256" in call("diff", exact, tmp_path / "other")[1]
    make_cache(tmp_path / "third")
    assert "other samples" in call("diff", exact, tmp_path / "third")[1]


# --- repair ---------------------------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe whose run is the folder beside it."""
    file = tmp_path / "r.yaml"
    file.write_text(
        f"name: t\nrun: {tmp_path / 'run'}\ntarget: {{model: none}}\nprompts: {{sources: [{{path: p.jsonl}}]}}\n"
        "evaluate: {sources: [{path: p.jsonl}]}\n"
    )
    return file


@pytest.fixture
def same_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe makes caches of the builders' identity; hashing a target is another test's."""
    monkeypatch.setattr(extract_step, "cache_identity", lambda run: IDENTITY)


@pytest.mark.usefixtures("same_recipe")
def test_repair_makes_damaged_and_missing_shards_again(
    call: Call, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "run" / "cache"
    plan = make_cache(cache)
    make_cache(tmp_path / "whole")
    flip_byte(features_of(cache, "shard-00001"), 100)
    (cache / "commits" / f"{plan.shards()[-1]}.json").unlink()
    code, _, err = call("repair", recipe, "--dry-run")
    assert code == 1
    assert "would take out 1 shards and make 2" in err
    assert len(committed_shards(open_storage(cache))) == plan.n_shards - 1

    def extract(run: steps.Run) -> None:
        for shard in set(plan.shards()) - set(committed_shards(open_storage(run.cache))):
            write_shard(Path(run.cache), plan, shard)

    monkeypatch.setitem(steps.STEPS, "extract", extract)
    code, out, err = call("repair", recipe, "--json")
    found = strict_json(out)
    assert code == 0
    assert found["made"] == ["shard-00001", plan.shards()[-1]]
    assert "took shard-00001 out" in err
    assert equal_caches(cache, tmp_path / "whole") == []
    assert verify_cache(cache).ok
    code, out, err = call("repair", recipe)
    assert code == 0
    assert "nothing to do" in err


@pytest.mark.parametrize("harm", [True, False])
def test_repair_takes_nothing_out_that_the_recipe_would_not_make_again(
    call: Call, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: bool
) -> None:
    cache = tmp_path / "run" / "cache"
    make_cache(cache)
    if harm:
        flip_byte(features_of(cache, "shard-00001"), 100)
    before = sorted(p for p in cache.rglob("*"))
    other = dataclasses.replace(IDENTITY, **INT8)
    monkeypatch.setattr(extract_step, "cache_identity", lambda run: other)
    code, _, err = call("repair", recipe)
    assert code == Exit.MISMATCH
    assert "feature_dtype" in err
    monkeypatch.undo()
    code, _, err = call("repair", recipe)  # there are no responses
    assert code == 1
    assert "responses" in err
    assert sorted(p for p in cache.rglob("*")) == before


@pytest.mark.usefixtures("same_recipe")
def test_repair_mends_the_heldout_cache_of_a_rolling_run(
    call: Call, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heldout = tmp_path / "run" / "cache-heldout"
    make_cache(tmp_path / "run" / "cache")
    plan = make_cache(heldout)
    make_cache(tmp_path / "whole")
    flip_byte(features_of(heldout, "shard-00001"), 100)
    assert call("repair", recipe)[0] == 0  # no rolling run: nothing needs it, and nothing would make it again
    monkeypatch.setattr(rolling_train, "is_rolling", lambda run, plan, identity: True)
    code, out, err = call("repair", recipe, "--dry-run", "--json")
    assert code == 1
    assert list(strict_json(out)["heldout"]["damaged"]) == ["shard-00001"]
    assert "cache-heldout/shard-00001 is damaged" in err
    monkeypatch.setitem(steps.STEPS, "extract", lambda run: write_shard(heldout, plan, "shard-00001"))
    code, out, err = call("repair", recipe, "--json")
    assert (code, strict_json(out)["heldout"]["made"], strict_json(out)["made"]) == (0, ["shard-00001"], [])
    assert "took cache-heldout/shard-00001 out" in err
    assert equal_caches(heldout, tmp_path / "whole") == []
    assert verify_cache(heldout).ok


def test_repair_refuses_a_run_that_is_in_use(call: Call, recipe: Path, tmp_path: Path) -> None:
    from pipeline.folder import RunFolder

    make_cache(tmp_path / "run" / "cache")
    with RunFolder(tmp_path / "run").locked():
        code, _, err = call("repair", recipe)
    assert code == Exit.IN_USE
    assert f"process {os.getpid()}" in err


def test_repair_refuses_a_cache_without_identity(call: Call, recipe: Path, damaged: Path) -> None:
    flip_byte(damaged / "cache.json", 20)
    code, _, err = call("repair", recipe)
    assert code in (Exit.BAD, Exit.MISMATCH)
    assert "cache.json" in err


# --- gc -------------------------------------------------------------------------------------------------


def age(path: Path, seconds: float = 7200) -> None:
    for p in [*path.rglob("*"), path] if path.is_dir() else [path]:
        os.utime(p, (time.time() - seconds,) * 2)


def test_gc_deletes_what_is_old_and_unnamed_and_nothing_else(call: Call, exact: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(exact, cache)
    old, young, foreign = (cache / "shards" / n for n in ("shard-00001.0badc0de", "shard-00000.feedbeef", "backup"))
    for folder in (old, young, foreign):
        (folder / "features").mkdir(parents=True)
        (folder / "features" / "zarr.json").write_bytes(b"x" * 50)
    temporary = cache / ".plan.parquet.123.0123abcd.tmp"
    temporary.write_bytes(b"y" * 7)
    for path in (old, foreign, temporary):
        age(path)
    for path in (cache / "shards").iterdir():
        if path not in (old, young):
            age(path)
    found = strict_json(call("gc", cache, "--json")[1])
    states = {Path(item["key"]).name: item["state"] for item in found["items"]}
    assert states == {old.name: "old", young.name: "young", foreign.name: "kept", temporary.name: "old"}
    assert (found["old_bytes"], found["young_bytes"]) == (57, 50)
    assert old.exists()
    code, text, _ = call("gc", cache, "--delete")
    assert code == 0
    assert "deleted 2 items, 57 B" in text
    assert not old.exists()
    assert not temporary.exists()
    assert young.exists()
    assert foreign.exists()
    assert equal_caches(cache, exact) == []
    assert call("gc", cache, "--delete", "--older-than", "0s")[0] == 0
    assert not young.exists()
    assert verify_cache(cache).ok
    assert call("gc", cache, "--older-than", "soon")[0] == 2


def test_gc_keeps_the_group_of_a_damaged_marker(call: Call, exact: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(exact, cache)
    flip_byte(cache / "commits" / "shard-00001.json", 30)
    age(cache / "shards")
    groups = sorted((cache / "shards").iterdir())
    text = call("gc", cache, "--delete", "--older-than", "0s")[1]
    assert "the marker of shard-00001 is damaged" in text
    assert sorted((cache / "shards").iterdir()) == groups


def test_gc_of_an_object_store(call: Call, compact: Path, tmp_path: Path) -> None:
    place = f"memory://gc-{tmp_path.name}/cache"
    call("copy", compact, place)
    storage = open_storage(place)
    storage.create("probes/0badc0de", b"x" * 9)
    storage.create("shards/shard-00001.0badc0de/zarr.json", b"y" * 4)
    found = strict_json(call("gc", place, "--json")[1])
    assert [(i["key"], i["state"], i["bytes"]) for i in found["items"]] == [
        ("shards/shard-00001.0badc0de", "young", 4),
        ("probes", "young", 9),
    ]
    assert "deleted 2 items, 13 B" in call("gc", place, "--delete", "--older-than", "0s")[1]
    assert "nothing lies about" in call("gc", place)[1]
    assert verify_cache(place).ok


def test_gc_looks_again_before_it_deletes(exact: Path, tmp_path: Path) -> None:
    """A group that is committed between listing and deleting stays."""
    from cache_schema.garbage import delete_garbage, find_garbage

    cache = tmp_path / "cache"
    shutil.copytree(exact, cache)
    marker = cache / "commits" / "shard-00001.json"
    raw = marker.read_bytes()
    marker.unlink()
    found = find_garbage(cache, 0.0)
    assert [item.state for item in found] == ["old"]
    marker.write_bytes(raw)
    assert [item.state for item in delete_garbage(cache, found, 0.0)] == ["kept"]
    assert verify_cache(cache).ok


# --- copy -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_copy_there_and_back(call: Call, compact: Path, tmp_path: Path, kind: str) -> None:
    place = tmp_path / "far" if kind == "folder" else f"memory://copy-{tmp_path.name}/deep/cache"
    code, text, err = call("copy", compact, place)
    assert code == 0
    assert "3 shards copied and verified" in text
    assert "copy:" in err
    assert "B/s" in err
    assert call("verify", place)[0] == 0
    assert call("copy", place, tmp_path / "back")[0] == 0
    assert equal_caches(compact, tmp_path / "back") == []
    assert verify_cache(tmp_path / "back").ok
    found = strict_json(call("info", place, "--json")[1])
    assert found["stored"]["samples"] == 5


def test_commands_on_a_real_object_store(call: Call, compact: Path, s3_url: str, tmp_path: Path) -> None:
    place = f"{s3_url}/cache"
    assert call("copy", compact, place, "--shards", "0,1")[0] == 0
    code, out, err = call("copy", compact, place, "--json")
    assert (code, strict_json(out)["copied"]) == (0, ["shard-00002"]), err
    found = strict_json(call("verify", place, "--workers", "2", "--json")[1])
    assert (found["ok"], found["path"], found["shards"]["ok"]) == (True, place, 3)
    assert call("diff", compact, place, "--data")[0] == 0
    assert strict_json(call("info", place, "--json")[1])["garbage"] == {"items": 0, "bytes": 0}
    assert "a in shard-00000: 70 tokens" in call("show", place, SHARD, "a")[1]
    assert call("export", place, tmp_path / "out", "--format", "safetensors", "--samples", "2")[0] == 0
    open_storage(place).delete(names.commit_key("shard-00001"))
    assert "could go" in call("gc", place, "--older-than", "0s")[1]
    assert "deleted 1 items" in call("gc", place, "--older-than", "0s", "--delete")[1]
    assert call("verify", place)[0] == 1
    assert call("copy", place, tmp_path / "back")[0] == 0
    assert committed_shards(open_storage(tmp_path / "back")) == ["shard-00000", "shard-00002"]


def test_copy_goes_on_where_it_was_stopped(call: Call, exact: Path, tmp_path: Path) -> None:
    place, seen = tmp_path / "far", 0

    def stop_early(n_bytes: int) -> None:
        nonlocal seen
        seen += n_bytes
        if len(committed_shards(open_storage(place))) == 1:
            raise OSError(28, "No space left on device", str(place))

    plan = copying.plan_copy(exact, place)
    with pytest.raises(OSError, match="No space"):
        copying.run_copy(plan, 1, stop_early)
    assert len(committed_shards(open_storage(place))) == 1
    assert len(list((place / "shards").iterdir())) == 1  # nothing of the shard that failed
    (place / "shards" / "shard-00002.0badc0de" / "features").mkdir(parents=True)  # what kill -9 leaves
    found = strict_json(call("copy", exact, place, "--json")[1])
    assert (len(found["copied"]), len(found["present"])) == (2, 1)
    assert found["bytes"] < plan.bytes
    assert equal_caches(exact, place) == []
    code, text, _ = call("copy", exact, place)
    assert code == 0
    assert "0 shards copied" in text
    assert "3 were there already" in text


def test_copy_of_some_shards(call: Call, exact: Path, tmp_path: Path) -> None:
    assert call("copy", exact, tmp_path / "far", "--shards", "0,2")[0] == 0
    assert committed_shards(open_storage(tmp_path / "far")) == ["shard-00000", "shard-00002"]
    assert call("copy", exact, tmp_path / "far", "--shards", "9")[0] == 2


def test_copy_never_commits_what_is_damaged(call: Call, damaged: Path, tmp_path: Path) -> None:
    code, text, _ = call("copy", damaged, tmp_path / "far")
    assert code == 1
    assert "NOT COPIED shard-00001: the source is damaged" in text
    assert committed_shards(open_storage(tmp_path / "far")) == ["shard-00000", "shard-00002"]
    assert len(list((tmp_path / "far" / "shards").iterdir())) == 2


def test_copy_of_a_shard_whose_objects_are_gone_blames_the_source(
    call: Call, exact: Path, damaged: Path, tmp_path: Path
) -> None:
    for group in (damaged / "shards").iterdir():
        shutil.rmtree(group)
    code, text, _ = call("copy", damaged, tmp_path / "far", "--workers", "1")
    assert code == 1
    assert text.count("the source is damaged") == 3
    assert committed_shards(open_storage(tmp_path / "far")) == []


def test_copy_refuses_another_spelling_of_the_source_and_its_inside(call: Call, exact: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(exact)
    for place in (tmp_path / "link", f"{exact}/../{exact.name}/", f"file://{exact}"):
        code, _, err = call("copy", exact, place)
        assert code == 1
        assert "is both source and destination" in err
    code, _, err = call("copy", exact, tmp_path / "link" / "deep" / "copy")
    assert code == 1
    assert "lies inside the source" in err
    assert not (exact / "deep").exists()


def test_copy_refuses_another_cache_other_content_and_itself(call: Call, exact: Path, tmp_path: Path) -> None:
    value_cache(tmp_path / "other", responses_sha256="q" * 64)
    code, _, err = call("copy", exact, tmp_path / "other")
    assert code == Exit.MISMATCH
    assert "responses_sha256" in err
    value_cache(tmp_path / "same", seed=1)
    code, _, err = call("copy", exact, tmp_path / "same")
    assert code == 1
    assert "nothing is overwritten" in err
    assert verify_cache(tmp_path / "same").ok
    assert call("copy", exact, exact)[0] == 1
    create_cache(tmp_path / "cut", IDENTITY, plan_shards([*LENGTHS, "lost"], [*LENGTHS.values(), 9], 1, 1))
    assert "divided into other shards" in call("copy", exact, tmp_path / "cut")[2]


def test_two_copies_at_once_commit_each_shard_once(exact: Path, tmp_path: Path) -> None:
    place = tmp_path / "far"
    first, second = copying.plan_copy(exact, place), copying.plan_copy(exact, place)
    assert copying.run_copy(first) == copying.run_copy(second) == {}
    assert len(list((place / "shards").iterdir())) == 3
    assert verify_cache(place).ok


# --- export ---------------------------------------------------------------------------------------------


def stored_states(cache: Path, sample_id: str) -> torch.Tensor:
    """bfloat16 [T, L, D], the way training gets them."""
    opened = FeatureCache.open(cache)
    sample, form = opened.read(sample_id), feature_format(opened.identity)
    return dequantize(*from_stored(sample.features, sample.scale, form), form, torch.bfloat16)


@pytest.mark.parametrize("kind", ["exact", "compact"])
def test_export_to_safetensors_is_read_by_safetensors(
    call: Call, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    from safetensors import safe_open

    cache = request.getfixturevalue(kind)
    code, _, _ = call("export", cache, tmp_path / "out", "--format", "safetensors")
    assert code == 0
    seen: list[str] = []
    for path in sorted((tmp_path / "out").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            assert strict_json(metadata["identity"])["target_name"] == "tiny"
            for s in json.loads(metadata["sample_ids"]):
                seen.append(s)
                found = file.get_tensor(f"{s}/features")
                assert found.dtype == torch.bfloat16
                assert torch.equal(found, stored_states(cache, s))
                assert file.get_tensor(f"{s}/input_ids").tolist() == (token_ids(s, LENGTHS[s]) % 250).tolist()
                assert file.get_tensor(f"{s}/loss_mask").tolist() == mask(LENGTHS[s]).tolist()
    assert seen == list(LENGTHS)


@pytest.mark.parametrize("kind", ["exact", "compact"])
def test_export_to_arrow_is_read_by_arrow(
    call: Call, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    import pyarrow as pa

    cache = request.getfixturevalue(kind)
    assert call("export", cache, tmp_path / "out", "--format", "arrow")[0] == 0
    rows = 0
    for path in sorted((tmp_path / "out").glob("*.arrow")):
        with pa.ipc.open_file(path) as file:
            table = file.read_all()
        table.validate(full=True)
        shape = json.loads(table.schema.field("features").metadata[b"shape"])
        for row in table.to_pylist():
            rows += 1
            bits = torch.tensor(row["features"], dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
            assert torch.equal(bits.reshape(-1, *shape), stored_states(cache, row["sample_id"]))
            assert row["loss_mask"] == mask(LENGTHS[row["sample_id"]]).tolist()
            assert len(row["input_ids"]) == LENGTHS[row["sample_id"]]
        assert table.schema.metadata[b"fingerprint"].decode() == FeatureCache.open(cache).identity.fingerprint()
    assert rows == len(LENGTHS)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_raw_export_keeps_codes_and_scales(call: Call, dtype: str, tmp_path: Path) -> None:
    import pyarrow as pa
    from safetensors.torch import load_file

    settings = INT8 if dtype == "int8" else {"feature_dtype": dtype, "feature_group": 24}
    value_cache(tmp_path / "cache", **settings)
    for kind in ("safetensors", "arrow"):
        assert call("export", tmp_path / "cache", tmp_path / kind, "--format", kind, "--raw", "--shard", "0")[0] == 0
    sample = FeatureCache.open(tmp_path / "cache").read("a")
    tensors = load_file(tmp_path / "safetensors" / f"{SHARD}.safetensors")
    codes = tensors["a/features"]
    assert codes.dtype == getattr(torch, dtype)
    assert np.array_equal(codes.view(torch.int8).numpy(), sample.features.view(np.int8))
    assert sample.scale is not None
    assert np.array_equal(tensors["a/feature_scale"].numpy(), sample.scale)
    with pa.ipc.open_file(tmp_path / "arrow" / f"{SHARD}.arrow") as file:
        row = file.read_all().to_pylist()[0]
    assert np.array_equal(np.array(row["features"]).reshape(sample.features.shape), sample.features)
    assert np.array_equal(np.array(row["feature_scale"], np.float32).reshape(sample.scale.shape), sample.scale)


def test_export_goes_on_and_refuses_another_export(call: Call, exact: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export = ["export", exact, out, "--format", "safetensors"]
    assert len(strict_json(call(*export, "--json")[1])["written"]) == 3
    (out / "shard-00001.safetensors").unlink()
    found = strict_json(call(*export, "--json")[1])
    assert (found["written"], len(found["present"])) == (["shard-00001.safetensors"], 2)
    code, _, err = call("export", exact, out, "--format", "arrow")
    assert code == 1
    assert "differs in format" in err
    found = strict_json(call(*export, "--samples", "2", "--json")[1])
    assert found["written"] == ["samples-2-seed0.safetensors"]
    assert not list(out.glob(".*"))


@pytest.mark.parametrize("format", ["safetensors", "arrow"])
def test_export_writes_again_what_is_cut_off_and_removes_left_overs(
    call: Call, exact: Path, tmp_path: Path, format: str
) -> None:
    out = tmp_path / "out"
    export = ["export", exact, out, "--format", format, "--json"]
    call(*export)
    whole = {p.name: p.read_bytes() for p in out.iterdir()}
    (out / f"shard-00000.{format}").write_bytes(b"")
    (out / f"shard-00002.{format}").write_bytes(whole[f"shard-00002.{format}"][:-100])
    left, foreign = out / f".shard-00001.{format}.{os.getpid()}.tmp", out / f".mine.{format}.{os.getpid()}.tmp"
    at_work = out / f".shard-00001.{format}.{os.getppid()}.tmp"
    for path in (left, foreign, at_work):
        path.write_bytes(b"x")
    found = strict_json(call(*export)[1])
    assert found["written"] == [f"shard-00000.{format}", f"shard-00002.{format}"]
    assert {p.name: p.read_bytes() for p in out.iterdir()} == whole | {foreign.name: b"x", at_work.name: b"x"}


@pytest.mark.parametrize("format", ["safetensors", "arrow"])
def test_export_refuses_files_of_another_content_plan_or_cache(
    call: Call, exact: Path, tmp_path: Path, format: str
) -> None:
    out = tmp_path / "out"
    assert call("export", exact, out, "--format", format, "--shard", "0")[0] == 0
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    value_cache(tmp_path / "same", seed=1)
    value_cache(tmp_path / "other", responses_sha256="q" * 64)
    make_cache(tmp_path / "plan")
    shutil.copy(exact / "cache.json", tmp_path / "plan" / "cache.json")
    for cache, words in (("same", "content_sha256"), ("other", "fingerprint"), ("plan", "plan_sha256")):
        code, _, err = call("export", tmp_path / cache, out, "--format", format, "--shard", "1")
        assert code == 1
        assert words in err
        assert "export to another folder" in err
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_export_of_samples_keeps_those_of_another_seed_or_number(call: Call, exact: Path, tmp_path: Path) -> None:
    export = ["export", exact, tmp_path / "out", "--format", "arrow", "--json", "--samples"]
    names = [strict_json(call(*export, n, "--seed", s)[1])["written"] for n, s in (("2", "0"), ("2", "-1"), ("3", "0"))]
    assert names == [["samples-2-seed0.arrow"], ["samples-2-seed-1.arrow"], ["samples-3-seed0.arrow"]]
    assert strict_json(call(*export, "2")[1])["present"] == names[0]
    assert "content_sha256" in call(*export, "2", "--shard", "0")[2]


def test_export_of_a_damaged_shard_leaves_no_file(call: Call, damaged: Path, tmp_path: Path) -> None:
    code, _, err = call("export", damaged, tmp_path / "out", "--format", "arrow")
    assert code == 1
    assert "shard-00001: features is damaged" in err
    assert [p.name for p in (tmp_path / "out").iterdir() if "shard" in p.name] == ["shard-00000.arrow"]
