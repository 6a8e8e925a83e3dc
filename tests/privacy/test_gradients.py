"""Per-record gradients equal a loop of batches of 1 for every kind of model; the check of the engines (rules 7, 8).

The loop here is written with ``backward`` on the user's own loss, apart from the package's own.
"""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout

from dpmixmin.errors import UserError
from dpmixmin.finetune.dp_sgd import ClippedSum
from dpmixmin.models import gradients, language, networks
from dpmixmin.models.gradients import Opacus, TorchFunc, binary_cross_entropy, per_record_gradients
from dpmixmin.models.language import next_token_loss
from dpmixmin.models.trainable import choose
from dpmixmin.text_sections import LanguageModel, Trainable

VOCABULARY, POSITIONS = 50, 16


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sentences(lengths=(7, 3, 5, 2), padded=8) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a start and tokens, (records, padded + 1), and how many tokens; these do not depend on the padding."""
    tokens = torch.full((len(lengths), padded + 1), VOCABULARY - 1)
    tokens[:, 0] = 0
    for number, length in enumerate(lengths):
        tokens[number, 1 : length + 1] = torch.randint(0, VOCABULARY, (length,), generator=generator(number))
    return tokens, torch.tensor(lengths)


def masked_loss(model, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The same loss with a mask over tokens, at whose values transformers looks before some kinds of attention."""
    mask = (torch.arange(tokens.shape[1] - 1) < lengths[:, None]).long()
    positions = torch.arange(mask.shape[1]).expand(mask.shape)
    logits = model(input_ids=tokens[:, :-1], attention_mask=mask, position_ids=positions).logits
    losses = cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    return (losses * mask).sum(dim=1) / lengths.clamp(min=1)


def gpt2(attention: str = "eager") -> nn.Module:
    """Tied input and output embeddings, Conv1D, position embeddings, dropout of 0.1."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=VOCABULARY, n_positions=POSITIONS, bos_token_id=0, eos_token_id=0
    )
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return GPT2LMHeadModel(config).train()


class LowRank(nn.Module):
    """A frozen layer plus a trainable product of two thin matrices, the second zero at first."""

    def __init__(self, inner: nn.Module, width: int, outputs: int, rank: int = 2):
        super().__init__()
        self.inner = inner
        self.down = nn.Parameter(torch.randn(width, rank, generator=generator()) / width**0.5)
        self.up = nn.Parameter(torch.zeros(rank, outputs))

    def forward(self, x):
        return self.inner(x) + x @ self.down @ self.up


def gpt2_with_adapters(trained: bool = True) -> nn.Module:
    model = gpt2().requires_grad_(False)
    for number, block in enumerate(model.transformer.h):
        block.attn.c_attn = LowRank(block.attn.c_attn, 32, 96)
        if trained:
            nn.init.normal_(block.attn.c_attn.up, std=0.1, generator=generator(number))
    return model


def resnet() -> nn.Module:
    """ResNet-18 with GroupNorm; its ReLUs work in place."""
    from torchvision.models import resnet18

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        inner = resnet18(num_classes=1, norm_layer=lambda channels: nn.GroupNorm(8, channels))
    return nn.Sequential(nn.Unflatten(1, (3, 32, 32)), inner)


def small(kind: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return networks.cnn((1, 8, 8), (4, 6), 8, 1) if kind == "cnn" else networks.mlp(64, 16, 1)


def language_model(which: str, trained: bool = True) -> nn.Module:
    """Our GPT-2 with a config's choice of what trains; LoRA's second matrices not at zero."""
    model = language.build(LanguageModel(layers=2, width=32, heads=2), VOCABULARY, POSITIONS, 0, seed=5)
    model = choose(model, Trainable(which=which, blocks=1))
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if trained and "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=generator(number))
    return model


def chosen_small(kind: str, which: str) -> nn.Module:
    return choose(small(kind), Trainable(which=which))


def labelled(width: int, records: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(records, width, generator=generator(1)), torch.tensor([1.0, 0.0, torch.nan, 1.0])[:records]


class Branching(nn.Module):
    """Python code that depends on a tensor's value: torch.func cannot run it."""

    def __init__(self):
        super().__init__()
        self.inner = small("mlp")

    def forward(self, x):
        return self.inner(x) if bool((x.abs().amax() >= 0).item()) else x[:, :1]


MODELS = {
    "cnn": (lambda: small("cnn"), binary_cross_entropy, lambda: labelled(64), TorchFunc),
    "mlp": (lambda: small("mlp"), binary_cross_entropy, lambda: labelled(64), TorchFunc),
    "branching": (Branching, binary_cross_entropy, lambda: labelled(64), Opacus),
    "resnet": (resnet, binary_cross_entropy, lambda: labelled(3 * 32 * 32, 3), TorchFunc),
    "gpt2": (gpt2, next_token_loss, sentences, TorchFunc),
    "gpt2 that branches": (lambda: gpt2("sdpa"), masked_loss, sentences, Opacus),
    "gpt2 with adapters": (gpt2_with_adapters, next_token_loss, sentences, TorchFunc),
    **{
        f"language model, {which}": (partial(language_model, which), next_token_loss, sentences, TorchFunc)
        for which in ("all", "norms", "biases", "blocks", "lora")
    },
    **{
        f"{kind}, {which}": (
            partial(chosen_small, kind, which),
            binary_cross_entropy,
            partial(labelled, 64),
            TorchFunc,
        )
        for kind in ("cnn", "mlp")
        for which in ("norms", "biases")
    },
}


def alone(model: nn.Module, loss, batch) -> torch.Tensor:
    """One backward pass per record, without dropout."""
    model = copy.deepcopy(model).eval()
    rows = []
    for number in range(len(batch[0])):
        model.zero_grad()
        loss(model, *(part[number : number + 1] for part in batch)).sum().backward()
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        rows.append(torch.cat([torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1)
                               for p in trainable]))  # fmt: skip
    return torch.stack(rows)


def largest_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


# -- the gradients are those of single records ----------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_rule_8_gradients_equal_a_loop_of_batches_of_1(name):
    build, loss, records, engine = MODELS[name]
    model, batch = build(), records()
    chosen = per_record_gradients(model, loss, batch)
    assert type(chosen) is engine
    found, expected = chosen(*batch), alone(model, loss, batch)
    assert found.shape == expected.shape == (len(batch[0]), chosen.size)
    assert sum(row.abs().max() > 1e-3 for row in expected) >= 2
    assert largest_difference(found, expected) < 2e-5
    assert len(chosen(*(part[:0] for part in batch))) == 0


def test_rule_8_tied_weights_are_one_parameter_and_get_both_gradients():
    model = gpt2()
    chosen = per_record_gradients(model, next_token_loss, sentences())
    assert chosen.size == sum(parameter.numel() for parameter in model.parameters())
    assert model.lm_head.weight is chosen.parameters[0]
    untied = copy.deepcopy(model)
    untied.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    split = per_record_gradients(untied, next_token_loss, sentences())
    parts = split.by_parameter(*sentences())
    both = parts["transformer.wte.weight"] + parts["lm_head.weight"]
    found = chosen.by_parameter(*sentences())["transformer.wte.weight"]
    assert torch.allclose(found, both, atol=1e-6)
    assert parts["transformer.wte.weight"].abs().max() > 1e-2


SENTENCE_MODELS = {
    "gpt2": gpt2,
    "gpt2 with adapters": gpt2_with_adapters,
    "all": partial(language_model, "all"),
    "lora": partial(language_model, "lora"),
}


@pytest.mark.parametrize("name", SENTENCE_MODELS)
def test_rule_4_padding_of_sentences_changes_nothing(name):
    """Padded to 8 or 12, with any ids, or alone at its own length."""
    model, lengths = SENTENCE_MODELS[name](), (7, 3, 5, 2)
    chosen = per_record_gradients(model, next_token_loss, sentences())
    tokens, counts = sentences(lengths)
    bare = torch.cat([chosen(tokens[number : number + 1, : length + 1], counts[number : number + 1])
                      for number, length in enumerate(lengths)])  # fmt: skip
    for padded in (8, 12):
        assert float((chosen(*sentences(lengths, padded)) - bare).abs().max()) <= 1e-6
    other, _ = sentences(lengths, 12)
    for row, length in zip(other, lengths, strict=True):
        row[length + 1 :] = torch.arange(12 - length)
    assert float((chosen(other, counts) - bare).abs().max()) <= 1e-6
    assert largest_difference(chosen(*sentences((7, 3, 5, 3))), bare) > 1e-2


@pytest.mark.parametrize("which", ["all", "norms", "biases", "blocks", "lora"])
def test_rule_8_both_engines_are_right_on_our_language_models(which, monkeypatch):
    """So that what one of them cannot do on a later model is not what ours depend on."""
    model, batch = language_model(which), sentences()
    expected = alone(model, next_token_loss, batch)
    for engine in (TorchFunc, Opacus):
        only(monkeypatch, engine)
        assert largest_difference(per_record_gradients(model, next_token_loss, batch)(*batch), expected) < 2e-5


@pytest.mark.parametrize("which", ["all", "norms", "biases", "blocks", "lora"])
def test_rule_6_a_record_without_tokens_has_the_gradient_zero(which):
    chosen = per_record_gradients(language_model(which), next_token_loss, sentences())
    found = chosen(*sentences((0, 4, 0)))
    assert not found[[0, 2]].any()
    assert found[1].abs().max() > 1e-3


@pytest.mark.parametrize("name", SENTENCE_MODELS)
def test_rule_4_the_sum_over_sentences_is_the_same_for_every_physical_batch_and_padding(name):
    lengths = tuple(2 + number % 6 for number in range(12))
    unit = np.repeat(np.arange(6), [1, 1, 3, 4, 2, 1])
    sums = []
    for physical, padded in ((1, 8), (4, 8), (64, 8), (4, 12), (64, 12)):
        tokens, counts = (part.numpy() for part in sentences(lengths, padded))
        model = SENTENCE_MODELS[name]()
        total = ClippedSum(model, tokens, counts, unit, 6, physical, loss=next_token_loss, examples=sentences())
        sums.append(total(np.arange(6) != 1, 0.5))
    assert float(sums[0].abs().max()) > 1e-2
    for other in sums[1:]:
        assert float((other - sums[0]).abs().max()) <= 1e-6


# -- the check ------------------------------------------------------------------------------------------------


def only(monkeypatch, *engines):
    monkeypatch.setattr(gradients, "ENGINES", engines)


def unnumbered(loss):
    """Let the network number the positions itself, once for all records."""
    return lambda model, *batch: loss(lambda position_ids, **inputs: model(**inputs), *batch)


@pytest.mark.parametrize(
    ("build", "loss", "records", "fault"),
    [
        (
            gpt2,
            unnumbered(next_token_loss),
            sentences,
            "gives the wrong number of gradients of `transformer.wpe.weight`",
        ),
        (resnet, binary_cross_entropy, lambda: labelled(3 * 32 * 32, 2), "fails"),
    ],
    ids=["position embeddings", "in-place ReLU"],
)
def test_rule_8_what_opacus_gets_wrong_is_refused_and_torch_func_is_right(build, loss, records, fault, monkeypatch):
    model = build()
    assert type(per_record_gradients(model, loss, records())) is TorchFunc
    only(monkeypatch, Opacus)
    with pytest.raises(UserError, match=f"Opacus {fault}") as caught:
        per_record_gradients(model, loss, records())
    assert "\n" not in str(caught.value)


def test_rule_8_a_model_that_no_engine_gets_right_is_refused_by_its_parameter():
    """This attention branches on the mask's values; and then Opacus is wrong about shared positions."""
    with pytest.raises(UserError, match=r"torch.func fails .*; Opacus gives .*`transformer.wpe.weight`") as caught:
        per_record_gradients(gpt2("sdpa"), unnumbered(masked_loss), sentences())
    assert "\n" not in str(caught.value)


class Mean(TorchFunc):
    """Divides by the number of records, as a mean loss would."""

    def by_parameter(self, *batch):
        return {name: part / len(batch[0]) for name, part in super().by_parameter(*batch).items()}


class Mixed(TorchFunc):
    """A thousandth of another record's gradient, in one parameter."""

    def by_parameter(self, *batch):
        found = super().by_parameter(*batch)
        last = list(found)[-1]
        return {**found, last: found[last] + 1e-3 * found[last].roll(1, dims=0)}


class Forgets(TorchFunc):
    """Leaves out the adapters' first matrices."""

    def by_parameter(self, *batch):
        found = super().by_parameter(*batch)
        return {name: part * ("down" not in name) for name, part in found.items()}


class NotFinite(TorchFunc):
    """NaN in one coordinate."""

    def by_parameter(self, *batch):
        found = super().by_parameter(*batch)
        next(iter(found.values()))[0].view(-1)[0] = torch.nan
        return found


@pytest.mark.parametrize("engine", [Mean, Mixed, NotFinite])
def test_rule_8_the_check_sees_small_faults(engine, monkeypatch):
    only(monkeypatch, engine, Opacus)
    assert type(per_record_gradients(small("cnn"), binary_cross_entropy, labelled(64))) is Opacus
    only(monkeypatch, engine)
    with pytest.raises(UserError, match=r"torch.func gives wrong gradients of `"):
        per_record_gradients(small("cnn"), binary_cross_entropy, labelled(64))


def test_rule_8_the_check_sees_faults_that_weights_of_zero_would_hide(monkeypatch):
    """Before training, the gradient of the first matrix is zero, whatever an engine does."""
    model = gpt2_with_adapters(trained=False)
    assert "down" in gradients._fault(Forgets(gpt2_with_adapters(), next_token_loss), sentences())
    assert gradients._fault(Forgets(model, next_token_loss), sentences()) is None
    only(monkeypatch, Forgets)
    with pytest.raises(UserError, match=r"wrong gradients of `transformer.h.0.attn.c_attn.down`"):
        per_record_gradients(model, next_token_loss, sentences())


@pytest.mark.parametrize("name", ["cnn", "branching", "gpt2"])
def test_the_check_and_the_gradients_leave_model_and_generators_alone(name):
    build, loss, records, _ = MODELS[name]
    model = build().train()
    list(model.modules())[-1].eval()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    before, state, numpy_state = copy.deepcopy(model), torch.get_rng_state(), np.random.get_state()[1].copy()
    chosen = per_record_gradients(model, loss, records())
    chosen(*records())
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    for one, other in zip(model.modules(), before.modules(), strict=True):
        assert one.training == other.training
        assert not one._forward_hooks
        assert not one._backward_hooks
    for one, other in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(one, other)
        assert (one.grad == 7.0).all()
        assert not hasattr(one, "grad_sample")
    assert list(model.state_dict()) == list(before.state_dict())


def test_rule_10_the_check_sees_made_up_records_only():
    """Whatever the private table holds, the same calls happen before the first step."""
    seen: list[list[bytes]] = []

    def listening(model, features, labels):
        seen[-1].append(repr((type(features), features.shape)).encode())
        if not torch._C._functorch.is_batchedtensor(features):
            seen[-1].append(features.numpy().tobytes() + labels.numpy().tobytes())
        return binary_cross_entropy(model, features, labels)

    for value, records in ((0.0, 0), (1.0, 5), (np.nan, 5), (np.inf, 900)):
        seen.append([])
        x, y = np.full((records, 64), value, np.float32), np.full(records, value, np.float32)
        ClippedSum(small("mlp"), x, y, np.arange(records), records, loss=listening)
    assert len(seen[0]) > 3
    assert all(calls == seen[0] for calls in seen)


# -- what is refused, and dropout -----------------------------------------------------------------------------


class AlwaysDropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = small("mlp")

    def forward(self, x):
        return self.inner(dropout(x, 0.5, training=True))


def test_rule_14_dropout_is_off_and_draws_nothing_from_the_global_generator():
    model = nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1)).train()
    chosen = per_record_gradients(model, binary_cross_entropy, labelled(64))
    state = torch.get_rng_state()
    found = chosen(*labelled(64))
    assert torch.equal(torch.get_rng_state(), state)
    assert largest_difference(found, alone(model, binary_cross_entropy, labelled(64))) < 1e-5
    assert all(module.training for module in model.modules())


def test_rule_14_a_network_that_draws_in_evaluation_too_is_refused():
    state = torch.get_rng_state()
    with pytest.raises(UserError, match="no engine"):
        per_record_gradients(AlwaysDropped(), binary_cross_entropy, labelled(64))
    assert torch.equal(torch.get_rng_state(), state)


def test_rule_7_layers_that_mix_records_are_refused():
    with pytest.raises(UserError, match=r"layer `1` .BatchNorm1d"):
        per_record_gradients(nn.Sequential(nn.Linear(64, 4), nn.BatchNorm1d(4)), binary_cross_entropy, labelled(64))


class Centred(nn.Module):
    """Mixes records in a way that no list of layers knows."""

    def __init__(self):
        super().__init__()
        self.inner = small("mlp")

    def forward(self, x):
        return self.inner(x - x.mean(dim=0))


def test_rule_7_records_that_meet_in_the_forward_pass_never_meet_in_a_gradient():
    """torch.func shows a model one record at a time, so even this one cannot mix them; Opacus would."""
    chosen = per_record_gradients(Centred(), binary_cross_entropy, labelled(64))
    assert type(chosen) is TorchFunc
    x, y = labelled(64)
    found = chosen(x, y)[0]
    x[1:] = 1e4
    assert torch.allclose(chosen(x, y)[0], found, atol=1e-6)


def test_rule_7_opacus_on_records_that_meet_is_refused(monkeypatch):
    only(monkeypatch, Opacus)
    with pytest.raises(UserError, match="Opacus gives wrong gradients of"):
        per_record_gradients(Centred(), binary_cross_entropy, labelled(64))


def test_models_and_losses_that_cannot_be_checked_are_refused():
    with pytest.raises(UserError, match="no trainable parameter"):
        per_record_gradients(small("mlp").requires_grad_(False), binary_cross_entropy, labelled(64))
    with pytest.raises(ValueError, match="two examples"):
        per_record_gradients(small("mlp"), binary_cross_entropy, labelled(64, 1))
    with pytest.raises(ValueError, match="one value per record"):
        per_record_gradients(small("mlp"), lambda model, x, y: model(x).mean(), labelled(64))
    broken = small("mlp")
    nn.init.constant_(broken[0].weight, torch.nan)
    with pytest.raises(UserError, match=r"gradients of `0.weight`"):
        per_record_gradients(broken, binary_cross_entropy, labelled(64))


def test_gradients_follow_the_weights_as_they_are_trained():
    model = small("mlp")
    chosen = per_record_gradients(model, binary_cross_entropy, labelled(64))
    chosen(*labelled(64))
    with torch.no_grad():
        model[0].weight.mul_(3)
    expected = alone(model, binary_cross_entropy, labelled(64))
    assert largest_difference(chosen(*labelled(64)), expected) < 1e-5
