"""Check a bundle: what a third party runs, without config, checkout, ledger or private data."""

from __future__ import annotations

from dpmixmin.release import verify


def add_arguments(parser) -> None:
    """Add the stage's options."""
    parser.add_argument("bundle", metavar="BUNDLE", help="folder of the bundle")


def run(config: None, args) -> None:
    """Print one line for each check; the first that fails is an error."""
    for line in verify.checks(args.bundle):
        print(line, flush=True)
    print("verified: every number of the statement follows from the public parameters in the bundle", flush=True)
