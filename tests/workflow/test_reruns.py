"""Re-running, deleting, editing and killing: only what depends on a change runs, and nothing is released twice."""

from __future__ import annotations

import os
import shutil
import signal

import pytest

NO_AUDITS = ("--config", "audit=none")
"""Audits have tests of their own (test_audits.py)."""

MIXTURES = "results/mini/released/mixtures"


def test_deleted_releases_come_back_byte_for_byte_without_a_new_entry(copy):
    """Rule 18: the store re-publishes; a deletion never draws new noise."""
    before, events = copy.files("released"), copy.ledger_events()
    shutil.rmtree(copy.path / MIXTURES)
    shutil.rmtree(copy.path / "results/mini/released/finetuned")
    copy.snakemake("all", "-c2")
    assert copy.files("released") == before
    assert copy.ledger_events() == events


def test_a_second_clone_with_the_same_ledger_spends_nothing(copy):
    """Rule 18: neither a fresh clone nor a new results folder resets the budget."""
    before, events = copy.files("released"), copy.ledger_events()
    shutil.rmtree(copy.path / "results")
    shutil.rmtree(copy.path / ".snakemake")
    copy.snakemake("mixtures", "-c2")
    after = copy.files("released")
    mixtures = {name: content for name, content in before.items() if name.startswith("released/mixtures/")}
    assert {name for name in after if name.startswith("released/mixtures/")} == set(mixtures)
    weights = [name for name in mixtures if name.endswith("weights.json")]
    assert weights
    assert all(after[name] == mixtures[name] for name in weights)
    assert copy.ledger_events() == events


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        (
            "src/dpmixmin/finetune/dp_sgd.py",
            "_FLOAT32_MARGIN = 1 - 1e-5",
            "_FLOAT32_MARGIN = 1 - 2e-5",
            {"tune_finetune_*", "finetune_*", "evaluate_*", "audit_*", "make_report"},
        ),
        (
            "src/dpmixmin/mixing/learners.py",
            "tolerance: float = 1e-9",
            "tolerance: float = 2e-9",
            {"tune_*", "mix_*", "pretrain_*", "finetune_*", "evaluate_*", "audit_*", "make_report"},
        ),
        (
            "src/dpmixmin/report/page.py",
            "import",
            "import sys  # edited\nimport",
            {"audit_summary", "audit_gate", "make_report"},
        ),
        ("src/dpmixmin/sections.py", "Failure probability", "Chance of failure", set()),
    ],
    ids=["dp_sgd", "learners", "page", "help_text"],
)
def test_an_edit_reruns_the_stages_that_use_the_module_and_no_others(copy, file, old, new, expected):
    if file.endswith("page.py"):
        text = (copy.path / file).read_text()
        (copy.path / file).write_text(text + "\n# edited\n")
    else:
        copy.edit(file, old, new)
    planned = copy.planned("all")
    for rule in planned:
        assert any(rule == name or (name.endswith("*") and rule.startswith(name[:-1])) for name in expected), rule
    for name in expected:
        assert any(rule == name or (name.endswith("*") and rule.startswith(name[:-1])) for rule in planned), name
    if "learners" in file:
        assert not {"train_proxy", "predict", "assign_parts", "pretrain_none"} & planned


def test_editing_a_mechanism_recomputes_it_as_a_new_entry(copy):
    """Study mode: the code is part of the store key, so an edit is a new release with fresh noise."""
    before = copy.files("released")
    copy.edit("src/dpmixmin/mixing/learners.py", "    k = gradients.table.k", "    k = int(gradients.table.k)")
    events = len(copy.ledger_events())
    copy.snakemake("mixtures", "-c2")
    new = copy.ledger_events()[events:]
    assert [event["event"] for event in new] == ["reserved", "committed"] * 2
    after = copy.files("released")
    changed = [
        n for n in after if n.startswith("released/mixtures/") and n.endswith("weights.json") and after[n] != before[n]
    ]
    assert len(changed) == 2


def test_editing_what_made_the_private_inputs_recomputes_the_releases_too(copy):
    """A release of predictions that no longer exist must not be taken for one of today's."""
    copy.edit("src/dpmixmin/data/loaders.py", "def content_ids(", "# edited\n\n\ndef content_ids(")
    events = len(copy.ledger_events())
    copy.snakemake("mixtures", "-c2")
    assert [event["event"] for event in copy.ledger_events()[events:]] == ["reserved", "committed"] * 2


def test_neither_a_new_name_nor_a_new_epsilon_redraws_what_is_committed(copy):
    before, events = copy.files("released"), copy.ledger_events()
    copy.edit("config/test.yaml", "experiment: mini", "experiment: mini_again")
    copy.edit("config/test.yaml", "epsilons: [1, 2]", "epsilons: [1, 2, 4]")
    copy.snakemake("mixtures", "-c2")
    new = copy.ledger_events()[len(events) :]
    assert [event["cell"]["epsilon"] for event in new if event["event"] == "reserved"] == [4.0]
    for name, content in before.items():
        if name.endswith("weights.json"):
            assert (copy.path / "results/mini_again" / name).read_bytes() == content


def test_charging_aborted_attempts_restates_every_release_and_draws_nothing(copy):
    events = copy.ledger_events()
    copy.edit("config/test.yaml", "privacy:\n", "privacy:\n  charge_aborted: true\n")
    planned = copy.planned("all")
    assert {"mix_three_or_eight_dp_mixmin", "finetune_three_or_eight_dp_mixmin"} <= planned
    copy.snakemake("finetuned", "-c2")
    assert copy.ledger_events() == events


def test_an_error_inside_a_mechanism_never_shows_its_text(copy):
    """Exception texts may hold private values: only the kind and the place are public (rule 20)."""
    loop = "        for step in range(done, spec.steps):"
    module = copy.path / "src/dpmixmin/finetune/dp_sgd.py"
    times = module.stat().st_atime_ns, module.stat().st_mtime_ns
    copy.edit("src/dpmixmin/finetune/dp_sgd.py", loop, f"        raise ValueError('SECRET')\n{loop}")
    # The public tuning stage uses this code too, and would fail first: hide the edit from Snakemake.
    os.utime(module, ns=times)
    shutil.rmtree(copy.path / "results/mini/released/finetuned")
    target = (
        "results/mini/released/finetuned/task=three_or_eight/method=uniform/mechanism=dp_sgd/eps=1/seed=0/privacy.json"
    )
    done = copy.snakemake(target, "-c1", "--rerun-triggers", "mtime", check=False)
    assert done.returncode == 1
    assert "internal error in finetune: ValueError at dp_sgd.py" in done.stdout
    assert "SECRET" not in done.stdout
    for path in (copy.path / "results/mini/logs").rglob("*"):
        assert b"SECRET" not in path.read_bytes()
    kept = list((copy.path / "results/mini/private/logs").glob("finetune-*.traceback"))
    assert len(kept) == 1
    assert "SECRET" in kept[0].read_text()
    assert kept[0].stat().st_mode & 0o777 == 0o600
    assert copy.ledger_events()[-1]["event"] == "void"


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.ci)])
def test_killed_runs_finish_with_the_same_command_and_release_nothing_twice(finished, tmp_path, how):
    copy = finished.clone(tmp_path / "killed")
    for folder in ("results", ".snakemake", ".ledger"):
        shutil.rmtree(copy.path / folder)
    total = len(finished.ledger_events())
    for events in (1, total // 3, 2 * total // 3):
        copy.kill_when_ledger_has(events, "all", "-c2", "--rerun-incomplete", *NO_AUDITS, how=how)
        assert len(copy.ledger_events()) < total, "the run ended before it could be killed"
        copy.snakemake("--unlock")
    copy.snakemake("all", "-c2", "--rerun-incomplete", *NO_AUDITS)
    assert set(copy.committed().values()) == {1}
    assert set(copy.committed())
    assert len(copy.committed()) == len(finished.committed())
    reserved = [event for event in copy.ledger_events() if event["event"] == "reserved"]
    ended = [event for event in copy.ledger_events() if event["event"] in ("committed", "void")]
    assert len(reserved) == len(ended)
    assert copy.planned("all", *NO_AUDITS) == set()


def test_one_cell_and_one_stage_can_be_asked_for(copy):
    cell = f"{MIXTURES}/task=three_or_eight/method=dp_mixmin/eps=1/seed=0/weights.json"
    (copy.path / cell).unlink()
    assert copy.planned(cell) == {"mix_three_or_eight_dp_mixmin"}
    for folder in ("results", ".snakemake"):
        shutil.rmtree(copy.path / folder)
    planned = copy.planned("mixtures")
    assert "mix_three_or_eight_dp_mixmin" in planned
    assert not any(rule.startswith(("pretrain", "finetune", "evaluate", "make", "tune_finetune")) for rule in planned)
    for target in ("sources", "splits", "proxies", "settings", "predictions", "pretrained", "finetuned", "metrics"):
        assert target in copy.snakemake(target, "-n").stdout


def test_the_test_seed_reproduces_and_is_stamped(copy):
    """Rule 14: `insecure_seed` repeats a release and marks everything NOT PRIVATE; without it two releases differ."""
    texts = []
    for run in range(2):
        for folder in ("results/mini/released", ".ledger"):
            shutil.rmtree(copy.path / folder)
        if run == 0:
            copy.edit("config/test.yaml", "privacy:\n", "privacy:\n  insecure_seed: 7\n")
        copy.snakemake("mixtures", "-c2")
        files = copy.files("released")
        texts.append({name: files[name] for name in files if name.endswith("weights.json")})
        statements = [files[name] for name in files if name.endswith("privacy.json")]
        assert statements
        assert all(b"NOT PRIVATE" in statement for statement in statements)
    assert texts[0] == texts[1]


def test_two_releases_draw_different_noise(copy):
    before = copy.files("released")
    copy.edit("config/test.yaml", "privacy:\n", "privacy:\n  release: second\n")
    copy.snakemake("mixtures", "-c2")
    after = copy.files("released")
    names = [name for name in after if name.startswith("released/mixtures/") and name.endswith("weights.json")]
    assert names
    assert all(after[name] != before[name] for name in names)
    assert {event["label"] for event in copy.ledger_events() if event["event"] == "reserved"} == {"first", "second"}
