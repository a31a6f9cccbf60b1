"""The storage frontier's own arithmetic, on small made-up states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import frontier, frontier_bytes, frontier_plot
from benchmarks.frontier_schemes import channel_scale, parse
from cache_schema.errors import CacheError


def states() -> torch.Tensor:
    """[T, L, D] = [150, 2, 100] with two outlier channels."""
    x = torch.randn(150, 2, 100, generator=torch.Generator().manual_seed(0))
    x[..., 3:5] *= 50
    return x.bfloat16()


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8-64", "float8-5b-D", "int8-6b-32", "norm-5b-D"])
def test_a_scheme_is_found_by_its_name(name: str) -> None:
    assert parse(name).name == name


@pytest.mark.parametrize("name", ["int4-D", "int8-3b-D", "int8-6b-0", "int8-D"])
def test_unknown_schemes_are_refused(name: str) -> None:
    with pytest.raises((ValueError, CacheError)):
        parse(name)


def test_bytes_count_codes_scales_checksums_and_index() -> None:
    x = states()
    errors, points = frontier_bytes.measure(parse("int8-8b-50"), x, channel_scale(x), compressions=("none",))
    n_chunks = 3
    expected = 150 * 2 * 100 + 150 * 2 * 2 * 4 + 2 * n_chunks * frontier_bytes.CHUNK_OVERHEAD
    assert points[0].ratio == pytest.approx(expected / (150 * 2 * 100 * 2))
    assert 0 < errors.summary()["all"] < errors.token_mean < 0.3


@pytest.mark.parametrize("order", list(frontier_bytes.ORDERS))
def test_every_order_and_compression_is_measured(order: str) -> None:
    x = states()
    _, points = frontier_bytes.measure(parse("int8-5b-D"), x, channel_scale(x), orders=(order,))
    assert [p.compression for p in points] == list(frontier_bytes.COMPRESSIONS)
    assert all(p.ratio < points[0].ratio for p in points if p.compression.startswith("zstd"))


def test_static_normalisation_helps_the_quiet_channels() -> None:
    x = states()
    plain, _ = frontier_bytes.measure(parse("int8-6b-D"), x, channel_scale(x), compressions=())
    normed, _ = frontier_bytes.measure(parse("norm-6b-D"), x, channel_scale(x), compressions=())
    assert normed.token_mean < plain.token_mean / 4


def test_the_exact_scheme_has_no_error() -> None:
    x = states()
    errors, _ = frontier_bytes.measure(parse("bfloat16"), x, channel_scale(x), compressions=())
    assert errors.summary()["all"] == errors.token_worst_all == 0.0


def test_taus_are_paired_by_seed_and_drawn(tmp_path: Path) -> None:
    x = states()
    rows = frontier.measure_bytes([parse("bfloat16"), parse("int8-8b-D")], x, channel_scale(x))
    runs = [("bfloat16", 0, 1.5), ("bfloat16", 1, 1.7), ("int8-8b-D", 1, 1.6), ("int8-8b-D", 0, 1.5)]
    lines = [json.dumps({"scheme": n, "seed": s, "steps": 9, "tau": t, "heldout_loss": 3.0}) for n, s, t in runs]
    (tmp_path / "tau.jsonl").write_text("\n".join(lines))
    frontier.add_tau(rows, tmp_path / "tau.jsonl")
    assert rows[1]["tau"]["against_exact"] == pytest.approx([-0.1, 0.0])
    assert "1.550 (-0.100, +0.000)" in frontier.table(rows)
    frontier_plot.draw(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
