"""Attack the mixture weights: many runs with and without a canary, with and without noise (DP-MixMin paper, A.8).

Reads: the mixture's settings; in a study the prediction table of the first seed (mixing part, or all of train under
sequential composition), in a deployment public stand-ins and the proxies. Writes, per epsilon,
``audits/mixture/task=…/eps=…/{audit.json,scores.parquet}`` in ``study/``, in a deployment in ``public/``.
Spends nothing: nothing that is drawn here is released.
"""

from __future__ import annotations

from dpmixmin import artifacts
from dpmixmin.audit import subjects
from dpmixmin.audit.evidence import of_mixture
from dpmixmin.audit.mixture import audit_mixture
from dpmixmin.audit.report import publish
from dpmixmin.audit.trajectories import TwinDiffers
from dpmixmin.cells import audited_mixtures, audits_room, select
from dpmixmin.config import Config
from dpmixmin.data.fetch import say
from dpmixmin.errors import UserError
from dpmixmin.paths import Paths
from dpmixmin.privacy.noise import NoiseSource
from dpmixmin.sections import MixtureSettings
from dpmixmin.specs import mixture_spec


def add_arguments(parser) -> None:
    """Add the stage's options."""
    parser.add_argument("--task", required=True, help="sensitive task")


def run(config: Config, args) -> None:
    """Audit the mixture of one task at every epsilon; the table is opened once."""
    paths = Paths(config.experiment)
    folder = paths.settings("mixture")
    settings = MixtureSettings(**artifacts.read_json(f"{folder}/settings.json")["choice"])
    parents = [artifacts.parent(folder)]
    cells = select(audited_mixtures(config), task=args.task)
    with subjects.mixture_table(config, paths, cells[0]) as (table, more):
        for cell in cells:
            spec = mixture_spec(config, settings, cell.epsilon)
            try:
                audit = audit_mixture(
                    table,
                    spec,
                    config.mixture.learner,
                    settings.learning_rate,
                    runs=config.audit.runs,
                    seed=config.audit.seed,
                    noise=NoiseSource(),
                    # Stand-in units of one record have no names, and nothing to choose among.
                    records_per_step=None if table.names is None else config.private.records_per_step,
                    workers=config.threads,
                )
            except TwinDiffers:
                raise UserError(
                    f"audit: the mixture learner `{config.mixture.learner}` does something else than its "
                    "audited twin (audit/trajectories.py): clipping, grid, noise, averaging or the update were "
                    "changed in one only. Do not release what it made; change both, or undo the change"
                ) from None
            found = of_mixture(audit, spec, cell)
            place = paths.audit(audits_room(config), "mixture", task=cell.task, eps=cell.epsilon)
            publish(place, "audit_mixture", config, found, audit.scores, [*parents, *more], spec=spec)
            say(f"  {cell.task} at epsilon {cell.epsilon:g}: {config.audit.runs} runs a world")
