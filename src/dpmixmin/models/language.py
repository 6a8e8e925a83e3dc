"""GPT-2: building, saving so that plain transformers loads it, the loss of a record, log-probabilities of its tokens.

A record is its tokens; the network sees ``[<|endoftext|>, t_1, ..., t_T]`` and predicts t_1 to t_T, so every token is
scored, the first given the start of a text alone. Rows of ids are one longer than the network's inputs: ``ids[:-1]``
go in and ``ids[1:]`` come out. Rows are padded on the right, with any valid id. Attention is causal, so nothing that
is scored sees the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from dpmixmin.artifacts import read_json
from dpmixmin.errors import UserError
from dpmixmin.text_sections import LanguageModel

if TYPE_CHECKING:
    from transformers import GPT2Config, GPT2LMHeadModel

_TIED = "lm_head.weight"
"""The output matrix is the input embedding: saved and counted once."""


# -- building, saving, loading ----------------------------------------------------------------------------------


def build(settings: LanguageModel, vocabulary: int, context: int, end_of_text: int, seed: int) -> GPT2LMHeadModel:
    """Build a GPT-2 with a public initialisation; torch's global generator is left as it was.

    Args:
        settings: layers, width and heads.
        vocabulary: entries of the tokenizer.
        context: inputs at most, in tokens.
        end_of_text: id of the special token.
        seed: public seed of the initialisation.
    """
    from transformers import GPT2Config

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=context,
        n_embd=settings.width,
        n_layer=settings.layers,
        n_head=settings.heads,
        # The same function as GPT-2's gelu_new, as one operation instead of eight.
        activation_function="gelu_pytorch_tanh",
        # Dropout draws from torch's global generator, and the private training has none (models/gradients.py).
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _new(config)
    model.generation_config.pad_token_id = end_of_text
    return model


def _new(config: GPT2Config) -> GPT2LMHeadModel:
    from transformers import GPT2LMHeadModel

    # torch.func cannot run the other attentions: they branch on values of a mask.
    config._attn_implementation = "eager"
    config.dtype = torch.float32
    return GPT2LMHeadModel(config).eval()


def files(model: GPT2LMHeadModel, tokenizer_files: dict[str, bytes], card: str) -> dict[str, bytes]:
    """Return the files of a folder that plain ``AutoModelForCausalLM`` and ``AutoTokenizer`` load.

    Args:
        model: from :func:`build`; adapters merged (``trainable.merged``).
        tokenizer_files: from ``data.tokenizer.files``.
        card: Markdown of the model card, ``README.md``.
    """
    from safetensors.torch import save

    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items() if name != _TIED}
    config = model.config.to_dict() | {"architectures": ["GPT2LMHeadModel"]}
    return {
        "config.json": type(model.config).from_dict(config).to_json_string().encode(),
        "generation_config.json": model.generation_config.to_json_string().encode(),
        "model.safetensors": save(weights, metadata={"format": "pt"}),
        **tokenizer_files,
        "README.md": card.encode(),
    }


def load(folder: str | Path) -> GPT2LMHeadModel:
    """Load a folder of :func:`files`: eager attention, float32, on the CPU, in evaluation mode.

    Raises:
        UserError: something is missing, or the weights are not those of the config.
    """
    from safetensors.torch import load_file
    from transformers import GPT2Config

    folder = Path(folder)
    config = GPT2Config.from_dict(read_json(folder / "config.json"))
    generation = read_json(folder / "generation_config.json")
    # Not from_pretrained: that asks the hub about a folder that does not exist, and draws from the global generator.
    with torch.random.fork_rng(devices=[]):
        model = _new(config)
    path = folder / "model.safetensors"
    try:
        outcome = model.load_state_dict(load_file(path), strict=False)
    except FileNotFoundError:
        raise UserError(f"{path}: missing; run the stage that makes it") from None
    except Exception:  # safetensors and torch have several for damaged or unfitting files
        raise UserError(f"{path}: not the weights of {folder}/config.json; delete {folder} and run again") from None
    if outcome.unexpected_keys or outcome.missing_keys not in ([], [_TIED]):
        raise UserError(f"{path}: not the weights of {folder}/config.json; delete {folder} and run again")
    model.generation_config.update(**generation)
    return model


@contextmanager
def fused_attention(model: GPT2LMHeadModel) -> Iterator[None]:
    """Use torch's fused attention inside, for PUBLIC training and for scoring: the same up to rounding, and faster."""
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation("eager")


# -- the loss of a record ---------------------------------------------------------------------------------------


def next_token_loss(model: Callable, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return each row's mean loss per token, shape (n,), in nats: a ``Loss`` for ``models/gradients.py``.

    It does not depend on the padding or on the other rows. A row of length 0 has loss 0 and gradient 0 (rule 6).

    Args:
        model: a GPT-2 with eager attention.
        tokens: ids of shape (n, L + 1), padded on the right with valid ids, with L at most the context.
        lengths: number of tokens that are scored, 0 to L, shape (n,).
    """
    inputs, targets = tokens[:, :-1].long(), tokens[:, 1:].long()
    positions = torch.arange(inputs.shape[1], device=tokens.device)
    # Written out, so that no code of transformers looks at values to find out what mask it needs.
    hidden = torch.finfo(torch.float32).min * (positions[None, :] > positions[:, None])
    logits = model(
        input_ids=inputs,
        attention_mask=hidden[None, None],
        # One row per record: with one row for all, Opacus' gradients of the position embedding are wrong.
        position_ids=positions.expand(inputs.shape),
        use_cache=False,
    ).logits
    losses = cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    scored = positions < lengths[:, None]
    return torch.where(scored, losses, 0.0).sum(dim=1) / lengths.clamp(min=1)


def windows(tokens: np.ndarray, context: int, end_of_text: int) -> list[tuple[np.ndarray, int]]:
    """Cut a record into rows for :func:`next_token_loss`; each token is scored in exactly one of them.

    The record's mean loss per token is the mean of its rows' losses with weights proportional to their lengths. A
    record without tokens gives one row of length 0, which contributes zero.

    Args:
        tokens: ids of the record, shape (T,).
        context: inputs of a row.
        end_of_text: id that stands before the record, and the padding.

    Returns:
        Rows ``(ids, length)``: int32 of shape (context + 1,), and how many of its tokens are scored.
    """
    stream = np.concatenate([[end_of_text], tokens]).astype(np.int32)
    rows = []
    for start in range(0, max(len(tokens), 1), context):
        row = np.full(context + 1, end_of_text, dtype=np.int32)
        part = stream[start : start + context + 1]
        row[: len(part)] = part
        rows.append((row, len(part) - 1))
    return rows


# -- log-probabilities ------------------------------------------------------------------------------------------


@torch.inference_mode()
def token_logprobs(
    model: GPT2LMHeadModel,
    sequences: Sequence[np.ndarray],
    context: int,
    stride: int,
    long: Literal["windows", "truncate"],
    batch: int = 32,
) -> list[np.ndarray]:
    """Return the log-probability of every token of every record, in the order given.

    A token that is not among its record's first ``context`` is scored in a window that holds at least
    ``context - stride`` tokens before it. Windows of similar length are computed together and padded, so the last
    bits of a value depend on the records it was computed with: for PRIVATE records, give those of ONE unit at a time
    (rules 4 and 25).

    Args:
        model: where it is, on any one device.
        sequences: ids of each record, shape (T,).
        context: inputs of a window, at most the model's.
        stride: tokens that a window moves by, 1 to context.
        long: what happens to records of more than ``context`` tokens: read in windows, or cut (a public rule that
            looks at one record).
        batch: windows at a time; changes speed and rounding only.

    Returns:
        float32 arrays in nats, of shape (T,), or (min(T, context),) if cut.
    """
    if not 1 <= stride <= context <= model.config.n_positions:
        raise ValueError("1 <= stride <= context <= the model's positions must hold")
    if long == "truncate":
        sequences = [tokens[:context] for tokens in sequences]
    results = [np.full(len(tokens), np.nan, dtype=np.float32) for tokens in sequences]
    pieces = [
        (number, start, min(start + context, len(tokens)))
        for number, tokens in enumerate(sequences)
        for start in _starts(len(tokens), context, stride)
    ]
    pieces.sort(key=lambda piece: piece[2] - piece[1])
    device = model.get_input_embeddings().weight.device
    start_id = np.asarray([model.config.eos_token_id])
    streams = [np.concatenate([start_id, tokens]) for tokens in sequences]
    with fused_attention(model):
        model.eval()
        for first in range(0, len(pieces), batch):
            chosen = pieces[first : first + batch]
            width = max(stop - start for _, start, stop in chosen)
            rows = np.full((len(chosen), width + 1), start_id[0], dtype=np.int64)
            for row, (number, start, stop) in zip(rows, chosen, strict=True):
                row[: stop - start + 1] = streams[number][start : stop + 1]
            ids = torch.from_numpy(rows).to(device)
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
            found = -cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").cpu().numpy()
            for values, (number, start, stop) in zip(found, chosen, strict=True):
                new = start + context - stride if start else 0
                results[number][new:stop] = values[new - start : stop - start]
    return results


def _starts(length: int, context: int, stride: int) -> range:
    """Return where the windows over a record begin: the first scores ``context`` tokens, the others ``stride``."""
    further = -(-max(length - context, 0) // stride)
    return range(0, (further + 1) * stride if length else 0, stride)
