"""Command line: ``python -m dpmixmin STAGE [--config FILE] [options]``.

Each stage can be run by hand; Snakemake runs the same commands. A user's mistake is one line and exit status 1.
So are a signal and a full disk, after which the same command goes on from where it was. Anything else that fails in a
stage that reads sensitive records is shown by its kind and place only: its text could hold a value. The whole
traceback then goes to ``private/logs/``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path

from dpmixmin import interrupt
from dpmixmin.errors import UserError, disk_failure

STAGES = {
    "fetch": "get the data that the config names, or say where it must be",
    "sources": "prepare the public tables",
    "records": "prepare the sensitive table (private)",
    "split": "assign units to parts (private)",
    "proxy": "train the joint proxy on public data",
    "predict": "predict sensitive records with the proxy (private)",
    "tune_mixture": "choose the mixture's settings on public stand-ins",
    "tune_finetune": "choose a method's fine-tuning settings on public stand-ins",
    "mix": "learn mixture weights (mechanism 1)",
    "pretrain": "pretrain on the weighted public mixture",
    "finetune": "fine-tune privately (mechanism 2)",
    "evaluate": "measure on the test part (study)",
    "evaluate_private": "measure on the test part, charged (deploy)",
    "text_sources": "prepare the public texts and the tokenizer",
    "text_records": "prepare the sensitive texts (private)",
    "text_proxy": "train the proxy of one text source",
    "text_predict": "score sensitive texts under every proxy (private)",
    "text_tune_mixture": "choose the mixture's settings on public texts",
    "text_tune_finetune": "choose fine-tuning settings on public texts",
    "text_pretrain": "pretrain a GPT-2 on the weighted public mixture",
    "text_finetune": "fine-tune a GPT-2 privately (mechanism 2)",
    "text_evaluate": "measure language models on the test part (study)",
    "text_evaluate_private": "measure a language model on the test part, charged (deploy)",
    "audit_mixture": "attack the mixture of a task (study; deploy: on public stand-ins)",
    "audit_training": "attack the fine-tuning of a method (study; deploy: on public stand-ins)",
    "audit_membership": "membership inference on the models of a task (study)",
    "audit_replay": "replay the mechanisms on neighbours (study; deploy: on public stand-ins)",
    "audit_summary": "put claims, bounds, controls and power in one table",
    "audit_gate": "fail if an audit refuted a claim",
    "report": "tables, figures and the page (study)",
    "status": "show what runs, how far it is, and where its log is",
    "budget": "show what was spent on the dataset, and what is left",
    "release": "write the bundle of a deployment's chain",
    "verify": "check a bundle: needs nothing but the bundle",
    "schema": "print the config's JSON schema",
}
_READ_RECORDS = {"records", "predict", "finetune", "evaluate", "evaluate_private"}
_AUDITS = {"audit_mixture", "audit_training", "audit_membership", "audit_replay"}
PRIVATE_STAGES = {"split", "mix", *_READ_RECORDS, *(f"text_{stage}" for stage in _READ_RECORDS), *_AUDITS}

WITHOUT_CONFIG = {"verify"}
"""Stages that a third party runs, with nothing but what it was given."""

PRINTED = {"status", "budget", "verify", "schema"}
"""Stages whose output is what they print, and whose work is quick."""


def main(arguments: list[str] | None = None) -> int:
    """Run one stage; return the exit status.

    Args:
        arguments: the command line; by default the process's own, whose signals and streams are then handled too.
    """
    if arguments is None:
        arguments = sys.argv[1:]
        interrupt.install()
        if arguments and arguments[0] not in PRINTED:
            sys.stdout, sys.stderr = _steady(sys.stdout), _steady(sys.stderr)
    try:
        return _run(arguments)
    except interrupt.Interrupted:
        print("stopped by a signal; the same command goes on from where it is", file=sys.stderr)
        return interrupt.STATUS
    except KeyboardInterrupt:
        print("stopped by Ctrl-C; the same command goes on from where it is", file=sys.stderr)
        return 128 + signal.SIGINT


def _run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="dpmixmin", description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="stage", required=True, metavar="STAGE")
    modules = {}
    for name, text in STAGES.items():
        command = commands.add_parser(name, help=text, description=text)
        if name not in WITHOUT_CONFIG:
            command.add_argument(
                "--config",
                default=os.environ.get("DPMIXMIN_CONFIG", "config/config.yaml"),
                help="config file (default: $DPMIXMIN_CONFIG, else config/config.yaml)",
            )
        # Only the stage that runs is imported: most need no torch.
        if arguments and arguments[0] == name:
            modules[name] = importlib.import_module(f"dpmixmin.stages.{name}")
            modules[name].add_arguments(command)
    parsed = parser.parse_args(arguments)
    os.umask(0o077 if parsed.stage in PRIVATE_STAGES else 0o022)
    if parsed.stage in PRIVATE_STAGES:
        # A warning, or a library's log line, would tell that some record has a wild value.
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
    from dpmixmin import progress
    from dpmixmin.config import load

    experiment = "?"
    try:
        config = load(parsed.config) if parsed.stage not in WITHOUT_CONFIG else None
        experiment = config.experiment if config else "?"
        if parsed.stage not in PRINTED:
            _show_progress(config, parsed)
        modules[parsed.stage].run(config, parsed)
        if parsed.stage in PRINTED:
            sys.stdout.flush()
        progress.end()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except MemoryError:
        print(
            f"error: {parsed.stage} ran out of memory: give it more (compute.memory_mb on a cluster)", file=sys.stderr
        )
        return 1
    except Exception as error:
        failure = disk_failure(error)
        if failure is not None:
            where = f"{failure.what}, in {parsed.stage} of experiment `{experiment}`"
            print(f"error: {where}: {failure.fix}, then run the same command again", file=sys.stderr)
            return 1
        if parsed.stage in PRINTED and isinstance(error, BrokenPipeError):
            # `| head` has read enough. What is still in the buffer has nowhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        if parsed.stage not in PRIVATE_STAGES:
            raise
        _report_privately(error, parsed.stage, experiment)
        return 1
    return 0


def _show_progress(config, parsed: argparse.Namespace) -> None:
    """Start the live-status file that ``status`` reads."""
    from dpmixmin import jobs, progress
    from dpmixmin.paths import Paths

    stages = {step: stage for stage, step in jobs.STAGES.items()}
    cells = jobs.own(config, stages[parsed.stage.removeprefix("text_")], parsed) if "part" in parsed else ()
    job = progress.job_of(parsed.stage, vars(parsed))
    progress.begin(progress.folder_of(Paths(config.experiment)), job, cells, stage=parsed.stage)


class _Steady(io.FileIO):
    """A stream that loses lines rather than end a training: `| tee` may be gone, or the log's disk full."""

    def write(self, data) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _steady(stream):
    """Return a text stream that writes to the same file and never raises."""
    if stream is None:
        return None
    stream.flush()
    raw = _Steady(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=True)


def _report_privately(error: Exception, stage: str, experiment: str) -> None:
    """Show an unexpected error without its text; keep the traceback in ``private/``.

    The file is written directly: after a mechanism was opened, the usual writers refuse. Nothing here may raise, or
    Python would print the original error with its text.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "dpmixmin" in frame.filename]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "unknown place"
    where = "not kept"
    with contextlib.suppress(Exception):
        folder = Path("results") / experiment / "private" / "logs"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = folder / f"{stage}-{os.getpid()}.traceback"
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            out.write("".join(traceback.format_exception(error)))
        where = str(log)
    print(
        f"internal error in {stage}: {type(error).__name__} at {place}; traceback (private): {where}", file=sys.stderr
    )


if __name__ == "__main__":
    sys.exit(main())
