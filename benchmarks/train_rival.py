"""One training step of a rival's DFlash, timed: run by file name with the Python of an environment that has it.

    /tmp/venv-specforge/bin/python benchmarks/train_rival.py specforge '{"hidden": 128, "vocab": 8192, …}'

Prints one line of JSON. It imports nothing of this project, so that the environment needs nothing but the rival. What
each computes is in `WHAT`; shapes are those of `benchmarks.train_cases`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WHAT = {
    "specforge": "SpecForge 0.2.0, OnlineDFlashModel, sdpa: dense boolean mask [Q, T+Q] made each step, all Q rows in "
    "every layer, head over all Q rows in checkpointed chunks of 128 blocks (logits made twice), cross-entropy with "
    "position weights, accuracy",
    "speculators": "speculators 0.9.0, DFlashDraftModel, sdpa: dense boolean mask [Q, T+Q] made each step, all Q rows "
    "in every layer, head over all Q rows at once, and the target's head over the T stored last states, as its "
    "soft labels; cross-entropy towards those with position weights (eager losses: its fused ones need a GPU), "
    "accuracy",
}
LAYER_IDS = [1, 9, 17, 25, 33]


def main() -> None:
    torch.set_num_threads(1)
    rival, sizes = sys.argv[1], json.loads(sys.argv[2])
    torch.manual_seed(0)
    make = {"specforge": specforge_step, "speculators": speculators_step}[rival]
    forward, model = make(sizes)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    seconds, losses = [], []
    for _ in range(sizes["rounds"]):
        started = time.process_time()
        loss = forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.process_time() - started)
        losses.append(float(loss.detach()))
    found = {"rival": rival, "seconds": min(seconds), "losses": losses, "what": WHAT[rival],
             "trained": sum(p.numel() for p in parameters), "peak_mb": peak_mb()}  # fmt: skip
    print(json.dumps(found))


def peak_mb() -> float:
    """Most resident memory of this process."""
    with open("/proc/self/status") as file:  # noqa: PTH123
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) / 1024


def decoder_config(sizes: dict[str, Any], **more: Any) -> Any:
    from transformers import Qwen3Config

    hidden, heads = sizes["hidden"], sizes["heads"]
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=sizes["layers"], num_attention_heads=heads,
        num_key_value_heads=sizes["kv_heads"], head_dim=hidden // heads, vocab_size=sizes["vocab"],
        max_position_embeddings=4096, **more,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    return config


def inputs(sizes: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids [1, T], loss mask [1, T] (all but the first eighth), features [1, T, 5·D]."""
    n_tokens = sizes["tokens"]
    ids = torch.randint(0, sizes["vocab"] - 1, (1, n_tokens))
    mask = (torch.arange(n_tokens) >= n_tokens // 8).long()[None]
    return ids, mask, torch.randn(1, n_tokens, len(LAYER_IDS) * sizes["hidden"])


def specforge_step(sizes: dict[str, Any]) -> tuple[Callable[[], torch.Tensor], nn.Module]:
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel

    mask_id = sizes["vocab"] - 1
    config = decoder_config(
        sizes, num_target_layers=36, block_size=sizes["block"],
        dflash_config={"mask_token_id": mask_id, "target_layer_ids": LAYER_IDS},
    )  # fmt: skip
    draft = DFlashDraftModel(config).float()
    head = nn.Linear(sizes["hidden"], sizes["vocab"], bias=False).requires_grad_(False)
    embed = nn.Embedding(sizes["vocab"], sizes["hidden"]).requires_grad_(False)
    model = OnlineDFlashModel(
        draft, head, embed, mask_id, block_size=sizes["block"], attention_backend="sdpa", num_anchors=sizes["anchors"],
        loss_decay_gamma=7.0,
    ).train()  # fmt: skip
    ids, mask, features = inputs(sizes)
    return lambda: model(input_ids=ids, hidden_states=features, loss_mask=mask.float())[0], model


def speculators_step(sizes: dict[str, Any]) -> tuple[Callable[[], torch.Tensor], nn.Module]:
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import DFlashSpeculatorConfig
    from speculators.models.dflash.core import DFlashDraftModel

    config = DFlashSpeculatorConfig(
        transformer_layer_config=decoder_config(sizes), draft_vocab_size=sizes["vocab"], block_size=sizes["block"],
        aux_hidden_state_layer_ids=LAYER_IDS, mask_token_id=sizes["vocab"] - 1,
    )  # fmt: skip
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = DFlashDraftModel(config).float().train()
    for frozen in (model.embed_tokens, model.lm_head, model.verifier_lm_head, model.verifier_norm):
        frozen.requires_grad_(False)
        if frozen is not model.verifier_norm:  # left uninitialised until a target's are loaded
            nn.init.normal_(frozen.weight, std=sizes["hidden"] ** -0.5)
    ids, mask, features = inputs(sizes)
    last = torch.randn(1, sizes["tokens"], sizes["hidden"])
    losses = resolve_loss_config("ce", "eager")
    documents = torch.zeros_like(ids)

    def forward() -> torch.Tensor:
        _, loss, _ = model(features, ids, mask, last, documents, loss_config=losses, gamma=7.0,
                           max_anchors=sizes["anchors"])  # fmt: skip
        return loss

    return forward, model


if __name__ == "__main__":
    main()
