"""What was spent: the budget's arithmetic and its text (rule 21)."""

import json
import math
import os
import re
import time

import deployment
import dp_accounting as dpa
import pytest
from deployment import raw_config
from dp_accounting.pld import PLDAccountant

from dpmixmin.config import validate
from dpmixmin.privacy import totals
from dpmixmin.privacy.accounting import Composition
from dpmixmin.privacy.composition import Touch, worst_compositions
from dpmixmin.privacy.events import GaussianEvent, PacEvent
from dpmixmin.privacy.ledger import Cap, Ledger, Mechanism, Study
from dpmixmin.privacy.mechanisms import GridGaussian, ModelGaussian
from dpmixmin.privacy.noise import NoiseSource
from dpmixmin.release import budget
from dpmixmin.stages import budget as budget_stage

made, home = deployment.made, deployment.home


def total_epsilon(touches, delta: float) -> float:
    """The reference: every choice of parts, composed one by one."""
    return max(each.epsilon(delta) for each in worst_compositions(touches))


def test_the_budget_of_a_deployment_names_the_cap_what_used_it_and_what_is_left(home, capsys):
    config = validate(raw_config(home))
    ledger = Ledger.of(config)
    found = budget.report(ledger, config.privacy.delta)
    spent = total_epsilon([entry.touch() for entry in ledger.charged()], 2e-5)
    assert found["totals"] == [
        {"unit": "patient", "epsilon": pytest.approx(spent, rel=1e-9), "delta": 2e-5, "releases": 4, "exact": True}
    ]
    assert found["cap"]["left"] == pytest.approx(2.5 - spent)
    assert [len(found["aborted"]), found["aborted_charged"], found["uncharged"]] == [1, False, []]
    mixing = next(part for part in found["parts"] if part["part"] == "mixing")
    assert mixing["epsilon"] == pytest.approx(spent)
    assert mixing["used_by"] == ["mixture ill (first)", "mixture other (first)"]
    budget_stage.run(config, type("Arguments", (), {"json": True}))
    assert json.loads(capsys.readouterr().out) == found
    budget_stage.run(config, type("Arguments", (), {"json": False}))
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert "The cap is epsilon 2.5 at delta 2e-05; left: epsilon 1." in text
    assert re.search(r"not charged.*:\n  1 x stage=mixture task=ill", text)
    strict = budget.report(Ledger.of(validate(raw_config(home, privacy__charge_aborted=True))), 1e-5)
    assert strict["totals"][0]["epsilon"] > 1.1 * spent
    assert "charged, in the table above" in budget.text(strict)


def study_entries(ledger, tasks, epsilons, seeds, delta=1e-5) -> None:
    """A study's releases: for each cell a mixture and Poisson DP-SGD behind it, and uniform DP-SGD on both parts."""
    for task in tasks:
        for epsilon in epsilons:
            grid = GridGaussian.for_target(
                epsilon=epsilon, delta=delta, clip=4.0, steps=50, sampling_rate=1.0, nominal_units=800
            )
            model = ModelGaussian.for_target(
                epsilon=epsilon, delta=delta, clip=1.0, steps=120, sampling_rate=0.0625, nominal_units=2000
            )
            for seed in seeds:
                mix = {"task": task, "method": "dp_mixmin", "epsilon": epsilon, "seed": seed, "stage": "mixture",
                       "chain": f"mix@{epsilon:g}"}  # fmt: skip
                tune = {
                    **mix,
                    "stage": "finetuned",
                    "mechanism": "dp_sgd",
                    "chain": f"mix@{epsilon:g} > dp_sgd@{epsilon:g}",
                }
                uniform = {**tune, "method": "uniform", "chain": f"dp_sgd@{epsilon:g}"}
                for cell, spec, parts in ((mix, grid, ("mixing",)), (tune, model, ("finetune",)),
                                          (uniform, model, ("mixing", "finetune"))):  # fmt: skip
                    purpose = Mechanism(spec, cell, {}, {}, "code")
                    with ledger.open(parts, purpose, f"seed={seed}/fractions=a-long-name-of-fractions") as release:
                        release.commit({"x": NoiseSource().random_bytes(4)}, {"stage": "x"})


def test_rule_21_the_budget_of_a_study_composes_tasks_and_seeds_as_dp_accounting_does(ledger):
    study_entries(ledger, ["odd"], [1.0], [0, 1])
    study_entries(ledger, ["even"], [1.0], [0])
    with ledger.open(("test",), Study("test metrics of odd")):
        pass
    found = budget.report(ledger, 1e-5)
    assert found["cap"] is None
    first = found["entries"]
    assert [row["alone"] == row["chain"] for row in first[:3]] == [True, False, True]
    assert first[1]["chain"] == max(first[0]["alone"], first[1]["alone"]) <= 1.0, "disjoint parts: the larger"
    # The worst unit lies in the mixing part or in the finetune part under each key: try all four by hand.
    events = {row["parts"][0] if len(row["parts"]) == 1 else "both": entry.touch().events[0]
              for row, entry in zip(first, ledger.entries(), strict=True)}  # fmt: skip

    def by_hand(parts: tuple[str, str]) -> float:
        accountant = PLDAccountant(value_discretization_interval=2e-4)
        for key, part in enumerate(parts):
            for kind, times in ((part, (2, 1)[key]), ("both", (2, 1)[key])):
                event = events[kind]
                step = dpa.GaussianDpEvent(event.noise_multiplier)
                if event.sampling_rate < 1:
                    step = dpa.PoissonSampledDpEvent(event.sampling_rate, step)
                accountant.compose(dpa.SelfComposedDpEvent(step, event.steps), times)
        return accountant.get_epsilon(1e-5)

    reference = max(by_hand((a, b)) for a in ("mixing", "finetune") for b in ("mixing", "finetune"))
    assert found["totals"][0]["epsilon"] == pytest.approx(reference, rel=5e-3)
    assert found["totals"][0]["epsilon"] == pytest.approx(
        total_epsilon([entry.touch() for entry in ledger.entries()], 1e-5), rel=2e-3
    )
    assert found["totals"][0]["epsilon"] > 2.5 * max(row["alone"] for row in first)
    text = budget.text(found)
    assert max(map(len, text.splitlines())) <= 100
    assert "as if it were the only release" in text
    assert "Measured without charge" in text
    assert "  test metrics of odd on test" in text


def test_the_budget_of_a_hundred_releases_is_quick_and_of_many_keys_an_upper_bound(ledger, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # what takes long is making them
    study_entries(ledger, ["a", "b", "c", "d"], [1.0, 2.0, 5.0], [0, 1, 2])
    start = time.monotonic()
    found = budget.report(ledger, 1e-5)
    assert len(found["entries"]) == 108
    assert time.monotonic() - start < 10
    assert found["totals"][0]["exact"]
    assert budget.text(found).count("\n") > 108
    monkeypatch.setattr(totals, "MOST", 1)
    bound = budget.report(ledger, 1e-5)
    assert bound["totals"][0]["epsilon"] >= found["totals"][0]["epsilon"]
    assert not bound["totals"][0]["exact"]
    assert "(An upper bound" in budget.text(bound)


def test_a_unit_may_lie_in_the_dearest_part_under_every_key():
    dear, cheap = GaussianEvent(2.0, 1.0, 1), GaussianEvent(9.0, 1.0, 1)
    touches = [Touch((dear if (part == "mixing") == (key == "a") else cheap,), frozenset({part}), key)
               for key in ("a", "b") for part in ("mixing", "finetune")]  # fmt: skip
    assert totals.total(touches, 1e-5) == (Composition([dear, dear]).epsilon(1e-5), True)
    assert totals.total(touches, 1e-5)[0] == total_epsilon(touches, 1e-5)


def test_a_part_that_a_pac_mechanism_read_has_no_finite_epsilon():
    dp, pac = GaussianEvent(4.0, 1.0, 1), PacEvent(0.1)
    touches = [Touch((dp,), frozenset({"mixing"}), "s"), Touch((pac,), frozenset({"finetune"}), "s")]
    assert totals.total(touches[:1], 1e-5) == (total_epsilon(touches[:1], 1e-5), True)
    assert totals.total(touches, 1e-5) == (math.inf, True)


def test_the_budget_of_an_untouched_dataset_is_zero(tmp_path):
    found = budget.report(Ledger(tmp_path / "ledger", "clinic", cap=Cap(1.0, 1e-5)), 1e-5)
    assert found["totals"] == []
    assert found["cap"] == {"epsilon": 1.0, "delta": 1e-5, "spent": 0.0, "left": 1.0}
    assert "Nothing was charged yet." in budget.text(found)


def mixed_units(ledger) -> list[float]:
    """Release once for a record and twice for a patient; return each kind's epsilon by hand."""
    for unit, label, epsilon in (("record", "a", 0.5), ("patient", "b", 1.0), ("patient", "c", 2.0)):
        spec = GridGaussian.for_target(
            epsilon=epsilon, delta=1e-5, clip=1.0, steps=1, sampling_rate=1.0, nominal_units=100, unit=unit
        )
        cell = {"stage": "mixture", "task": label, "method": "dp_mixmin", "seed": 0, "chain": f"mix@{epsilon:g}"}
        with ledger.open(("mixing",), Mechanism(spec, cell, {}, {}, "code"), "key=a") as release:
            release.commit({"x": b"1"}, {"stage": "x"})
    sigma = [entry.facts["spec"]["noise_multiplier"] for entry in ledger.entries()]
    return [
        Composition([GaussianEvent(sigma[0], 1.0, 1)]).epsilon(1e-5),
        Composition([GaussianEvent(sigma[1], 1.0, 1), GaussianEvent(sigma[2], 1.0, 1)]).epsilon(1e-5),
    ]


def test_releases_that_protect_different_units_have_no_common_total(ledger):
    wanted = mixed_units(ledger)
    found = budget.report(ledger, 1e-5)
    assert [(each["unit"], each["releases"]) for each in found["totals"]] == [("record", 1), ("patient", 2)]
    assert [each["epsilon"] for each in found["totals"]] == pytest.approx(wanted, rel=1e-9)
    parts = [(row["unit"], row["epsilon"]) for row in found["parts"]]
    assert parts == [("record", pytest.approx(wanted[0])), ("patient", pytest.approx(wanted[1]))]
    text = budget.text(found)
    assert "not comparable" in text
    assert re.search(r"protects one record were published: epsilon 0\.\d+ at delta 1e-05,\s+from 1 releases", text)
    assert re.search(r"^first .* record +mixing", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 100


def test_a_cap_is_not_compared_with_releases_that_protect_different_units(ledger):
    mixed_units(ledger)
    capped = Ledger(ledger.root.parent, ledger.root.name, cap=Cap(5.0, 1e-5))
    found = budget.report(capped, 1e-5)
    assert found["cap"] == {"epsilon": 5.0, "delta": 1e-5, "spent": None, "left": None}
    assert "is for one kind of unit" in " ".join(budget.text(found).split())
