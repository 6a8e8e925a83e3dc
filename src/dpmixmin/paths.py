"""Every path of a run, in one place: the rules and the stages both import this module.

The first folder below ``results/{experiment}/`` is the artefact's privacy label (a *room*):
``public``, ``private``, ``released`` or ``study``. Below it, Hive-style ``key=value`` folders name the cell.
"""

from __future__ import annotations

import os
from pathlib import Path

from dpmixmin.errors import UserError

PUBLIC, PRIVATE, RELEASED, STUDY = "public", "private", "released", "study"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
GPT2_FILES = ("model.safetensors", "config.json", "generation_config.json", *TOKENIZER_FILES)
"""What plain transformers loads from the folder of a language model."""

ROOMS = (PUBLIC, PRIVATE, RELEASED, STUDY)


def checkout() -> Path:
    """Return the checkout whose workflow is running: ``$DPMIXMIN_ROOT``, else the working directory.

    Raises:
        UserError: the working directory is not a checkout.
    """
    root = Path(os.environ.get("DPMIXMIN_ROOT") or ".").resolve()
    if not (root / "Snakefile").is_file():
        raise UserError(f"{root}: no Snakefile here; run from the repository root, or set an absolute ledger.path")
    return root


def slug(value: float) -> str:
    """Write a number so that it can stand in a path: ``0.5 -> 0p5``, ``1.0 -> 1``, ``1e-05 -> 1e-05``."""
    return f"{value:g}".replace(".", "p")


def room_of(path: str | os.PathLike) -> str | None:
    """Return the privacy label of a path, or None for files outside ``results/{experiment}/{room}/``."""
    parts = Path(path).parts
    if "results" not in parts:
        return None
    below = parts[len(parts) - parts[::-1].index("results") :]
    return below[1] if len(below) > 1 and below[1] in ROOMS else None


class Paths:
    """Path templates of one experiment, relative to the working directory.

    Every method returns a ``str`` because Snakemake compares paths as text.
    """

    def __init__(self, experiment: str, root: str = "results"):
        self.base = f"{root}/{experiment}"

    # -- public: computed from public data alone -------------------------------------------------------
    def fetched(self) -> str:
        """Record of which raw files are used and their hashes."""
        return f"{self.base}/public/data/fetched.json"

    def source(self, name: str) -> str:
        """Folder of a prepared public table (``sources`` or ``standins``)."""
        return f"{self.base}/public/sources/{name}"

    def text(self, name: str) -> str:
        """Folder of a prepared public text source."""
        return f"{self.base}/public/sources/source={name}"

    def tokenizer(self) -> str:
        """Folder of the tokenizer, trained on public text."""
        return f"{self.base}/public/tokenizer"

    def proxy(self, source: str = "joint") -> str:
        """Folder of the joint multi-label proxy, or of one text source's own."""
        return f"{self.base}/public/proxies/" + ("joint" if source == "joint" else f"source={source}")

    def state(self, folder: str) -> str:
        """Folder in which a long public training keeps its state until it ends; in the room of its artefact."""
        room, below = folder.removeprefix(f"{self.base}/").split("/", 1)
        return f"{self.base}/{room}/states/{below}"

    def settings(self, name: str) -> str:
        """Folder of settings chosen on public stand-ins (``mixture``, ``finetune/method=…``)."""
        return f"{self.base}/public/settings/{name}"

    def finetune_settings(self, method: str) -> str:
        """Folder of the fine-tuning settings of one method."""
        return self.settings(f"finetune/method={method}")

    # -- private: raw functions of sensitive records ---------------------------------------------------
    def records(self) -> str:
        """Folder of the sensitive record table."""
        return f"{self.base}/private/records"

    def split(self, seed: int) -> str:
        """Folder of one partition of the units."""
        return f"{self.base}/private/splits/seed={seed}"

    def predictions(self, seed: int) -> str:
        """Folder of the n-by-k prediction table of one partition."""
        return f"{self.base}/private/predictions/seed={seed}"

    # -- cells -----------------------------------------------------------------------------------------
    def cell(
        self,
        room: str,
        stage: str,
        *,
        task: str = "",
        method: str = "",
        mechanism: str = "",
        eps: float | None = None,
        seed: int | None = None,
    ) -> str:
        """Folder of one cell; empty coordinates are left out of the path."""
        folder = {"mixture": "mixtures"}.get(stage, stage)
        parts = [f"{self.base}/{room}/{folder}"]
        parts += [f"task={task}"] if task else []
        parts += [f"method={method}"] if method else []
        parts += [f"mechanism={mechanism}"] if mechanism else []
        parts += [f"eps={slug(eps)}"] if eps is not None else []
        parts += [f"seed={seed}"] if seed is not None else []
        return "/".join(parts)

    def bundle(self) -> str:
        """Folder of a deployment's release bundle."""
        return f"{self.base}/released/bundle"

    # -- study -----------------------------------------------------------------------------------------
    def metrics(self, task: str) -> str:
        """Folder of the non-releasable measurements of one task."""
        return f"{self.base}/study/metrics/task={task}"

    def audit(self, room: str, name: str, *, task: str = "", method: str = "", eps: float | None = None) -> str:
        """Folder of one audit; in a study in ``study/``, in a deployment (of public stand-ins) in ``public/``."""
        parts = [f"{self.base}/{room}/audits/{name}"]
        parts += [f"task={task}"] if task else []
        parts += [f"method={method}"] if method else []
        parts += [f"eps={slug(eps)}"] if eps is not None else []
        return "/".join(parts)

    def report(self) -> str:
        """Folder of tables, figures and the page."""
        return f"{self.base}/study/report"

    # -- bookkeeping -----------------------------------------------------------------------------------
    def log(self, rule: str) -> str:
        """Public progress log of one rule."""
        return f"{self.base}/logs/{rule}.log"

    def benchmark(self, rule: str) -> str:
        """Wall time and memory of one rule's last run: private, because they may tell the number of records."""
        return f"{self.base}/private/benchmarks/{rule}.tsv"

    def config(self, digest: str) -> str:
        """Resolved config of a run, named by its content; it says where private data and the ledger are."""
        return f"{self.base}/private/config/{digest}.json"
