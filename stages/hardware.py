"""How much arithmetic a step needs, and how much the hardware could do.

Counted is what the step cannot do without: matrix products of the layers, of attention over what is visible, and of
the head over the rows with a label; a forward and a backward pass. Recomputed activations do not count, so that the
share of the peak tells useful work only. Source of the peaks: NVIDIA's data sheets, dense bfloat16, without sparsity.
"""

from __future__ import annotations

import torch

from stages.batch import Batch
from stages.drafter import DrafterSpec

_PEAK_TFLOPS = {
    "A100": 312.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "B200": 2250.0,
}
"""By a part of the device's name; the first that fits."""


def peak_tflops(device: torch.device, given: float | None, *, bf16: bool) -> float | None:
    """The peak of one rank's hardware in 10¹² operations per second, or None when it is not known.

    Args:
        device: of the rank.
        given: `train.peak_tflops`, which wins.
        bf16: whether matrix products are in bfloat16; of other types no table is kept.
    """
    if given is not None or not bf16 or device.type != "cuda":
        return given
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_TFLOPS.items() if part in name), None)


def step_flops(
    spec: DrafterSpec, *, context_rows: float, slots: float, labels: float, visible: float
) -> dict[str, float]:
    """Floating-point operations of a forward and a backward pass, by part.

    With D hidden, n feature layers, N drafter layers, E head width, H query heads, G key/value heads, I MLP width, V
    vocabulary, C context rows, Q slots, R slots with a label:

        part             forward                                        backward   because
        ctx_projection   2·C·n·D·D                                      1 ×        features are data
        ctx_keys_values  2·N·C·D·2·G·E                                  2 ×
        block_linear     2·(N−1)·Q·(2·D·H·E + 2·D·G·E + 3·D·I)          2 ×
                         + 2·Q·2·D·G·E + 2·R·(2·D·H·E + 3·D·I)          2 ×        the last layer, where R are asked for
        attention        4·H·E·pairs·(N − 1 + R/Q)                      2 ×        only visible pairs
        head             2·R·D·V                                        1 ×        the head is frozen

    Args:
        spec: of the drafter.
        context_rows: context tokens, all samples together.
        slots: block slots (anchors × B).
        labels: slots with a label: they reach the head, and the last layer asks for them only.
        visible: pairs of a slot and a key that it sees, of one layer.
    """
    d, n = spec.hidden_size, spec.n_layers
    q, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    n_features = 1 if spec.features == "none" else len(spec.feature_layer_ids)
    asking, keyed = 2 * d * q + 3 * d * spec.intermediate_size, 2 * d * kv
    share = labels / slots if slots else 0.0
    return {
        "ctx_projection": 2 * 2.0 * context_rows * n_features * d * d,
        "ctx_keys_values": 3 * 2.0 * context_rows * sum(map(spec.sees_context, range(n))) * keyed,
        "block_linear": 3 * 2.0 * (slots * n * keyed + (slots * (n - 1) + labels) * asking),
        "attention": 3 * 4.0 * visible * (n - 1 + share) * q,
        "head": 2 * 2.0 * labels * d * spec.vocab_size,
    }


def batch_flops(spec: DrafterSpec, batch: Batch) -> float:
    """As `step_flops`, the sum for a micro-batch; sliding windows are counted as if they were full."""
    slots, labels = batch.n_blocks * spec.block_size, len(batch.rows_R)
    visible = spec.block_size * int(batch.layout.anchors_N.sum()) + slots * spec.block_size
    context_rows = sum(batch.layout.n_context)
    return sum(step_flops(spec, context_rows=context_rows, slots=slots, labels=labels, visible=visible).values())
