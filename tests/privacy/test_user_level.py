"""The mixture of users with very different numbers of records: 3 of 1000, 300 of 5, at most 15 of a user's a step.

Rule 3: no user moves a release by more than its sensitivity. Rule 13: at most G_ULS records of a unit enter a step.
Rule 25: which they are is a function of the unit and the step's secret. DP-SGD: test_user_level_training.py.
"""

from dataclasses import dataclass
from math import comb

import numpy as np
import pytest
from scipy.stats import chi2

from dpmixmin.audit.replay import FrozenNoise, replay
from dpmixmin.mixing.learners import learn_private
from dpmixmin.mixing.objective import SourceTable, UnitGradients
from dpmixmin.privacy.mechanisms import GridGaussian, ResponsibilityGaussian
from dpmixmin.privacy.noise import InsecureNoise
from dpmixmin.privacy.subsample import SECRET_BYTES, chosen, names

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
"""A numpy warning goes to a public log and tells that some record has a wild value (rule 20): here it is a failure."""

SIZES = (1000,) * 3 + (5,) * 300
G_ULS = 15
K = 9
"""More than eight sources: from there on numpy adds the numbers of a row in another order than those of a column."""
SECRET = b"a secret of this step, 32 bytes."


# -- which records (rule 13) ----------------------------------------------------------------------------------


def ids(sizes) -> tuple[np.ndarray, np.ndarray]:
    """Names of the records of units of these sizes, and the units."""
    unit = np.repeat(np.arange(len(sizes)), sizes)
    return names(f"user {one}, mail {number}" for number, one in enumerate(unit)), unit


def test_rule_13_a_step_takes_the_limit_or_all_of_a_unit_and_another_secret_takes_others():
    record, unit = ids(SIZES)
    mask = chosen(SECRET, record, unit, G_ULS)
    assert np.bincount(unit[mask]).tolist() == [15] * 3 + [5] * 300
    other = chosen(SECRET[::-1], record, unit, G_ULS)
    assert (mask & other)[unit < 3].sum() <= 6, "15 of 1000, twice: 0.7 in common for three users on average"
    assert chosen(SECRET, record, unit, 1000).all()
    assert chosen(SECRET, record[:0], unit[:0], 3).shape == (0,)
    with pytest.raises(ValueError, match="at least 1"):
        chosen(SECRET, record, unit, 0)


def test_rule_25_the_subset_of_a_unit_depends_on_no_other_unit_and_on_no_position(rng):
    record, unit = ids((40, 3, 60, 17, 200))
    whole = set(record[chosen(SECRET, record, unit, 4)].tolist())
    for gone in range(5):
        keep = unit != gone
        relabelled = np.unique(unit[keep], return_inverse=True)[1]
        left = record[keep][chosen(SECRET, record[keep], relabelled, 4)]
        assert set(left.tolist()) == whole - set(record[unit == gone].tolist())
    order = rng.permutation(len(record))
    assert set(record[order][chosen(SECRET, record[order], unit[order], 4)].tolist()) == whole


@pytest.mark.parametrize("across", ["secrets", "units"])
@pytest.mark.parametrize("kind", ["hashed", "counted"])
def test_rule_13_every_subset_of_a_unit_is_equally_likely(kind, across):
    """3 of 6 records: 20 subsets, 7,000 times. False-alarm rate 1e-6 a case over the choice of secrets.

    Over the steps of one unit, and over units in one step. Names that count up are the hardest for the mixer.
    """
    trials, size, limit = 7000, 6, 3
    unit = np.repeat(np.arange(trials), size)
    record = ids((size,) * trials)[0] if kind == "hashed" else np.arange(len(unit), dtype=np.uint64)
    if across == "units":
        masks = chosen(SECRET, record, unit, limit).reshape(trials, size)
    else:
        one, alone = record[:size], unit[:size]
        masks = np.stack([chosen(b"step %d" % step, one, alone, limit) for step in range(trials)])
    counts = np.unique(masks @ (2 ** np.arange(size)), return_counts=True)[1]
    assert len(counts) == comb(size, limit)
    expected = trials / comb(size, limit)
    assert np.sum((counts - expected) ** 2 / expected) < chi2.ppf(1 - 1e-6, comb(size, limit) - 1)
    # Independence of the next step, or unit: what two of them share is hypergeometric.
    common = (masks[:-1] & masks[1:]).sum(axis=1)
    law = np.asarray([comb(3, j) * comb(3, 3 - j) for j in range(4)]) / comb(6, 3) * (trials - 1)
    found = np.bincount(common, minlength=4)
    assert np.sum((found - law) ** 2 / law) < chi2.ppf(1 - 1e-6, 3)


def test_names_are_of_each_id_alone_and_do_not_repeat():
    many = names(map(str, range(20_000)))
    assert many.dtype == np.uint64
    assert len(np.unique(many)) == 20_000
    assert names(["17", "é", "\udc80"])[0] == many[17]
    assert names([]).shape == (0,)


# -- mechanism 1: the mixture weights -------------------------------------------------------------------------


@dataclass
class Texts:
    """Token log-probabilities of records of users; a record's name is its own whoever else is there."""

    logp: np.ndarray
    record: np.ndarray
    length: np.ndarray
    unit: np.ndarray
    names: np.ndarray

    @property
    def units(self) -> tuple[int, np.ndarray]:
        return int(self.unit.max(initial=-1)) + 1, self.unit

    def table(self, objective: str) -> SourceTable:
        if objective == "token":
            return SourceTable.of_tokens(self.logp, self.record, self.length, self.units, self.names)
        totals = np.zeros((len(self.length), K))
        np.add.at(totals, self.record, self.logp)
        return SourceTable.of_sequences(totals, self.length, self.units, self.names)

    def take(self, wanted) -> "Texts":
        """These units, in this order."""
        records = np.concatenate([np.flatnonzero(self.unit == one) for one in wanted])
        rows = np.concatenate([np.flatnonzero(self.record == one) for one in records])
        sizes = [(self.unit == one).sum() for one in wanted]
        length = self.length[records]
        return Texts(
            self.logp[rows], np.repeat(np.arange(len(records)), length), length,
            np.repeat(np.arange(len(wanted)), sizes), self.names[records],
        )  # fmt: skip


def texts(rng, sizes=SIZES) -> Texts:
    """Users agree with themselves: each prefers a source of its own, so that vectors are long and differ."""
    record_names, unit = ids(sizes)
    length = rng.integers(0, 4, size=len(unit))
    record = np.repeat(np.arange(len(unit)), length)
    logp = rng.normal(-6, 1, size=(len(record), K))
    logp[np.arange(len(record)), unit[record] % K] += 4
    return Texts(logp, record, length, unit, record_names)


def mixture(learner: str, **changes):
    """A spec, whether gradients are centred, and the step size."""
    values = {"noise_multiplier": 1.0, "steps": 4, "sampling_rate": 1.0, "nominal_units": 300.0, "epsilon": 1.0,
              "delta": 1e-5, **changes}  # fmt: skip
    if learner == "responsibilities":
        return ResponsibilityGaussian(clip=1.0, **values), False, 1.5
    return GridGaussian(clip=0.1, **values), learner == "centred", 3.0


LEARNERS = ("algorithm1", "centred", "responsibilities")
OBJECTIVES = ("sequence", "token")


@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("learner", LEARNERS)
def test_rule_3_and_13_no_user_moves_a_mixture_release_by_more_than_the_sensitivity(learner, objective, rate, rng):
    """Whoever goes: two of the large users, two of the small, and one who has one bad record among 1000."""
    data = texts(rng)
    spec, centred, learning_rate = mixture(learner, sampling_rate=rate)

    def run(some: Texts, taped, noise):
        gradients = UnitGradients.of(some.table(objective), centred=centred)
        options = {"average": False, "records_per_step": G_ULS}
        return learn_private(gradients, taped, learning_rate, noise, **options).trajectory

    worst = []
    for gone in (0, 2, 3, 302):
        others = [one for one in range(len(SIZES)) if one != gone]
        worst.append(replay(run, spec, data.take([*others, gone]), data.take(others)))
    bad = data.take([*range(1, len(SIZES)), 0])
    bad.logp[np.flatnonzero(bad.unit[bad.record] == len(SIZES) - 1)[::2], 1] = np.nan
    worst.append(replay(run, spec, bad, data.take(range(1, len(SIZES)))))
    assert all(found.holds for found in worst)
    assert max(found.worst for found in worst) > 0.5, "the check has teeth: some user comes near the bound"


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_rule_25_every_other_users_vector_stays_the_same_to_the_last_bit(objective, rng):
    """Users removed, reordered, or alone; with and without a subset."""
    data = texts(rng, (60, 1, 9, 40, 3, 17, 8, 16))
    weights = rng.dirichlet(np.ones(K))

    def vectors(some: Texts, limit):
        table = some.table(objective)
        present = None if limit is None else table.subset(SECRET, limit)
        gradients = UnitGradients.of(table, centred=True)
        plain = UnitGradients.of(table, centred=False)
        found = gradients.clipped(weights, 0.05, present), plain.responsibilities(weights, present)
        return np.concatenate([plain.clipped(weights, 1e9, present), *found], axis=1)

    for limit in (None, 5):
        whole = vectors(data, limit)
        assert np.isfinite(whole).all()
        assert len(np.unique(whole, axis=0)) == 8
        for wanted in ([0, 1, 2, 3, 4, 6, 7], list(rng.permutation(8)), *([one] for one in range(8))):
            assert np.array_equal(vectors(data.take(wanted), limit), whole[wanted])


def test_rule_25_a_units_records_may_lie_anywhere_in_the_table(rng):
    p, unit = rng.uniform(0.1, 1, size=(60, K)), rng.integers(0, 7, size=60)
    weights, order = rng.dirichlet(np.ones(K)), np.argsort(unit, kind="stable")
    mixed = UnitGradients.of(SourceTable.of_labels(p, (7, unit)), centred=True).clipped(weights, 0.3)
    sorted_ = UnitGradients.of(SourceTable.of_labels(p[order], (7, unit[order])), centred=True).clipped(weights, 0.3)
    assert np.array_equal(mixed, sorted_)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_rule_13_the_unit_vector_is_the_mean_over_the_chosen_records_alone(objective, rng):
    """As if the others were not there, even where they are bad."""
    data = texts(rng, (8, 30, 2))
    table = data.table(objective)
    present = table.subset(SECRET, 4)
    assert np.bincount(data.unit[present]).tolist() == [4, 4, 2]
    rows = present[data.record]
    fewer = Texts(
        data.logp[rows], np.repeat(np.arange(10), data.length[present]), data.length[present], data.unit[present],
        data.names[present],
    ).table(objective)  # fmt: skip
    data.logp[~rows] = np.nan
    spoilt = data.table(objective)
    weights = rng.dirichlet(np.ones(K))
    for centred in (False, True):
        expected = UnitGradients.of(fewer, centred=centred).clipped(weights, 0.2)
        assert np.isfinite(expected).all()
        assert np.array_equal(UnitGradients.of(table, centred=centred).clipped(weights, 0.2, present), expected)
        assert np.array_equal(UnitGradients.of(spoilt, centred=centred).clipped(weights, 0.2, present), expected)
    expected = UnitGradients.of(fewer, centred=False).responsibilities(weights)
    assert np.array_equal(UnitGradients.of(spoilt, centred=False).responsibilities(weights, present), expected)


class Counting(InsecureNoise):
    """Remembers how many bytes each draw asked for."""

    def __init__(self):
        super().__init__(1)
        self.asked = []

    def random_bytes(self, count):
        self.asked.append(count)
        return super().random_bytes(count)


@pytest.mark.parametrize("learner", ["centred", "responsibilities"])
@pytest.mark.parametrize("sizes", [(), (2,), (30, 2)])
def test_rule_2_a_mixture_draws_one_secret_a_step_whoever_is_there(sizes, learner, rng):
    spec, centred, learning_rate = mixture(learner)
    noise = Counting()
    gradients = UnitGradients.of(texts(rng, sizes).table("token"), centred=centred)
    learn_private(gradients, spec, learning_rate, noise, average=True, records_per_step=4)
    assert noise.asked.count(SECRET_BYTES) == spec.steps
    noise = Counting()
    learn_private(gradients, spec, learning_rate, noise, average=True)
    assert SECRET_BYTES not in noise.asked


def test_rule_13_each_step_of_a_mixture_takes_other_records(rng):
    """A learning rate of 0 keeps the weights, so the vectors differ by the records alone."""

    class Spy(UnitGradients):
        def clipped(self, *args):
            found = super().clipped(*args)
            seen.append(found.tobytes())
            return found

    gradients = Spy.of(texts(rng, (1000,)).table("token"), centred=True)
    spec, _, _ = mixture("centred", steps=6)
    for limit, expected in ((None, 1), (15, 6)):
        seen = []
        learn_private(gradients, spec, 0.0, FrozenNoise(), average=True, records_per_step=limit)
        assert len(set(seen)) == expected
