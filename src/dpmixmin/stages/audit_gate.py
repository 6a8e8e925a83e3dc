"""The gate: stop a run in which an audit refuted a claim, or in which the strongest attack does not even work.

Reads: the findings of every audit. Writes: ``audits/gate/passed.json``, with the digests of the specs that passed
(`release` compares them with its chain's). With ``audit: report`` it only notes what failed. Touches nothing private.
"""

from __future__ import annotations

from dpmixmin import artifacts, provenance
from dpmixmin.audit import report
from dpmixmin.audit.finding import FALSE_ALARM, failed_names, failures, level
from dpmixmin.cells import audit_folders, audits_room
from dpmixmin.config import Config
from dpmixmin.data.fetch import say
from dpmixmin.errors import UserError
from dpmixmin.paths import Paths


def add_arguments(parser) -> None:
    """Nothing to add."""


def run(config: Config, args) -> None:
    """Judge all findings together."""
    paths = Paths(config.experiment)
    room, folders = audits_room(config), audit_folders(config, paths)
    findings = report.read(folders)
    failed = failures(findings)
    # A study's numbers come from sensitive records, and the log is public: it names what failed, no more (rule 20).
    shown = failed if config.mode == "deploy" else failed_names(findings)
    for sentence in shown:
        say(f"  audit: {sentence}")
    if failed and config.audit.gate == "required":
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise UserError(
            f"audit: {shown[0]}: the claim does not hold, or its control failed{more}; see "
            f"{paths.audit(room, 'summary')}/audits.txt. Do not release anything that this mechanism made; "
            "`audit: report` shows failures without stopping"
        )
    body = {
        "gate": config.audit.gate,
        "false_alarm": FALSE_ALARM,
        "level": level(findings),
        "findings": len(findings),
        "failures": failed,
        "specs": report.specs(folders),
    }
    manifest = artifacts.manifest(
        "audit_gate",
        config=config.shown("audit_gate"),
        code=provenance.code_digest("audit_gate"),
        parents=[artifacts.parent(folder) for folder in folders],
    )
    artifacts.publish(paths.audit(room, "gate"), {"passed.json": artifacts.json_bytes(body)}, manifest)
    say(f"audits: {len(failed)} failed")
