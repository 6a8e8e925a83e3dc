"""GPT-2: plain transformers loads what we save; losses and log-probabilities are those of single records."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from dpmixmin.data import tokenizer as tokenizers
from dpmixmin.errors import UserError
from dpmixmin.models import language, networks
from dpmixmin.models.trainable import choose, merged
from dpmixmin.text_sections import LanguageModel, Trainable

CONTEXT, END = 12, 0
SMALL = LanguageModel(layers=2, width=16, heads=2)


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.train(["a little text about little cats and text"] * 3, 280)


@pytest.fixture
def model(tokenizer):
    found = language.build(SMALL, tokenizer.get_vocab_size(), CONTEXT, END, seed=1)
    # Larger weights than a new network's, so that what is predicted depends on the context.
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return found


def sequences(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 270, length).astype(np.int32) for length in lengths]


def write(folder, files):
    for name, data in files.items():
        (folder / name).write_bytes(data)


@torch.no_grad()
def alone(model, tokens):
    """Log p of each token, one forward pass per token on the text before it, none of it cut or padded."""
    ids = [END, *tokens.tolist()]
    found = []
    for position, token in enumerate(tokens):
        logits = model(torch.tensor([ids[: position + 1]])).logits[0, -1]
        found.append(float(logits[token] - torch.logsumexp(logits, 0)))
    return np.array(found)


# -- building and saving ----------------------------------------------------------------------------------------


def test_the_start_is_the_seeds_and_the_global_generator_is_left_alone():
    state = torch.get_rng_state()
    one, again, other = (language.build(SMALL, 300, CONTEXT, END, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert one.lm_head.weight is one.transformer.wte.weight
    assert sum(p.numel() for p in one.parameters()) == 16 * (300 + 12) + 2 * (12 * 16**2 + 13 * 16) + 2 * 16
    assert not [m for m in one.modules() if isinstance(m, torch.nn.Dropout) and m.p]


def test_plain_transformers_loads_and_generates(model, tokenizer, tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel

    files = language.files(model, tokenizers.files(tokenizer), "# A card\n")
    write(tmp_path, files)
    assert set(files) == {"config.json", "generation_config.json", "model.safetensors", "README.md",
                          "tokenizer.json", "tokenizer_config.json"}  # fmt: skip
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    words = AutoTokenizer.from_pretrained(tmp_path)
    ids = torch.tensor([words("little cats")["input_ids"]])
    expected = model(ids).logits
    for plain in (GPT2LMHeadModel.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert torch.allclose(plain(ids).logits, expected, atol=1e-5)
        assert plain.lm_head.weight is plain.transformer.wte.weight
        assert plain.dtype == torch.float32
        out = plain.generate(ids, max_new_tokens=3, do_sample=False)
        assert out.shape[1] <= ids.shape[1] + 3
        assert plain.generation_config.eos_token_id == plain.generation_config.pad_token_id == END
    ours = language.load(tmp_path)
    assert torch.equal(ours(ids).logits, expected)
    assert ours.config._attn_implementation == "eager"
    assert ours.lm_head.weight is ours.transformer.wte.weight
    assert language.files(ours, tokenizers.files(tokenizer), "# A card\n") == files


def test_folders_that_hold_no_model_are_refused(model, tmp_path):
    with pytest.raises(UserError, match="missing"):
        language.load(tmp_path)
    files = language.files(model, {}, "")
    other = language.files(language.build(LanguageModel(layers=1, width=16, heads=2), 280, 12, END, 0), {}, "")
    state = torch.get_rng_state()
    for broken in (b"", files["model.safetensors"][:100], other["model.safetensors"]):
        write(tmp_path, {**files, "model.safetensors": broken})
        with pytest.raises(UserError, match=r"model.safetensors: not the weights") as caught:
            language.load(tmp_path)
        assert "\n" not in str(caught.value)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="missing"):
        language.load(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)


# -- the loss ---------------------------------------------------------------------------------------------------


def rows_of(records, width):
    rows = torch.full((len(records), width + 1), 7)
    for row, tokens in zip(rows, records, strict=True):
        row[: len(tokens) + 1] = torch.tensor([END, *tokens.tolist()])
    return rows, torch.tensor([len(tokens) for tokens in records])


def test_the_loss_of_a_record_is_the_mean_over_all_its_tokens_whatever_the_padding(model):
    records = sequences([5, 1, 9, 3])
    expected = np.array([-alone(model, tokens).mean() for tokens in records])
    assert expected.std() > 0.1
    for width in (9, 12):
        found = language.next_token_loss(model, *rows_of(records, width)).detach().numpy()
        assert np.allclose(found, expected, atol=1e-5)


def test_rule_6_a_record_without_tokens_has_loss_and_gradient_zero(model):
    rows, lengths = rows_of(sequences([0, 4]), 6)
    assert language.next_token_loss(model, rows, lengths)[0] == 0
    language.next_token_loss(model, rows[:1], lengths[:1]).sum().backward()
    assert all(not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("length", [0, 1, 11, 12, 13, 24, 25, 40])
def test_windows_score_every_token_once_with_weights_by_length(length):
    tokens = sequences([length])[0]
    rows = language.windows(tokens, CONTEXT, END)
    assert sum(size for _, size in rows) == length
    assert all(ids.shape == (CONTEXT + 1,) and ids.dtype == np.int32 for ids, _ in rows)
    assert np.array_equal(np.concatenate([ids[1 : size + 1] for ids, size in rows]), tokens)
    assert rows[0][0][0] == END
    # What goes in first is what came out last.
    assert all(after[0] == before[size] for (before, size), (after, _) in pairwise(rows))
    assert len(rows) == max(1, -(-length // CONTEXT))


# -- log-probabilities ------------------------------------------------------------------------------------------


def test_log_probabilities_are_those_of_single_tokens_in_the_order_given(model):
    records = sequences([5, 0, 12, 1, 9])
    found = language.token_logprobs(model, records, CONTEXT, 6, "windows", batch=2)
    for tokens, values in zip(records, found, strict=True):
        assert values.dtype == np.float32
        assert np.allclose(values, alone(model, tokens), atol=1e-5)
    for batch in (1, 64):
        for one, other in zip(
            found, language.token_logprobs(model, records, CONTEXT, 6, "windows", batch), strict=True
        ):
            assert np.allclose(one, other, atol=1e-5)
    assert language.token_logprobs(model, [], CONTEXT, 6, "windows") == []
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(("context", "stride"), [(12, 12), (12, 6), (12, 1), (8, 3)])
def test_long_records_are_scored_once_per_token_with_enough_text_before(model, context, stride):
    for length in (13, 18, 19, 40):
        tokens = sequences([length], seed=length)[0]
        found = language.token_logprobs(model, [tokens], context, stride, "windows")[0]
        assert found.shape == (length,)
        assert np.isfinite(found).all()
        ids = np.concatenate([[END], tokens])
        for position in (0, context - 1, context, length - 1):
            # The window's start, from its definition: the first one that reaches the position.
            start = 0 if position < context else -(-(position - context + 1) // stride) * stride
            logits = model(torch.from_numpy(ids[None, start : position + 1])).logits[0, -1].detach()
            assert position - start + 1 > context - stride or start == 0
            assert abs(found[position] - float(logits.log_softmax(0)[tokens[position]])) < 1e-5


def test_long_records_can_be_cut_instead(model):
    records = sequences([30, 4])
    cut = language.token_logprobs(model, records, CONTEXT, 6, "truncate")
    whole = language.token_logprobs(model, records, CONTEXT, 6, "windows")
    assert [len(values) for values in cut] == [CONTEXT, 4]
    assert np.allclose(cut[0], whole[0][:CONTEXT], atol=1e-5)
    with pytest.raises(ValueError, match="stride"):
        language.token_logprobs(model, records, CONTEXT, 13, "windows")
    with pytest.raises(ValueError, match="positions"):
        language.token_logprobs(model, records, CONTEXT + 1, 6, "windows")


# -- what trains ------------------------------------------------------------------------------------------------


def training(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_choices_train_what_they_name_and_nothing_else(model):
    everything = {name for name, _ in model.named_parameters()}
    norms = {name for name in everything if ".ln_" in name}
    last = {name for name in everything if ".h.1." in name}
    expected = {
        "all": everything,
        "norms": norms,
        "biases": {name for name in everything if name.endswith(".bias")},
        # The head is the embedding.
        "blocks": last | {"transformer.ln_f.weight", "transformer.ln_f.bias", "transformer.wte.weight"},
    }
    assert len(norms) == 10
    for which, names in expected.items():
        assert choose(model, Trainable(which=which, blocks=1)) is model
        assert training(model) == names
    choose(model, Trainable(which="blocks", blocks=2))
    assert training(model) == everything - {"transformer.wpe.weight"}
    with pytest.raises(UserError, match="more than the model's 2"):
        choose(model, Trainable(which="blocks", blocks=3))


def test_lora_starts_as_the_model_is_and_is_merged_into_it(model):
    ids = torch.tensor([[END, 5, 6, 7]])
    names, start = list(model.state_dict()), model(ids).logits.detach()
    state = torch.get_rng_state()
    wrapped = choose(model, Trainable(which="lora", rank=2), seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.allclose(wrapped(input_ids=ids).logits, start, atol=1e-6)
    assert all("lora_" in name for name in training(wrapped))
    # Rank 2 on the four matrices of two blocks: (inputs + outputs) each.
    assert sum(p.numel() for p in wrapped.parameters() if p.requires_grad) == 2 * 2 * (64 + 32 + 80 + 80)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(wrapped.named_parameters()):
            if "lora_B" in name:
                parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    moved = wrapped(input_ids=ids).logits.detach()
    assert not torch.allclose(moved, start, atol=1e-2)
    plain = merged(wrapped)
    assert type(plain).__name__ == "GPT2LMHeadModel"
    assert list(plain.state_dict()) == names
    assert torch.allclose(plain(ids).logits, moved, atol=1e-4)
    assert plain.lm_head.weight is plain.transformer.wte.weight
    assert all(p.requires_grad for p in plain.parameters())
    assert merged(plain) is plain
    assert len(language.token_logprobs(plain, sequences([20]), CONTEXT, 6, "windows")[0]) == 20


def test_lora_starts_from_its_seed():
    def first(seed):
        wrapped = choose(language.build(SMALL, 280, CONTEXT, END, 0), Trainable(which="lora"), seed)
        return torch.cat([p.detach().reshape(-1) for name, p in wrapped.named_parameters() if "lora_A" in name])

    assert torch.equal(first(1), first(1))
    assert not torch.equal(first(1), first(2))
    # Uniform with standard deviation 1 / sqrt(3 inputs): 16 or 64 inputs. 448 draws: within 15 % at 4 sigma.
    expected = np.sqrt((6 * 16 / (3 * 16) + 2 * 64 / (3 * 64)) / (6 * 16 + 2 * 64))
    assert abs(float(first(1).std()) / expected - 1) < 0.15


def test_small_networks_can_train_their_norms_or_biases():
    cnn = networks.cnn((1, 8, 8), (4, 6), 8, 1)
    choose(cnn, Trainable(which="norms"))
    assert training(cnn) == {"2.weight", "2.bias", "6.weight", "6.bias"}
    choose(cnn, Trainable(which="biases"))
    assert training(cnn) == {name for name, _ in cnn.named_parameters() if name.endswith("bias")}
    choose(cnn, Trainable(which="all"))
    assert len(training(cnn)) == 12
    for which in ("blocks", "lora"):
        with pytest.raises(UserError, match="is for language models"):
            choose(cnn, Trainable(which=which))
    with pytest.raises(UserError, match="this model has no norms"):
        choose(torch.nn.Sequential(torch.nn.Linear(3, 1)), Trainable(which="norms"))
