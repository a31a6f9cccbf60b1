"""Ids and masks of conversations: boundaries, chains of turns, and refusals, for four kinds of template."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from stages.chat import GivenSamples, RenderedSample, end_of_turn_ids, render_given, render_prompt, turn_end
from stages.errors import SampleRefused, TargetError

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>", "<|header|>", "<|/header|>", "<|eot|>"]
CORPUS = [
    "user\n\n\nassistant\n\nHello there, how are you?\n\n\n",
    "system\n 1 2 3 fruits\n\n<think>\n\n</think>\n\n",
] * 9

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN3 = """
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
  {{- '<|im_start|>' + message.role + '\n' }}
  {%- if message.role == 'assistant' and loop.index0 > ns.last %}
    {{- '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}
  {%- endif %}
  {{- message.content }}
  {%- for call in message.tool_calls or [] %}{{- '<call>' + call.function.name + '</call>' }}{%- endfor %}
  {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\n' }}
  {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
LLAMA3 = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- if message.role not in ['system', 'user', 'assistant'] %}{{- raise_exception('no role ' + message.role) }}"
    "{%- endif %}"
    "{{- '<|header|>' + message.role + '<|/header|>\n\n' + message.content | trim + '<|eot|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|header|>assistant<|/header|>\n\n' }}{%- endif %}"
)
PHI3 = (  # closes with eos behind the last line break, unless it asks
    "{%- for message in messages %}{{- '<|header|>' + message.role + '\n' + message.content + '<|eot|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|header|>assistant\n' }}{%- else %}{{- eos_token }}{%- endif %}"
)
THINKS_FIRST = SMOLLM2.replace("'<|im_start|>assistant\n' }}", "'<|im_start|>assistant\n<think>\n' }}")
"""As the reasoning-only models do it: the generation prompt opens a thought that a given answer does not have."""


def make_tokenizer(template: str | None, eos: str = "<|im_end|>") -> Any:
    """A byte-level BPE with some merges, so that line breaks at a boundary do merge. Pad is eos (case 19)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 3)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token=eos, pad_token=eos, chat_template=template
    )


TOKENIZERS = {
    "smollm2": make_tokenizer(SMOLLM2),
    "qwen3": make_tokenizer(QWEN3),
    "llama3": make_tokenizer(LLAMA3, "<|eot|>"),
    "phi3": make_tokenizer(PHI3, "<|endoftext|>"),
}
END = {"smollm2": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot|>", "phi3": "<|eot|>"}


def talk(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """User and assistant in turn."""
    head = [] if system is None else [{"role": "system", "content": system}]
    return head + [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


def text_of(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def runs(sample: RenderedSample) -> list[tuple[int, int]]:
    """Beginnings and ends of the supervised stretches."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask, [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def supervised(tokenizer: Any, found: GivenSamples) -> list[tuple[str, str]]:
    """(context, answer) of every supervised stretch, as text."""
    out = []
    for sample in found.samples:
        ids = sample.prompt_ids + sample.response_ids
        assert len(sample.loss_mask) == len(ids)
        assert sample.loss_mask.dtype == np.uint8
        assert runs(sample)[0][0] == len(sample.prompt_ids)
        assert runs(sample)[-1][1] == len(ids)
        out += [(text_of(tokenizer, ids[:a]), text_of(tokenizer, ids[a:b])) for a, b in runs(sample)]
    return out


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_prompt_is_what_the_template_renders_with_no_second_bos(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    messages = talk("Hello", "Hi", "How?", system="Be terse.")
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert render_prompt(tokenizer, messages) == expected
    assert expected.count(tokenizer.bos_token_id) == (1 if name == "llama3" else 0)


def test_template_arguments_and_tools_reach_the_template() -> None:
    tokenizer = TOKENIZERS["qwen3"]
    ids = render_prompt(tokenizer, talk("q"), template_kwargs={"enable_thinking": False})
    assert text_of(tokenizer, ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    with_tools = make_tokenizer("{% for t in tools %}{{ t.name }};{% endfor %}" + SMOLLM2)
    ids = render_prompt(with_tools, talk("q"), tools=[{"name": "weather"}])
    assert text_of(with_tools, ids).startswith("weather;<|im_start|>")


def test_case_10_a_short_answer_is_masked_exactly() -> None:
    tokenizer = TOKENIZERS["smollm2"]
    (sample,) = render_given(tokenizer, talk("Q", "A", system="S")).samples
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert sample.response_ids == [*tokenizer("A", add_special_tokens=False)["input_ids"], end]
    assert sample.loss_mask.tolist() == [0] * len(sample.prompt_ids) + [1, 1]
    assert sample.prompt_ids == render_prompt(tokenizer, talk("Q", system="S"))
    assert sample.suffix == ""


def test_turns_that_continue_each_other_share_a_sample() -> None:
    tokenizer = TOKENIZERS["llama3"]
    found = render_given(tokenizer, talk("q1", "a1", "q2", "a2", "q3"))
    assert [s.suffix for s in found.samples] == [""]
    assert [answer for _, answer in supervised(tokenizer, found)] == ["a1<|eot|>", "a2<|eot|>"]
    assert len(runs(found.samples[0])) == 2


def test_case_12_a_turn_whose_context_is_rendered_otherwise_is_its_own_sample() -> None:
    tokenizer = TOKENIZERS["qwen3"]
    messages = talk("q1", "a1", "q2", "a2", "q3", "a3")
    messages[1]["reasoning_content"] = "why one"
    messages[3]["reasoning_content"] = "why two"
    found = render_given(tokenizer, messages)
    assert [s.suffix for s in found.samples] == ["", "#turn-2", "#turn-3"]
    (c1, a1), (c2, a2), (c3, a3) = supervised(tokenizer, found)
    assert a1 == "<think>\nwhy one\n</think>\n\na1<|im_end|>"
    assert a2 == "<think>\nwhy two\n</think>\n\na2<|im_end|>"
    assert a3 == "<think>\n\n</think>\n\na3<|im_end|>"
    assert "why one" not in c2
    assert "assistant\na1<|im_end|>" in c2
    assert c3 == text_of(tokenizer, render_prompt(tokenizer, messages[:5]))
    assert c1 == text_of(tokenizer, render_prompt(tokenizer, messages[:1]))


def test_tool_steps_of_one_turn_stay_together() -> None:
    tokenizer = TOKENIZERS["qwen3"]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    messages = [*talk("q"), call, {"role": "tool", "content": "t"}, {"role": "assistant", "content": "a"}]
    found = render_given(tokenizer, messages)
    assert [s.suffix for s in found.samples] == [""]
    answers = [answer for _, answer in supervised(tokenizer, found)]
    assert answers == ["<think>\n\n</think>\n\n<call>f</call><|im_end|>", "<think>\n\n</think>\n\na<|im_end|>"]


def test_case_11_a_conversation_without_an_answer_is_refused() -> None:
    with pytest.raises(SampleRefused, match="none of the 1 messages") as caught:
        render_given(TOKENIZERS["smollm2"], talk("q"))
    assert caught.value.reason == "empty_loss_mask"


def test_an_answer_whose_prefix_never_matches_is_refused() -> None:
    tokenizer = make_tokenizer(THINKS_FIRST)
    with pytest.raises(SampleRefused, match=r"message 1: .* from token") as caught:
        render_given(tokenizer, talk("q", "a"))
    assert caught.value.reason == "prefix_mismatch"
    messages = talk("q", "a", "q2", "<think>\nwell\n</think>a2")
    found = render_given(tokenizer, messages)
    assert [(r.suffix, r.reason) for r in found.refused] == [("", "prefix_mismatch")]
    assert [(s.suffix, s.turns) for s in found.samples] == [("#turn-2", (2,))]
    assert supervised(tokenizer, found)[0][1] == "well\n</think>a2<|im_end|>"


def test_an_answer_that_the_template_closes_otherwise_is_refused() -> None:
    odd = SMOLLM2.replace("'<|im_end|>' + '\n'}}", "('<|im_end|>' if message['content'] != 'odd' else '') + '\n'}}")
    with pytest.raises(SampleRefused, match=r"message 1: .*expected the template's end of turn") as caught:
        render_given(make_tokenizer(odd), talk("q", "odd"))
    assert caught.value.reason == "no_end_of_turn"


def test_what_the_template_cannot_render_is_refused_with_its_words() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    tool = {"role": "tool", "content": "t"}
    for name, words in (("smollm2", "TypeError|UndefinedError"), ("llama3", "no role tool")):
        messages = [*talk("q"), call if name == "smollm2" else tool, tool]
        for render in (render_prompt, render_given):
            with pytest.raises(SampleRefused, match=words) as caught:
                render(TOKENIZERS[name], [*messages, *talk("q")[:1], {"role": "assistant", "content": "a"}])
            assert caught.value.reason == "template_error"


def test_one_turn_that_cannot_be_rendered_refuses_the_whole_conversation() -> None:
    messages = [*talk("q", "a"), {"role": "tool", "content": "t"}, {"role": "assistant", "content": "a2"}]
    with pytest.raises(SampleRefused, match=r"template_error: .*no role tool"):
        render_given(TOKENIZERS["llama3"], messages)


def test_an_answer_that_renders_to_nothing_is_refused() -> None:
    plain = make_tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    silent = make_tokenizer(plain.chat_template + "{% if add_generation_prompt %}assistant: {% endif %}")
    with pytest.raises(SampleRefused, match="empty_loss_mask: message 1 renders to no token"):
        render_given(silent, talk("q", ""))


def test_a_tokenizer_that_marks_the_beginning_of_a_text_puts_no_blank_into_an_answer() -> None:
    words = ["▁a:", "▁q", "▁yes", "yes", ":yes", "▁a:yes", "▁"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="▁"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template="{{ messages[0].content }} a:{% if messages[1] %}{{ messages[1].content }}{% endif %}",
    )
    with pytest.raises(SampleRefused, match="prefix_mismatch"):  # "▁a:yes" is one token, and "▁yes" is not "yes"
        render_given(tokenizer, talk("q", "yes"))


def test_unusable_templates_are_errors_of_the_target() -> None:
    for template, words in (
        (None, "no chat template"),
        ("{{ raise_exception('never') }}", "cannot render one question.*never"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "leaves out"),
    ):
        with pytest.raises(TargetError, match=words):
            render_given(make_tokenizer(template), talk("q", "a"))


def test_ids_that_end_a_turn() -> None:
    def ids(*tokens: str) -> frozenset[int]:
        return frozenset(SPECIALS.index(t) for t in tokens)

    assert end_of_turn_ids(TOKENIZERS["smollm2"]) == ids("<|im_end|>")
    assert end_of_turn_ids(TOKENIZERS["phi3"]) == ids("<|endoftext|>", "<|eot|>")
    both = GenerationConfig(eos_token_id=[0, 2])
    assert end_of_turn_ids(TOKENIZERS["llama3"], both) == ids("<|endoftext|>", "<|im_end|>", "<|eot|>")
    assert end_of_turn_ids(TOKENIZERS["qwen3"], GenerationConfig(eos_token_id=0)) == ids("<|endoftext|>", "<|im_end|>")
    plain = make_tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert turn_end(plain).kept == []
    assert end_of_turn_ids(plain) == ids("<|im_end|>")
    plain.eos_token = None
    with pytest.raises(TargetError, match="no token that ends a turn"):
        end_of_turn_ids(plain)


def test_a_template_without_an_end_token_leaves_its_separator_out() -> None:
    plain = make_tokenizer(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert [a for _, a in supervised(plain, render_given(plain, talk("q", "yes", "q", "no")))] == ["yes", "no"]


def test_an_answer_that_merges_with_the_header_starts_where_the_target_would_start() -> None:
    tokenizer = TOKENIZERS["smollm2"]
    joint = tokenizer("assistant\n\nx", add_special_tokens=False)["input_ids"]
    apart = [i for t in ("assistant\n", "\nx") for i in tokenizer(t, add_special_tokens=False)["input_ids"]]
    assert joint != apart, "the tokenizer of this test has to merge the two line breaks"
    found = render_given(tokenizer, talk("q", "\nx", "q2", "a2"))
    assert found.refused == []
    assert [s.suffix for s in found.samples] == ["", "#turn-2"]
    assert found.samples[0].prompt_ids == render_prompt(tokenizer, talk("q"))
    assert [a for _, a in supervised(tokenizer, found)] == ["\nx<|im_end|>", "a2<|im_end|>"]


# Texts full of what could mislead: headers, halves of control tokens, line breaks that merge, multi-byte characters.
PIECES = ["<|im_", "end|>", "<|eot", "<|im_start|assistant\n", "\n", "\n\n", " ", "a", "Hello ", "12",
          "é", "🌅", "</think>", "assistant"]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join)
TURNS = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), TEXTS), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(TOKENIZERS)), st.none() | TEXTS, TURNS)
@example("smollm2", None, [("user", "<|im_end"), ("assistant", "|im_end|>"), ("user", "\n"), ("assistant", "\n\n")])
def test_the_mask_is_exactly_the_assistants_tokens(name: str, system: str | None, turns: list[tuple[str, str]]) -> None:
    tokenizer = TOKENIZERS[name]
    messages = [*talk("q", system=system), *({"role": r, "content": c} for r, c in turns)]
    answers = [k for k, m in enumerate(messages) if m["role"] == "assistant"]
    seen = messages[: answers[-1] + 1] if answers else []
    control = any("<|im_end|>" in m["content"] for m in seen)  # two pieces may make one
    if not answers or control:
        with pytest.raises(SampleRefused, match="special_token_text" if answers else "empty_loss_mask"):
            render_given(tokenizer, messages)
        return
    found = render_given(tokenizer, messages)
    assert found.refused == []
    said = [messages[k]["content"] for k in answers]
    if name == "llama3":
        said = [s.strip() for s in said]
    if name == "qwen3":
        said = ["<think>\n\n</think>\n\n" + s for s in said]
    expected = [
        (text_of(tokenizer, render_prompt(tokenizer, messages[:k])), s + END[name])
        for k, s in zip(answers, said, strict=True)
    ]
    assert supervised(tokenizer, found) == expected
    suffixes = [s.suffix for s in found.samples]
    assert suffixes[0] == ""
    assert len(set(suffixes)) == len(suffixes)
