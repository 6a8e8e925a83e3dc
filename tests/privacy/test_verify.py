"""Verifying a bundle as a third party: whatever number is changed, it is noticed (rules 16, 17, 21)."""

import json
import re
import subprocess
import sys
from pathlib import Path

import deployment
import numpy as np
import pytest
from deployment import DAY, ROOT, make_chain, raw_config, statement_of
from safetensors.numpy import save

from dpmixmin import artifacts
from dpmixmin.config import validate
from dpmixmin.errors import UserError
from dpmixmin.privacy.ledger import Ledger
from dpmixmin.release import bundle, page, verify

made, empty, released, copy = deployment.made, deployment.empty, deployment.released, deployment.copy


def rewrite(folder: Path, statement: dict, *, expert: bool) -> None:
    """Change the statement and the hashes; an expert also the statement's own digest and its page."""
    if expert:
        rest = {key: value for key, value in statement.items() if key != "sha256"}
        statement = {**rest, "sha256": artifacts.digest(rest)}
        (folder / "statement.md").write_text(page.render(statement))
    (folder / "statement.json").write_bytes(artifacts.json_bytes(statement))
    resum(folder)


def resum(folder: Path) -> None:
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "SHA256SUMS"}
    (folder / "SHA256SUMS").write_bytes(bundle.sums(files))


def refused(folder: Path) -> str:
    """Return the one line with which verify refuses a bundle."""
    with pytest.raises(UserError) as caught:
        list(verify.checks(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


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
    "privacy.epsilons", "privacy.delta", "evaluation.bins",
)  # fmt: skip
UNDERIVABLE = re.compile(
    rf"config\.(?!{'|'.join(map(re.escape, DERIVED_CONFIG))})"
    r"|privacy\.(other_entries|aborted)\.0\.(cell\.|clip$|grid_bits$|nominal_units$|sampler_total_variation$)"
)


def test_a_number_that_can_be_derived_is_noticed_whatever_the_tamperer_recomputes(copy, monkeypatch):
    """The tamperer also recomputes the statement's digest and its page; what remains is in verify's docstring."""
    rebuild, known = verify.statements.rebuild, {}

    def remembered(privacy: dict) -> dict:
        """The same section is derived once: most numbers of the config leave it as it is."""
        key = json.dumps(privacy)
        if key not in known:
            known[key] = rebuild(privacy)
        return known[key]

    monkeypatch.setattr(verify.statements, "rebuild", remembered)
    found = unnoticed(copy, expert=True)
    assert not [path for path in found if not UNDERIVABLE.match(path)]
    assert not [path for path in found if path.startswith(("bundle", "dataset", "cap", "files", "privacy.entries"))]


def edit(copy: Path, change) -> str:
    stated = statement_of(copy)
    change(stated)
    rewrite(copy, stated, expert=True)
    return refused(copy)


def test_verify_names_the_place_the_stated_and_the_derived_value(copy):
    epsilon = statement_of(copy)["privacy"]["guarantee"]["epsilon"]
    text = edit(copy, lambda s: s["privacy"]["guarantee"].update(epsilon=0.5))
    assert text == f"statement.json: privacy.guarantee.epsilon: stated 0.5, derived {epsilon!r}"


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


def replaced(copy: Path, name: str, data: bytes) -> str:
    """Swap a file as an expert would, and return the refusal."""
    (copy / name).write_bytes(data)
    stated = statement_of(copy)
    files = [path for path in sorted(copy.iterdir())
             if path.name not in ("SHA256SUMS", "statement.json", "statement.md")]  # fmt: skip
    stated["files"] = [{"name": p.name, "sha256": artifacts.file_digest(p), "bytes": p.stat().st_size} for p in files]
    rewrite(copy, stated, expert=True)
    return refused(copy)


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
    metric = {"value": 0.9, "noise_standard_error": 0.1}
    assert "auc: stated 7" in swap(
        "metrics.json", artifacts.json_bytes({"loss": metric, "accuracy": metric, "auc": {**metric, "value": 7}})
    )
    settings = json.loads((copy / "settings_finetune.json").read_text())
    longer = {**settings, "choice": {**settings["choice"], "steps": 21}}
    assert "privacy.entries.1" in swap("settings_finetune.json", artifacts.json_bytes(longer))
    private = {**settings, "chosen_by": "private_uncharged"}
    assert "privacy.tuning" in swap("settings_finetune.json", artifacts.json_bytes(private))
    assert "notes.txt: must not be in this bundle" in replaced(copy, "notes.txt", b"x")


@pytest.mark.parametrize("name", ["weights.json", "metrics.json", "trajectory.parquet", "settings_mixture.json"])
@pytest.mark.parametrize("data", [b"[]", b"{", b'{"weights": {"one": "x", "two": {}}, "auc": 1}', b"\xff"])
def test_a_file_of_another_form_is_refused_in_one_line(name, data, copy):
    replaced(copy, name, data)


def test_rule_11_a_statement_that_hides_a_selection_by_position_is_refused(empty):
    table = {"kind": "idx", "images": "images.idx", "labels": "labels.idx", "rows": [0, 4000]}
    config = validate(raw_config(empty, private__table=table, private__unit="record"))
    make_chain(config, Ledger.of(config))
    folder, _ = bundle.release(config, Ledger.of(config), DAY)
    assert statement_of(folder)["config"]["private"]["table"]["images"] == "withheld"

    def hide(stated):
        stated["privacy"]["not_covered"] = [p for p in stated["privacy"]["not_covered"] if "by position" not in p]

    assert "must say that private.table.rows selects by position" in edit(folder, hide)


def test_what_a_target_covers_alongside_is_exactly_what_the_chain_released_before(empty):
    config = validate(raw_config(empty, privacy__composition="sequential"))
    make_chain(config, Ledger.of(config))
    folder, _ = bundle.release(config, Ledger.of(config), DAY)

    def a_little_more_noise(stated):
        stated["privacy"]["entries"][1]["alongside"][0]["noise_multiplier"] *= 1 + 1e-6

    assert "privacy.entries.1.alongside.0.noise_multiplier: stated" in edit(folder, a_little_more_noise)


def test_rule_17_a_delta_that_is_not_below_one_over_the_units_is_warned_about(empty):
    config = validate(raw_config(empty, private__nominal_units=1000, privacy__delta=1e-3, ledger__cap={
        "epsilon": 3.0, "delta": 1e-3}))  # fmt: skip
    make_chain(config, Ledger.of(config))
    folder, _ = bundle.release(config, Ledger.of(config), DAY)
    warnings = [line for line in verify.checks(folder) if line.startswith("warning: ")]
    assert len(warnings) == 1
    assert "not below 1/1000" in warnings[0]
