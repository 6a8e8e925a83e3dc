"""Config mistakes read well, the schema is in step, and every shipped config resolves."""

from __future__ import annotations

import json

import pytest
import yaml
from checkout import ROOT, Checkout
from deployment import raw_config, raw_text_config

from dpmixmin import config as config_module
from dpmixmin.config import load, validate
from dpmixmin.data import texts
from dpmixmin.errors import UserError
from dpmixmin.explain import model_in
from dpmixmin.table_sections import TextFile

CONFIGS = sorted((ROOT / "config").rglob("*.yaml"))


def test_schema_file_is_in_step_with_the_models():
    assert json.loads((ROOT / "config/schema.json").read_text()) == config_module.schema(), "run `make schema`"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_is_valid_and_says_what_it_does(path):
    load(path)
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    text = " ".join(head)
    assert "$schema=" in head[0]
    assert "Takes:" in text
    assert "Gives:" in text


def test_every_field_has_a_help_text():
    def walk(model):
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
            inner = model_in(field.annotation)
            for one in inner.values() if isinstance(inner, dict) else [inner] * (inner is not None):
                walk(one)

    walk(config_module.Config)


MISTAKES = [
    (lambda c: c.update(sedes=c.pop("seeds")), "sedes: unknown key; did you mean `seeds`?"),
    (lambda c: c["privacy"].update(epsilons=["two"]), 'privacy.epsilons.0: "two" is not valid'),
    (lambda c: c["privacy"].update(delta=2), "privacy.delta: 2 is not valid: input should be less than 0.1"),
    (lambda c: c["private"]["parts"].update(test=0.9), "add up to 1.5; they must add up to 1"),
    (lambda c: c["private"].pop("nominal_units"), "private.nominal_units: missing; add it"),
    (lambda c: c["axes"]["three"].update(colunm=c["axes"]["three"].pop("column")), "did you mean `column`?"),
    (
        lambda c: c["private"]["table"].update(kind="csv"),
        "write hub, idx, images, maildir, parquet, spam_assassin or text",
    ),
    (lambda c: c["finetune"]["grid"].append({"seeds": [9]}), "finetune.grid names 9, which is not in seeds"),
    (lambda c: c["privacy"].update(epsilons=[float("nan")]), "privacy.epsilons.0: NaN is not valid"),
    (lambda c: c["privacy"].update(epsilons=[1, 1]), "privacy.epsilons lists a value twice"),
    (lambda c: c["public"].pop("standins"), "mixture.settings is missing"),
    (lambda c: c["tune"]["finetune"].update(batch=[999]), "tune.finetune.batch: 999 exceeds the finetune part's 210"),
    (lambda c: c["axes"]["three"].update(column="digits"), "axes.three.column: `digits` is not a label of public.so"),
    (lambda c: c["privacy"].update(epsilons=[1, 1.0000001]), "privacy.epsilons: two values agree in their first six"),
    (lambda c: c["tasks"].update(macro=c["tasks"]["three_or_eight"]), "tasks.macro: `macro` names the mean over ta"),
    (lambda c: c["axes"].update(step=c["axes"]["three"]), "axes.step: `step` names a column of the trajectory"),
    (lambda c: c["tasks"].update(a=c["tasks"]["three_or_eight"], a_dp=c["tasks"]["three_or_eight"]), "`a_dp_mixmin`"),
    (lambda c: c.update(experiment="public"), "experiment: `public` is the name of a folder"),
    (lambda c: c.update(mode="production"), 'mode: "production" is not valid'),
    (lambda c: c.update(mode="deploy"), "mode deploy makes one chain, so give exactly one"),
    (lambda c: c.update(ledger={"cap": {"epsilon": 2}}), "ledger.cap is for mode: deploy"),
    (lambda c: c["privacy"].update(adjacency="replace_one"), "privacy.adjacency: replace_one needs ids that stay"),
    (lambda c: c.update(audit=False), "audit: YAML reads on, off, yes and no as true and false: write `required`"),
    (lambda c: c.update(compute={"devices": 3, "nodes": 2}), "compute: devices 3 is not a multiple of nodes 2"),
    (lambda c: c["privacy"].update(adjacency="swap"), 'privacy.adjacency: "swap" is not valid'),
]


@pytest.mark.parametrize(("break_it", "message"), MISTAKES, ids=[message[:40] for _, message in MISTAKES])
def test_a_mistake_is_one_line_that_names_key_value_and_fix(break_it, message):
    raw = yaml.safe_load((ROOT / "config/test.yaml").read_text())
    break_it(raw)
    with pytest.raises(UserError) as caught:
        validate(raw, "my.yaml")
    text = str(caught.value)
    assert message in text
    assert text.startswith("my.yaml: ")
    assert "\n" not in text


TEXT_MISTAKES = [
    ({"private__table__rows": 5}, "private.table.rows is for public tables"),
    (
        {"private__table__path": "letters.txt"},
        "private.table.path: letters.txt is of no known form; use .jsonl, .json",
    ),
    ({"public__texts__letters__path": "a.jsonl.gz"}, "public.texts.letters.path: a.jsonl.gz is of no known form"),
    ({"private__unit": "record", "private__min_records_per_unit": 2}, "private.min_records_per_unit: with `unit: rec"),
]


@pytest.mark.parametrize(("changes", "message"), TEXT_MISTAKES, ids=[message[:40] for _, message in TEXT_MISTAKES])
def test_a_mistake_about_texts_is_one_line_too(changes, message, tmp_path):
    with pytest.raises(UserError) as caught:
        validate(raw_text_config(tmp_path, **changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_records_cannot_have_too_few_records_in_labelled_tables_either(tmp_path):
    with pytest.raises(UserError, match="min_records_per_unit"):
        validate(raw_config(tmp_path, private__unit="record", private__min_records_per_unit=2))


def test_a_deployment_does_not_pass_a_gate_that_saw_no_fine_tuning(tmp_path):
    with pytest.raises(UserError, match=r"audit.canaries: 0 would release a fine-tuning that nobody attacked"):
        validate(raw_config(tmp_path, audit={"gate": "required", "canaries": 0}))
    validate(raw_config(tmp_path, audit={"gate": "report", "canaries": 0}))


def test_the_suffixes_of_the_config_are_those_that_the_loader_reads(tmp_path):
    for suffix in (*config_module.TEXT_SUFFIXES, ".txt"):
        path = tmp_path / f"t{suffix}"
        path.write_text('{"text": "a"}')
        try:
            texts.read_public(TextFile(kind="text", path=str(path)), 10)
            read = True
        except UserError as error:
            read = "unknown suffix" not in str(error)
        assert read == (suffix != ".txt")


HERE = "the folder of the test"
SHARED = [
    ({"kind": "hub", "name": "owner/mail"}, {"kind": "hub", "name": "owner/mail"}, True),
    (
        {"kind": "hub", "name": "owner/mail", "split": "a", "revision": "1"},
        {"kind": "hub", "name": "owner/mail"},
        True,
    ),
    ({"kind": "hub", "name": "Owner/Mail"}, {"kind": "hub", "name": "owner/mail", "subset": "en"}, True),
    ({"kind": "hub", "name": "a/mail", "subset": "de"}, {"kind": "hub", "name": "a/mail", "subset": "en"}, False),
    ({"kind": "hub", "name": "owner/mails"}, {"kind": "hub", "name": "owner/mail"}, False),
    ({"kind": "hub", "name": "data/saved"}, {"kind": "hub", "name": "./data/saved", "split": "test"}, True),
    ({"kind": "hub", "name": "data/saved"}, {"kind": "hub", "name": HERE + "/data/saved"}, True),
    ({"kind": "text", "path": "data/saved/x.jsonl"}, {"kind": "hub", "name": "data/saved"}, True),
    ({"kind": "text", "path": "data/saved2/x.jsonl"}, {"kind": "hub", "name": "data/saved"}, False),
    ({"kind": "text", "path": "./data/../data/x.jsonl"}, {"kind": "text", "path": "data/x.jsonl"}, True),
    ({"kind": "text", "path": "link/x.jsonl"}, {"kind": "text", "path": "data/x.jsonl"}, True),
    ({"kind": "text", "path": "link/ann/sent/1.json"}, {"kind": "maildir", "path": "data/"}, True),
    ({"kind": "text", "path": "datum/x.jsonl"}, {"kind": "maildir", "path": "data"}, False),
    ({"kind": "hub", "name": "./data"}, {"kind": "text", "path": "data/x.jsonl"}, True),
    ({"kind": "text", "path": "x.jsonl"}, {"kind": "maildir", "path": "/"}, True),
    ({"kind": "packaged", "domain": "kjv"}, {"kind": "spam_assassin"}, False),
]


@pytest.mark.parametrize(("public", "private", "shared"), SHARED)
def test_a_deployment_s_file_is_either_public_or_sensitive(public, private, shared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/saved").mkdir(parents=True)
    (tmp_path / "link").symlink_to("data")
    private = {key: value.replace(HERE, str(tmp_path)) for key, value in private.items()}
    unit = {"maildir": "user", "spam_assassin": "sender"}.get(private["kind"], "patient")
    raw = raw_text_config(
        tmp_path, public__texts__letters=public, private__table=private, private__unit=unit, mode="deploy"
    )
    if not shared:
        validate(raw)
        return
    with pytest.raises(UserError, match=r"is also private\.table; a file is either public or sensitive"):
        validate(raw)


def test_snakemake_shows_a_config_mistake_in_one_line(tmp_path):
    checkout = Checkout.fresh(tmp_path / "checkout")
    checkout.edit("config/test.yaml", "epsilons:", "epsilon:")
    done = checkout.snakemake("-n", check=False)
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    assert lines == ["error: config/test.yaml: privacy.epsilon: unknown key; did you mean `epsilons`?"]
    assert not (checkout.path / "results").exists()


def test_a_sensitive_file_of_the_wrong_form_is_one_line_and_leaves_nothing_behind(tmp_path):
    checkout = Checkout.fresh(tmp_path / "checkout")
    checkout.edit("config/test.yaml", "    pool: 4\n    rows: [0, 600]", "    pool: 3\n    rows: [0, 600]")
    done = checkout.snakemake("splits", "-c1", check=False)
    assert done.returncode == 1
    assert "28x28 pixels cannot be pooled by 3; use a divisor" in done.stdout
    assert "Traceback" not in done.stdout
    assert not (checkout.path / "results/mini/private/records/records.parquet").exists()


@pytest.mark.parametrize("profile", [[], ["--profile", "slurm"]], ids=["local", "slurm"])
def test_the_default_demo_resolves_and_explains_itself(tmp_path, profile):
    checkout = Checkout.fresh(tmp_path / "checkout")
    done = checkout.snakemake("all", "-n", *profile, config="config/config.yaml")
    assert "Learning" in done.stdout or "Mixture weights by dp_mixmin" in done.stdout
    assert "Fine-tuning" in done.stdout
    jobs = checkout.planned("all", config="config/config.yaml")
    assert {"mix_odd_dp_mixmin", "finetune_three_dp_mixmin", "evaluate_odd", "make_report"} <= jobs


def test_rule_17_a_delta_that_one_published_record_would_meet_is_warned_about(tmp_path):
    checkout = Checkout.fresh(tmp_path / "checkout")
    assert "warning" not in checkout.snakemake("all", "-n").stdout
    checkout.edit("config/test.yaml", "delta: 1.0e-4", "delta: 0.01")
    assert "warning: privacy.delta 0.01 is not below 1/nominal_units" in checkout.snakemake("all", "-n").stdout
