"""A small target for the ablations: trained here in minutes on templated text, it answers with what its prompt says.

    python -m benchmarks.ablation_target [--out runs/ablations-target] [--steps 2500]

The language has 192 words. A prompt gives a list, pairs or numbers; the answer repeats, reverses, sorts, looks up or
counts them, so that what comes next is in the context, and a target that has learned to copy carries it in its hidden
states. The answers that the drafters learn are the target's own, right or wrong.

Writes a checkpoint with tokenizer, and `prompts.jsonl`. What is there already is left as it is.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
ROLES = ["user", "assistant"]
HEADS = ("ba", "de", "fo", "gu", "ka", "le", "mi", "no", "pu", "ra", "si", "to")
NOUNS = [a + b for a in HEADS for b in ("l", "n", "r", "s")]
NAMES = [a + b for a in ("An", "Be", "Ca", "Do", "Em", "Fi", "Ge", "Hu") for b in ("a", "o", "us", "ry")]
NUMBERS = [str(i) for i in range(70)]
GLUE = ["repeat", "reverse", "sort", "count", "pairs", "of", "from", "to", "by", "find", "the", "list", "is", "and",
        "then", ",", ".", ":", ";", "here", "are", "they", "has", "all", "done"]  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message.role }} {{ message.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def make_tokenizer() -> Any:
    """Whole words between blanks."""
    words = [*SPECIALS, *ROLES, *GLUE, *NOUNS, *NAMES, *NUMBERS]
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=SPECIALS[0]))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"eos_token": "<|im_end|>", "pad_token": SPECIALS[0], "mask_token": "<|mask|>", "unk_token": SPECIALS[0]}
    made = PreTrainedTokenizerFast(tokenizer_object=plain, chat_template=TEMPLATE, **named)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    return made


def make_pair(rng: np.random.Generator) -> tuple[str, str, str]:
    """Category, question and right answer."""
    kind = str(rng.choice(["repeat", "reverse", "sort", "pairs", "count"]))
    if kind == "count":
        start, step = int(rng.integers(0, 20)), int(rng.integers(1, 5))
        stop = start + step * int(rng.integers(5, 12))
        numbers = " , ".join(str(i) for i in range(start, stop + 1, step))
        return kind, f"count from {start} to {stop} by {step}", f"here they are : {numbers} . all done ."
    if kind == "pairs":
        names = rng.choice(NAMES, int(rng.integers(4, 8)), replace=False)
        things = rng.choice(NOUNS, len(names), replace=False)
        given = " ; ".join(f"{a} has {b}" for a, b in zip(names, things, strict=True))
        order = rng.permutation(len(names))
        asked = " , ".join(names[order])
        found = " ; ".join(f"the {things[i]} is of {names[i]}" for i in order)
        return kind, f"pairs : {given} . find {asked}", f"here they are : {found} . all done ."
    words = [str(w) for w in rng.choice(NOUNS, int(rng.integers(6, 13)), replace=False)]
    answer = {"repeat": words, "reverse": words[::-1], "sort": sorted(words)}[kind]
    return kind, f"{kind} the list : {' , '.join(words)}", f"here they are : {' , '.join(answer)} . all done ."


def make_model(vocab: int) -> Qwen3ForCausalLM:
    """Eight layers of width 64."""
    config = Qwen3Config(
        vocab_size=vocab, hidden_size=64, intermediate_size=192, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=SPECIALS.index("<|im_end|>"), pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


def train(model: Qwen3ForCausalLM, tokenizer: Any, steps: int, batch: int = 24, lr: float = 3e-3) -> None:
    """Next-token prediction of the answers (and, weakly, of the questions), fresh samples in every step."""
    rng, began = np.random.default_rng(1), time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        rows = [_ids(tokenizer, make_pair(rng)) for _ in range(batch)]
        width = max(len(ids) for ids, _ in rows)
        inputs = torch.zeros(batch, width, dtype=torch.long)
        weight = torch.zeros(batch, width)
        for i, (ids, prompt) in enumerate(rows):
            inputs[i, : len(ids)] = torch.tensor(ids)
            weight[i, : len(ids)] = 0.05
            weight[i, prompt : len(ids)] = 1
        logits = model(input_ids=inputs).logits[:, :-1]
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs[:, 1:].flatten(), reduction="none")
        loss = (each * weight[:, 1:].flatten()).sum() / weight[:, 1:].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 100) * 0.5 * (1 + np.cos(np.pi * step / steps))
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            hits = (logits.argmax(-1) == inputs[:, 1:])[weight[:, 1:] == 1].float().mean()
            print(f"step {step}: loss {loss.item():.3f}, answer tokens right {hits.item():.3f}, "
                  f"{time.perf_counter() - began:.0f} s", flush=True)


def _ids(tokenizer: Any, pair: tuple[str, str, str]) -> tuple[list[int], int]:
    """Token ids of question and answer, and where the answer begins."""
    _, question, answer = pair
    prompt = tokenizer.encode(f"<|im_start|> user {question} <|im_end|> <|im_start|> assistant")
    return [*prompt, *tokenizer.encode(f"{answer} <|im_end|>")], len(prompt)


def write_prompts(file: Path, n: int) -> None:
    """Questions, other ones than the target was trained on (but for chance)."""
    rng = np.random.default_rng(2)
    with file.open("w") as out:
        for i in range(n):
            category, question, _ = make_pair(rng)
            row = {"id": f"p{i:05d}", "category": category, "messages": [{"role": "user", "content": question}]}
            out.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/ablations-target"))
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--prompts", type=int, default=1600)
    args = parser.parse_args()
    if (args.out / "model.safetensors").exists():
        print(f"{args.out} is there already")
        return
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    write_prompts(args.out / "prompts.jsonl", args.prompts)
    write_prompts(args.out / "first.jsonl", 4)
    model = make_model(len(tokenizer))
    train(model, tokenizer, args.steps)
    tokenizer.save_pretrained(args.out)
    model.to(torch.bfloat16).save_pretrained(args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
