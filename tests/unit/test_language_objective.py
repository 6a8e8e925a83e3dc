"""The sequence and the token objective against autograd and against a general optimiser; bad and empty texts."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from dpmixmin.mixing.learners import closeness, learn_nonprivate, uniform
from dpmixmin.mixing.objective import SourceTable, UnitGradients, mean_loss
from dpmixmin.privacy.mechanisms import GridGaussian


def texts(rng, sizes=(2, 1, 3), k=4):
    """Token log-probabilities, each token's record, the records' lengths (one is empty) and the records' units."""
    unit = np.repeat(np.arange(len(sizes)), sizes)
    length = rng.integers(1, 6, size=len(unit))
    length[4] = 0
    record = np.repeat(np.arange(len(unit)), length)
    return rng.normal(-5, 2, size=(len(record), k)), record, length, (len(sizes), unit)


def table_of(objective, logp, record, length, units) -> SourceTable:
    if objective == "token":
        return SourceTable.of_tokens(logp, record, length, units)
    totals = np.zeros((len(length), logp.shape[1]))
    np.add.at(totals, record, logp)
    return SourceTable.of_sequences(totals, length, units)


def language_loss(objective, logp, record, length, weights, which) -> torch.Tensor:
    """The loss of one record, written on raw log-probabilities."""
    if not length[which]:
        return 0.0 * weights.sum()
    rows = torch.from_numpy(logp[record == which])
    if objective == "sequence":
        return -torch.logsumexp(weights.log() + rows.sum(dim=0), dim=0) / int(length[which])
    return -torch.logsumexp(weights.log() + rows, dim=1).sum() / int(length[which])


@pytest.mark.parametrize("objective", ["sequence", "token"])
@pytest.mark.parametrize("centred", [False, True])
def test_language_gradients_are_those_of_autograd(centred, objective, rng):
    logp, record, length, (count, unit) = texts(rng)
    weights = rng.dirichlet(np.ones(4))
    expected, losses = [], []
    for one in range(count):
        variable = torch.tensor(weights, requires_grad=True)
        members = np.flatnonzero(unit == one)
        loss = sum(language_loss(objective, logp, record, length, variable, each) for each in members) / len(members)
        loss.backward()
        losses.append(float(loss.detach()))
        expected.append(variable.grad.numpy() - (float(variable.grad.mean()) if centred else 0.0))
    table = table_of(objective, logp, record, length, (count, unit))
    found = UnitGradients.of(table, centred=centred).clipped(weights, 1e9)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    clipped = UnitGradients.of(table, centred=centred).clipped(weights, 0.2)
    norms = np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(clipped, expected * np.minimum(1, 0.2 / norms), rtol=1e-9, atol=1e-12)
    assert mean_loss(table, weights) == pytest.approx(np.mean(losses))


@pytest.mark.parametrize("objective", ["sequence", "token"])
def test_language_gradients_are_finite_however_unlikely_the_text(objective, rng):
    """Log-probabilities of -1e5, sources that differ by 1e5, and weights that are zero where a source is needed."""
    logp = np.asarray([[-1e5, -1e5 - 2, -2e5], [-3.0, -1e5, -5.0], [-1e5, -4.0, -1e5], [-1e308, 0.0, -1e308]])
    if objective == "sequence":
        table = SourceTable.of_sequences(logp, np.asarray([30, 1, 7, 5]))
    else:
        table = SourceTable.of_tokens(logp, np.arange(4), np.ones(4, dtype=int))
    for weights in ([0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]):
        for centred in (False, True):
            vectors = UnitGradients.of(table, centred=centred).clipped(np.asarray(weights), 0.5)
            assert np.isfinite(vectors).all()
            assert (np.linalg.norm(vectors, axis=1) <= 0.5 * (1 + 1e-12)).all()
        responsibilities = UnitGradients.of(table, centred=False).responsibilities(np.asarray(weights))
        assert np.isfinite(responsibilities).all()
        assert (responsibilities.sum(axis=1) <= 1 + 1e-12).all()
    # The first record does not care about the 1e5 that all sources share.
    scale = 1 / 30 if objective == "sequence" else 1.0
    p = np.asarray([1.0, np.exp(-2.0), 0.0])
    found = UnitGradients.of(table, centred=False).clipped(np.asarray([0.2, 0.3, 0.5]), 1e9)[0]
    np.testing.assert_allclose(found, -scale * p / (p @ [0.2, 0.3, 0.5]), rtol=1e-9)


def test_responsibilities_of_tokens_are_means_over_tokens_then_records(rng):
    logp, record, length, (count, unit) = texts(rng)
    weights = rng.dirichlet(np.ones(4))
    each = np.exp(logp) * weights
    each /= each.sum(axis=1, keepdims=True)
    means = [each[record == one].mean(axis=0) if length[one] else np.zeros(4) for one in range(len(length))]
    expected = [np.asarray(means)[unit == one].mean(axis=0) for one in range(count)]
    table = table_of("token", logp, record, length, (count, unit))
    found = UnitGradients.of(table, centred=False).responsibilities(weights)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("objective", ["sequence", "token"])
@pytest.mark.parametrize("units", [False, True])
def test_the_nonprivate_optimum_of_texts_is_that_of_a_general_optimiser(units, objective, rng):
    """Mean over units of mean over records: with 40 units of very different sizes."""
    *rows, of_units = texts(rng, sizes=tuple(rng.integers(1, 12, size=40)))
    table = table_of(objective, *rows, of_units if units else None)
    found = learn_nonprivate(table)
    peer = minimize(
        lambda weights: mean_loss(table, weights / weights.sum()),
        np.full(4, 0.25),
        bounds=[(1e-9, 1)] * 4,
        constraints={"type": "eq", "fun": lambda weights: weights.sum() - 1},
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-12},
    )
    assert mean_loss(table, found.weights) == pytest.approx(peer.fun, abs=1e-6)
    assert closeness(found.weights, peer.x)["l1"] < 0.02
    assert mean_loss(table, found.weights) < mean_loss(table, uniform(4).weights) - 1e-4


def test_the_nonprivate_optimum_leaves_units_with_a_bad_record_out(rng):
    """As the private learner does: the same objective."""
    p, unit = rng.uniform(0.1, 1, size=(9, 5)), np.asarray([0, 0, 0, 1, 1, 2, 2, 2, 2])
    p[4] = np.nan
    with_bad = SourceTable.of_labels(p, (3, unit))
    keep = unit != 1
    without = SourceTable.of_labels(p[keep], (2, np.where(unit[keep] == 2, 1, 0)))
    assert np.allclose(learn_nonprivate(with_bad).weights, learn_nonprivate(without).weights)
    weights = rng.dirichlet(np.ones(5))
    assert mean_loss(with_bad, weights) == pytest.approx(mean_loss(without, weights))
    assert np.isnan(UnitGradients.of(with_bad, centred=True).clipped(weights, 1.0)[1]).all(), "the grid makes it 0"


@pytest.mark.parametrize("objective", ["sequence", "token"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rule_6_a_unit_with_a_bad_text_contributes_zero_and_changes_no_other(bad, objective, rng):
    logp, record, length, units = texts(rng)

    def vectors():
        gradients = UnitGradients.of(table_of(objective, logp, record, length, units), centred=True)
        return GridGaussian(0.3, 1.0, 1, 1.0, 60.0, 1.0, 1e-5).to_grid(gradients.clipped(uniform(4).weights, 0.3))

    clean = vectors()
    logp[np.flatnonzero(record == 1)[0], 2] = bad
    found = vectors()
    assert clean.any(axis=1).all()
    assert not found[0].any()
    assert np.array_equal(found[1:], clean[1:])


def test_an_empty_text_counts_among_its_units_records(rng):
    """Its loss is 0, so the mean over the unit's two records is half of the other's."""
    logp, ones = rng.normal(-5, 1, size=(3, 4)), uniform(4).weights
    alone = SourceTable.of_tokens(logp, np.zeros(3, dtype=int), np.asarray([3]))
    both = SourceTable.of_tokens(logp, np.zeros(3, dtype=int), np.asarray([3, 0]), (1, np.zeros(2, dtype=int)))
    one, other = (UnitGradients.of(table, centred=True).clipped(ones, 1e9) for table in (alone, both))
    np.testing.assert_allclose(other, one / 2)
    nothing = SourceTable.of_sequences(np.zeros((1, 4)), np.zeros(1))
    assert not UnitGradients.of(nothing, centred=False).clipped(ones, 1.0).any()


def test_tables_that_do_not_fit_together_are_refused(rng):
    logp, record, length, units = texts(rng)
    with pytest.raises(ValueError, match="lengths"):
        SourceTable.of_tokens(logp, record[::-1], length, units)
    with pytest.raises(ValueError, match="lengths"):
        SourceTable.of_tokens(logp, record, length + 1, units)
    with pytest.raises(ValueError, match="one entry per record"):
        SourceTable.of_labels(np.ones((3, 2)), (1, np.zeros(2, dtype=int)))
    with pytest.raises(ValueError, match="names"):
        SourceTable.of_labels(np.ones((3, 2))).subset(b"x" * 32, 1)
