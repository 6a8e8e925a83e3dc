"""Helpers of the rules: the validated config, the jobs, what they ask a cluster for, code inputs. No rules here.

Cells share jobs as dpmixmin/jobs.py says. Each job has its own rule with a static list of outputs, so asking for one
cell runs its job; cells that the ledger has committed are only copied.
"""

import os
import sys
from pathlib import Path
from shlex import quote

sys.path.insert(0, str(Path(workflow.basedir) / "src"))

from dpmixmin import cells, jobs, provenance
from dpmixmin.artifacts import canonical, digest, write_json
from dpmixmin.config import PLACES, validate
from dpmixmin.errors import UserError
from dpmixmin.lock import hold_while_running
from dpmixmin.paths import GPT2_FILES, Paths

try:
    CONFIG = validate(dict(config), " ".join(os.path.relpath(path) for path in workflow.configfiles) or "config")
    JOBS = jobs.jobs_of(CONFIG)
except UserError as error:
    sys.exit(f"error: {error}")

PATHS = Paths(CONFIG.experiment)
CELLS = cells.cells_of(CONFIG)
RESOLVED = PATHS.config(digest(CONFIG.dump())[:12])
TARGETS = {}

if CONFIG.privacy.delta >= 1 / CONFIG.private.nominal_units:
    print(
        f"warning: privacy.delta {CONFIG.privacy.delta:g} is not below 1/nominal_units: a mechanism that publishes "
        "one record in full could meet it; choose a smaller delta",
        file=sys.stderr,
    )

# A run started by hand holds the lock that `make demo` waits for before it unlocks Snakemake's folder.
RUN_LOCK = hold_while_running()

# What only this user may see: sensitive tables, Snakemake's and Slurm's records of the jobs that read them, and the
# times of log lines: how long such a job takes may tell the number of records.
PRIVATE_FOLDERS = [
    ".snakemake",
    "logs",
    f"{PATHS.base}/logs",
    f"{PATHS.base}/private",
    f"{PATHS.base}/private/benchmarks",
]
for folder in PRIVATE_FOLDERS + ([f"{PATHS.base}/study"] if CONFIG.mode == "study" else []):
    os.makedirs(folder, mode=0o700, exist_ok=True)
    os.chmod(folder, 0o700)

# The stages read the merged and validated config, under a name that says its content.
if not os.path.exists(RESOLVED):
    write_json(RESOLVED, CONFIG.dump())

# Jobs use the Python that runs Snakemake, and this checkout's code, wherever they run. A prefix of our own replaces
# Snakemake's, so strict mode is said again: without it a failed stage in front of `tee` would count as a success.
# A cluster's SIGTERM is for the stage, which saves its state and ends; the shell and `tee` wait for that.
shell.prefix(
    f"set -euo pipefail; trap '' TERM; "
    f'export PATH={quote(str(Path(sys.executable).parent))}:"$PATH" '
    f"PYTHONPATH={quote(str(Path(workflow.basedir) / 'src'))} DPMIXMIN_ROOT={quote(str(workflow.basedir))} "
    f"DPMIXMIN_CONFIG={quote(RESOLVED)} OMP_NUM_THREADS={CONFIG.threads} "
    f"DPMIXMIN_PROCESSES={CONFIG.compute.devices} DPMIXMIN_NODES={CONFIG.compute.nodes}; "
)


def stage_of(name):
    """Return the stage that does a step for this run's kind of data: labels, or texts."""
    return f"text_{name}" if CONFIG.text else name


def code_of(stage):
    """Return the source files of a stage: inputs of its rule, so that an edit reruns it and nothing else."""
    return [os.path.relpath(path) for path in provenance.code_of(stage)]


def subtree(stage, task=""):
    """Return the config that a stage depends on, as one parameter: a change elsewhere does not rerun it."""
    return canonical(CONFIG.subtree(stage, task))


def jobs_of(stage):
    """Return the jobs that make the cells of one stage."""
    return [job for job in JOBS if job.stage == stage]


def asks(step, **kind):
    """Return what a rule asks the cluster for."""
    return jobs.resources(CONFIG, step, **kind)


def local_files(*tables):
    """Return the files of these tables that lie outside the data cache: inputs, so that a new file is noticed."""
    named = [getattr(t, key) for t in tables if t is not None and t.kind != "hub" for key in PLACES.get(t.kind, ())]
    return [os.path.expanduser(path) for path in named if path is not None and ":" not in path]


def text_files():
    """Return the files of the public texts; where missing ones are left out, those that are there."""
    found = local_files(*CONFIG.public.texts.values())
    leave_out = CONFIG.text and CONFIG.text.missing == "leave_out"
    return [path for path in found if os.path.exists(path) or not leave_out]


def files_of(folders, *names):
    """Return these files of these folders; every artefact also has a manifest."""
    return [f"{folder}/{name}" for folder in folders for name in (*names, "manifest.json")]


def folders_of(chosen):
    """Return the folders of cells."""
    return [cell.folder(PATHS) for cell in chosen]


def seeds_of(chosen):
    """Return the seeds of cells, each once."""
    return sorted({cell.seed for cell in chosen})


def mixtures_behind(chosen):
    """Return the mixture cells behind models, each once."""
    found = [cells.mixture_cell(CONFIG, c.task, c.method, c.epsilon, c.seed) for c in chosen]
    return list(dict.fromkeys(cell for cell in found if cell is not None))


def pretrained_behind(chosen):
    """Return the pretrained models behind fine-tuned ones, each once."""
    return list(dict.fromkeys(cells.pretrained_cell(CONFIG, c.task, c.method, c.epsilon, c.seed) for c in chosen))


def models_of(task):
    """Return every cell that a task's evaluation reads."""
    return [cell for cell in CELLS if cell.task in ("", task)]


def mixture_audits(task):
    """Return the folders of one task's mixture audits."""
    return [PATHS.audit(ROOM, "mixture", task=c.task, eps=c.epsilon) for c in AUDITED_MIXTURES if c.task == task]


def training_audits(chosen):
    """Return the folders of audits of fine-tuning."""
    return [PATHS.audit(ROOM, "training", task=c.task, method=c.method, eps=c.epsilon) for c in chosen]


def finetuned_of(task):
    """Return the fine-tuned cells of one task."""
    return cells.select(CELLS, stage="finetuned", task=task)


# What is audited, and where the audits lie.
ROOM = cells.audits_room(CONFIG)
STUDIED = CONFIG.mode == "study"
AUDITED_MIXTURES = cells.audited_mixtures(CONFIG)
AUDITED_TRAININGS = cells.audited_trainings(CONFIG)
AUDIT_FILES = ("audit.json", "scores.parquet")

# What a kind of data adds: names of files, and of the artefacts that several rules read.
if CONFIG.text:
    MODEL = GPT2_FILES
    CARD = ("README.md",)
    SAMPLED = ("sampled.json",)
    SOURCES = [f"{PATHS.text(name)}/documents.parquet" for name in CONFIG.sources]
    STANDINS = SOURCES
    TOKENIZER = [f"{PATHS.tokenizer()}/tokenizer.json"]
    PROXIES = [f"{PATHS.proxy(name)}/manifest.json" for name in CONFIG.sources]
else:
    MODEL, CARD, SAMPLED, TOKENIZER = ("model.safetensors",), (), (), []
    SOURCES = [f"{PATHS.source('sources')}/records.parquet"]
    STANDINS = [f"{PATHS.source('standins' if CONFIG.public.standins else 'sources')}/records.parquet"]
    PROXIES = [f"{PATHS.proxy()}/model.safetensors"]

WEIGHTS = ("weights.json", "trajectory.parquet", "privacy.json")
PRETRAINED = (*MODEL, *CARD, *SAMPLED, "loss.parquet", "privacy.json")
FINETUNED = (*MODEL, *CARD, "privacy.json")
EVALUATION = ("metrics.json", "released.json", "privacy.json")
SETTINGS = ("settings.json", "curve.parquet")
SUMMARY = ("audits.csv", "table.csv", "audits.txt", "index.html")
if AUDITED_MIXTURES:
    SUMMARY += tuple(f"figure_{name}.{kind}" for name in ("tradeoff", "audit_bounds") for kind in ("svg", "png"))
FILES = {"mixture": WEIGHTS, "pretrained": PRETRAINED, "finetuned": FINETUNED}
TUNED_MIXTURE = CONFIG.mixture.settings is None
TUNED_FINETUNE = CONFIG.finetune.settings is None
