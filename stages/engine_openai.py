"""Answers from servers that speak OpenAI's protocol: vLLM, SGLang, `transformers serve`, and others.

Prompts are rendered here, once, and sent as token ids to `/v1/completions` where a server takes them, so that no
server's own chat template or tokenizer comes between. Before a server gets its first prompt it is asked three things:
which models it has (one of them must be the target), whether it takes and returns token ids, and which of the
manners below it understands.

  ids              prompt as token ids, every sampling setting, ids wanted back (vLLM, SGLang)
  generation       prompt as text, sampling as transformers' generation config (`transformers serve`)
  plain            prompt as text and what OpenAI's own protocol has; there is no top_k

In the last two only text comes back, and `engine_tokens` proves its ids or refuses the sample. As text a prompt is sent
only if the tokenizer turns that text into exactly our ids, and the server must count as many tokens as they are.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from stages.anchors import stable_key
from stages.config import GenerateConfig, TargetConfig
from stages.engine import CONTEXT_LENGTH, Answer, EngineError, Prompt, Refusal
from stages.engine_http import MODELS, Reply
from stages.engine_servers import FIRST_WAIT_S, Failure, Server, Servers
from stages.engine_tokens import (
    ROUND_TRIP,
    TokenReader,
    first_choice,
    other_prompt,
    prompt_text,
    token_list,
)

COMPLETIONS = "/v1/completions"
DECLINED = "declined"
_TOO_LONG = ("context length", "context_length", "maximum model length", "max_model_len", "too long", "longer than the")
_PROBE = "Hello there"


class Form(StrEnum):
    """How a server is asked."""

    IDS = "ids"
    GENERATION = "generation"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Manner:
    """What is known of a server."""

    model: str
    form: Form


@dataclass(frozen=True, slots=True)
class Asking:
    """Sampling of a run, as request bodies."""

    config: GenerateConfig
    seed: int
    stop_ids: frozenset[int]
    tokenizer: Any

    def body(self, manner: Manner, prompt: Prompt) -> dict[str, Any] | None:
        """The request for a prompt; None if the prompt cannot be sent as text."""
        c = self.config
        body: dict[str, Any] = {"model": manner.model, "max_tokens": c.max_new_tokens}
        if c.temperature > 0:
            body["seed"] = stable_key("generate", self.seed, prompt.sample_id) % 2**63
        if manner.form == Form.IDS:
            # All of it is said, since servers fill gaps from the model's generation config.
            return body | {
                "prompt": prompt.ids, "return_token_ids": True, "temperature": c.temperature, "top_p": c.top_p,
                "top_k": c.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
                "frequency_penalty": 0.0, "stop_token_ids": sorted(self.stop_ids), "skip_special_tokens": False,
            }  # fmt: skip
        text = prompt_text(self.tokenizer, prompt.ids)
        if text is None:
            return None
        body["prompt"] = text
        if manner.form == Form.GENERATION:
            return body | {"generation_config": json.dumps(self._generation_config())}
        return body | {"temperature": c.temperature, "top_p": c.top_p}

    def _generation_config(self) -> dict[str, Any]:
        c, stop = self.config, sorted(self.stop_ids)
        settings: dict[str, Any] = {"max_new_tokens": c.max_new_tokens}
        if stop:
            settings |= {"eos_token_id": stop, "pad_token_id": stop[0]}
        if c.temperature == 0:
            return settings | {"do_sample": False}
        return settings | {"do_sample": True, "temperature": c.temperature, "top_p": c.top_p, "top_k": c.top_k}


class OpenAIEngine:
    """Answers from the servers of a recipe.

    Args:
        target: what the servers must serve.
        config: servers, limits of time and number.
        tokenizer: the target's.
        end_id: token that ends a turn in the target's chat template, if it has one.
        aliases: further names of the target (its folder).
        first_wait_s: pause after a first failure (tests).

    Raises:
        EngineError: no server can be reached, or one cannot be used: another model, another tokenizer, a refused key.
    """

    def __init__(
        self, target: TargetConfig, config: GenerateConfig, tokenizer: Any, end_id: int | None,
        aliases: Sequence[str] = (), first_wait_s: float = FIRST_WAIT_S,
    ) -> None:  # fmt: skip
        self.target, self.config, self.tokenizer, self.end_id = target, config, tokenizer, end_id
        self.aliases = {target.model, *aliases}
        self.servers = Servers(config.server_urls, config.api_key_env, config.timeout_s, config.retries, first_wait_s)
        # As a server tokenizes a text, so that it can be asked for by text too.
        self._probe = Prompt("probe", list(tokenizer(_PROBE)["input_ids"]))
        asyncio.run(self._meet_one())

    def answer(
        self, prompts: Sequence[Prompt], config: GenerateConfig, *, seed: int, stop_ids: frozenset[int]
    ) -> list[Answer | Refusal]:
        """See `engine.Engine`."""
        asking = Asking(config, seed, stop_ids, self.tokenizer)
        reader = TokenReader(self.tokenizer, stop_ids, self.end_id, config.max_new_tokens)
        return asyncio.run(self._answer_all(prompts, asking, reader))

    async def _answer_all(
        self, prompts: Sequence[Prompt], asking: Asking, reader: TokenReader
    ) -> list[Answer | Refusal]:
        async with self.servers.open():
            if self.servers.down:
                await self.servers.require_one()
            gate = asyncio.Semaphore(self.config.concurrency)

            async def one(prompt: Prompt) -> Answer | Refusal:
                async with gate:
                    return await self._answer_one(prompt, asking, reader)

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(p)) for p in prompts]
            except* EngineError as errors:
                raise _first(errors) from None
            return [task.result() for task in tasks]

    async def _answer_one(self, prompt: Prompt, asking: Asking, reader: TokenReader) -> Answer | Refusal:
        async def attempt(server: Server) -> Answer | Refusal:
            body = asking.body(await self._manner(server), prompt)
            if body is None:
                detail = "no text gives exactly the prompt's token ids, and the server takes text only"
                return Refusal(prompt.sample_id, ROUND_TRIP, detail)
            reply = await self.servers.post(server, COMPLETIONS, body)
            if reply.status == 200:
                return reader.read(prompt, reply.body)
            return self._declined(server, prompt, reply)

        found = await self.servers.ask(attempt)
        return Refusal(prompt.sample_id, found.reason, found.detail) if isinstance(found, Failure) else found

    def _declined(self, server: Server, prompt: Prompt, reply: Reply) -> Refusal:
        if reply.status == 404:
            raise EngineError(
                f"{server.url}{COMPLETIONS} answers 404 in the middle of a run: {reply.text}. Was another model loaded?"
            )
        too_long = any(words in reply.text.lower() for words in _TOO_LONG)
        reason = CONTEXT_LENGTH if too_long else DECLINED
        return Refusal(prompt.sample_id, reason, f"{server.url} answers {reply.status}: {reply.text}")

    # --- meeting a server ------------------------------------------------------------------------------

    async def _meet_one(self) -> None:
        async with self.servers.open():
            found = await self.servers.ask(self._manner)
        if isinstance(found, Failure):
            raise EngineError(f"the server cannot be used: {found.detail}")

    async def _manner(self, server: Server) -> Manner:
        """How a server is asked; found out once."""
        assert server.meeting is not None
        async with server.meeting:
            if server.manner is None:
                model = await self._model(server)
                server.manner = await self._manner_of(server, model)
        manner: Manner = server.manner
        return manner

    async def _model(self, server: Server) -> str:
        """The name under which the server has the target."""
        reply = await self.servers.get(server, MODELS)
        cards = reply.body.get("data") if reply.status == 200 else None
        names = {str(card["id"]): str(card.get("root") or card["id"]) for card in cards or []
                 if isinstance(card, dict) and card.get("id")}  # fmt: skip
        wanted = self.config.server_model
        if wanted is not None:
            if names and wanted not in names:
                raise EngineError(
                    f"{server.url} has no model {wanted!r} (generate.server_model); it has {', '.join(names)}"
                )
            return wanted
        if not names:
            raise EngineError(
                f"{server.url}{MODELS} names no model (status {reply.status} {reply.text}): is this an "
                "OpenAI-compatible server? If it is, give the model's name as generate.server_model"
            )
        same = [name for name, root in names.items() if self._is_target(name) or self._is_target(root)]
        if not same:
            raise EngineError(
                f"{server.url} serves {', '.join(names)}, the recipe's target is {self.target.model!r}; answers of "
                "another model would be of no use. If one of these is the same model under another name, say so with "
                f"generate.server_model, such as {next(iter(names))!r}"
            )
        return same[0]

    def _is_target(self, name: str) -> bool:
        return name in self.aliases or any(_same_folder(name, alias) for alias in self.aliases)

    async def _manner_of(self, server: Server, model: str) -> Manner:
        """The first form that the server understands, tried with a prompt of a few tokens."""
        said = []
        for form in Form:
            manner = Manner(model, form)
            body = Asking(self._one_token(), 0, self._ends(), self.tokenizer).body(manner, self._probe)
            if body is None:
                said.append(f"{form}: the tokenizer does not give a text's ids back")
                continue
            reply = await self.servers.post(server, COMPLETIONS, body)
            if reply.status == 200:
                self._check_probe(server, manner, reply)
                return manner
            said.append(f"{form}: {reply.status} {reply.text}")
        raise EngineError(f"{server.url}{COMPLETIONS} declines every form of request:\n  " + "\n  ".join(said))

    def _one_token(self) -> GenerateConfig:
        c = self.config
        return GenerateConfig(max_new_tokens=2, temperature=c.temperature, top_p=c.top_p, top_k=c.top_k)

    def _ends(self) -> frozenset[int]:
        return frozenset(i for i in (self.end_id, self.tokenizer.eos_token_id) if i is not None)

    def _check_probe(self, server: Server, manner: Manner, reply: Reply) -> None:
        problem = other_prompt(self._probe.ids, reply.body)
        if problem:
            raise EngineError(
                f"{server.url}: {problem} (asked with {manner.form}); its tokenizer is not the target's, or it adds "
                "tokens of its own"
            )
        if manner.form == Form.PLAIN and self.config.top_k:
            raise EngineError(f"{server.url} takes no top_k, generate.top_k is {self.config.top_k}; set it to 0")
        token_list(first_choice(reply.body), "token_ids")


def _first(errors: BaseExceptionGroup[EngineError]) -> EngineError:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, EngineError)
    return error


def _same_folder(a: str, b: str) -> bool:
    return Path(a).is_absolute() and Path(a).is_dir() and Path(b).is_dir() and Path(a).samefile(b)
