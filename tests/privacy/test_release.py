"""The bundle of a deployment: what it holds, and every reason not to make it (rules 9, 14, 20)."""

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import deployment
import dp_accounting as dpa
import jsonschema
import pytest
from deployment import (
    DAY,
    FINETUNE,
    MIXTURE,
    PRIVATE_PARENT,
    ROOT,
    STANDINS,
    make_chain,
    make_settings,
    other_release,
    raw_config,
    release,
    statement_of,
)
from dp_accounting.pld import PLDAccountant

from dpmixmin import artifacts
from dpmixmin.config import validate
from dpmixmin.errors import UserError
from dpmixmin.privacy.events import from_json
from dpmixmin.privacy.ledger import Ledger, Study
from dpmixmin.release import bundle, page, schema, verify
from dpmixmin.stages import release as release_stage

made, home, empty, released = deployment.made, deployment.home, deployment.empty, deployment.released


# -- what a bundle is -----------------------------------------------------------------------------------------


def test_a_bundle_is_an_allow_list_with_hashes_that_sha256sum_checks(released):
    names = {path.name for path in released.iterdir()}
    assert names == {
        "weights.json", "trajectory.parquet", "model.safetensors", "metrics.json", "released.json",
        "settings_mixture.json", "settings_finetune.json", "statement.json", "statement.md", "statement.schema.json",
        "SHA256SUMS",
    }  # fmt: skip
    done = subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=released, capture_output=True, check=True)
    assert done.stdout.count(b": OK") == len(names) - 1


def test_the_statement_states_the_chain_the_dataset_and_the_cap(released, made):
    stated = statement_of(released)
    privacy = stated["privacy"]
    assert [entry["cell"]["stage"] for entry in privacy["entries"]] == ["mixture", "finetuned", "evaluation"]
    assert [len(privacy[key]) for key in ("aborted", "other_entries")] == [1, 1]
    assert 0.99 < privacy["guarantee"]["epsilon"] <= 1.0
    assert privacy["guarantee"]["unit"] == "patient"
    # The other release meets the mixing part a second time; at the cap's delta, by dp-accounting's own accountant.
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    for entry in (privacy["entries"][0], privacy["other_entries"][0]):
        event = from_json(entry["events"][0])
        accountant.compose(dpa.SelfComposedDpEvent(dpa.GaussianDpEvent(event.noise_multiplier), event.steps))
    assert stated["cap"]["spent"] == pytest.approx(accountant.get_epsilon(2e-5), rel=2e-3)
    assert stated["cap"] == {"epsilon": 2.5, "delta": 2e-5, "spent": stated["cap"]["spent"]}
    assert stated["data"]["tables"] == [
        {"name": "sources", "used_for": "the proxy and pretraining", "licence": "CC0-1.0"}
    ]
    assert [each["name"] for each in stated["data"]["artefacts"]] == [
        "public/proxies/joint", "public/settings/finetune/method=dp_mixmin", "public/settings/mixture",
        "public/sources/sources",
    ]  # fmt: skip
    assert stated["dataset"]["id"] == Ledger(made.parent / "vault", "clinic").dataset_id


def test_rule_20_a_bundle_names_nothing_private(released, made):
    """No path, id, hash, size or time of a private artefact, no key, no store, in any file."""
    ledger = Ledger(made.parent / "vault", "clinic")
    keys = json.loads((ledger.root / "keys.json").read_text())
    secrets = [
        PRIVATE_PARENT,
        "private/predictions",
        "patients-table",
        "vault",
        str(made),
        keys["records"],
        keys["split"],
    ]
    secrets += [entry.key for entry in ledger.entries()] + [str(event["time"]) for event in ledger.log.read()]
    for path in released.iterdir():
        data = path.read_bytes()
        assert not [secret for secret in secrets if secret.encode() in data], path
    assert statement_of(released)["config"]["private"]["table"]["path"] == "withheld"


def test_the_page_says_everything_a_person_needs_and_rounds_up(released):
    text, stated = (released / "statement.md").read_text(), statement_of(released)
    for head in ("What is protected, and from whom", "The guarantee", "How it was made", "What is not covered",
                 "How settings were chosen", "Data and licences", "How to verify"):  # fmt: skip
        assert f"## {head}\n" in text
    for words in ("All records of one patient", "CC0-1.0", "python -m dpmixmin verify", "1 attempts died before",
                  *stated["privacy"]["not_covered"]):  # fmt: skip
        assert words in text
    shown = float(re.search(r"\| this bundle \| (\S+) \|", text)[1])
    assert stated["privacy"]["guarantee"]["epsilon"] <= shown <= 1.0
    assert [page.up(value) for value in (0.99991, 1.0, 1.23401, 2e-5, 123456.0, None, 0.0)] == [
        "1", "1", "1.235", "2e-05", "1.235e+05", "infinite", "0",
    ]  # fmt: skip


def test_the_schema_is_in_step_strict_and_describes_every_field(released):
    assert (ROOT / "docs/statement.schema.json").read_text() == schema.text(), "run `make schema`"
    assert (released / "statement.schema.json").read_text() == schema.text()
    jsonschema.Draft202012Validator.check_schema(schema.schema())
    models = [schema.schema(), *schema.schema()["$defs"].values()]
    for model in models:
        assert model["additionalProperties"] is False, model["title"]
        assert model["description"]
        # Where a field and its model have one description, pydantic writes it once, in the model.
        assert all("description" in field or "$ref" in field for field in model["properties"].values()), model["title"]


def test_the_same_inputs_give_the_same_bundle_and_keep_the_day(home):
    folder, written = release(home, "2030-01-31")
    assert written
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    again, written = release(home, "2031-02-01")
    assert (again, written) == (folder, False)
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before
    (folder / "extra").write_text("left behind")
    assert release(home, "2031-02-01")[1]
    changed = {path.name for path in folder.iterdir() if path.read_bytes() != before[path.name][0]}
    assert changed == {"statement.json", "statement.md", "SHA256SUMS"}, "only the day differs"
    assert {path.name for path in folder.parent.iterdir() if path.name.startswith(".")} == set()


def test_aborted_attempts_count_in_the_cap_where_the_owner_charges_them(home):
    folder, _ = release(home)
    lenient = statement_of(folder)["cap"]["spent"]
    folder, written = release(home, privacy__charge_aborted=True)
    strict = statement_of(folder)
    assert written
    assert strict["privacy"]["aborted_attempts_charged"]
    assert strict["cap"]["spent"] > 1.1 * lenient
    assert "(they count)" in (folder / "statement.md").read_text()


def test_a_run_that_dies_leaves_the_old_bundle_or_none_never_half(home, monkeypatch):
    folder, _ = release(home)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    config = validate(raw_config(home))
    other_release(Ledger.of(config), config, "another")
    monkeypatch.setattr(verify, "checks", lambda _: (_ for _ in ()).throw(UserError("no")))
    with pytest.raises(UserError, match="nothing was published: no"):
        release(home)
    monkeypatch.undo()
    monkeypatch.chdir(home)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    leftover = folder.with_name(".bundle.new")
    leftover.mkdir()
    (leftover / "half").write_text("of a killed run")
    assert release(home)[1]
    assert not leftover.exists()
    assert len(statement_of(folder)["privacy"]["other_entries"]) == 2


SEARCHED = {"public__standins": STANDINS, "finetune__settings": None}
"""Fine-tuning settings are chosen on stand-ins, which may choose not to fine-tune."""


@pytest.mark.parametrize(
    ("changes", "finetune", "names"),
    [
        ({"methods": ["uniform"]}, FINETUNE, ["finetuned", "evaluation"]),
        ({"private__parts": {"mixing": 0.3, "finetune": 0.7, "test": 0.0}, **SEARCHED}, None, ["mixture"]),
        ({"privacy__composition": "sequential", "ledger__cap": {"epsilon": 1.0, "delta": 1e-5}}, FINETUNE,
         ["mixture", "finetuned", "evaluation"]),
        ({"mixture__learner": "responsibilities", "privacy__adjacency": "replace_one"}, FINETUNE,
         ["mixture", "finetuned", "evaluation"]),
    ],
    ids=["uniform", "not fine-tuned", "sequential", "responsibilities under replace-one"],
)  # fmt: skip
def test_other_chains_release_and_verify(changes, finetune, names, empty):
    config = validate(raw_config(empty, **changes))
    ledger = Ledger.of(config)
    how = "user_declared" if config.finetune.settings else "public_standin"
    make_chain(config, ledger, finetune=finetune, tuned=("user_declared", how))
    folder, _ = bundle.release(config, ledger, DAY)
    assert [entry["cell"]["stage"] for entry in statement_of(folder)["privacy"]["entries"]] == names
    assert (folder / "weights.json").exists() == (config.methods == ("dp_mixmin",))
    lines = list(verify.checks(folder))
    assert all(line.startswith("ok: ") for line in lines)
    assert statement_of(folder)["privacy"]["guarantee"]["epsilon"] <= 1.0


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("method", ["uniform", "none"])
def test_a_chain_that_touched_nothing_private_has_a_bundle_that_says_so(method, others, empty):
    parts = {"mixing": 0.3, "finetune": 0.7, "test": 0.0}
    config = validate(raw_config(empty, methods=[method], private__parts=parts, **SEARCHED))
    ledger = Ledger.of(config)
    make_chain(config, ledger, finetune=None, tuned=("user_declared", "public_standin"))
    if others:
        other_release(ledger, validate(raw_config(empty, private__parts=parts)))
    folder, _ = bundle.release(config, ledger, DAY)
    stated = statement_of(folder)
    assert stated["privacy"]["headline"] == "no private data was touched"
    assert stated["privacy"]["entries"] == []
    assert [stated["privacy"]["guarantee"][key] for key in ("epsilon", "delta")] == [0.0, 0.0]
    # The other release counts in the total at the config's delta, though no entry of this chain tells of one.
    assert (0.79 < stated["privacy"]["dataset_total"]["epsilon"] <= 0.8) == bool(others)
    assert all(line.startswith("ok: ") for line in verify.checks(folder))
    text = (folder / "statement.md").read_text()
    assert "In a line: no private data was touched" in " ".join(text.split())
    assert "| this bundle | 0 | 0 |" in text
    assert "| everything charged so far | 0 | 0 |" in text or others
    assert "Protected from" not in text
    assert [each["name"] for each in stated["data"]["tables"]] == ["sources", "standins"]


def test_rule_14_the_page_says_what_the_noise_rests_on_and_promises_no_more(released):
    text = " ".join((released / "statement.md").read_text().split())
    assert "on AES-256 under keys that the system drew" in text
    assert "however long" not in text, "a cipher's key stream is no noise for whoever computes long enough"


def test_rule_18_a_new_experiment_on_the_same_ledger_releases_what_the_store_holds(home):
    config = validate(raw_config(home, experiment="clinic_again"))
    ledger, first = Ledger.of(config), release(home)[0]
    before = [entry.id for entry in ledger.entries()]
    make_chain(config, ledger)
    manifest = json.loads((home / MODEL.replace("clinic_run", "clinic_again") / "manifest.json").read_text())
    assert manifest["parents"][0]["path"].startswith("results/clinic_run/"), "as the store keeps it"
    folder, _ = bundle.release(config, ledger, DAY)
    assert [entry.id for entry in ledger.entries()] == before
    assert (folder / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    assert statement_of(folder)["data"] == statement_of(first)["data"]
    shutil.rmtree(home / "results/clinic_run")
    make_settings("results/clinic_again/public/settings/mixture", {**MIXTURE, "clip": 5.0}, "user_declared")
    with pytest.raises(UserError, match="another version of results/clinic_again/public/settings/mixture"):
        bundle.release(config, ledger, DAY)


def test_a_public_table_behind_the_proxy_that_changed_is_noticed(home):
    """The model names the table itself; the proxy was made from it too, and is named by the weights alone."""
    proxy = home / "results/clinic_run/public/proxies/joint/manifest.json"
    stated = json.loads(proxy.read_text())
    stated["parents"][0]["sha256"] = "0" * 64
    proxy.write_text(json.dumps(stated))
    assert "was made from another version of results/clinic_run/public/sources/sources" in refusal(home)


# -- refusals of release --------------------------------------------------------------------------------------


def refusal(home: Path, **changes) -> str:
    with pytest.raises(UserError) as caught:
        release(home, **changes)
    text = str(caught.value)
    assert "\n" not in text
    assert not (home / "results/clinic_run/released/bundle").exists()
    return text


def test_a_study_is_refused(home):
    with pytest.raises(UserError) as caught:
        release_stage.run(validate(raw_config(home, mode="study", ledger__cap=None)), None)
    text = str(caught.value)
    assert "uncharged metrics" in text
    assert "set mode: deploy" in text


CHAIN = "results/clinic_run/released"
MODEL = f"{CHAIN}/finetuned/task=ill/method=dp_mixmin/mechanism=dp_sgd/eps=1/seed=0"
EVALUATION = f"{CHAIN}/evaluation/task=ill/method=dp_mixmin/mechanism=dp_sgd/eps=1/seed=0"
WEIGHTS = f"{CHAIN}/mixtures/task=ill/method=dp_mixmin/eps=1/seed=0"


@pytest.mark.parametrize("folder", [MODEL, WEIGHTS, "results/clinic_run/public/settings/mixture"])
def test_a_missing_or_altered_artefact_is_refused(folder, home):
    name = next(
        path for path in sorted((home / folder).iterdir()) if path.name not in ("manifest.json", "privacy.json")
    )
    original = name.read_bytes()
    name.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    assert "incomplete or altered" in refusal(home)
    name.write_bytes(original)
    shutil.rmtree(home / folder)
    assert "missing; run the stage" in refusal(home)


def test_an_artefact_that_the_ledger_was_not_charged_for_is_refused(home):
    """Consistent with its own manifest, and with what was made from it, but not what is in the store."""
    folder = home / EVALUATION
    stated = json.loads((folder / "manifest.json").read_text())
    (folder / "metrics.json").write_text("{}")
    stated["files"]["metrics.json"] = hashlib.sha256(b"{}").hexdigest()
    (folder / "manifest.json").write_text(json.dumps(stated))
    assert "not what the ledger was charged for" in refusal(home)


def test_a_chain_of_mixed_versions_is_refused(home):
    make_settings("results/clinic_run/public/settings/mixture", {**MIXTURE, "clip": 5.0}, "user_declared")
    assert "was made from another version of results/clinic_run/public/settings/mixture" in refusal(home)


@pytest.mark.parametrize(
    "change", [{"guarantee": None, "stamp": "NOT PRIVATE: exact"}, {"stamp": "NOT PRIVATE: seed"}]
)
def test_a_statement_without_guarantee_is_refused(change, home):
    path = home / MODEL / "privacy.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    text = refusal(home)
    assert change["stamp"] in text
    assert "privacy.release label" in text


def test_a_chain_with_a_pac_step_is_refused(home):
    path = home / MODEL / "privacy.json"
    stated = json.loads(path.read_text())
    stated["headline"] = "DP: none for the units of finetune (PAC only)"
    stated["guarantee"]["no_dp_for_parts"] = ["finetune"]
    path.write_text(json.dumps(stated))
    assert "DP: none for the units of finetune (PAC only); a bundle states" in refusal(home)


def test_rule_14_noise_from_a_test_seed_is_refused(empty):
    config = validate(raw_config(empty))
    make_chain(config, Ledger.of(config), private=False)
    assert "NOT PRIVATE: the noise came from a test seed" in refusal(empty)


def test_rule_14_a_dataset_with_any_release_from_a_test_seed_is_refused(home):
    """Also where it is in no way behind this chain: the dataset's total would count it as private."""
    config = validate(raw_config(home))
    other_release(Ledger.of(config), config, "seeded", private=False)
    text = refusal(home)
    assert "NOT PRIVATE: the noise came from a test seed, in stage=mixture task=seeded" in text
    assert "private.name of their own" in text


def test_rule_11_a_chain_across_two_partitions_is_refused(empty):
    """The second partition's test part holds units of the first one's mixing part, so the maximum is no guarantee."""
    config = validate(raw_config(empty))
    make_chain(config, Ledger.of(config), evaluation_split="key=another/of=the-same-units")
    text = refusal(empty)
    assert "the units were re-partitioned within this chain: its entries lie under 2 partitions" in text
    assert "set privacy.release to a new label" in text


@pytest.mark.parametrize("tuned", [("private_uncharged", "user_declared"), ("public_standin", "private_uncharged")])
def test_rule_9_a_chain_tuned_on_private_scores_is_refused(tuned, empty):
    config = validate(raw_config(empty))
    make_chain(config, Ledger.of(config), tuned=tuned)
    text = refusal(empty)
    assert "chosen on private scores without charge" in text
    assert "public stand-ins" in text


def test_rule_9_a_config_that_rests_on_private_scores_is_refused(home):
    assert "privacy.settings_from: settings or checkpoints were" in refusal(
        home, privacy__settings_from="private_uncharged"
    )


def test_a_statement_that_hides_how_settings_were_chosen_is_refused(empty):
    config = validate(raw_config(empty))
    make_chain(config, Ledger.of(config), tuned=("user_declared", "user_declared"))
    path = empty / MODEL / "privacy.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tuning": "public_standin"}))
    assert "says tuning public_standin, but its settings say user_declared" in refusal(empty)


def test_records_that_a_study_measured_are_refused(home):
    study = Ledger(home.parent / "vault", "clinic")
    with study.open(("test",), Study("test metrics of ill")):
        pass
    artifacts.unrestrict_for_tests()
    text = refusal(home)
    assert "measured without charge (test metrics of ill on test)" in text
    assert "records that no study has read" in text


def test_entries_that_are_not_in_the_ledger_are_refused(home):
    shutil.rmtree(home.parent / "vault")
    assert "this ledger lacks an entry that a released artefact names" in refusal(home)


@pytest.mark.parametrize("keep", [0, 2])
def test_a_statement_that_names_too_few_entries_is_refused(keep, home):
    """An artefact whose privacy.json forgets what it cost."""
    for folder in (MODEL, WEIGHTS, EVALUATION):
        path = home / folder / "privacy.json"
        stated = json.loads(path.read_text())
        path.write_text(json.dumps({**stated, "entries": stated["entries"][:keep]}))
    assert "the ledger has no committed entry that its privacy.json names" in refusal(home)


def test_a_dataset_over_its_cap_is_refused(home):
    text = refusal(home, ledger__cap={"epsilon": 1.2, "delta": 2e-5})
    spent = float(re.search(r"spent epsilon (\S+) at delta 2e-05, above the cap of 1.2", text)[1])
    assert 1.2 < spent < 1.5


def test_the_stage_runs_as_a_command_would(home, capsys):
    release_stage.run(validate(raw_config(home)), None)
    assert "released/bundle: written and verified" in capsys.readouterr().err
