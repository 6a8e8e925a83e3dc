"""The switches of the privacy section, through the command line: sequential composition, adjacency, learner."""

from __future__ import annotations

import json

from checkout import Checkout  # noqa: F401
from test_own_data import as_study, checkout, write_data  # noqa: F401

from dpmixmin.privacy.accounting import Composition
from dpmixmin.privacy.events import from_json

CHAIN = "results/mine/released/finetuned/task=pneumonia/method=dp_mixmin/mechanism=dp_sgd/eps=1/seed=0"


def test_split_the_budget_instead_of_the_data_under_replace_one_with_responsibilities(checkout):  # noqa: F811
    """One run with all three switches: events compose on the same units, and the chain meets the target."""
    write_data(checkout.path, bad_values=False)
    as_study(
        checkout,
        privacy={"composition": "sequential", "adjacency": "replace_one"},
        mixture={"learner": "responsibilities"},
    )
    checkout.snakemake(f"{CHAIN}/model.safetensors", "-c2", config="mine.yaml")
    statement = json.loads((checkout.path / CHAIN / "privacy.json").read_text())
    mixture, tuned = statement["entries"]
    assert mixture["mechanism"] == "ResponsibilityGaussian"
    assert mixture["parts"] == tuned["parts"] == ["finetune", "mixing"]
    assert mixture["nominal_units"] == tuned["nominal_units"] == 320
    assert mixture["epsilon"] == 0.1
    assert tuned["alongside"] == mixture["events"]
    assert "sequential" in statement["guarantee"]["composition"]
    assert statement["guarantee"]["calibrated_to"] == "replace_one"
    events = [from_json(event) for entry in (mixture, tuned) for event in entry["events"]]
    asked = statement["other_adjacencies"]["replace_one"]["epsilon"]
    assert 0.99 < asked <= 1
    assert Composition(events, adjacency="replace_one").epsilon(1e-5) == asked
    assert statement["guarantee"]["epsilon"] == Composition(events).epsilon(1e-5) < 0.6
    alone = Composition([from_json(event) for event in tuned["events"]], adjacency="replace_one").epsilon(1e-5)
    assert alone < 0.999, "the mixture took its share"
