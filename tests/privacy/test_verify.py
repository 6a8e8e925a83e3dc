"""Verifying a bundle as a third party: whatever number is changed, it is noticed (rules 16, 17, 21)."""

import json
import re
import subprocess
import sys
from pathlib import Path

import deployment
import numpy as np
import pytest
from deployment import (
    DAY,
    ROOT,
    STANDINS,
    edit,
    make_chain,
    raw_config,
    refused,
    replaced,
    resum,
    rewrite,
    statement_of,
)
from restate import rebuilt
from safetensors.numpy import save

from dpmixmin import artifacts
from dpmixmin.config import validate
from dpmixmin.errors import UserError
from dpmixmin.privacy.ledger import Ledger
from dpmixmin.release import bundle, payload, verify
from dpmixmin.release.derive import spent_at

made, empty, released, copy = deployment.made, deployment.empty, deployment.released, deployment.copy


def test_a_third_party_verifies_a_copy_with_nothing_else(copy, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin", "HOME": str(elsewhere)}
    command = [sys.executable, "-m", "dpmixmin", "verify", str(copy)]
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) >= 12
    assert all(line.startswith("ok: ") for line in lines[:-1])
    assert lines[-1].startswith("verified: ")
    assert list(elsewhere.iterdir()) == [], "nothing is written"
    (copy / "weights.json").write_text("{}")
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"error: SHA256SUMS: weights.json: stated [0-9a-f]{64}, derived [0-9a-f]{64}\n", done.stderr)


def leaves(value, path=()):
    """Yield the path of every number in a JSON value."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, (*path, key))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from leaves(each, (*path, index))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path


def tampered(statement: dict, path: tuple) -> dict:
    """Return a copy in which one number is 10 % larger (an integer grows by at least 1)."""
    changed = json.loads(json.dumps(statement))
    place = changed
    for step in path[:-1]:
        place = place[step]
    value = place[path[-1]]
    if isinstance(value, int):
        place[path[-1]] = value + max(1, round(value * 0.1))
    else:
        place[path[-1]] = value * 1.1 if value else 0.1
    return changed


def unnoticed(copy: Path, expert: bool) -> set[str]:
    stated, found = statement_of(copy), set()
    paths = list(leaves(stated))
    assert len(paths) > 180
    for path in paths:
        rewrite(copy, tampered(stated, path), expert=expert)
        try:
            list(verify.checks(copy))
        except UserError:
            continue
        found.add(".".join(map(str, path)))
    rewrite(copy, stated, expert=expert)
    list(verify.checks(copy))
    return found


def test_any_single_number_that_is_tampered_with_is_noticed(copy):
    """The tamperer recomputes SHA256SUMS."""
    assert unnoticed(copy, expert=False) == set()


DERIVED_CONFIG = (
    "seeds", "private.nominal_units", "private.parts", "private.max_records_per_unit", "ledger.cap",
    "privacy.epsilons", "privacy.delta", "evaluation.bins", "evaluation.loss_bound", "mixture.settings",
    "finetune.settings",
)  # fmt: skip
UNDERIVABLE = re.compile(
    rf"config\.(?!{'|'.join(map(re.escape, DERIVED_CONFIG))})"
    r"|privacy\.(other_entries|aborted)\.0\.(cell\.|clip$|grid_bits$|nominal_units$|sampler_total_variation$)"
)


def test_a_number_that_can_be_derived_is_noticed_whatever_the_tamperer_recomputes(copy, monkeypatch):
    """The tamperer also recomputes the statement's digest and its page; what remains is in verify's docstring."""
    build, known = verify.statements.build, {}

    def remembered(entries: list, **rest) -> dict:
        """The same section is derived once: most numbers of the config leave it as it is."""
        key = json.dumps([entries, rest])
        if key not in known:
            known[key] = build(entries, **rest)
        return known[key]

    monkeypatch.setattr(verify.statements, "build", remembered)
    found = unnoticed(copy, expert=True)
    assert not [path for path in found if not UNDERIVABLE.match(path)]
    assert not [path for path in found if path.startswith(("bundle", "dataset", "cap", "files", "privacy.entries"))]


def test_verify_names_the_place_the_stated_and_the_derived_value(copy):
    epsilon = statement_of(copy)["privacy"]["guarantee"]["epsilon"]
    text = edit(copy, lambda s: s["privacy"]["guarantee"].update(epsilon=0.5))
    assert text == f"statement.json: privacy.guarantee.epsilon: stated 0.5, derived {epsilon!r}"


def consistent(stated: dict) -> None:
    """Derive everything again that follows from the entries, as an expert would."""
    stated["privacy"] = rebuilt(stated["privacy"])
    stated["cap"]["spent"] = spent_at(stated["privacy"], stated["cap"]["delta"])


def of_entry(key: str, **changes):
    """Return an edit that changes one entry and all that follows from it."""

    def change(stated):
        stated["privacy"][key][0].update(changes)
        consistent(stated)

    return change


def same_id(stated):
    stated["privacy"]["other_entries"][0]["entry"] = stated["privacy"]["entries"][0]["entry"]


def hide_aborted(stated):
    """The owner's config charges aborted attempts, but the statement does not."""
    stated["config"]["privacy"]["charge_aborted"] = True


def another_partition(stated):
    entry = stated["privacy"]["entries"][2]
    key, rest = entry["split"].split("/", 1)
    entry["split"] = f"{key}f/{rest}"
    consistent(stated)


def less_noise(stated):
    """Half the noise, in the mechanism and its events: consistent with itself, but above the target."""
    entry = stated["privacy"]["other_entries"][0]
    entry["noise_multiplier"] = entry["events"][0]["noise_multiplier"] = entry["noise_multiplier"] / 2


def drop_mixture(stated):
    stated["privacy"]["entries"] = stated["privacy"]["entries"][1:]


EDITS = {
    "an entry that spends more than it says": (less_noise, "above its target"),
    "a chain without its mixture": (drop_mixture, "privacy.entries (stages)"),
    "another adjacency's condition": (
        lambda s: s["privacy"]["other_adjacencies"]["zero_out"].update(condition="none"), "zero_out.condition"),
    "an entry from a test seed": (
        lambda s: s["privacy"]["entries"][0].update(private_randomness=False), "private_randomness"),
    "another stamp": (lambda s: s["privacy"].update(stamp="NOT PRIVATE"), 'stated "NOT PRIVATE", must be "private"'),
    "tuning on private scores": (lambda s: s["privacy"].update(tuning="private_uncharged"), "privacy.tuning"),
    "better tuning than the settings say": (lambda s: s["privacy"].update(tuning="public_standin"), "privacy.tuning"),
    "a cap below what was spent": (
        lambda s: (s["cap"].update(epsilon=1.1), s["config"]["ledger"]["cap"].update(epsilon=1.1)), "1.1, but"),
    "an aborted attempt that its config charges and it does not": (hide_aborted, "aborted_attempts_charged: stated"),
    "another release for another unit": (
        lambda s: s["privacy"]["other_entries"][0].update(unit="household"), "privacy.other_entries.0.unit"),
    "another release on a part that its stage does not read": (
        of_entry("other_entries", parts=["test"]),
        "privacy.other_entries.0.parts: stated test, stage mixture reads mixing or finetune.mixing"),
    "another evaluation on the mixture's part": (
        lambda s: s["privacy"]["other_entries"][0]["cell"].update(stage="evaluation"), "stage evaluation reads test"),
    "another release of an unknown stage": (
        lambda s: s["privacy"]["other_entries"][0]["cell"].update(stage="glance"), "glance reads no known stage"),
    "another release from a test seed": (
        of_entry("other_entries", private_randomness=False), "privacy.other_entries.0.private_randomness"),
    "a chain across two partitions": (another_partition, "privacy.entries.2.split"),
    "one entry that is listed twice": (same_id, "privacy.other_entries.0.entry: [0-9a-f]{32} is listed twice"),
    "another licence": (
        lambda s: s["data"]["tables"][0].update(licence="public domain"), "data.tables.0.licence: stated"),
    "no public artefacts": (lambda s: s["data"].update(artefacts=[]), "data.artefacts: stated"),
    "fewer public artefacts": (lambda s: s["data"]["artefacts"].pop(0), "data.artefacts: stated"),
    "other declared mixture settings": (
        lambda s: s["config"]["mixture"]["settings"].update(learning_rate=0.7), "settings_mixture.json: choice"),
    "other declared fine-tuning settings": (
        lambda s: s["config"]["finetune"]["settings"].update(learning_rate=0.7), "settings_finetune.json: choice"),
    "other parts": (lambda s: s["privacy"]["entries"][1].update(parts=["finetune", "mixing"]), "entries.1.parts"),
    "fewer points that are not covered": (lambda s: s["privacy"]["not_covered"].pop(0), "not_covered"),
    "a study": (lambda s: s["config"].update(mode="study"), "config"),
    "an unknown field": (lambda s: s["privacy"].update(note="trust me"), "trust me|note"),
    "a private path": (lambda s: s["config"]["private"]["table"].update(path="/data/x"), "config.private.table.path"),
    "another task": (lambda s: s["bundle"].update(task="well"), 'bundle.task: stated "well", derived "ill"'),
}  # fmt: skip


@pytest.mark.parametrize("what", EDITS)
def test_verify_refuses(what, copy):
    change, words = EDITS[what]
    assert re.search(words.replace("(", r"\(").replace(")", r"\)"), edit(copy, change))


def test_verify_refuses_files_that_are_missing_added_linked_or_edited(copy):
    original = {path.name: path.read_bytes() for path in copy.iterdir()}

    def attempt(name: str, data: bytes | None, sums: bool = True) -> str:
        if data is None:
            (copy / name).unlink()
        else:
            (copy / name).write_bytes(data)
        if sums:
            resum(copy)
        text = refused(copy)
        (copy / name).unlink(missing_ok=True)
        for each, content in original.items():
            (copy / each).write_bytes(content)
        return text

    assert "not listed" in attempt("notes.txt", b"x", sums=False)
    assert "files: stated" in attempt("notes.txt", b"x")
    assert "no such file" in attempt("metrics.json", None, sums=False)
    assert "metrics.json: stated not listed" in attempt("SHA256SUMS", b"", sums=False)
    assert "missing from the bundle" in attempt("statement.schema.json", None)
    assert "was edited" in attempt("statement.json", original["statement.json"].replace(b"\n  ", b"\n ", 1))
    assert "not valid JSON" in attempt("statement.json", b"{")
    assert "the page that follows" in attempt(
        "statement.md", original["statement.md"].replace(b"epsilon", b"alpha", 1)
    )
    assert "schema of this version" in attempt("statement.schema.json", b"{}")
    (copy / "link").symlink_to("weights.json")
    assert "plain files only" in refused(copy)


def test_verify_looks_into_the_files(copy):
    def swap(name, data):
        before = (copy / name).read_bytes()
        text = replaced(copy, name, data)
        (copy / name).write_bytes(before)
        return text

    weights = json.loads((copy / "weights.json").read_text())

    def with_weights(one, two):
        return artifacts.json_bytes({**weights, "weights": {"one": one, "two": two}})

    assert "add up to 1" in swap("weights.json", with_weights(0.5, 0.6))
    assert "add up to 1" in swap("weights.json", with_weights(1.5, -0.5))
    assert "derived from the trajectory" in swap("weights.json", with_weights(0.5, 0.5))
    bad = save({"weight": np.array([1.0, np.nan], dtype=np.float32)})
    assert "not finite" in swap("model.safetensors", bad)
    assert "not readable" in swap("model.safetensors", b"no tensors")
    settings = json.loads((copy / "settings_finetune.json").read_text())
    longer = {**settings, "choice": {**settings["choice"], "steps": 21}}
    assert "settings_finetune.json: choice: stated" in swap("settings_finetune.json", artifacts.json_bytes(longer))
    private = {**settings, "chosen_by": "private_uncharged"}
    assert "derived from the config 'user_declared'" in swap("settings_finetune.json", artifacts.json_bytes(private))
    assert "notes.txt: must not be in this bundle" in replaced(copy, "notes.txt", b"x")


def test_settings_that_the_config_declares_are_not_passed_off_as_chosen_on_stand_ins(copy):
    """Files and statement agree with one another; the config has no stand-ins at all."""
    for name in ("settings_mixture.json", "settings_finetune.json"):
        values = json.loads((copy / name).read_text())
        (copy / name).write_bytes(artifacts.json_bytes({**values, "chosen_by": "public_standin"}))
    stated = statement_of(copy)
    stated["privacy"]["tuning"] = "public_standin"
    rewrite(copy, stated, expert=True)
    data = (copy / "settings_mixture.json").read_bytes()
    assert replaced(copy, "settings_mixture.json", data) == (
        "settings_mixture.json: chosen_by: stated 'public_standin', derived from the config 'user_declared'"
    )


@pytest.mark.parametrize(
    ("name", "choice", "sound"),
    [
        ("mixture", {"clip": 4.0, "steps": 25, "learning_rate": 0.5}, True),
        ("mixture", {"clip": 4.0, "steps": 26, "learning_rate": 0.5}, False),
        ("mixture", {"clip": 4.0, "steps": 25}, False),
        ("mixture", None, False),
        ("finetune", None, True),
        ("finetune", {"learning_rate": 0.5, "steps": 40, "batch": 125, "clip": 0.5}, True),
        ("finetune", {"learning_rate": 0.5, "steps": 40, "batch": 125, "clip": 0.7}, False),
        ("finetune", "none", False),
    ],
)  # fmt: skip
def test_settings_chosen_on_stand_ins_are_candidates_of_the_public_search(name, choice, sound, tmp_path):
    config = validate(raw_config(tmp_path, public__standins=STANDINS, mixture__settings=None, finetune__settings=None))
    choices = {"mixture": {"clip": 6.0, "steps": 100, "learning_rate": 1.0}, "finetune": None, name: choice}
    files = {f"settings_{each}.json": artifacts.json_bytes({"chosen_by": "public_standin", "choice": value})
             for each, value in choices.items()}  # fmt: skip
    if sound:
        assert payload.settings(files, config)[name]["choice"] == choice
    else:
        with pytest.raises(UserError, match=f"settings_{name}.json: choice: .* no candidate of tune.{name}"):
            payload.settings(files, config)


def test_metrics_and_their_standard_errors_follow_from_the_noisy_sum(copy):
    metrics, released = (json.loads((copy / name).read_text()) for name in ("metrics.json", "released.json"))
    entry = statement_of(copy)["privacy"]["entries"][2]
    assert released["noise_std"] == entry["noise_multiplier"] * entry["clip"]

    def swap(name, value):
        before = (copy / name).read_bytes()
        text = replaced(copy, name, artifacts.json_bytes(value))
        (copy / name).write_bytes(before)
        return text

    for metric in ("loss", "accuracy", "auc"):
        for key in ("value", "noise_standard_error"):
            better = {**metrics, metric: {**metrics[metric], key: metrics[metric][key] * 1.0001}}
            assert f"metrics.json: {metric}.{key}: stated" in swap("metrics.json", better)
    assert "each with its noise_standard_error" in swap("metrics.json", {**metrics, "f1": metrics["auc"]})
    sums = released["noisy_sum"]
    assert "derived from released.json" in swap("released.json", {**released, "noisy_sum": [sums[0] + 9, *sums[1:]]})
    assert "released.json: noise_std: stated" in swap("released.json", {**released, "noise_std": 1.0})
    assert "22 finite numbers" in swap("released.json", {**released, "noisy_sum": sums[:-1]})
    assert "22 finite numbers" in swap("released.json", {**released, "units": 800})


@pytest.mark.parametrize(
    "name", ["weights.json", "metrics.json", "released.json", "trajectory.parquet", "settings_mixture.json"]
)
@pytest.mark.parametrize("data", [b"[]", b"{", b'{"weights": {"one": "x", "two": {}}, "auc": 1}', b"\xff"])
def test_a_file_of_another_form_is_refused_in_one_line(name, data, copy):
    replaced(copy, name, data)


def test_rule_11_a_statement_that_hides_a_selection_by_position_is_refused(empty):
    table = {"kind": "idx", "images": "images.idx", "labels": "labels.idx", "rows": [0, 4000]}
    config = validate(raw_config(empty, private__table=table, private__unit="record"))
    make_chain(config, Ledger.of(config))
    folder, _ = bundle.release(config, Ledger.of(config), DAY)
    assert statement_of(folder)["config"]["private"]["table"]["images"] == "withheld"

    original = statement_of(folder)

    def without(words):
        kept = [point for point in original["privacy"]["not_covered"] if words not in point]
        return lambda stated: stated["privacy"].update(not_covered=kept)

    assert "must say that private.table.rows selects by position" in edit(folder, without("by position"))
    assert "must say that ids come from content" in edit(folder, without("ids come from content"))


def test_what_a_target_covers_alongside_is_exactly_what_the_chain_released_before(empty):
    config = validate(raw_config(empty, privacy__composition="sequential"))
    make_chain(config, Ledger.of(config))
    folder, _ = bundle.release(config, Ledger.of(config), DAY)

    def a_little_more_noise(stated):
        stated["privacy"]["entries"][1]["alongside"][0]["noise_multiplier"] *= 1 + 1e-6

    assert "privacy.entries.1.alongside.0.noise_multiplier: stated" in edit(folder, a_little_more_noise)


def test_rule_17_a_delta_that_is_not_below_one_over_the_units_is_refused(copy):
    """Consistent in all that the statement says, but a mechanism that publishes one unit in full would fit it."""

    def fewer_units(stated):
        stated["dataset"]["nominal_units"] = stated["config"]["private"]["nominal_units"] = 20000

    def many_units(stated):
        stated["dataset"]["nominal_units"] = stated["config"]["private"]["nominal_units"] = 100_000

    assert "nominal_units: stated" in edit(copy, fewer_units)
    assert "is not below 1/nominal_units" in edit(copy, many_units)
