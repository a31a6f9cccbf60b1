"""The engine that a recipe names. What only one of them needs is imported here, when it is built."""

from __future__ import annotations

from typing import Any

from stages.chat import turn_end
from stages.config import GenerateConfig, TargetConfig
from stages.engine import Engine, EngineError
from stages.target import Target, resolve_model


def build_engine(
    target_config: TargetConfig, config: GenerateConfig, *, seed: int, tokenizer: Any, target: Target | None
) -> Engine:
    """The engine of `config`.

    Args:
        target_config: which model answers.
        config: which engine, and its settings.
        seed: of the run.
        tokenizer: the target's.
        target: the loaded target; needed where `engine.needs_weights` says so.

    Raises:
        EngineError: it cannot be used.
    """
    if config.engine == "openai":
        from stages.engine_openai import OpenAIEngine

        end = turn_end(tokenizer, template_kwargs=target_config.chat_template_kwargs).kept[-1:]
        names = [resolve_model(target_config)]
        return OpenAIEngine(target_config, config, tokenizer, end[0] if end else None, names)
    if config.engine == "vllm":
        from stages.engine_vllm import VllmEngine

        return VllmEngine(target_config, config, seed)
    from stages.generate import TransformersEngine

    if target is None:
        raise EngineError("engine transformers needs the target's weights; this is a fault of the generate stage")
    return TransformersEngine(target)
