"""Checking a bundle as a third party: every number of its statement is derived again, from nothing but the bundle.

No checkout, config, ledger or private data is needed. What is derived, and from what:

* files: their hashes and lengths; ``statement.md`` from ``statement.json``;
* dataset, cap, task, method, the chain's cells, public tables and the names of public artefacts: from the config in
  the statement, which must be a valid one; so are settings that it declares, and which others it could have chosen;
* mechanisms of the chain: from that config and the settings files, the noise calibrated anew; their accounting events
  from the mechanisms; the same for other and aborted entries, as far as their own parameters tell;
* epsilon, delta, curve, groups, other adjacencies, the dataset's total, what the cap has left: from the events;
* weights from their iterates; metrics with their standard errors from the noisy sum, whose noise is its mechanism's;
* of a language model: the form of its weights, its architecture, the model card; which sources are mixed, from the
  config and those that the statement says were left out; the tokenizer's hash, wherever it is named.

What nobody can derive, and how it is guarded. ``sha256`` (of the rest of statement.json) shows any single change:

* the date and the versions; ids, and digests of public artefacts;
* config values that no mechanism depends on (network sizes, public training, tuning candidates, threads);
* iterates, model and noisy sum: they are random; the tokenizer's entries; that a source could not be had;
* of ``other_entries`` and ``aborted``, whose configs are not in the bundle: task, method, clip, grid_bits,
  nominal_units, which of the parts that fit their stage, and the sampler's total variation;
* that the owner listed every release and abortion, and ran the code that the statement names: whoever rewrites a whole
  statement consistently can claim anything. A third party trusts the owner for that, and for the records behind it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from dpmixmin import __version__, artifacts
from dpmixmin.config import Config, validate
from dpmixmin.data.split import partition_name
from dpmixmin.errors import UserError
from dpmixmin.privacy import statement as statements
from dpmixmin.privacy.accounting import LEAST_NOISE
from dpmixmin.privacy.events import to_json
from dpmixmin.privacy.mechanisms import MechanismSpec, Spec
from dpmixmin.release import page, payload, schema
from dpmixmin.release.derive import (
    chain_cells,
    expected,
    has_private_mixture,
    mixed,
    public_artefacts,
    public_config,
    public_tables,
    spec_of,
    spent_at,
)

SUMS = "SHA256SUMS"
PAGE = "statement.md"
STATEMENT = "statement.json"
FORM = "statement.schema.json"

CLOSE = 1e-9
"""Relative difference up to which a derived number counts as the stated one."""

CALIBRATED = 2.5e-3
"""The same for noise that a search found: it may end elsewhere in its window (see ``accounting.calibrate``)."""

_PARTS_OF_STAGE = {
    "mixture": (["mixing"], ["finetune", "mixing"]),
    "finetuned": (["finetune"], ["finetune", "mixing"]),
    "evaluation": (["test"],),
}
"""What an entry of each stage may have read (see cells.py)."""

_CALIBRATED_KEYS = frozenset({"noise_multiplier"})


def checks(folder: str | Path) -> Iterator[str]:
    """Check a bundle; yield one line, ``ok: …``, for each thing that holds.

    Args:
        folder: the bundle.

    Raises:
        UserError: the first thing that does not: its place, what is stated and what is derived.
    """
    folder = Path(folder)
    files = _read(folder)
    yield _check_sums(files)
    statement = _parse(files)
    yield _check_form(files, statement)
    yield _check_files(files, statement)
    config = _check_config(statement)
    yield "ok: dataset, cap, task, method and public data are those of the config; delta is below 1 over its units"
    yield _check_stamps(statement)
    yield _check_entries(statement, config)
    settings = payload.settings(files, config)
    yield _check_tuning(statement, settings)
    yield _check_mechanisms(statement)
    yield _check_chain(statement, config, {name: each["choice"] for name, each in settings.items()})
    yield _check_guarantee(statement, config)
    yield _check_cap(statement)
    for line in payload.check(files, statement, config, _measured(statement)):
        yield f"ok: {line}"


def first_difference(stated: Any, derived: Any, place: str, loose: frozenset[str] = frozenset()) -> str | None:
    """Return where two JSON values differ first, with both; numbers may differ by :data:`CLOSE`.

    Args:
        stated: in the statement.
        derived: what it should be.
        place: path of the value.
        loose: keys whose numbers may differ by :data:`CALIBRATED`.
    """
    if isinstance(stated, dict) and isinstance(derived, dict):
        for key in [*derived, *(key for key in stated if key not in derived)]:
            if key not in stated or key not in derived:
                return f"{place}.{key}: " + ("missing" if key not in stated else "must not be there")
            found = first_difference(stated[key], derived[key], f"{place}.{key}", loose)
            if found:
                return found
        return None
    if isinstance(stated, list) and isinstance(derived, list) and len(stated) == len(derived):
        pairs = enumerate(zip(stated, derived, strict=True))
        found = (first_difference(one, other, f"{place}.{i}", loose) for i, (one, other) in pairs)
        return next((text for text in found if text), None)
    tolerance = CALIBRATED if place.rpartition(".")[2] in loose else CLOSE
    if _is_number(stated) and _is_number(derived):
        same = math.isclose(stated, derived, rel_tol=tolerance)
    else:
        same = type(stated) is type(derived) and stated == derived
    return None if same else f"{place}: stated {_short(stated)}, derived {_short(derived)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "…"


def _agree(stated: Any, derived: Any, place: str, loose: frozenset[str] = frozenset()) -> None:
    found = first_difference(stated, derived, place, loose)
    if found:
        raise UserError(f"{STATEMENT}: {found}")


# -- files --------------------------------------------------------------------------------------------------------


def _read(folder: Path) -> dict[str, bytes]:
    """Return the files of a bundle; there may be nothing else in it."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name the folder that holds {STATEMENT}")
    files = {}
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or not path.is_file():
            raise UserError(f"{path.name}: a bundle holds plain files only")
        files[path.name] = path.read_bytes()
    for name in (SUMS, STATEMENT, FORM, PAGE):
        if name not in files:
            raise UserError(f"{name}: missing from the bundle")
    return files


def _check_sums(files: dict[str, bytes]) -> str:
    lines = [line.split("  ", 1) for line in files[SUMS].decode(errors="replace").splitlines()]
    if any(len(line) != 2 for line in lines) or len({line[-1] for line in lines}) != len(lines):
        raise UserError(f"{SUMS}: each line must be a hash, two spaces and a name, each name once")
    stated = {name: digest for digest, name in lines}
    for name in sorted(stated.keys() | (files.keys() - {SUMS})):
        derived = hashlib.sha256(files[name]).hexdigest() if name in files else "no such file"
        if stated.get(name, "not listed") != derived:
            raise UserError(f"{SUMS}: {name}: stated {stated.get(name, 'not listed')}, derived {derived}")
    return f"ok: {SUMS} lists all {len(stated)} files, and their hashes match"


def _parse(files: dict[str, bytes]) -> dict[str, Any]:
    try:
        statement = json.loads(files[STATEMENT])
        # The one way to write it: no key twice, no infinity, nothing hidden in the layout.
        canonical = artifacts.json_bytes(statement) == files[STATEMENT]
    except ValueError as error:
        raise UserError(f"{STATEMENT}: not valid JSON ({error})") from None
    if not canonical or not isinstance(statement, dict):
        raise UserError(f"{STATEMENT}: not written the way `release` writes it; it was edited")
    return statement


def _check_form(files: dict[str, bytes], statement: dict[str, Any]) -> str:
    import jsonschema

    if files[FORM] != schema.text().encode():
        raise UserError(
            f"{FORM}: is not the schema of this version ({__version__}); verify with the version that made "
            f"the bundle, {_short(statement.get('bundle', {}).get('versions', {}).get('dpmixmin'))}"
        )
    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema.schema()).iter_errors(statement))
    if error is not None:
        place = ".".join(str(step) for step in error.absolute_path) or "the statement"
        raise UserError(f"{STATEMENT}: {place}: {error.message[:300]}")
    return f"ok: {STATEMENT} follows {FORM}, the schema of dpmixmin {__version__}"


def _check_files(files: dict[str, bytes], statement: dict[str, Any]) -> str:
    listed = [
        {"name": name, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        for name, data in sorted(files.items()) if name not in (SUMS, STATEMENT, PAGE)
    ]  # fmt: skip
    _agree(statement["files"], listed, "files")
    rest = {key: value for key, value in statement.items() if key != "sha256"}
    _agree(statement["sha256"], artifacts.digest(rest), "sha256")
    if page.render(statement).encode() != files[PAGE]:
        raise UserError(f"{PAGE}: is not the page that follows from {STATEMENT}; it was edited")
    return f"ok: {STATEMENT} lists the other files and has its own digest; {PAGE} follows from it"


# -- what follows from the config ---------------------------------------------------------------------------------


def _check_config(statement: dict[str, Any]) -> Config:
    config = validate(statement["config"], f"{STATEMENT}: config")
    if config.mode != "deploy":
        raise UserError(f'{STATEMENT}: config.mode: stated "{config.mode}"; only mode deploy is released')
    _agree(statement["config"], public_config(config), "config")
    model, private = chain_cells(config)["finetuned"], config.private
    bundle = {"experiment": config.experiment, "task": model.task, "method": model.method}
    _agree({key: statement["bundle"][key] for key in bundle}, bundle, "bundle")
    dataset = {
        "name": private.name,
        "id": statement["dataset"]["id"],
        "unit": private.unit,
        "max_records_per_unit": private.max_records_per_unit,
        "nominal_units": private.nominal_units,
        "parts": private.parts.model_dump(),
    }
    _agree(statement["dataset"], dataset, "dataset")
    cap = {"epsilon": config.ledger.cap.epsilon, "delta": config.ledger.cap.delta, "spent": statement["cap"]["spent"]}
    _agree(statement["cap"], cap, "cap")
    _check_data(statement["data"], config)
    strict = config.privacy.charge_aborted
    _agree(statement["privacy"]["aborted_attempts_charged"], strict, "privacy.aborted_attempts_charged")
    points = " ".join(statement["privacy"]["not_covered"])
    if getattr(private.table, "rows", None) is not None and "by position" not in points:
        raise UserError(f"{STATEMENT}: privacy.not_covered: must say that private.table.rows selects by position")
    by_content = private.unit == "record" and getattr(private.table, "record_id", None) is None
    if by_content and "ids come from content" not in points:
        raise UserError(f"{STATEMENT}: privacy.not_covered: must say that ids come from content")
    return config


def _check_data(data: dict[str, Any], config: Config) -> None:
    """Tables and public artefacts are those of the config, without texts that it allows to be left out."""
    keys = {"tables", "artefacts", *(("tokenizer", "left_out") if config.text else ())}
    _agree(sorted(data), sorted(keys), "data (keys)")
    left_out = data.get("left_out", [])
    if left_out:
        may = config.text.missing == "leave_out"
        _agree(left_out, [name for name in config.sources if name in left_out] if may else [], "data.left_out")
    if len(mixed(config, left_out)) < 2:
        raise UserError(f"{STATEMENT}: data.left_out: stated {left_out}; fewer than two sources would be mixed")
    names = [each["name"] for each in data["artefacts"]]
    derived = {"tables": public_tables(config, left_out), "artefacts": public_artefacts(config, left_out)}
    _agree({"tables": data["tables"], "artefacts": names}, derived, "data")


def _check_stamps(statement: dict[str, Any]) -> str:
    stamp = statement["privacy"]["stamp"]
    if stamp != statements.PRIVATE_STAMP:
        raise UserError(f'{STATEMENT}: privacy.stamp: stated "{stamp}", must be "{statements.PRIVATE_STAMP}"')
    return "ok: stamped private: the noise came from the operating system"


def _check_entries(statement: dict[str, Any], config: Config) -> str:
    """What each entry says about itself fits the others: ids, unit, randomness, the parts that its stage reads."""
    privacy, ids = statement["privacy"], set()
    for key in ("entries", "aborted", "other_entries"):
        for number, entry in enumerate(privacy[key]):
            place = f"privacy.{key}.{number}"
            if entry["entry"] in ids:
                raise UserError(f"{STATEMENT}: {place}.entry: {entry['entry']} is listed twice")
            ids.add(entry["entry"])
            _agree(entry["unit"], config.private.unit, f"{place}.unit")
            _agree(entry["private_randomness"], True, f"{place}.private_randomness")
            stage, known = entry["cell"]["stage"], _PARTS_OF_STAGE.get(entry["cell"]["stage"], ())
            if sorted(entry["parts"]) not in known:
                fits = " or ".join("+".join(parts) for parts in known) or "no known stage"
                raise UserError(
                    f"{STATEMENT}: {place}.parts: stated {'+'.join(entry['parts'])}, stage {stage} reads {fits}"
                )
    return f"ok: the {len(ids)} entries are different releases about one unit, on the parts that their stages read"


def _check_tuning(statement: dict[str, Any], settings: dict[str, dict]) -> str:
    derived = statements.least_public(*(each["chosen_by"] for each in settings.values()))
    _agree(statement["privacy"]["tuning"], derived, "privacy.tuning")
    if "private_uncharged" in (derived, statement["config"]["privacy"]["settings_from"]):
        raise UserError(f"{STATEMENT}: privacy.tuning: private_uncharged: settings were chosen on private scores")
    return f"ok: no private score chose a setting ({derived})"


def _check_chain(statement: dict[str, Any], config: Config, choices: dict[str, dict | None]) -> str:
    """The chain's entries are those that config and settings demand, with the parameters that follow from them."""
    try:
        wanted = expected(config, choices, statement["data"].get("left_out", []))
    except (TypeError, ValueError, ArithmeticError) as error:
        words = str(error).splitlines()[0]
        raise UserError(f"{STATEMENT}: config: no mechanism follows from it and the settings: {words}") from None
    entries = statement["privacy"]["entries"]
    _agree([e["cell"]["stage"] for e in entries], [w.cell.stage for w in wanted], "privacy.entries (stages)")
    # One partition for all: under two, parts of different names overlap.
    split = partition_name(entries[0]["split"].partition("/")[0], config.private) if entries else ""
    for number, (entry, want) in enumerate(zip(entries, wanted, strict=True)):
        place = f"privacy.entries.{number}"
        derived = {
            "entry": entry["entry"],
            "cell": want.cell.coordinates(),
            "parts": sorted(want.parts),
            "split": split,
            "release": config.privacy.release,
            **want.spec.describe(),
            "events": [to_json(event) for event in want.spec.events()],
            "sampler_total_variation": want.total_variation,
            "private_randomness": True,
        }
        _agree(entry, derived, place, loose=_CALIBRATED_KEYS)
        earlier = [each for each in entries[:number] if set(each["parts"]) & set(entry["parts"])]
        _agree(entry["alongside"], [event for each in earlier for event in each["events"]], f"{place}.alongside")
    kind = "a private mixture" if has_private_mixture(config) else f"method {config.methods[0]}"
    return f"ok: the {len(entries)} charged releases ({kind}) have the parameters that config and settings demand"


# -- accounting ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _spent(spec: Spec) -> float:
    return spec.spent()


def _check_mechanisms(statement: dict[str, Any]) -> str:
    """Each entry's events follow from its mechanism, which spends what its target says: no more, and not much less."""
    privacy, count = statement["privacy"], 0
    for key in ("entries", "aborted", "other_entries"):
        for number, entry in enumerate(privacy[key]):
            place, count = f"privacy.{key}.{number}", count + 1
            try:
                spec = spec_of(entry)
                spent = _spent(spec)
            except ValueError as error:
                raise UserError(f"{STATEMENT}: {place}: {error}") from None
            _agree(entry["events"], [to_json(event) for event in spec.events()], f"{place}.events")
            if spent < (1 - _slack(spec)) * spec.epsilon:
                raise UserError(
                    f"{STATEMENT}: {place}: stated target epsilon {spec.epsilon!r} at delta {spec.delta!r}, derived "
                    f"{spent!r}: the noise was not calibrated to it"
                )
    return f"ok: the accounting events of all {count} entries follow from their mechanisms, within their targets"


def _measured(statement: dict[str, Any]) -> Spec | None:
    """Return the mechanism of the chain's charged evaluation."""
    entries = statement["privacy"]["entries"]
    return next((spec_of(entry) for entry in entries if entry["cell"]["stage"] == "evaluation"), None)


def _slack(spec: Spec) -> float:
    """Return how far, relatively, a calibrated mechanism may stay below its target."""
    if not isinstance(spec, MechanismSpec):
        return 1.0
    if spec.sampling_rate == 1 and not spec.alongside:
        return CLOSE
    return 1.0 if spec.noise_multiplier <= LEAST_NOISE * (1 + CLOSE) else CALIBRATED


def _check_guarantee(statement: dict[str, Any], config: Config) -> str:
    privacy = statement["privacy"]
    derived = statements.build(
        privacy["entries"],
        delta=config.privacy.delta,
        tuning=privacy["tuning"],
        aborted=privacy["aborted"],
        charge_aborted=privacy["aborted_attempts_charged"],
        others=privacy["other_entries"],
        caveats=[point for point in privacy["not_covered"] if point not in statements.ALWAYS_OPEN],
    )
    _agree(privacy, derived, "privacy")
    chain, total = privacy["guarantee"], privacy["dataset_total"]
    return (
        f"ok: every number of the guarantee follows from the entries: epsilon {chain['epsilon']:.6g} at delta "
        f"{chain['delta']:.6g}; the whole dataset {total['epsilon']:.6g}"
    )


def _check_cap(statement: dict[str, Any]) -> str:
    cap = statement["cap"]
    spent = spent_at(statement["privacy"], cap["delta"])
    _agree(cap["spent"], spent, "cap.spent")
    if spent > cap["epsilon"]:
        raise UserError(f"{STATEMENT}: cap.epsilon: stated {cap['epsilon']:g}, but {spent:.6g} was spent")
    return f"ok: the dataset has spent epsilon {spent:.6g} of its cap of {cap['epsilon']:g} at delta {cap['delta']:g}"
