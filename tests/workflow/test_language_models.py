"""Language models through the workflow: the miniature on real text and mail, and a user's own JSON lines."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from checkout import Checkout

pytestmark = pytest.mark.ci

MAIL = "config/test_mail.yaml"
BASE = "results/mini_mail"
MODEL = f"{BASE}/released/finetuned/task=next_token/method=dp_mixmin/mechanism=dp_sgd/eps=1/seed=0"


@pytest.fixture(scope="module")
def mail(tmp_path_factory) -> Checkout:
    """Return a checkout in which the miniature of mail was run; tests must not change it."""
    checkout = Checkout.fresh(tmp_path_factory.mktemp("texts") / "mail")
    checkout.snakemake("all", "-c2", "--quiet", "reason", "host", "progress", config=MAIL)
    return checkout


def test_one_run_makes_everything_and_a_second_one_nothing(mail):
    assert mail.planned("all", config=MAIL) == set()
    rows = (mail.path / f"{BASE}/study/report/summary.csv").read_text().splitlines()
    found = {tuple(row.split(",")[i] for i in (2, 7, 8)) for row in rows[1:]}
    for method in ("none", "uniform", "mixmin", "dp_mixmin"):
        assert (method, "pretrained", "perplexity") in found
        assert (method, "pretrained", "perplexity_user") in found
    for method in ("uniform", "dp_mixmin"):
        assert (method, "finetuned", "perplexity") in found
    assert ("dp_mixmin", "mixture", "cosine") in found
    assert not list((mail.path / BASE).rglob("states/*")), "states of finished trainings are left behind"


def test_rule_13_the_guarantee_is_about_senders(mail):
    statement = json.loads((mail.path / MODEL / "privacy.json").read_text())
    assert statement["guarantee"]["unit"] == "sender"
    assert 0.98 < statement["guarantee"]["epsilon"] <= 1
    assert [entry["parts"] for entry in statement["entries"]] == [["mixing"], ["finetune"]]
    assert statement["tuning"] == "public_standin"
    card = (mail.path / MODEL / "README.md").read_text()
    assert statement["headline"] in card
    assert "one sender" in card


def test_the_released_model_loads_with_plain_transformers(mail, tmp_path):
    """In a process without this package: the folder alone is enough."""
    shutil.copytree(mail.path / MODEL, tmp_path / "model")
    program = (
        "import sys; from transformers import AutoTokenizer, GPT2LMHeadModel\n"
        "tokenizer, model = AutoTokenizer.from_pretrained('model'), GPT2LMHeadModel.from_pretrained('model')\n"
        "ids = tokenizer('The message', return_tensors='pt')\n"
        "out = model.generate(**ids, max_new_tokens=5, do_sample=False)\n"
        "assert out.shape[1] == ids['input_ids'].shape[1] + 5 and 'dpmixmin' not in sys.modules\n"
        "print(tokenizer.decode(out[0]))"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The message")


def test_rule_20_no_mail_is_in_any_public_file(mail):
    table = pq.read_table(mail.path / f"{BASE}/private/records/records.parquet")
    texts = [text for text in table["text"].to_pylist() if len(text) > 200]
    assert len(texts) > 20
    needles = [text[60:100].encode() for text in texts]
    units = [unit.encode() for unit in set(table["unit"].to_pylist())]
    for room in ("public", "released", "study", "logs"):
        for path in (mail.path / BASE / room).rglob("*"):
            if path.is_file():
                content = path.read_bytes()
                assert not any(needle in content for needle in needles), path
                assert not any(unit in content for unit in units), path


def test_rule_11_senders_are_keyed_hashes_and_private_files_are_closed(mail):
    for name in ("records/records", "predictions/seed=0/predictions"):
        path = mail.path / f"{BASE}/private/{name}.parquet"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for unit in pq.read_table(path)["unit"].to_pylist():
            int(unit, 16)


def test_predictions_hold_every_token_and_their_totals(mail):
    table = pq.read_table(mail.path / f"{BASE}/private/predictions/seed=0/predictions.parquet")
    assert set(table["part"].to_pylist()) <= {"mixing", "finetune"}
    for length, total, tokens in zip(
        table["length"].to_pylist(), table["source_sotu"].to_pylist(), table["tokens_sotu"].to_pylist(), strict=True
    ):
        assert len(tokens) == length <= 32
        assert total == pytest.approx(np.sum(tokens, dtype=np.float64))


def test_pretraining_reports_how_often_each_source_was_read(mail):
    folder = mail.path / f"{BASE}/public/pretrained/method=uniform/seed=0"
    sampled = json.loads((folder / "sampled.json").read_text())
    assert set(sampled["epochs"]) == {"sotu", "radiology", "news", "learned"}
    assert sampled["tokens"] >= 12000
    assert all(0 < epochs <= 2.01 for epochs in sampled["epochs"].values())
    curve = pq.read_table(folder / "loss.parquet")
    assert curve["heldout_loss"].to_pylist()[-1] < np.log(400)


def test_weights_of_another_tokenizer_are_refused(mail, tmp_path):
    copy = mail.clone(tmp_path / "copy")
    shutil.rmtree(copy.path / f"{BASE}/public/tokenizer")
    copy.edit(MAIL, "vocabulary: 400", "vocabulary: 380")
    # By hand and in the wrong order; the workflow would make everything again.
    for stage, message in (
        (("text_sources",), ""),
        (("text_pretrain", "--method", "uniform"), "learned with another tokenizer"),
        (("text_predict",), "made with another tokenizer"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "dpmixmin", *stage, "--config", MAIL],
            cwd=copy.path,
            env={**os.environ, "PYTHONPATH": str(copy.path / "src")},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.returncode != 0) == bool(message), done.stderr
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_a_deployment_ends_in_a_bundle_that_verifies(tmp_path):
    made = Checkout.fresh(tmp_path / "checkout")
    config = "config/test_mail_deploy.yaml"
    made.edit(config, "~/.dpmixmin/test-ledger", str(tmp_path / "ledger"))
    made.snakemake("all", "-c2", config=config)
    bundle = made.path / "results/mini_mail_deploy/released/bundle"
    done = subprocess.run(
        [sys.executable, "-m", "dpmixmin", "verify", str(bundle)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(made.path / "src")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "verified:" in done.stdout
    statement = json.loads((bundle / "statement.json").read_text())
    assert statement["privacy"]["guarantee"]["unit"] == "sender"
    assert not (made.path / "results/mini_mail_deploy/study").exists()
    assert {"model.safetensors", "tokenizer.json", "config.json", "README.md"} <= {p.name for p in bundle.iterdir()}


# -- a user's own texts ---------------------------------------------------------------------------------------


def sentences(seed: int, words: str, count: int) -> list[str]:
    generator, found = np.random.default_rng(seed), words.split()
    return [" ".join(generator.choice(found, 30)) + "." for _ in range(count)]


@pytest.fixture
def own(tmp_path) -> Checkout:
    """Return a checkout with three public files, of which one is missing, and sensitive notes of 40 users."""
    made = Checkout.fresh(tmp_path / "checkout")
    medical, legal = "the patient has pain and fever since monday again", "the court finds that a party owes nothing"
    for name, words in (("medicine", medical), ("law", legal)):
        lines = [json.dumps({"text": text}) for text in sentences(0, words, 200)]
        (made.path / f"{name}.jsonl").write_text("\n".join(lines))
    notes = [json.dumps({"text": text, "user": f"u{i % 40}"}) for i, text in enumerate(sentences(1, medical, 160))]
    (made.path / "notes.jsonl").write_text("\n".join([*notes, json.dumps({"text": None, "user": "u3"})]))
    tiny = {"layers": 1, "width": 16, "heads": 2, "tokens": 4000, "batch": 8, "evaluations": 1, "learning_rate": 0.01}
    config = {
        "experiment": "notes",
        "methods": ["uniform", "proportional", "dp_mixmin"],
        "text": {
            "tokenizer": {"vocabulary": 320},
            "context": 16,
            "missing": "leave_out",
            "heldout": 0.1,
            "proxy": tiny,
            "pretrain": tiny,
        },
        "public": {
            "texts": {name: {"kind": "text", "path": f"{name}.jsonl"} for name in ("medicine", "law", "poetry")}
        },
        "private": {
            "name": "notes",
            "table": {"kind": "text", "path": "notes.jsonl"},
            "unit": "user",
            "nominal_units": 40,
            "records_per_step": 2,
            "parts": {"mixing": 0.5, "finetune": 0.3, "test": 0.2},
        },
        "privacy": {"epsilons": [5], "delta": 0.001},
        "mixture": {"objective": "sequence", "settings": {"clip": 0.5, "steps": 20, "learning_rate": 5}},
        "finetune": {
            "trainable": {"which": "lora", "rank": 1},
            "settings": {"learning_rate": 0.5, "steps": 2, "batch": 6, "clip": 1},
        },
    }
    (made.path / "mine.yaml").write_text(yaml.safe_dump(config))
    return made


def test_own_json_lines_run_and_a_missing_source_is_left_out(own):
    done = own.snakemake("all", "-c2", config="mine.yaml")
    assert "LEFT OUT poetry" in done.stdout
    base = own.path / "results/notes"
    weights = json.loads(
        (base / "released/mixtures/task=next_token/method=dp_mixmin/eps=5/seed=0/weights.json").read_text()
    )
    assert set(weights["weights"]) == {"medicine", "law"}
    assert weights["weights"]["medicine"] > 0.6
    sizes = json.loads((base / "public/mixtures/method=proportional/weights.json").read_text())["weights"]
    assert sum(sizes.values()) == pytest.approx(1)
    assert "poetry" in (base / "study/report/index.html").read_text()
    # The released model of LoRA is a plain one again.
    names = {path.name for path in (base / "released/finetuned").rglob("*.safetensors")}
    assert names == {"model.safetensors"}


def test_a_missing_source_is_refused_unless_the_config_says_otherwise(own):
    config = yaml.safe_load((own.path / "mine.yaml").read_text())
    config["text"]["missing"] = "refuse"
    (own.path / "refuse.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "dpmixmin", "fetch", "--config", "refuse.json"],
        cwd=own.path,
        env={**os.environ, "PYTHONPATH": str(own.path / "src")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "public.texts.poetry" in done.stderr
    assert "leave_out" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
