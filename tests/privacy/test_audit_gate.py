"""The gate: what fails a run, what does not, and that a chain is released only with the specs that passed."""

import math
from dataclasses import replace

import deployment
import numpy as np
import pytest
from deployment import FINETUNE, MIXTURE, raw_config, release
from torch import nn

from dpmixmin import artifacts
from dpmixmin.audit import attacks, bounds, evidence
from dpmixmin.audit.evidence import of_training
from dpmixmin.audit.finding import (
    EXCEEDED,
    FALSE_ALARM,
    HOLDS,
    NO_LEAK,
    NO_POWER,
    REPORTED,
    Finding,
    failures,
    judge,
    level,
)
from dpmixmin.audit.tradeoff import Tradeoff
from dpmixmin.audit.training import audit_training
from dpmixmin.cells import Cell
from dpmixmin.config import validate
from dpmixmin.errors import UserError
from dpmixmin.finetune.dp_sgd import ClippedSum
from dpmixmin.models import networks
from dpmixmin.paths import Paths
from dpmixmin.privacy.gaussian import gaussian_mu
from dpmixmin.privacy.mechanisms import ModelGaussian
from dpmixmin.privacy.noise import NoiseSource
from dpmixmin.release.derive import expected

MODEL = nn.Sequential(nn.Linear(40, 10), nn.Linear(10, 1))
made, home = deployment.made, deployment.home

SOUND = Finding(
    audit="mixture",
    mechanism="mixture",
    canary="max_clip",
    unit="record",
    delta=1e-5,
    task="odd",
    epsilon=1.0,
    claim=1.0,
    bound=0.1,
    bound_family=0.4,
    family="gaussian",
    ceiling=5.6,
    control=5.6,
    control_ceiling=5.6,
    p_value=0.4,
    best_p=1e-12,
    gated=True,
    control_gated=True,
)


def test_a_sound_finding_holds():
    assert judge([SOUND]) == [HOLDS]
    assert failures([SOUND]) == []


def test_the_level_is_shared_among_gated_findings_only():
    """Bonferroni: with 10 gated findings a p-value of 5e-4 is chance, alone it is a violation."""
    reported = replace(SOUND, gated=False, control_gated=False, p_value=None)
    suspect = replace(SOUND, p_value=5e-4)
    assert level([suspect, *[SOUND] * 9, *[reported] * 50]) == pytest.approx(FALSE_ALARM / 10)
    assert judge([suspect, *[SOUND] * 9])[0] == HOLDS
    assert judge([suspect, *[reported] * 50])[0] == EXCEEDED
    assert judge([suspect, reported])[1] == REPORTED


def test_a_violation_says_what_where_and_by_how_much():
    broken = replace(SOUND, p_value=1e-9, bound=1.4, bound_family=2.5)
    assert judge([broken, SOUND]) == [EXCEEDED, HOLDS]
    assert failures([broken, SOUND]) == [
        "mixture task=odd eps=1 max_clip: epsilon is at least 2.5 (95 %), claimed 1; p = 1e-09"
    ]


def test_a_control_that_does_not_leak_fails_where_it_could_have_leaked():
    deaf = replace(SOUND, control=0.3)
    assert judge([deaf]) == [NO_LEAK]
    assert "without noise the attack shows epsilon 0.3 only, claimed 1" in failures([deaf])[0]
    # A sampled canary that seldom enters a step: the control cannot be relied on to exceed this claim.
    assert judge([replace(deaf, control_ceiling=0.5)]) == [HOLDS]
    # A natural canary may hide without noise too: its control is reported.
    assert judge([replace(deaf, canary="natural", control_gated=False)]) == [HOLDS]


def test_a_claim_above_the_ceiling_is_no_failure():
    """Even a perfect attack could not have refuted it: said, and not failed."""
    high = replace(SOUND, claim=8.0, control=5.6, ceiling=5.6, p_value=1.0, best_p=1.0)
    assert judge([high]) == [NO_POWER]
    assert failures([high]) == []


def test_a_replay_that_moves_too_far_fails():
    moved = Finding(
        audit="replay", mechanism="dp_sgd", canary="1000 equal records", unit="user", delta=1e-5, ratio=2.0,
        p_value=0.0, best_p=0.0, gated=True,
    )  # fmt: skip
    assert judge([moved]) == [EXCEEDED]
    assert failures([moved]) == [
        "replay dp_sgd 1000 equal records: one unit moves a release by 2 times the declared sensitivity"
    ]

    leaking = replace(moved, canary="nobody: each step has its noise", ratio=math.inf)
    assert "a release has no noise of its own" in failures([Finding.from_json(leaking.to_json())])[0]


def test_findings_survive_the_way_through_json():
    assert Finding.from_json(SOUND.to_json()) == SOUND
    assert replace(SOUND, bound_family=math.inf).to_json()["bound_family"] is None


# -- a release ------------------------------------------------------------------------------------------------


def publish_gate(config, specs: list[str], failed: tuple[str, ...] = ()) -> None:
    folder = Paths(config.experiment).audit("public", "gate")
    passed = artifacts.json_bytes({"failures": failed, "specs": specs})
    manifest = artifacts.manifest("audit_gate", config={}, code="", parents=[])
    artifacts.publish(folder, {"passed.json": passed}, manifest)


def test_a_chain_is_released_only_with_the_specs_that_passed(home):
    config = validate(raw_config(home, audit="required"))
    with pytest.raises(UserError, match=r"gate/manifest\.json: missing; run the stage"):
        release(home, audit="required")
    specs = [each.spec.digest() for each in expected(config, {"mixture": MIXTURE, "finetune": FINETUNE}, ())]
    publish_gate(config, specs[:1])
    with pytest.raises(UserError, match="the finetuned mechanism did not pass an audit with the parameters of this"):
        release(home, audit="required")
    publish_gate(config, specs[:2], ("mixture max_clip: …",))
    with pytest.raises(UserError, match="the mixture mechanism did not pass"):
        release(home, audit="required")
    publish_gate(config, specs[:2])
    assert release(home, audit="required")[1]


# -- the evidence ---------------------------------------------------------------------------------------------


def test_a_sound_mechanism_whose_canaries_seldom_enter_does_not_fail_its_control():
    """q = 0.05, 20 steps: a third of the canaries never enters a step, so even without noise they stay hidden."""
    spec = ModelGaussian.for_target(
        epsilon=2.0, delta=1e-5, clip=1.0, steps=20, sampling_rate=0.05, nominal_units=400.0
    )

    def build(make=ClippedSum):
        model = nn.Sequential(nn.Linear(40, 10), nn.Linear(10, 1))
        networks.load_bytes(model, networks.state_bytes(MODEL))
        x = np.random.default_rng(0).normal(size=(40, 40)).astype(np.float32)
        return make(model, x, np.ones(40, np.float32), np.arange(40), 40)

    audit = audit_training(build, spec, 0.1, NoiseSource(), canaries=400, seed=0)
    cell = Cell("finetuned", "odd", "dp_mixmin", "centred", "dp_sgd", 2.0, 0, "", "study")
    found = of_training(audit, spec, cell)[0]
    assert found.canary == "gradient"
    assert found.control > found.claim
    assert found.control_ceiling < found.ceiling
    assert judge([found])[0] != NO_LEAK


def test_a_wrong_conversion_of_the_curve_to_epsilon_is_refuted():
    """The curve is right and the stated epsilon is an eighth of the truth: the claim fails by its own bound."""
    truth = gaussian_mu(8.0, 1e-5)
    rng = np.random.default_rng(0)
    scores = {"score": (rng.normal(size=1000), rng.normal(size=1000) + truth)}
    attack = attacks.choose(scores, 1e-5, "dp")
    errors = attacks.count(attack, {"score": (rng.normal(size=1000), rng.normal(size=1000) + truth)})
    assert not bounds.rejects(errors, Tradeoff.gaussian(truth), 0.999)
    assert evidence._either(1.0, evidence._p_of_dp(errors, 1.0, 1e-5)) < 1e-4
    assert evidence._either(1.0, evidence._p_of_dp(errors, 8.0, 1e-5)) == 1.0
