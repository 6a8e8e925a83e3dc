"""Public training of language models: packing, drawing from a mixture, the loop, going on after a crash."""

import io

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from dpmixmin import progress
from dpmixmin.data.corpora import Corpus
from dpmixmin.errors import UserError
from dpmixmin.models import language, networks
from dpmixmin.models.scoring import score
from dpmixmin.pretrain import language as pretrain
from dpmixmin.pretrain.language import Curve
from dpmixmin.pretrain.packing import MixtureSampler, pack
from dpmixmin.pretrain.texts import curve_table, sampled, train_mixture
from dpmixmin.pretrain.train import train_public
from dpmixmin.privacy.access import Progress
from dpmixmin.sections import Network
from dpmixmin.text_sections import LanguageModel, Text

CONTEXT, VOCABULARY, END = 8, 20, 0


def documents(first, count=60, seed=0):
    """Words of a made-up language: each token is followed by the next but one, modulo ten, in 9 of 10 cases."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        tokens = [first]
        for _ in range(rng.integers(5, 20)):
            step = 2 if rng.random() < 0.9 else 5
            tokens.append(first + (tokens[-1] - first + step) % 9)
        found.append(np.asarray(tokens, np.int32))
    return found


@pytest.fixture(scope="module")
def sources():
    return {"low": pack(documents(1), END, CONTEXT), "high": pack(documents(10, 30), END, CONTEXT)}


@pytest.fixture(scope="module")
def heldout():
    return {name: pack(documents(first, 8, seed=9), END, CONTEXT) for name, first in (("low", 1), ("high", 10))}


def settings(**changes):
    values = {"layers": 1, "width": 16, "heads": 2, "batch": 4, "tokens": 40 * 4 * CONTEXT, "learning_rate": 1e-2,
              "evaluations": 4, "precision": "float32"}  # fmt: skip
    return LanguageModel(**values | changes)


def start(seed=0, **changes):
    return language.build(settings(**changes), VOCABULARY, CONTEXT, END, seed)


def weights_of(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


# -- packing ----------------------------------------------------------------------------------------------------


def test_packing_keeps_every_document_whole_between_marks():
    texts = [np.arange(1 + 10 * n, 2 + 10 * n + n % 7) for n in range(20)]
    blocks = pack(texts, END, 5, seed=3)
    assert blocks.dtype == np.int32
    assert (blocks[1:, 0] == blocks[:-1, -1]).all()
    stream = [*blocks[:, :-1].reshape(-1).tolist(), int(blocks[-1, -1])]
    total = sum(map(len, texts)) + len(texts) + 1
    assert len(stream) == 1 + (total - 1) // 5 * 5
    parts = [tuple(int(t) for t in part.split()) for part in " ".join(map(str, stream)).split(" 0 ")]
    whole = {tuple(text.tolist()) for text in texts}
    # The first follows the stream's first mark; what the last block cut is not looked at.
    assert len(parts) >= 19
    assert parts[0][0] == END
    assert set(parts[1:-1]) | {parts[0][1:]} <= whole
    assert np.array_equal(pack(texts, END, 5, seed=3), blocks)
    assert not np.array_equal(pack(texts, END, 5, seed=4), blocks)


def test_packing_too_little_text_gives_no_block():
    assert pack([np.array([1, 2])], END, 8).shape == (0, 9)
    assert pack([], END, 8).shape == (0, 9)
    assert pack([np.array([1, 2])], END, 3).tolist() == [[0, 1, 2, 0]]


# -- the mixture ------------------------------------------------------------------------------------------------


def counting(*sizes):
    """Blocks whose first number is the source and second the block."""
    return {
        f"s{i}": np.array([[i, n, 0] for n in range(size)], np.int32).reshape(-1, 3) for i, size in enumerate(sizes)
    }


def test_sources_are_drawn_by_their_weights_and_read_in_a_new_order_each_epoch():
    sampler = MixtureSampler(counting(7, 50, 5), [0.2, 0.8, 0.0], 10, seed=1)
    drawn = np.concatenate([sampler.draw() for _ in range(400)])
    share = (drawn[:, 0] == 0).mean()
    # Binomial(4000, 0.2): standard deviation 0.0063; 5 of them, false alarms 6e-7. The seed is fixed anyway.
    assert abs(share - 0.2) < 0.032
    assert not (drawn[:, 0] == 2).any()
    own = drawn[drawn[:, 0] == 0, 1]
    epochs = own[: len(own) // 7 * 7].reshape(-1, 7)
    assert (np.sort(epochs, axis=1) == np.arange(7)).all()
    assert len(np.unique(epochs, axis=0)) > len(epochs) / 2
    assert sampler.epochs == {"s0": len(own) / 7, "s1": (4000 - len(own)) / 50, "s2": 0.0}


def test_a_source_at_its_cap_is_not_drawn_again_and_batches_end():
    sampler = MixtureSampler(counting(4, 10), [0.9, 0.1], 4, seed=0, max_epochs=1.5)
    batches = []
    while (batch := sampler.draw()) is not None:
        batches.append(batch)
    drawn = np.concatenate(batches)
    assert np.bincount(drawn[:, 0]).tolist() == [6, 15]
    assert [len(batch) for batch in batches] == [4] * 5 + [1]
    assert sampler.draw() is None
    assert sampler.epochs == {"s0": 1.5, "s1": 1.5}
    assert MixtureSampler(counting(4, 10), [1, 0], 64, seed=0, max_epochs=0.1).draw().tolist()[0][0] == 0


def test_a_sampler_goes_on_where_its_state_was():
    def new():
        return MixtureSampler(counting(7, 50), [0.3, 0.7], 6, seed=5, max_epochs=4)

    whole, first, second = new(), new(), new()
    expected = [whole.draw() for _ in range(12)]
    found = [first.draw() for _ in range(5)]
    stored = io.BytesIO()
    torch.save(first.state_dict(), stored)
    second.load_state(torch.load(io.BytesIO(stored.getvalue()), weights_only=True))
    found += [second.draw() for _ in range(7)]
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
    other = MixtureSampler(counting(7, 50), [0.3, 0.7], 6, seed=6, max_epochs=4)
    assert not np.array_equal(other.draw(), expected[0])
    assert other.digest() != whole.digest() == new().digest()


def test_a_source_without_a_block_is_refused_by_name():
    with pytest.raises(UserError, match="source s1: shorter than one block"):
        MixtureSampler(counting(3, 0), [0.5, 0.5], 2, seed=0)
    for weights in ([1.0], [-1.0, 2.0], [0.0, 0.0], [np.nan, 1.0]):
        with pytest.raises(ValueError, match="one weight per source"):
            MixtureSampler(counting(3, 3), weights, 2, seed=0)


# -- the loop ---------------------------------------------------------------------------------------------------


def train(sources, heldout, model=None, weights=(0.5, 0.5), state=None, say=lambda line: None, **changes):
    chosen = settings(**changes)
    model = model or start(**changes)
    sampler = MixtureSampler(sources, weights, chosen.batch, 0, chosen.max_epochs)
    return model, pretrain.train(model, sampler, heldout, chosen, state=state, say=say)


def test_training_learns_and_reports(sources, heldout):
    state = torch.get_rng_state()
    model, curve = train(sources, heldout, weights=(0.75, 0.25))
    assert torch.equal(torch.get_rng_state(), state)
    assert [row["step"] for row in curve.rows] == [10, 20, 30, 40]
    assert [row["tokens"] for row in curve.rows] == [320, 640, 960, 1280]
    assert curve.stopped == "budget"
    assert curve.rows[-1]["heldout_loss"] < 1.9 < curve.rows[0]["heldout_loss"] < np.log(VOCABULARY) + 0.1
    assert curve.rows[-1]["train_loss"] < curve.rows[0]["train_loss"]
    drawn = {name: round(curve.epochs[name] * len(blocks)) for name, blocks in sources.items()}
    assert sum(drawn.values()) == 160
    # The held-out loss, on its own: the sources' means, weighted like the mixture.
    means = {}
    for name, blocks in heldout.items():
        assert int(0.1 * 1280 / 4 / CONTEXT / 2) == 2
        ids = torch.from_numpy(blocks[[0, -1]]).long()
        loss = cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
        means[name] = float(loss.detach())
    assert curve.rows[-1]["heldout_loss"] == pytest.approx(0.75 * means["low"] + 0.25 * means["high"], abs=1e-5)
    again, _ = train(sources, heldout, weights=(0.75, 0.25))
    assert torch.equal(weights_of(model), weights_of(again))
    assert model.config._attn_implementation == "eager"


def test_accumulated_parts_equal_the_full_batch(sources, heldout, monkeypatch):
    """The gradients of a batch of 4 blocks and of a last one of 3, in 1, 2 or 4 parts, and the loss reported."""
    few = {name: blocks[:size] for (name, blocks), size in zip(sources.items(), (4, 3), strict=True)}
    seen, curves = [], []

    def record(parameters, norm):
        seen.append(torch.cat([p.grad.reshape(-1) for p in parameters]))
        # No step follows, so that the second batch meets the same weights.
        for group in optimisers[-1].param_groups:
            group["lr"] = group["weight_decay"] = 0.0

    optimisers, adamw = [], pretrain._adamw
    monkeypatch.setattr(pretrain, "_adamw", lambda *arguments: optimisers.append(adamw(*arguments)) or optimisers[-1])
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", record)
    for parts in (1, 2, 4):
        curves.append(train(few, heldout, accumulate=parts, max_epochs=1.0)[1])
    assert len(seen) == 6
    assert float((seen[0] - seen[1]).abs().max()) > 1e-2
    for number, found in enumerate(seen):
        assert float((found - seen[number % 2]).abs().max()) <= 1e-6
    assert curves[0].rows[0]["train_loss"] == pytest.approx(curves[2].rows[0]["train_loss"], abs=1e-6)


def test_one_step_is_adamw_on_the_mean_gradient_and_matrices_alone_decay(sources, heldout):
    """Against the update's formula: at the first step AdamW moves by the sign, and decays by rate times decay."""
    model, _ = train(sources, heldout, tokens=4 * CONTEXT, warmup=0.0, weight_decay=0.5, evaluations=1)
    expected = start()
    ids = torch.from_numpy(MixtureSampler(sources, (0.5, 0.5), 4, 0).draw()).long()
    cross_entropy(expected(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in expected.parameters()))
    for (name, after), before in zip(model.named_parameters(), expected.parameters(), strict=True):
        gradient = before.grad * min(1.0, 1.0 / float(norm))
        decay = 0.5 if ".h." in name and name.endswith("weight") and "ln" not in name else 0.0
        moved = before * (1 - 1e-2 * decay) - 1e-2 * gradient / (gradient.abs() + 1e-8)
        large = gradient.abs() > 1e-5
        assert torch.allclose(after[large], moved[large], atol=1e-4), name


def test_the_learning_rate_rises_and_falls_to_zero():
    rates = [pretrain._schedule(step, 100, 0.1) for step in range(100)]
    assert rates[0] == pytest.approx(1 / 11)
    assert max(rates) == rates[10] == 1.0
    assert all(np.diff(rates[:11]) > 0)
    assert all(np.diff(rates[10:]) < 0)
    assert rates[55] == pytest.approx(0.5)
    assert 0 < rates[-1] < 1e-3
    assert pretrain._schedule(0, 1, 0.0) == 1.0


class Killed(Exception):
    pass


@pytest.mark.parametrize("patience", [None, 2])
def test_a_run_that_died_goes_on_to_the_weights_of_one_that_did_not(sources, heldout, tmp_path, monkeypatch, patience):
    changes = {"patience": patience, "max_epochs": 5.0}
    expected, curve = train(sources, heldout, **changes)
    measured = pretrain._Training._measure
    for killed_at in (0, 2):
        folder = tmp_path / f"state{killed_at}"
        progress = Progress(folder, seconds=0.0)

        def die(self, killed_at=killed_at):
            if len(self.curve.rows) == killed_at:
                raise Killed
            measured(self)

        monkeypatch.setattr(pretrain._Training, "_measure", die)
        with pytest.raises(Killed):
            train(sources, heldout, state=progress, **changes)
        monkeypatch.setattr(pretrain._Training, "_measure", measured)
        assert progress.exists()
        said = []
        model, again = train(sources, heldout, state=progress, say=said.append, **changes)
        # The step that was measured had not been saved yet: it is done again.
        assert f"after step {10 * (killed_at + 1) - 1}/40" in said[0]
        assert torch.equal(weights_of(model), weights_of(expected))
        assert again == curve


def test_the_state_of_another_run_is_not_used(sources, heldout, tmp_path, monkeypatch):
    expected, _ = train(sources, heldout, learning_rate=2e-2)
    progress = Progress(tmp_path / "state", seconds=0.0)

    def die(self):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(pretrain._Training, "_measure", die)
        with pytest.raises(Killed):
            train(sources, heldout, state=progress)
    model, _ = train(sources, heldout, state=progress, learning_rate=2e-2)
    assert torch.equal(weights_of(model), weights_of(expected))


def test_patience_stops_and_gives_back_the_best_weights(sources, heldout, monkeypatch):
    losses = iter([3.0, 2.0, 2.5, 2.0, 1.0])
    seen = []

    def fake(self):
        seen.append(weights_of(self.model))
        return next(losses)

    monkeypatch.setattr(pretrain._Training, "_heldout_loss", fake)
    model, curve = train(sources, heldout, patience=2, evaluations=8)
    assert curve.stopped == "patience"
    assert [row["heldout_loss"] for row in curve.rows] == [3.0, 2.0, 2.5, 2.0]
    assert torch.equal(weights_of(model), seen[1])
    assert not torch.equal(seen[3], seen[1])


def test_nothing_held_out(sources):
    nothing = {"low": np.zeros((0, CONTEXT + 1), np.int32)}
    _, curve = train(sources, nothing)
    assert [row["heldout_loss"] for row in curve.rows] == [None] * 4
    with pytest.raises(UserError, match="patience: nothing is held out"):
        train(sources, nothing, patience=1)


def test_sources_at_their_cap_end_the_training(sources, heldout):
    _, curve = train(sources, heldout, max_epochs=0.5)
    assert curve.stopped == "exhausted"
    assert curve.rows[-1]["learning_rate"] < 0.1 * settings().learning_rate, "the schedule ends with the text"
    assert all(0.5 <= epochs < 0.55 for epochs in curve.epochs.values())
    assert curve.rows[-1]["tokens"] == sum(-(-len(blocks) // 2) for blocks in sources.values()) * CONTEXT


def test_bfloat16_where_it_is_asked_for(sources, heldout):
    exact, _ = train(sources, heldout)
    for precision, differs in (("auto", torch.cuda.is_available()), ("bfloat16", True)):
        model, curve = train(sources, heldout, precision=precision)
        assert torch.equal(weights_of(model), weights_of(exact)) is not differs
        assert weights_of(model).dtype == torch.float32
        assert curve.rows[-1]["heldout_loss"] < 2.0


# -- as stages use it -------------------------------------------------------------------------------------------


def trained(name, documents_of, tmp_path, **options):
    """A proxy: trained on one source, from the same start as all of them."""
    text = Text(context=CONTEXT, proxy=settings(**options))
    model = language.build(text.proxy, VOCABULARY, CONTEXT, END, 0)
    corpus = Corpus(name, documents_of[3:], documents_of[:3])
    state = str(tmp_path / "results/run/public/states" / name)
    curve = train_mixture(
        model, {name: corpus}, {name: 1.0}, text, text.proxy, END, seed=0, state=state, say=lambda line: None
    )
    return model, curve, text


def test_a_proxy_prefers_its_own_source(tmp_path):
    models = [trained(name, documents(first), tmp_path) for name, first in (("low", 1), ("high", 10))]
    texts = [*documents(1, 3, seed=5), *documents(10, 2, seed=5)]
    low, high = (score(model, texts, text) for model, _, text in models)
    for own, other in ((low[:3], high[:3]), (high[3:], low[3:])):
        assert np.concatenate(own).mean() > np.concatenate(other).mean() + 1
    assert not list(tmp_path.rglob("states")), "a finished training leaves no state"


def test_the_report_of_a_mixture_says_how_often_each_source_was_read(tmp_path):
    text = Text(context=CONTEXT, pretrain=settings())
    model = language.build(text.pretrain, VOCABULARY, CONTEXT, END, 0)
    corpora = {
        name: Corpus(name, documents(first), documents(first, 4, seed=3)) for name, first in (("a", 1), ("b", 10))
    }
    curve = train_mixture(
        model, corpora, {"a": 0.9, "b": 0.1}, text, text.pretrain, END, seed=1,
        state=str(tmp_path / "results/run/public/states/x"), say=lambda line: None,
    )  # fmt: skip
    found = sampled(curve)
    assert found["tokens"] >= text.pretrain.tokens
    assert found["stopped"] == "budget"
    assert 4 < found["epochs"]["a"] / found["epochs"]["b"] < 20
    assert curve_table(curve).column_names == ["step", "tokens", "train_loss", "heldout_loss", "learning_rate"]
    assert sampled(Curve()) == {"tokens": 0, "epochs": {}, "stopped": "not trained"}


def test_a_source_without_a_block_is_named(tmp_path):
    with pytest.raises(UserError, match="source empty"):
        trained("empty", [np.zeros(0, np.int32)] * 4, tmp_path)


@pytest.mark.parametrize("private", [False, True])
def test_a_training_on_weights_learned_without_privacy_says_steps_only(private, monkeypatch, capsys):
    """Its loss, and how long it takes, tell of the sensitive records behind the weights; the log is public."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    rng = np.random.default_rng(0)
    features, targets = rng.normal(size=(50, 4)).astype(np.float32), rng.uniform(size=(50, 1)).astype(np.float32)
    settings = Network(hidden=4, steps=100, batch=20)
    train_public(networks.mlp(4, 4, 1), features, targets, settings, 0, private=private)
    lines = capsys.readouterr().err.splitlines()
    if private:
        assert lines == [f"  step {step}/100" for step in range(10, 101, 10)]
    else:
        assert any("public loss" in line for line in lines)
