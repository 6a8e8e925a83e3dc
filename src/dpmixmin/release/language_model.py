"""What the bundle of a language model holds beside that of any model: architecture, tokenizer, model card.

A folder that plain transformers loads is more than weights: a config or a tokenizer that says something else makes
another model of them, or has other code run. So all of it is derived again from the statement's config, but for the
tokenizer's entries, which rest on the public texts: they are named by their hash. Needs no torch and no transformers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from dpmixmin import artifacts
from dpmixmin.config import Config
from dpmixmin.data import tokenizer
from dpmixmin.errors import UserError
from dpmixmin.models.card import finetuned_card, pretrained_card
from dpmixmin.paths import TOKENIZER_FILES, Paths
from dpmixmin.release.derive import chain_cells, has_private_mixture

CARD, STATEMENT = "README.md", "statement.json"

Look = Callable[[dict[str, bytes], Config], str]
"""Checks a file of a bundle and says in a line what holds."""

_GPT2 = {
    "activation_function": "gelu_pytorch_tanh",
    "add_cross_attention": False,
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.0,
    "dtype": "float32",
    "embd_pdrop": 0.0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_inner": None,
    "pad_token_id": None,
    "reorder_and_upcast_attn": False,
    "resid_pdrop": 0.0,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "tie_word_embeddings": True,
    "use_cache": True,
}
"""What ``config.json`` says of every model of models/language.py."""

_GENERATION = {
    "_from_model_config": True,
    "output_attentions": False,
    "output_hidden_states": False,
    "use_cache": True,
}
"""The same for ``generation_config.json``."""

_VERSION = "transformers_version"


def card(config: Config, privacy: dict[str, Any], files: dict[str, bytes]) -> bytes:
    """Return the model card: a function of the statement, the chosen settings and the weights.

    Args:
        config: mode deploy; the paths of private tables are not used.
        privacy: the statement's section of that name.
        files: of the bundle; read are ``settings_finetune.json`` and ``weights.json``.
    """
    cells = chain_cells(config)
    if json.loads(files["settings_finetune.json"])["choice"] is None:
        weights = json.loads(files["weights.json"])["weights"] if has_private_mixture(config) else None
        text = pretrained_card(config, cells["pretrained"], privacy, weights, STATEMENT)
    else:
        text = finetuned_card(config, cells["finetuned"], privacy, STATEMENT)
    return text.encode()


def facts(files: dict[str, bytes], left_out: Iterable[str]) -> dict[str, Any]:
    """Return what a statement's ``data`` says more of texts."""
    return {"tokenizer": tokenizer_hash(files), "left_out": list(left_out)}


def tokenizer_hash(files: dict[str, bytes]) -> str:
    """Return the hash that proxies, weights and models name their tokenizer by."""
    return hashlib.sha256(files["tokenizer.json"]).hexdigest()


def looks(statement: dict[str, Any]) -> dict[str, Look]:
    """Return the checks of a language model's files by name.

    Args:
        statement: whose other sections were found sound.
    """
    return {
        "tokenizer_config.json": _tokenizer_config,
        "tokenizer.json": partial(_tokenizer, statement["data"]),
        "config.json": _architecture,
        "generation_config.json": _generation,
        "model.safetensors": _parameters,
        CARD: partial(_card, statement["privacy"]),
    }


def _read(files: dict[str, bytes]):
    """Return the tokenizer in a bundle."""
    from tokenizers import Tokenizer

    try:
        found = Tokenizer.from_str(files["tokenizer.json"].decode())
    except Exception:  # the library raises bare exceptions
        raise UserError("tokenizer.json: not a tokenizer") from None
    if tokenizer.end_of_text(found) is None:
        raise UserError(f"tokenizer.json: has no {tokenizer.END_OF_TEXT}")
    return found


def _tokenizer(data: dict[str, Any], files: dict[str, bytes], config: Config) -> str:
    found, derived = _read(files), tokenizer_hash(files)
    if data["tokenizer"] != derived:
        raise UserError(f"tokenizer.json: stated in data.tokenizer {data['tokenizer']}, derived {derived}")
    # The artefact of the run that models and proxies were made with: the same two files.
    place = Paths(config.experiment).tokenizer().removeprefix(f"{Paths(config.experiment).base}/")
    derived = artifacts.digest({name: hashlib.sha256(files[name]).hexdigest() for name in TOKENIZER_FILES})
    stated = {each["name"]: each["sha256"] for each in data["artefacts"]}[place]
    if stated != derived:
        raise UserError(f"tokenizer.json: stated for {place} {stated}, derived {derived}")
    size, wanted = found.get_vocab_size(), config.text.tokenizer
    most = wanted.vocabulary if wanted.kind == "bpe" else tokenizer.GPT2_ENTRIES
    if size > most or (wanted.kind == "gpt2" and size != most):
        raise UserError(f"tokenizer.json: has {size} entries, the config's has {most}")
    return f"the tokenizer of {size} entries is the one that the statement names"


def _tokenizer_config(files: dict[str, bytes], config: Config) -> str:
    _same("tokenizer_config.json", files, json.loads(tokenizer.files(_read(files))["tokenizer_config.json"]))
    return "the tokenizer is loaded as it is"


def _architecture(files: dict[str, bytes], config: Config) -> str:
    found, size = _read(files), config.text.pretrain
    end = tokenizer.end_of_text(found)
    derived = {
        **_GPT2,
        "vocab_size": found.get_vocab_size(),
        "n_positions": config.text.context,
        "n_embd": size.width,
        "n_layer": size.layers,
        "n_head": size.heads,
        "bos_token_id": end,
        "eos_token_id": end,
    }
    _same("config.json", files, derived)
    return f"the architecture is the config's: GPT-2, {size.layers} layers of width {size.width}"


def _generation(files: dict[str, bytes], config: Config) -> str:
    end = tokenizer.end_of_text(_read(files))
    derived = {**_GENERATION, "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    _same("generation_config.json", files, derived)
    return "generation ends with the tokenizer's end of text"


def _same(name: str, files: dict[str, bytes], derived: dict[str, Any]) -> None:
    """Compare a JSON object with what it should be; the version of transformers that wrote it may be any."""
    stated = json.loads(files[name])
    if not isinstance(stated.pop(_VERSION, ""), str):
        raise UserError(f"{name}: {_VERSION}: not a version")
    for key in [*derived, *(key for key in stated if key not in derived)]:
        if key not in stated or key not in derived:
            raise UserError(f"{name}: {key}: " + ("missing" if key not in stated else "must not be there"))
        if type(stated[key]) is not type(derived[key]) or stated[key] != derived[key]:
            raise UserError(f"{name}: {key}: stated {stated[key]!r}, derived {derived[key]!r}")


def _parameters(files: dict[str, bytes], config: Config) -> str:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        tensors = load(files["model.safetensors"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"model.safetensors: not readable ({type(error).__name__})") from None
    wanted = _shapes(config, _read(files).get_vocab_size())
    for name in sorted(wanted.keys() | tensors.keys()):
        stated = tensors[name].shape if name in tensors else "no such parameter"
        if stated != wanted.get(name):
            raise UserError(f"model.safetensors: {name}: stated {stated}, derived {wanted.get(name, 'none')}")
        if tensors[name].dtype != np.float32 or not np.isfinite(tensors[name]).all():
            raise UserError(f"model.safetensors: {name} holds values that are not finite float32")
    count = sum(tensor.size for tensor in tensors.values())
    return f"the model's {count} parameters are those of its architecture, and finite"


def _shapes(config: Config, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Return the parameters of a GPT-2 with a tied head by name."""
    size = config.text.pretrain
    width, found = size.width, {}
    found["wte.weight"], found["wpe.weight"] = (vocabulary, width), (config.text.context, width)
    for block in range(size.layers):
        for name, inputs, outputs in (("attn.c_attn", 1, 3), ("attn.c_proj", 1, 1), ("mlp.c_fc", 1, 4),
                                      ("mlp.c_proj", 4, 1)):  # fmt: skip
            found[f"h.{block}.{name}.weight"] = (inputs * width, outputs * width)
            found[f"h.{block}.{name}.bias"] = (outputs * width,)
    for name in ("ln_f", *(f"h.{block}.{norm}" for block in range(size.layers) for norm in ("ln_1", "ln_2"))):
        found[f"{name}.weight"] = found[f"{name}.bias"] = (width,)
    return {f"transformer.{name}": shape for name, shape in found.items()}


def _card(privacy: dict[str, Any], files: dict[str, bytes], config: Config) -> str:
    if files[CARD] != card(config, privacy, files):
        raise UserError(f"{CARD}: is not the card that follows from statement.json; it was edited")
    return "the model card follows from the statement"
