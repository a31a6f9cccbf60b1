"""Small chat templates that behave as those of three families do, and a tokenizer with their control tokens.

Written for these tests after the families' formats:
  - SmolLM2: ChatML with a default system prompt; its real template is tested in `test_smollm2.py`.
  - Qwen3: reasoning of turns before the latest question is dropped; without thinking, the generation prompt has an
    empty thought; tool results are user turns of their own, several in a row sharing one.
  - Llama 3: bos, header tokens, a system turn with today's date, trimmed contents, tools in the first question, one
    tool call per turn, tool results under the role ipython.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
           "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<filename>"]  # fmt: skip
SPOKEN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
"""Added tokens that a model writes itself; Qwen3 does not mark them special either."""

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

QWEN3 = """
{%- set found = namespace(question=0) %}
{%- for message in messages %}
  {%- if message.role == 'user' %}{%- set found.question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- set has_system = messages[0].role == 'system' %}
{%- if tools %}
  {{- '<|im_start|>system\n' }}
  {%- if has_system %}{{- messages[0].content + '\n\n' }}{%- endif %}
  {{- 'You may call these functions:' }}
  {%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}
  {{- '<|im_end|>\n' }}
{%- elif has_system %}
  {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
  {%- set content = message.content if message.content is string else '' %}
  {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
  {%- elif message.role == 'assistant' %}
    {%- set thought = message.reasoning_content or '' %}
    {%- if not thought and '</think>' in content %}
      {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
      {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\n' }}
    {%- if loop.index0 > found.question and (loop.last or thought) %}
      {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
    {%- else %}
      {{- content }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
      {%- if content or not loop.first %}{{- '\n' }}{%- endif %}
      {%- set arguments = call.function.arguments %}
      {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
      {{- arguments if arguments is string else arguments | tojson }}
      {{- '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- elif message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\n' }}
  {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""

LLAMA3 = """
{{- bos_token }}
{%- if date_string is not defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}
{%- set has_system = messages[0].role == 'system' %}
{%- set rest = messages[1:] if has_system else messages %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + '\n\n' }}
{{- (messages[0].content | trim if has_system else '') + '<|eot_id|>' }}
{%- for message in rest %}
  {%- if message.role in ['tool', 'ipython'] %}
    {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content | tojson + '<|eot_id|>' }}
  {%- elif message.tool_calls %}
    {%- if message.tool_calls | length != 1 %}{{- raise_exception('one tool call at a time') }}{%- endif %}
    {%- set call = message.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
    {{- call.arguments | tojson + '}<|eot_id|>' }}
  {%- elif message.role == 'user' and loop.first and tools %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nCall one of these functions as JSON:\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}
    {{- message.content | trim + '<|eot_id|>' }}
  {%- else %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

TEMPLATES = {"smollm2": SMOLLM2, "qwen3": QWEN3, "llama3": LLAMA3}
END = {"smollm2": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>"}


def chat_tokenizer(name: str) -> Any:
    """A byte-level BPE with a few merges (line breaks at boundaries do merge). Pad is eos (case 19)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False
    )
    corpus = ["user\n\n\nassistant\n\nHello there, how are you?\n\n\n", "system\n 1 2 3 fruits\n\n\n\n12 12"] * 9
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in SPOKEN])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=TEMPLATES[name], bos_token="<|begin_of_text|>", eos_token=END[name],
        pad_token=END[name],
    )  # fmt: skip


def text_of(tokenizer: Any, ids: list[int]) -> str:
    """Ids as text, control tokens included."""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def talk(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """User and assistant in turn."""
    head = [] if system is None else [{"role": "system", "content": system}]
    return head + [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


def call(name: str = "weather", **arguments: Any) -> dict[str, Any]:
    """A message in which the assistant calls a function."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
