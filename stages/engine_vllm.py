"""Answers from vLLM in this process (extra `vllm`): its own batching and scheduling, prompts and answers as token ids.

vLLM promises no bits: an answer may depend on what else was in its batches, within rounding. Sampling is seeded by
sample, as with the other engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stages.anchors import stable_key
from stages.config import GenerateConfig, TargetConfig
from stages.engine import CONTEXT_LENGTH, Answer, EngineError, Prompt, Refusal
from stages.engine_tokens import UNFINISHED
from stages.target import resolve_model


class VllmEngine:
    """The target in this process, by vLLM.

    Args:
        target: the model.
        config: `vllm_args` for `vllm.LLM`.
        seed: of the run.

    Raises:
        EngineError: vLLM is not installed, or cannot load the target.
    """

    def __init__(self, target: TargetConfig, config: GenerateConfig, seed: int) -> None:
        try:
            import vllm
        except ImportError as error:
            raise EngineError(
                f"generate.engine is vllm, but vLLM cannot be imported ({error}); install the extra (pip install "
                "'dflash[vllm]'), or serve the target elsewhere and use engine openai"
            ) from error
        self._vllm: Any = vllm
        arguments = {
            "model": resolve_model(target), "revision": target.revision, "dtype": target.dtype,
            "trust_remote_code": target.trust_remote_code, "seed": seed % 2**32, **config.vllm_args,
        }  # fmt: skip
        try:
            self._model = vllm.LLM(**arguments)
        except (ValueError, RuntimeError, OSError, TypeError) as error:
            raise EngineError(f"vLLM cannot load {target.model!r} with {arguments}: {error}") from error

    def answer(
        self, prompts: Sequence[Prompt], config: GenerateConfig, *, seed: int, stop_ids: frozenset[int]
    ) -> list[Answer | Refusal]:
        """See `engine.Engine`."""
        room = int(self._model.model_config.max_model_len) - config.max_new_tokens
        fitting = [p for p in prompts if len(p.ids) <= room]
        asked = [{"prompt_token_ids": p.ids} for p in fitting]
        sampling = [self._sampling(p, config, seed, stop_ids) for p in fitting]
        outputs = self._model.generate(asked, sampling, use_tqdm=False) if asked else []
        found = {p.sample_id: self._read(p, o, stop_ids) for p, o in zip(fitting, outputs, strict=True)}
        return [found[p.sample_id] if p.sample_id in found else _too_long(p, room) for p in prompts]

    def _sampling(self, prompt: Prompt, config: GenerateConfig, seed: int, stop_ids: frozenset[int]) -> Any:
        own = stable_key("generate", seed, prompt.sample_id) % 2**63 if config.temperature > 0 else None
        return self._vllm.SamplingParams(
            temperature=config.temperature, top_p=config.top_p, top_k=config.top_k or -1, seed=own,
            max_tokens=config.max_new_tokens, stop_token_ids=sorted(stop_ids), detokenize=False,
        )  # fmt: skip

    def _read(self, prompt: Prompt, output: Any, stop_ids: frozenset[int]) -> Answer | Refusal:
        if list(output.prompt_token_ids) != prompt.ids:
            raise EngineError(f"vLLM answered another prompt than that of sample {prompt.sample_id!r}")
        answer = output.outputs[0]
        ids = [int(i) for i in answer.token_ids]
        if answer.finish_reason not in ("stop", "length") or not ids:
            detail = f"vLLM ended the answer for reason {answer.finish_reason!r} after {len(ids)} tokens"
            return Refusal(prompt.sample_id, UNFINISHED, detail)
        end = next((i for i, token in enumerate(ids) if token in stop_ids), None)
        return Answer(
            prompt.sample_id, ids if end is None else ids[: end + 1], "length" if end is None else "stop",
            {"tokens": "server", "server_build": f"vllm-{self._vllm.__version__}"},
        )  # fmt: skip


def _too_long(prompt: Prompt, room: int) -> Refusal:
    detail = f"{len(prompt.ids)} tokens, vLLM has room for {room} beside generate.max_new_tokens"
    return Refusal(prompt.sample_id, CONTEXT_LENGTH, detail)
