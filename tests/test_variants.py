"""The variants of the paper: each switch does what it says, and nothing else changes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_schema.reader import FeatureCache
from stages.anchors import eligible_anchors, partition_anchors
from stages.batch import Batch, TrainingSample, make_batch
from stages.checkpoint_format import CheckpointError
from stages.config import ConfigError, DistillConfig, DrafterConfig, TrainConfig
from stages.dataset import SampleReader
from stages.decode import decode_plain, decode_speculative
from stages.distill import Teacher
from stages.drafter import ENTRIES, Drafter
from stages.errors import TrainingError
from stages.export import export_drafter
from stages.loss import head_losses
from stages.objective import run_objective
from stages.sessions import DraftSession
from stages.weighting import SlotWeights, dpace_weights, make_slot_weights
from tests.tiny import FEATURE_LAYERS, HIDDEN, MASK_ID, VOCAB, make_spec, make_target, response, start_extraction

TARGET = make_target()
BLOCK = 4
CPU = torch.device("cpu")


def sample(seed: int, n_tokens: int = 24, n_prompt: int = 6, n_anchors: int = 5) -> TrainingSample:
    rng = np.random.default_rng(seed)
    mask = (np.arange(n_tokens) >= n_prompt).astype(np.uint8)
    eligible = eligible_anchors(mask)
    anchors = np.sort(rng.choice(eligible, min(n_anchors, len(eligible)), replace=False))
    features = torch.randn(n_tokens, len(FEATURE_LAYERS), HIDDEN, generator=torch.Generator().manual_seed(seed))
    ids = rng.integers(3, MASK_ID, n_tokens).astype(np.int32)
    last = torch.randn(n_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed + 1000))
    return TrainingSample(f"s{seed}", features, ids, mask, anchors, last_hidden_TD=last)


def batch_of(*samples: TrainingSample) -> Batch:
    return make_batch(samples, BLOCK, MASK_ID)


def states(drafter: Drafter, batch: Batch) -> torch.Tensor:
    """[N, B, D], as the training pass gives them."""
    none = drafter.spec.features == "none"
    features = TARGET.embed(batch.context_ids_C)[:, None] if none else batch.features(torch.float32)
    out: torch.Tensor = drafter(features, batch.embedded(TARGET.embed, torch.float32), batch.layout)
    return out.detach()


# --- where the features enter ------------------------------------------------------------------------------------


def drafter_with(features: str, **changes: Any) -> Drafter:
    return Drafter(make_spec(features=features, **changes), seed=3)


def test_with_one_layer_the_first_layer_is_every_layer() -> None:
    batch = batch_of(sample(1), sample(2, 17))
    one = [states(drafter_with(f, n_layers=1), batch) for f in ("inject", "first_layer")]
    assert torch.equal(*one)
    two = [states(drafter_with(f, n_layers=2), batch) for f in ("inject", "first_layer")]
    assert not torch.allclose(*two, atol=1e-3)


@pytest.mark.parametrize("features", ENTRIES)
def test_what_a_block_depends_on(features: str) -> None:
    """`input` on the feature at a−1 and on no other, `none` on tokens and on no feature, the others on all before a."""
    drafter, base = drafter_with(features), sample(5)
    before = states(drafter, batch_of(base))
    changed: set[tuple[int, int]] = set()
    for position in range(int(base.anchors[-1])):
        spoilt = base.features_TLD.clone()
        spoilt[position] += 1
        after = states(drafter, batch_of(dataclasses.replace(base, features_TLD=spoilt)))
        moved = (after - before).abs().amax(dim=(1, 2)) > 1e-6
        changed |= {(int(a), position) for a, m in zip(base.anchors, moved, strict=True) if m}
    anchors = base.anchors.tolist()
    expected = {
        "input": {(a, a - 1) for a in anchors},
        "none": set(),
        "inject": {(a, p) for a in anchors for p in range(a)},
        "first_layer": {(a, p) for a in anchors for p in range(a)},
    }
    assert changed == expected[features]


def test_without_features_the_context_is_its_tokens() -> None:
    drafter, base = drafter_with("none"), sample(5)
    assert drafter.fc.weight.shape == (HIDDEN, HIDDEN)
    before = states(drafter, batch_of(base))
    ids = base.input_ids.copy()
    place = int(base.anchors[0]) - 1
    ids[place] = (ids[place] + 1) % MASK_ID
    after = states(drafter, batch_of(dataclasses.replace(base, input_ids=ids)))
    assert not torch.allclose(after[0], before[0], atol=1e-4)


@pytest.mark.parametrize("features", ENTRIES)
def test_drafting_computes_what_training_did(features: str) -> None:
    """The drafts of a decoding session are the training pass's, and the output stays the target's own."""
    drafter = drafter_with(features).eval()
    prompt = list(range(3, 15))
    plain = decode_plain(TARGET, prompt, 12, frozenset())
    made = decode_speculative(TARGET, drafter, prompt, 12, frozenset())
    assert made.ids == plain.ids
    ids = np.array([*prompt, *plain.ids], np.int32)
    mask = (np.arange(len(ids)) >= len(prompt)).astype(np.uint8)
    hidden = TARGET.model(input_ids=torch.tensor(ids[None].astype(np.int64)), output_hidden_states=True).hidden_states  # type: ignore[operator]
    features_TLD = torch.stack([hidden[i + 1][0] for i in FEATURE_LAYERS], dim=1)
    anchor = len(prompt)
    batch = batch_of(TrainingSample("s", features_TLD, ids, mask, np.array([anchor])))
    drafts = (states(drafter, batch)[0, 1:] @ TARGET.head.T).argmax(dim=-1).tolist()
    agreed = next((i for i, (d, p) in enumerate(zip(drafts, plain.ids[1:], strict=False)) if d != p), BLOCK - 1)
    assert made.cycles[0] == agreed + 1


@pytest.mark.parametrize("features", ENTRIES[1:])
def test_a_variant_that_no_engine_runs_is_not_exported(features: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"features: {features} cannot be exported: SGLang and vLLM inject"):
        export_drafter(drafter_with(features), tmp_path / "out", card="")
    assert list(tmp_path.iterdir()) == []


# --- anchors -----------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.booleans(), min_size=2, max_size=80), st.integers(2, 9))
def test_the_partition_is_that_of_a_slow_loop(bits: list[bool], block_size: int) -> None:
    mask = np.array(bits, np.uint8)
    expected = []
    for start, stop in spans(bits):
        expected += [a for a in range(start, stop, block_size) if a + 1 < stop]
    found = partition_anchors(mask, 512, block_size, seed=0, epoch=0, sample_id="s")
    assert found.tolist() == expected
    again = partition_anchors(mask, 512, block_size, seed=1, epoch=5, sample_id="t")
    assert again.tolist() == expected


def spans(bits: list[bool]) -> list[tuple[int, int]]:
    out, place = [], 0
    for value, group in itertools.groupby(bits):
        n = len(list(group))
        if value:
            out.append((place, place + n))
        place += n
    return out


def test_too_many_blocks_of_a_partition_are_drawn_anew_in_each_epoch() -> None:
    mask = np.ones(200, np.uint8)
    draws = [partition_anchors(mask, 10, 4, seed=0, epoch=e, sample_id="s").tolist() for e in range(6)]
    assert len({tuple(d) for d in draws}) > 1
    assert all(len(d) == 10 and d == sorted(d) and all(a % 4 == 0 for a in d) for d in draws)


# --- weights -----------------------------------------------------------------------------------------------------


def supervised_lengths(*lengths: int, block_size: int = 5) -> torch.Tensor:
    """Blocks with labels at slots 1 … n."""
    return torch.stack([(torch.arange(block_size) >= 1) & (torch.arange(block_size) <= n) for n in lengths])


def test_dpace_weights_are_the_derivative_of_the_expected_acceptance() -> None:
    """α → 0 of the formula is ∂E/∂log q with E = Σ_m Π_{i≤m} q_i, which autograd knows as well."""
    supervised, ce = supervised_lengths(4, 2, 1), torch.rand(7, dtype=torch.float64) * 2
    log_q = (-ce).requires_grad_()
    blocks = log_q.split([4, 2, 1])
    expected_length = sum(block.cumsum(0).exp().sum() for block in blocks)
    assert isinstance(expected_length, torch.Tensor)
    (derivative,) = torch.autograd.grad(expected_length, log_q)
    found = dpace_weights(supervised, ce, 1e-12)
    torch.testing.assert_close(found.double(), derivative, rtol=1e-5, atol=1e-6)


def test_dpace_weights_by_hand() -> None:
    """q = ½, ¼ smoothed by α = ½ to ¾, ⅝: products ¾ and 15/32, so that the weights are 39/32 and 15/32."""
    found = dpace_weights(supervised_lengths(2), torch.tensor([math.log(2), math.log(4)]), 0.5)
    assert found.tolist() == pytest.approx([39 / 32, 15 / 32])
    sure = dpace_weights(supervised_lengths(4), torch.zeros(4), 0.5)
    assert sure.tolist() == [4, 3, 2, 1]


@pytest.mark.parametrize("kind", ["decay", "uniform", "dpace"])
@pytest.mark.parametrize("normalise", ["mean", "sum", None])
def test_the_loss_is_what_the_weights_say(kind: Any, normalise: Any) -> None:
    if (kind, normalise) == ("dpace", "mean"):
        with pytest.raises(ConfigError, match=r"train\.normalise is 'mean'.*D-PACE"):
            TrainConfig(slot_weights=kind, normalise=normalise)
        return
    config = TrainConfig(slot_weights=kind, normalise=normalise, gamma=2.0)
    weights = make_slot_weights(config, BLOCK, CPU)
    drafter, batch = drafter_with("inject"), batch_of(sample(1), sample(2, 12, n_anchors=9))
    outcome = run_objective(drafter, TARGET.embed, TARGET.head, batch, weights, bf16=False)
    hidden = states(drafter, batch)
    loss = total_weight = 0.0
    labelled = dict(zip(batch.rows_R.tolist(), batch.labels_R.tolist(), strict=True))
    for n in range(batch.n_blocks):
        each = [
            float(F.cross_entropy(hidden[n, k] @ TARGET.head.T, torch.tensor(labelled[n * BLOCK + k])))
            for k in range(1, BLOCK) if n * BLOCK + k in labelled
        ]  # fmt: skip
        reached = np.cumprod([0.5 * math.exp(-ce) + 0.5 for ce in each])
        for k, ce in enumerate(each, start=1):
            w = {"decay": math.exp(-(k - 1) / 2), "uniform": 1.0, "dpace": float(reached[k - 1 :].sum())}[kind]
            loss, total_weight = loss + w * ce, total_weight + w
    assert float(outcome.loss_sum.detach()) == pytest.approx(loss, rel=1e-4)
    by = batch.n_blocks if "sum" in (normalise, config.normalised_by) else total_weight
    assert float(weights.divide_by(batch)) == pytest.approx(by, rel=1e-5)


# --- distillation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["l1", "kl", "reverse_kl"])
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_distillation_value_and_gradient(kind: Any, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against autograd over plain formulas, in float64; in chunks of one row and in one chunk."""
    monkeypatch.setitem(__import__("stages.loss", fromlist=["loss"]).CHUNK_BYTES, "cpu", chunk_bytes)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 6, generator=generator).requires_grad_()
    teacher, head = torch.randn(5, 6, generator=generator), torch.randn(9, 6, generator=generator)
    labels, weights = torch.randint(9, (5,), generator=generator), torch.rand(5, generator=generator)
    losses = head_losses(hidden, head, labels, Teacher(DistillConfig(loss=kind, share=0.3), teacher, head))
    log_p, log_q = (hidden @ head.T).log_softmax(-1), (teacher @ head.T).log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    plain = {
        "l1": (p - q).abs().sum(-1),
        "kl": F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1),
        "reverse_kl": F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1),
    }[kind]
    expected = 0.7 * F.cross_entropy(hidden @ head.T, labels, reduction="none") + 0.3 * plain
    torch.testing.assert_close(losses.loss_R, expected.detach(), rtol=1e-5, atol=1e-6)
    (found,) = torch.autograd.grad((losses.loss_R * weights).sum(), hidden)
    (slow,) = torch.autograd.grad((expected * weights).sum(), hidden)
    torch.testing.assert_close(found, slow, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["l1", "kl", "reverse_kl"])
def test_distillation_gradcheck(kind: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 7, generator=generator, dtype=torch.float64).requires_grad_()
    log_q = torch.randn(3, 7, generator=generator, dtype=torch.float64).log_softmax(-1)
    from stages.distill import _LOSSES

    class Terms(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
            value, gradient = _LOSSES[kind](logits.log_softmax(-1), log_q)
            ctx.save_for_backward(gradient)
            return value

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad[:, None] * ctx.saved_tensors[0]

    assert torch.autograd.gradcheck(Terms.apply, (logits,))


def test_the_teacher_stands_one_before_the_label() -> None:
    """Case of an off-by-one: the state at a+k−1 is what the target draws token a+k from."""
    batch = batch_of(sample(1), sample(2, 11, n_anchors=9))
    assert batch.teacher_RD is not None
    place = 0
    for row in (sample(1), sample(2, 11, n_anchors=9)):
        for a in row.anchors.tolist():
            for k in range(1, min(BLOCK, len(row.input_ids) - a)):
                assert row.last_hidden_TD is not None
                assert torch.equal(batch.teacher_RD[place], row.last_hidden_TD[a + k - 1])
                assert int(batch.labels_R[place]) == row.input_ids[a + k]
                place += 1
    assert place == len(batch.labels_R)


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    """A cache with last hidden states."""
    responses = [response(f"s{i}", 5, 9 + i) for i in range(3)]
    return start_extraction(tmp_path_factory.mktemp("rich"), TARGET, responses, last_hidden=True).run()


def test_the_cached_teacher_gives_the_targets_own_distribution(rich: FeatureCache) -> None:
    config = TrainConfig(anchors=50, distill=DistillConfig(), bf16=False)
    read = SampleReader(rich, config, 0, DrafterConfig(block_size=BLOCK)).read("s2", 0)
    assert read is not None
    batch = batch_of(read)
    assert batch.teacher_RD is not None
    ids = torch.tensor(read.input_ids[None].astype(np.int64))
    logits = TARGET.model(input_ids=ids).logits[0].detach()  # type: ignore[operator]
    expected = []
    for a in read.anchors.tolist():
        expected += [logits[a + k - 1] for k in range(1, min(BLOCK, len(read.input_ids) - a))]
    found = batch.teacher_RD.float() @ TARGET.head.T
    torch.testing.assert_close(found, torch.stack(expected), rtol=0.02, atol=0.05 * float(logits.abs().max()))


def test_distillation_needs_a_cache_that_has_the_states(tmp_path: Path) -> None:
    poor = start_extraction(tmp_path, TARGET, [response("s", 5, 9)]).run()
    with pytest.raises(TrainingError, match=r"train\.distill needs .*cache\.last_hidden: true"):
        SampleReader(poor, TrainConfig(distill=DistillConfig()), 0)
    with pytest.raises(ConfigError, match="D-PACE"):
        TrainConfig(distill=DistillConfig(), slot_weights="dpace")


# --- fewer feature layers ----------------------------------------------------------------------------------------


def test_a_drafter_may_use_some_of_the_cached_layers(rich: FeatureCache) -> None:
    config = TrainConfig(anchors=50)
    all_of_them = SampleReader(rich, config, 0).read("s1", 0)
    some = SampleReader(rich, config, 0, DrafterConfig(feature_layers=(1, 4))).read("s1", 0)
    assert all_of_them is not None
    assert some is not None
    assert FEATURE_LAYERS == (1, 3, 4)
    assert torch.equal(some.features_TLD, all_of_them.features_TLD[:, [0, 2]])
    with pytest.raises(TrainingError, match=r"feature_layers names \[2\].*holds the layers \[1, 3, 4\]"):
        SampleReader(rich, config, 0, DrafterConfig(feature_layers=(1, 2)))


def test_recomputing_layers_changes_no_gradient() -> None:
    drafter, batch = drafter_with("inject"), batch_of(sample(1), sample(2, 17))
    weights = SlotWeights(torch.ones(BLOCK))
    found = []
    for recompute in (False, True):
        drafter.recompute = recompute
        outcome = run_objective(drafter, TARGET.embed, TARGET.head, batch, weights, bf16=False)
        found.append(torch.autograd.grad(outcome.loss_sum, list(drafter.parameters())))
    for kept, again in zip(*found, strict=True):
        assert torch.equal(kept, again)
    assert VOCAB > MASK_ID


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # asked for by torch's own tracer
def test_a_compiled_drafter_trains_the_same(
    rich: FeatureCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced with its backward pass; what the tracing hands to a code generator is run as it is."""
    from tests.test_train import CONFIG, make_trainer, metrics

    compiled: list[dict[str, Any]] = []
    compile_module = torch.nn.Module.compile

    def compile_for_test(module: torch.nn.Module, **settings: Any) -> None:
        compiled.append(settings)
        compile_module(module, backend="aot_eager", **settings)

    monkeypatch.setattr(Drafter, "compile", compile_for_test)
    config = dataclasses.replace(CONFIG, epochs=1, trackers=())
    make_trainer(rich, tmp_path / "plain", config, n_layers=1).run()
    make_trainer(rich, tmp_path / "compiled", dataclasses.replace(config, compile=True), n_layers=1).run()
    assert compiled == [{"dynamic": True}]
    losses = [[row["loss"] for row in metrics(folder)] for folder in (tmp_path / "plain", tmp_path / "compiled")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("features", ENTRIES)
def test_sequences_of_different_lengths_are_drafted_side_by_side_as_they_were_trained(features: str) -> None:
    drafter = drafter_with(features).eval()
    samples = [dataclasses.replace(sample(seed, n), anchors=np.array([a])) for seed, n, a in ((1, 20, 5), (2, 24, 16))]
    counts = [int(s.anchors[0]) for s in samples]
    session = DraftSession(drafter, TARGET, n_rows=2)
    for start, stop in ((0, 3), (3, 16)):  # the shorter one stops growing on the way
        features_RTLD = torch.stack([s.features_TLD[start:stop] for s in samples])
        ids_RT = torch.tensor(np.stack([s.input_ids[start:stop] for s in samples]), dtype=torch.long)
        session.extend(features_RTLD, [min(n, stop) - start for n in counts], ids_RT)
    found = session.draft(torch.tensor([int(s.input_ids[a]) for s, a in zip(samples, counts, strict=True)]), BLOCK)
    for logits, one in zip(found, samples, strict=True):
        expected = states(drafter, batch_of(one))[0, 1:] @ TARGET.head.T
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
