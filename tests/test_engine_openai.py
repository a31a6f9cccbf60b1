"""Answers from servers over HTTP: right ids or a reason, whatever the servers do."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stages.config import ConfigError, GenerateConfig, TargetConfig
from stages.engine import Answer, EngineError, Prompt, Refusal
from stages.engine_openai import OpenAIEngine
from stages.engine_tokens import prompt_text
from tests.servers.completions import Action, Change, CompletionServer, Drop, Kind, Request, Say
from tests.tiny import make_tokenizer

TOKENIZER = make_tokenizer()
END: int = TOKENIZER.eos_token_id
STOP = frozenset({END, TOKENIZER.convert_tokens_to_ids("<|endoftext|>")})
KEY = "sk-secret-1234"
NEVER: Callable[[Request], Action] = lambda request: None  # noqa: E731


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


PROMPTS = [Prompt(f"p{i}", ids_of(f"<|im_start|>user\nquestion {i}<|im_end|>\n<|im_start|>assistant\n"))
           for i in range(12)]  # fmt: skip


@pytest.fixture
def server() -> Iterator[CompletionServer]:
    with CompletionServer(TOKENIZER).running() as running:
        yield running


def make_engine(*servers: CompletionServer, **settings: Any) -> OpenAIEngine:
    values: dict[str, Any] = {"max_new_tokens": 20, "retries": 3, "timeout_s": 20.0, "concurrency": 4} | settings
    urls = tuple(s.url for s in servers)
    config = GenerateConfig(engine="openai", server_urls=urls, **values)
    return OpenAIEngine(TargetConfig(model="tiny"), config, TOKENIZER, END, first_wait_s=0.02)


def ask(engine: OpenAIEngine, prompts: list[Prompt] = PROMPTS, seed: int = 0) -> list[Answer | Refusal]:
    return engine.answer(prompts, engine.config, seed=seed, stop_ids=STOP)


def one(server: CompletionServer, behave: Callable[[Request], Action], **settings: Any) -> Answer | Refusal:
    """What becomes of the first prompt when the server behaves so; all others must be answered."""
    server.behave = lambda r: behave(r) if r.prompt_ids == PROMPTS[0].ids else None
    first, *others = ask(make_engine(server, **settings), PROMPTS[:4])
    assert all(isinstance(o, Answer) for o in others)
    return first


def refused(server: CompletionServer, action: Action, **settings: Any) -> Refusal:
    outcome = one(server, lambda r: action, **settings)
    assert isinstance(outcome, Refusal)
    assert outcome.sample_id == "p0"
    return outcome


# --- answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ids", "generation", "plain"])
def test_answers_have_the_servers_tokens_in_the_order_of_the_prompts(server: CompletionServer, kind: Kind) -> None:
    server.kind = kind
    # The first come back last.
    server.behave = lambda r: Change(delay_s=0.3 if r.prompt_ids == PROMPTS[0].ids else 0.0)
    outcomes = ask(make_engine(server))
    source = "server" if kind == "ids" else "text"
    for prompt, outcome in zip(PROMPTS, outcomes, strict=True):
        assert outcome == Answer(
            prompt.sample_id, server.answer_ids(prompt.ids), "stop", {"tokens": source, "server_build": "test-1"}
        )


@pytest.mark.parametrize("kind", ["ids", "generation", "plain"])
def test_answers_that_reach_the_limit_are_cut_there(server: CompletionServer, kind: Kind) -> None:
    server.kind = kind
    server.n_tokens = lambda ids: 30
    outcomes = ask(make_engine(server))
    for prompt, outcome in zip(PROMPTS, outcomes, strict=True):
        assert isinstance(outcome, Answer)
        assert (outcome.ids, outcome.finish_reason) == (server.answer_ids(prompt.ids)[:20], "length")


def test_a_turn_ends_with_its_first_end_token(server: CompletionServer) -> None:
    letters = ids_of("abcdef")
    found = one(server, lambda r: Change({"token_ids": [*letters, END, *letters], "finish_reason": "length"}))
    assert isinstance(found, Answer)
    assert (found.ids, found.finish_reason) == ([*letters, END], "stop")


@pytest.mark.parametrize("name", ["stop_reason", "matched_stop"])
def test_an_end_token_that_a_server_only_names_is_added(server: CompletionServer, name: str) -> None:
    letters, other = ids_of("abc"), next(iter(STOP - {END}))
    named = one(server, lambda r: Change({"token_ids": letters, name: other}))
    assert isinstance(named, Answer)
    assert named.ids == [*letters, other]
    unnamed = one(server, lambda r: Change({"token_ids": letters}))
    assert isinstance(unnamed, Answer)
    assert unnamed.ids == [*letters, END]


def test_all_settings_are_said_and_the_random_stream_is_the_samples(server: CompletionServer) -> None:
    settings = {"temperature": 0.7, "top_k": 40, "top_p": 0.9}
    ask(make_engine(server, **settings))
    ask(make_engine(server, **settings), PROMPTS[::-1])
    ask(make_engine(server, **settings), seed=1)
    seeds: dict[tuple[int, ...], list[int]] = {}
    for request in server.prompt_requests():
        body = request.body
        assert {k: body[k] for k in settings} == settings
        assert (body["max_tokens"], body["repetition_penalty"], body["min_p"]) == (20, 1.0, 0.0)
        assert body["stop_token_ids"] == sorted(STOP)
        assert body["return_token_ids"] is True
        seeds.setdefault(tuple(request.prompt_ids), []).append(body["seed"])
    assert len(seeds) == len({s[0] for s in seeds.values()}) == len(PROMPTS)
    assert all(first == again != other for first, again, other in seeds.values())
    server.requests.clear()
    ask(make_engine(server))
    assert all(r.body["temperature"] == 0 and "seed" not in r.body and r.body["top_k"] == -1 for r in server.requests)


def test_transformers_serve_gets_all_settings_as_a_generation_config(server: CompletionServer) -> None:
    server.kind = "generation"
    ask(make_engine(server, temperature=0.7, top_k=40))
    settings = json.loads(server.prompt_requests()[0].body["generation_config"])
    assert settings["do_sample"] is True
    assert (settings["temperature"], settings["top_k"], settings["max_new_tokens"]) == (0.7, 40, 20)
    assert settings["eos_token_id"] == sorted(STOP)
    server.requests.clear()
    ask(make_engine(server))
    assert json.loads(server.prompt_requests()[0].body["generation_config"])["do_sample"] is False


def test_requests_under_way_are_bounded(server: CompletionServer) -> None:
    server.behave = lambda r: Change(delay_s=0.05)
    ask(make_engine(server, concurrency=3))
    assert server.most_open == 3


# --- troubles that pass ------------------------------------------------------------------------------------------

TROUBLES: dict[str, Action] = {
    "500": Say(500, {"error": {"message": "out of luck"}}),
    "503": Say(503, "loading"),
    "429": Say(429, {"error": {"message": "slow down"}}, {"Retry-After": "0.3"}),
    "dropped": Drop(),
    "garbage": Say(200, "<html>hello</html>"),
    "no choices": Say(200, {"choices": []}),
    "ids that are none": Change({"token_ids": ["a", None]}),
    "slow": Change(delay_s=1.0),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_what_fails_twice_is_asked_a_third_time(server: CompletionServer, trouble: str) -> None:
    timeout_s = 0.4 if trouble == "slow" else 20.0
    started = time.monotonic()
    found = one(server, lambda r: TROUBLES[trouble] if r.n < 2 else None, timeout_s=timeout_s)
    assert isinstance(found, Answer)
    assert found.ids == server.answer_ids(PROMPTS[0].ids)
    assert sum(r.prompt_ids == PROMPTS[0].ids for r in server.requests) == 3
    if trouble == "429":
        assert time.monotonic() - started >= 0.6  # as long as the server asked for


@pytest.mark.parametrize(
    ("trouble", "reason", "words"),
    [
        ("500", "server_error", "out of luck"),
        ("dropped", "connection_lost", "broke off"),
        ("garbage", "bad_reply", "<html>"),
        ("no choices", "bad_reply", "choices"),
        ("ids that are none", "bad_reply", "token ids"),
        ("slow", "timed_out", "generate.timeout_s"),
    ],
)
def test_what_fails_each_time_on_one_sample_is_refused_with_its_story(
    server: CompletionServer, trouble: str, reason: str, words: str
) -> None:
    refusal = refused(server, TROUBLES[trouble], timeout_s=0.4 if trouble == "slow" else 20.0)
    assert refusal.reason == reason
    assert words in refusal.detail
    assert "4 attempts" in refusal.detail


def test_a_server_that_stays_busy_is_an_error_with_advice(server: CompletionServer) -> None:
    server.behave = lambda r: Say(429, {"error": {"message": "slow down"}})
    with pytest.raises(EngineError, match=r"too much to do: 429 slow down.*generate\.concurrency"):
        ask(make_engine(server))


# --- answers that are none ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "reason", "words"),
    [
        (Change({"prompt_token_ids": [*PROMPTS[0].ids[:5], 9]}), "other_prompt", "at token 5"),
        (Change({"prompt_token_ids": None}, {"prompt_tokens": 3}), "other_prompt", "3 tokens"),
        (Change({"token_ids": None}, None), "no_token_ids", "how many tokens"),
        (Change({"token_ids": None}, {"completion_tokens": 99}), "round_trip", "99 at the server"),
        (Change({"token_ids": None, "text": "half a \ufffd"}), "round_trip", "does not come back"),
        (Change({"token_ids": None, "text": "a<|im_end|>b"}), "round_trip", "end of turn"),
        (Change({"finish_reason": "abort"}), "unfinished", "abort"),
        (Change({"finish_reason": "length"}), "context_length", "do not fit"),
        (Say(400, {"error": {"message": "This model's maximum context length is 9 tokens."}}), "context_length", "9 t"),
        (Say(400, {"message": "no such penalty", "code": 400}), "declined", "400: no such penalty"),
    ],
)
def test_an_answer_that_cannot_be_proven_is_refused(
    server: CompletionServer, action: Action, reason: str, words: str
) -> None:
    if reason == "context_length" and isinstance(action, Change):
        action = Change(action.choice | {"token_ids": ids_of("abc")})
    refusal = refused(server, action)
    assert refusal.reason == reason
    assert words in refusal.detail
    assert sum(r.prompt_ids == PROMPTS[0].ids for r in server.requests) == 1  # asking again would change nothing


def test_text_is_taken_only_if_the_server_counts_the_same_tokens(server: CompletionServer) -> None:
    server.kind = "plain"
    assert refused(server, Change(usage={"completion_tokens": 2})).reason == "round_trip"
    assert refused(server, Change(usage=None)).reason == "no_token_ids"
    assert refused(server, Change(usage={"prompt_tokens": 2})).reason == "other_prompt"


def test_a_prompt_without_a_text_of_its_own_is_refused_by_servers_that_take_text(server: CompletionServer) -> None:
    half = Prompt("half", ids_of("é")[:1])
    assert isinstance(ask(make_engine(server), [half])[0], Answer)
    server.kind = "plain"
    refusal = ask(make_engine(server), [half])[0]
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "round_trip"


def test_a_prompts_text_leaves_out_what_the_servers_tokenizer_adds() -> None:
    from tokenizers.processors import TemplateProcessing

    adding = make_tokenizer(bos_token="<|endoftext|>")
    bos = adding.bos_token_id
    adding.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    assert prompt_text(adding, [bos, *ids_of("hello")]) == "hello"
    assert prompt_text(adding, ids_of("hello")) is None
    assert prompt_text(TOKENIZER, ids_of("<|im_start|>hello")) == "<|im_start|>hello"


# --- servers that cannot be used ---------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_no_server_there_is_said_in_clear_words() -> None:
    nobody = CompletionServer(TOKENIZER, port=free_port())
    with pytest.raises(EngineError, match=r"the server is down: .*Connection refused.*4 attempts.*Start it.*run again"):
        make_engine(nobody)


def test_a_server_that_dies_stops_the_work_and_is_found_again() -> None:
    server = CompletionServer(TOKENIZER)
    with contextlib.ExitStack() as stack:
        stack.enter_context(server.running())
        engine = make_engine(server)
    with pytest.raises(EngineError, match="down"):
        ask(engine)
    started = time.monotonic()
    with pytest.raises(EngineError, match="down"):
        ask(engine)
    assert time.monotonic() - started < 1  # without trying each prompt anew
    with server.running():
        assert all(isinstance(o, Answer) for o in ask(engine))


def test_a_server_that_hangs_is_told_from_one_that_is_slow(server: CompletionServer) -> None:
    engine = make_engine(server, timeout_s=0.3)
    server.behave = lambda r: Change(delay_s=1.0)
    assert {o.reason for o in ask(engine) if isinstance(o, Refusal)} == {"timed_out"}
    server.models = Change(delay_s=1.0)
    with pytest.raises(EngineError, match=r"down: .* (nor anything else|does not name its models in 0.3 s)"):
        ask(engine)


def test_another_model_is_refused_unless_the_recipe_says_it_is_the_same(server: CompletionServer) -> None:
    server.model = "tiny-awq"
    with pytest.raises(EngineError, match=r"serves tiny-awq, the recipe's target is 'tiny'.*generate\.server_model"):
        make_engine(server)
    assert len(ask(make_engine(server, server_model="tiny-awq"))) == len(PROMPTS)
    with pytest.raises(EngineError, match=r"no model 'big'.*it has tiny-awq"):
        make_engine(server, server_model="big")
    server.root = "tiny"  # an alias of the target, as vLLM's --served-model-name
    assert len(ask(make_engine(server))) == len(PROMPTS)


def test_a_server_with_another_tokenizer_is_refused(server: CompletionServer) -> None:
    def every(request: Request) -> Action:
        return Change({"prompt_token_ids": [1, 2, 3]})

    server.behave = every
    with pytest.raises(EngineError, match="tokenizer is not the target's"):
        make_engine(server)


def test_the_key_comes_from_the_environment_and_is_never_shown(
    server: CompletionServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineError, match="no such environment variable"):
        make_engine(server, api_key_env="DFLASH_TEST_KEY")
    monkeypatch.setenv("DFLASH_TEST_KEY", KEY)
    ask(make_engine(server, api_key_env="DFLASH_TEST_KEY"))
    assert {r.authorization for r in server.requests} == {f"Bearer {KEY}"}
    server.models = Say(401, {"error": {"message": f"Incorrect API key provided: {KEY}."}})
    with pytest.raises(EngineError, match=r"401.*DFLASH_TEST_KEY.*Incorrect API key provided") as caught:
        make_engine(server, api_key_env="DFLASH_TEST_KEY")
    assert KEY not in str(caught.value)
    with pytest.raises(EngineError, match=r"api_key_env names none"):
        make_engine(server)


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (Say(404, "not here"), "names no model.*404 not here"),
        (Say(200, "hello"), "bad reply"),
        (Say(307, "", {"Location": "http://127.0.0.1:1/"}), "another place"),
        (Say(200, {"data": []}), "names no model"),
    ],
)
def test_what_is_no_openai_server_is_said(server: CompletionServer, models: Say, words: str) -> None:
    server.models = models
    with pytest.raises(EngineError, match=words):
        make_engine(server)


def test_a_server_that_understands_no_form_is_refused_with_its_words(server: CompletionServer) -> None:
    def every(request: Request) -> Action:
        return Say(400, {"detail": "chat only"})

    server.behave = every
    with pytest.raises(EngineError, match=r"declines every form[\s\S]*ids: 400 chat only"):
        make_engine(server)
    server.kind, server.behave = "plain", NEVER
    with pytest.raises(EngineError, match=r"takes no top_k"):
        make_engine(server, top_k=5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"server_urls": ()}, "server_urls"),
        ({"server_urls": ("127.0.0.1:8000",)}, "http://host:port"),
        ({"server_urls": ("http://me:secret@host",)}, "api_key_env"),
        ({"server_urls": ("http://host",), "api_key_env": "sk-abc-def"}, "never the key"),
        ({"server_urls": ("http://host",), "concurrency": 0}, "concurrency"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        GenerateConfig(engine="openai", **settings)
    assert "sk-abc" not in str(caught.value)
    assert "secret" not in str(caught.value)


# --- several servers ---------------------------------------------------------------------------------------------


def test_several_servers_share_the_work_and_a_dead_one_is_left_out_and_found_again() -> None:
    with contextlib.ExitStack() as stack:
        servers = [CompletionServer(TOKENIZER, behave=lambda r: Change(delay_s=0.02)) for _ in range(3)]
        others, dying = servers[:2], servers[2]
        for server in others:
            stack.enter_context(server.running())
        with dying.running():
            engine = make_engine(*servers)
            expected = ask(engine)
            assert all(isinstance(o, Answer) for o in expected)
            shares = [len(s.prompt_requests()) for s in servers]
            assert min(shares) >= 2
            assert sum(shares) == len(PROMPTS)
        assert ask(engine) == expected
        with dying.running():
            dying.requests.clear()
            time.sleep(0.2)  # longer than it is left out
            assert ask(engine) == expected
            assert dying.requests


def test_one_of_two_servers_may_be_absent_from_the_start() -> None:
    absent = CompletionServer(TOKENIZER, port=free_port())
    with CompletionServer(TOKENIZER).running() as server:
        engine = make_engine(absent, server)
        assert all(isinstance(o, Answer) for o in ask(engine))
        time.sleep(0.2)
        with absent.running():
            assert all(isinstance(o, Answer) for o in ask(engine))


def test_a_sample_that_a_living_server_fails_on_is_refused_though_another_server_is_down(
    server: CompletionServer,
) -> None:
    absent = CompletionServer(TOKENIZER, port=free_port())
    server.behave = lambda r: Say(500, "boom") if r.prompt_ids == PROMPTS[0].ids else None
    first, *others = ask(make_engine(absent, server, retries=8), PROMPTS[:4])
    assert isinstance(first, Refusal)
    assert (first.reason, "boom" in first.detail) == ("server_error", True)
    assert all(isinstance(o, Answer) for o in others)


def test_urls_may_end_in_v1(server: CompletionServer) -> None:
    config = GenerateConfig(engine="openai", server_urls=(server.url + "/v1/",), max_new_tokens=20)
    engine = OpenAIEngine(TargetConfig(model="tiny"), config, TOKENIZER, END)
    assert isinstance(ask(engine)[0], Answer)


def test_proxies_of_the_environment_are_not_used(server: CompletionServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    assert isinstance(ask(make_engine(server))[0], Answer)
