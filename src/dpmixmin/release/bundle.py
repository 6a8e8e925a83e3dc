"""The bundle of one deployment: an allow-list of files, a statement for people and machines, and the hashes of all.

Nothing in it is derived from private records but through a charged mechanism, and no private artefact is named: no
hash, size, count or time. It is verified before it is published, and published by a rename: there is never half of
one. The same inputs give the same bundle; if only the day differs, the old one stays.
"""

from __future__ import annotations

import hashlib
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpmixmin import artifacts
from dpmixmin.config import Config
from dpmixmin.errors import UserError
from dpmixmin.paths import Paths
from dpmixmin.privacy.ledger import Ledger
from dpmixmin.release import language_model, page, schema, verify
from dpmixmin.release.chain import Chain, read_chain
from dpmixmin.release.derive import chain_cells, public_config, public_tables, spent_at

VERSIONS = ("dpmixmin", "torch", "opacus", "dp-accounting")
TEXT_VERSIONS = (*VERSIONS, "transformers")


def release(config: Config, ledger: Ledger, today: str | None = None) -> tuple[Path, bool]:
    """Bundle the chain of a deployment.

    Args:
        config: mode deploy.
        ledger: of its dataset.
        today: ISO date; default: the day in UTC.

    Returns:
        The bundle's folder, and whether it was written (False: it was there already).

    Raises:
        UserError: a reason not to release, see chain.py; or the dataset has spent more than the cap.
    """
    chain = read_chain(config, ledger)
    privacy = ledger.statement(chain.entries, delta=config.privacy.delta, tuning=chain.tuning)
    spent = spent_at(privacy, config.ledger.cap.delta)
    if spent > config.ledger.cap.epsilon:
        raise UserError(
            f"ledger.cap: this dataset has spent epsilon {spent:.4g} at delta {config.ledger.cap.delta:g}, above the "
            f"cap of {config.ledger.cap.epsilon:g}; nothing more is released from it unless its owner raises the cap"
        )
    folder, today = Path(Paths(config.experiment).bundle()), today or datetime.now(UTC).date().isoformat()
    if _written_on(folder) and _files(config, ledger, chain, privacy, spent, _written_on(folder)) == _read(folder):
        return folder, False
    _publish(folder, _files(config, ledger, chain, privacy, spent, today))
    return folder, True


def sums(files: dict[str, bytes]) -> bytes:
    """Return the text of ``SHA256SUMS`` (checked by ``sha256sum -c`` too)."""
    return "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files)).encode()


def _files(
    config: Config, ledger: Ledger, chain: Chain, privacy: dict[str, Any], spent: float, day: str
) -> dict[str, bytes]:
    """Return the whole bundle: name to content."""
    files = {**chain.files, "statement.schema.json": schema.text().encode()}
    if config.text:
        files["README.md"] = language_model.card(config, privacy, files)
    statement = _statement(config, ledger, chain, privacy, spent, day, files)
    files["statement.json"] = artifacts.json_bytes(statement)
    files["statement.md"] = page.render(statement).encode()
    return {**files, "SHA256SUMS": sums(files)}


def _statement(
    config: Config,
    ledger: Ledger,
    chain: Chain,
    privacy: dict[str, Any],
    spent: float,
    day: str,
    files: dict[str, bytes],
) -> dict[str, Any]:
    model = chain_cells(config)["finetuned"]
    statement = {
        "bundle": {
            "format": schema.FORMAT,
            "experiment": config.experiment,
            "task": model.task,
            "method": model.method,
            "created": day,
            "versions": {name: chain.versions[name] for name in (TEXT_VERSIONS if config.text else VERSIONS)},
        },
        "dataset": {
            "name": config.private.name,
            "id": ledger.dataset_id,
            "unit": config.private.unit,
            "max_records_per_unit": config.private.max_records_per_unit,
            "nominal_units": config.private.nominal_units,
            "parts": config.private.parts.model_dump(),
        },
        "privacy": privacy,
        "cap": {"epsilon": config.ledger.cap.epsilon, "delta": config.ledger.cap.delta, "spent": spent},
        "data": {
            "tables": public_tables(config, chain.left_out),
            "artefacts": [{"name": name, "sha256": digest} for name, digest in chain.public.items()],
            **(language_model.facts(files, chain.left_out) if config.text else {}),
        },
        "config": public_config(config),
        "files": [
            {"name": name, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
            for name, data in sorted(files.items())
        ],
    }  # fmt: skip
    return {**statement, "sha256": artifacts.digest(statement)}


def _written_on(folder: Path) -> str | None:
    """Return the day of the bundle that lies there, if one does."""
    try:
        return artifacts.read_json(folder / "statement.json")["bundle"]["created"]
    except (UserError, KeyError, TypeError):
        return None


def _read(folder: Path) -> dict[str, bytes]:
    """Return what lies in a folder; what is no file counts as an empty one, so it is never taken for the bundle."""
    return {path.name: path.read_bytes() if path.is_file() else b"" for path in folder.iterdir()}


def _publish(folder: Path, files: dict[str, bytes]) -> None:
    """Write the bundle beside its place, verify it there, and move it in; leftovers of a killed run are removed."""
    new, old = folder.with_name(".bundle.new"), folder.with_name(".bundle.old")
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        for name, data in files.items():
            artifacts.write_bytes(new / name, data)
        try:
            for _ in verify.checks(new):
                pass
        except UserError as error:
            raise UserError(f"the bundle would not verify, so nothing was published: {error}") from None
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    finally:
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
