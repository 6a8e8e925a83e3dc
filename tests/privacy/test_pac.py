"""PAC and DP stand side by side and are never merged; what has no DP is said first (rule 22)."""

import json
import math

import pytest
from restate import rebuilt

from dpmixmin.privacy import statement
from dpmixmin.privacy.accounting import Composition
from dpmixmin.privacy.composition import Touch
from dpmixmin.privacy.events import GaussianEvent, PacEvent, from_json, to_json
from dpmixmin.privacy.pac import posterior_success
from dpmixmin.privacy.totals import total

MIX = GaussianEvent(20.0, 1.0, 25)
DELTA = 1e-5


def entry(name: str, parts: tuple[str, ...], event, **changes) -> dict:
    return {
        "entry": name, "cell": {}, "parts": sorted(parts), "split": "seed=0", "release": "first", "unit": "patient",
        "delta": DELTA, "adjacency": "add_remove", "events": [to_json(event)], "sampler_total_variation": 0.0,
        "private_randomness": True, **changes,
    }  # fmt: skip


def stated(*entries, **options) -> dict:
    return statement.build(list(entries), delta=DELTA, tuning="public_standin", **options)


def test_posterior_success_solves_the_divergence_bound():
    """Against the definition, and the known ends: no information gives the prior, ln 2 gives certainty."""
    assert posterior_success(0.0) == pytest.approx(0.5)
    assert posterior_success(math.log(2)) == pytest.approx(1.0)
    assert posterior_success(5.0) == 1.0
    for information, expected in ((1e-4, 0.507), (0.01, 0.571), (0.1, 0.720), (0.33, 0.882), (0.68, 0.998)):
        p = posterior_success(information)
        assert p == pytest.approx(expected, abs=6e-4)
        assert p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p)) == pytest.approx(information, rel=1e-9)
    assert posterior_success(0.1, 0.875) > 0.875
    with pytest.raises(ValueError, match="mutual_information"):
        posterior_success(-1.0)


def test_rule_22_a_chain_with_a_pac_step_says_first_that_its_units_have_no_dp():
    found = stated(entry("a", ("mixing",), MIX), entry("b", ("finetune",), PacEvent(0.33)))
    assert next(iter(found)) == "headline"
    assert found["headline"] == "DP: none for the units of finetune (PAC only)"
    assert found["guarantee"]["no_dp_for_parts"] == ["finetune"]
    assert found["guarantee"]["epsilon"] == Composition([MIX]).epsilon(DELTA), "what is left is for mixing's units"
    (pac,) = found["pac"]
    assert pac["parts"] == ["finetune"]
    assert pac["posterior_success"] == posterior_success(0.33)
    assert "not membership in the pool" in pac["protects"]
    assert rebuilt(json.loads(json.dumps(found))) == found


def test_rule_22_dp_spent_on_units_that_a_pac_step_reads_is_no_guarantee():
    found = stated(entry("a", ("finetune",), MIX), entry("b", ("finetune",), PacEvent(0.01)))
    assert found["guarantee"]["epsilon"] is None
    assert found["other_adjacencies"] == {}
    assert found["headline"].startswith("DP: none")


def test_rule_22_mutual_information_adds_up_per_subset_and_never_meets_an_accountant():
    found = stated(entry("a", ("finetune",), PacEvent(0.1)), entry("b", ("finetune",), PacEvent(0.2, 0.875)))
    (pac,) = found["pac"]
    assert pac["mutual_information"] == pytest.approx(0.3)
    assert pac["prior"] == 0.875
    with pytest.raises(ValueError, match="kinds"):
        Composition([MIX, PacEvent(0.1)])
    touches = [Touch((MIX,), frozenset({"mixing"}), "s"), Touch((PacEvent(0.1),), frozenset({"finetune"}), "s")]
    assert total(touches, DELTA)[0] == math.inf, "no cap on DP can be met"


def test_a_chain_without_pac_says_its_guarantee_first():
    found = stated(entry("a", ("mixing",), MIX))
    shown = float(found["headline"][1:].split(",")[0])
    assert found["guarantee"]["epsilon"] <= shown <= 1.001 * found["guarantee"]["epsilon"], "rounded up"
    assert found["headline"].endswith(", 1e-05)-DP for one patient, added or removed")
    assert found["pac"] == []
    assert found["guarantee"]["no_dp_for_parts"] == []
    assert stated()["headline"] == "no private data was touched"


def test_pac_events_survive_json_and_refuse_nonsense():
    assert from_json(json.loads(json.dumps(to_json(PacEvent(0.2, 0.6))))) == PacEvent(0.2, 0.6)
    for bad in ({"mutual_information": -0.1}, {"mutual_information": math.inf},
                {"mutual_information": 0.1, "prior": 0.4}, {"mutual_information": 0.1, "prior": 1.0}):  # fmt: skip
        with pytest.raises(ValueError, match="PacEvent needs"):
            PacEvent(**bad)
