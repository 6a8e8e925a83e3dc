"""DP-SGD for users with very different numbers of texts: 3 of 1000, 300 of 5, at most 15 of a user's a step.

As in test_user_level.py; and physical batches, padding, and texts of several windows (rules 3, 4, 6, 13, 25).
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dpmixmin.audit.replay import FrozenNoise, replay
from dpmixmin.finetune.dp_sgd import ClippedSum, fine_tune
from dpmixmin.models import networks
from dpmixmin.privacy.mechanisms import ModelGaussian
from dpmixmin.privacy.noise import InsecureNoise
from dpmixmin.privacy.subsample import SECRET_BYTES, chosen, names

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

SIZES = (1000,) * 3 + (5,) * 300
G_ULS = 15
SECRET = b"a secret of this step, 32 bytes."
WORDS, CONTEXT = 11, 6


def ids(sizes) -> tuple[np.ndarray, np.ndarray]:
    """Names of the records of units of these sizes, and the units."""
    unit = np.repeat(np.arange(len(sizes)), sizes)
    return names(f"user {one}, mail {number}" for number, one in enumerate(unit)), unit


class Counting(InsecureNoise):
    """Remembers how many bytes each draw asked for."""

    def __init__(self):
        super().__init__(1)
        self.asked = []

    def random_bytes(self, count):
        self.asked.append(count)
        return super().random_bytes(count)


class Reader(nn.Module):
    """A language model in small: each position sees the mean of the tokens so far."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, WORDS)

    def forward(self, tokens):
        seen = self.embed(tokens).cumsum(dim=1) / torch.arange(1, tokens.shape[1] + 1)[:, None]
        return self.head(torch.tanh(seen))


def reader() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Reader()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=1, n_embd=8, n_head=2, vocab_size=WORDS, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return GPT2LMHeadModel(config)


def next_word_loss(model, tokens, lengths):
    """Mean loss of the next words of each row, from its first; 0 for a row with nothing to predict."""
    found = model(tokens)
    logits = getattr(found, "logits", found)
    losses = cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    counted = torch.arange(1, tokens.shape[1]) < lengths[:, None]
    return (losses * counted).sum(dim=1) / (lengths - 1).clamp(min=1)


def cut(tokens, lengths):
    """Padding that no row of the batch needs."""
    return tokens[:, : max(2, int(lengths.max()))], lengths


EXAMPLES = torch.arange(3 * CONTEXT).reshape(3, CONTEXT) % WORDS, torch.tensor([6, 3, 2])


@dataclass
class Mails:
    """Rows of tokens (int64) with lengths, of records of users."""

    tokens: np.ndarray
    length: np.ndarray
    unit: np.ndarray
    names: np.ndarray

    def sums(self, model=reader, physical=512, limit=G_ULS, **options) -> ClippedSum:
        units = int(self.unit.max(initial=-1)) + 1
        options = {"loss": next_word_loss, "examples": EXAMPLES, "trim": cut, "names": self.names, **options}
        return ClippedSum(
            model(), self.tokens, self.length, self.unit, units, physical, records_per_step=limit, **options
        )

    def take(self, wanted) -> "Mails":
        rows = np.concatenate([np.flatnonzero(self.unit == one) for one in wanted])
        sizes = [(self.unit == one).sum() for one in wanted]
        return Mails(self.tokens[rows], self.length[rows], np.repeat(np.arange(len(wanted)), sizes), self.names[rows])


def mails(rng, sizes=SIZES, padded=CONTEXT) -> Mails:
    record_names, unit = ids(sizes)
    length = rng.integers(1, CONTEXT + 1, size=len(unit))
    length[np.searchsorted(unit, np.arange(len(sizes)))] = CONTEXT  # a record of length 1 predicts nothing
    tokens = np.full((len(unit), padded), WORDS - 1)
    drawn = (rng.integers(0, 3, size=(len(unit), CONTEXT)) + 2 * unit[:, None]) % WORDS
    tokens[:, :CONTEXT] = np.where(np.arange(CONTEXT) < length[:, None], drawn, WORDS - 1)
    return Mails(tokens, length, unit, record_names)


def everyone(sums) -> np.ndarray:
    return np.ones(sums.units, dtype=bool)


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_rule_3_and_13_no_user_moves_dp_sgd_by_more_than_the_clip(rate, rng):
    """The noise is tiny, so that the difference is not lost in its rounding."""
    data = mails(rng)
    spec = ModelGaussian(0.2, 1e-6, 3, rate, 300.0, 1.0, 1e-5)

    def run(some: Mails, taped, noise):
        sums = some.sums()
        fine_tune(sums, taped, 0.5, noise)
        return [parameter.detach().numpy() for parameter in sums.parameters]

    worst = []
    for gone in (1, 300):
        others = [one for one in range(len(SIZES)) if one != gone]
        worst.append(replay(run, spec, data.take([*others, gone]), data.take(others)))
    assert all(found.holds for found in worst)
    assert max(found.worst for found in worst) > 0.99


def test_rule_3_no_user_moves_a_gpt2_by_more_than_the_clip(rng):
    data = mails(rng, (200, 3, 5, 1, 200, 4))
    spec = ModelGaussian(0.2, 1e-6, 2, 1.0, 6.0, 1.0, 1e-5)

    def run(some: Mails, taped, noise):
        sums = some.sums(gpt2, physical=16)
        fine_tune(sums, taped, 0.5, noise)
        return [parameter.detach().numpy() for parameter in sums.parameters]

    for gone in (0, 3):
        others = [one for one in range(6) if one != gone]
        found = replay(run, spec, data.take([*others, gone]), data.take(others))
        assert found.holds
        assert found.worst > 0.99


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_rule_25_the_records_of_the_others_stay_the_same_when_a_user_goes(rate, rng):
    """The rows and weights that each step reads, in the steps of a training."""
    data = mails(rng, (60, 5, 40, 100))
    spec = ModelGaussian(0.2, 1e-6, 5, rate, 4.0, 1.0, 1e-5)

    def steps(some: Mails):
        seen = []

        class Spy(ClippedSum):
            def _present(self, batch, secret):
                rows, weights = super()._present(batch, secret)
                seen.append(dict(zip(some.names[rows].tolist(), weights.tolist(), strict=True)))
                return rows, weights

        units = int(some.unit.max()) + 1
        sums = Spy(reader(), some.tokens, some.length, some.unit, units, loss=next_word_loss, examples=EXAMPLES,
                   names=some.names, records_per_step=G_ULS)  # fmt: skip
        fine_tune(sums, spec, 0.1, FrozenNoise())
        return seen

    whole, less = steps(data), steps(data.take([0, 1, 2]))
    gone = set(data.names[data.unit == 3].tolist())
    for one, other in zip(whole, less, strict=True):
        assert {name: weight for name, weight in one.items() if name not in gone} == other
    assert len({frozenset(step) for step in whole}) == 5, "each step takes other records"


def test_rule_2_dp_sgd_draws_one_secret_a_step_whoever_is_there(rng):
    spec = ModelGaussian(0.2, 1.0, 3, 1.0, 4.0, 1.0, 1e-5)
    for sizes in ((), (2,), (30, 2)):
        asked = []
        for limit in (4, None):
            noise = Counting()
            fine_tune(mails(rng, sizes).sums(limit=limit), spec, 0.1, noise)
            asked.append(noise.asked)
        assert asked[0].count(SECRET_BYTES) == asked[1].count(SECRET_BYTES) + 3
        assert len(asked[0]) == len(asked[1]) + 3


def unit_gradient(model, mails: Mails, rows, weights) -> np.ndarray:
    """By plain autograd, one row at a time, each at its own length."""
    total = 0.0
    model.eval()  # no dropout
    for row, weight in zip(rows, weights, strict=True):
        model.zero_grad()
        length = max(2, int(mails.length[row]))
        tokens = torch.from_numpy(mails.tokens[row : row + 1, :length])
        next_word_loss(model, tokens, torch.from_numpy(mails.length[row : row + 1])).sum().backward()
        total = total + weight * torch.cat([part.grad.reshape(-1) for part in model.parameters()]).double()
    return total.numpy()


@pytest.mark.parametrize("physical", [1, 4, 64])
@pytest.mark.parametrize("padded", [CONTEXT, 13])
@pytest.mark.parametrize("model", [reader, gpt2])
def test_rule_4_a_unit_in_pieces_is_clipped_when_it_is_whole(model, padded, physical, rng):
    """Padding, the physical batch, and cutting padding off change nothing; and the sum is that of a loop."""
    data = mails(rng, (9, 2, 1, 30), padded)
    for options in ({}, {"trim": None}):
        sums = data.sums(model, physical, limit=7, **options)
        found = sums(everyone(sums), 0.2, SECRET).numpy()
        expected = 0.0
        for one in range(4):
            members = np.flatnonzero((data.unit == one) & chosen(SECRET, data.names, data.unit, 7))
            vector = unit_gradient(model(), data, members, np.full(len(members), 1 / len(members)))
            expected = expected + vector * min(1, 0.2 / np.linalg.norm(vector))
        assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max() + 1e-6


def test_rule_4_no_more_rows_than_the_physical_batch_are_in_memory(rng):
    data, seen = mails(rng, (1000, 2, 2)), []

    def listening(model, tokens, lengths):
        seen.append(tokens.shape)
        return next_word_loss(model, tokens, lengths)

    sums = data.sums(physical=100, limit=None, loss=listening)
    original = sums._per_record
    read = []
    sums._per_record = lambda rows: (read.append(rows), original(rows))[1]
    sums(everyone(sums), 0.2)
    assert max(len(rows) for rows in read) == 100
    assert np.concatenate(read).tolist() == list(range(1004))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("limit", [None, 2])
def test_rule_13_windows_of_a_text_are_one_record(limit, weighted, rng):
    """A record's gradient is the weighted mean over its rows, and its rows are chosen together."""
    data = mails(rng, (12, 3, 1))
    # User 0: records of 1, 2, 3, 4 and 2 windows. User 1: one of 3. User 2: one of 1. Record 3 has no rows.
    record = np.asarray([0, 1, 1, 2, 2, 2, 4, 4, 4, 4, 5, 5, 6, 6, 6, 7])
    weight = 1 / np.bincount(record)[record]
    if weighted:
        weight = rng.uniform(0.1, 1, size=16)
        weight /= np.bincount(record, weights=weight)[record]
    record_names, record_unit = names(map(str, range(8))), np.asarray([0, 0, 0, 0, 0, 0, 1, 2])
    there = np.asarray([0, 1, 2, 4, 5, 6, 7])
    options = {"names": record_names, "row_record": record, "row_weight": weight if weighted else None}
    sums = data.sums(limit=limit, physical=3, **options)
    found = sums(everyone(sums), 0.1, SECRET).numpy()
    kept = there if limit is None else there[chosen(SECRET, record_names[there], record_unit[there], limit)]
    expected = 0.0
    for one in range(3):
        mine = [each for each in kept if record_unit[each] == one]
        vector = 0.0
        for each in mine:
            rows = np.flatnonzero(record == each)
            vector = vector + unit_gradient(reader(), data, rows, weight[rows]) / len(mine)
        expected = expected + vector * min(1, 0.1 / np.linalg.norm(vector))
    assert np.abs(found - expected).max() <= 1e-6


def test_rule_6_a_bad_record_that_is_not_chosen_does_no_harm_and_one_that_is_zeroes_its_user(rng):
    record_names, unit = ids((20, 3))
    x, y = rng.normal(size=(23, 4)).astype(np.float32), np.ones(23, dtype=np.float32)
    present = chosen(SECRET, record_names, unit, 5)

    def total(x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = networks.mlp(4, 3, 1)
        sums = ClippedSum(model, x, y, unit, 2, names=record_names, records_per_step=5)
        return sums(np.ones(2, dtype=bool), 0.1, SECRET).numpy(), sums(np.arange(2) == 1, 0.1, SECRET).numpy()

    clean, other = total(x)
    harmless = np.where((unit == 0)[:, None] & ~present[:, None], np.float32(np.nan), x)
    assert np.array_equal(total(harmless)[0], clean)
    x[np.flatnonzero(present)[2], 1] = np.inf
    assert np.allclose(total(x)[0], other, atol=1e-7)


def test_what_does_not_fit_together_is_refused(rng):
    data = mails(rng, (3, 2))
    with pytest.raises(ValueError, match="names"):
        data.sums(names=None)
    with pytest.raises(ValueError, match="one unit"):
        data.sums(row_record=np.asarray([0, 1, 2, 2, 3]))
    sums = data.sums()
    with pytest.raises(ValueError, match="secret"):
        sums(everyone(sums), 0.1)
