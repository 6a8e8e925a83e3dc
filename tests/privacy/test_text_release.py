"""The bundle of a language model: plain transformers loads it, and whatever is changed in it is noticed."""

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import deployment
import numpy as np
import pyarrow as pa
import pytest
from deployment import (
    DAY,
    FINETUNE,
    ROOT,
    checkout,
    edit,
    make_chain,
    other_release,
    raw_config,
    raw_text_config,
    release,
    replaced,
    statement_of,
)
from safetensors.numpy import load, save

from dpmixmin import artifacts, evaluation
from dpmixmin.config import PLACES, validate
from dpmixmin.data import corpora, tokenizer
from dpmixmin.data.split import partition, partition_name
from dpmixmin.data.text_records import TextRecords
from dpmixmin.errors import UserError
from dpmixmin.paths import Paths
from dpmixmin.privacy.ledger import Ledger
from dpmixmin.release import budget, bundle, derive, verify
from dpmixmin.stages import text_evaluate_private as stage

empty = deployment.empty
CELL = "task=next_token/method=dp_mixmin/mechanism=dp_sgd/eps=1/seed=0"
FILES = ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A checkout with a whole chain's results; one of three sources could not be had."""
    home = checkout(tmp_path_factory.mktemp("made"))
    config = validate(raw_text_config(home))
    with contextlib.chdir(home):
        ledger = Ledger.of(config)
        make_chain(config, ledger, left_out=("verse",))
        other_release(ledger, config)
    return home


@pytest.fixture
def home(made, tmp_path, monkeypatch) -> Path:
    home = shutil.copytree(made.parent, tmp_path / "whole") / "home"
    monkeypatch.chdir(home)
    return home


@pytest.fixture(scope="module")
def released(made, tmp_path_factory) -> Path:
    home = shutil.copytree(made.parent, tmp_path_factory.mktemp("released") / "whole") / "home"
    with contextlib.chdir(home):
        folder, _ = release(home, raw=raw_text_config)
        return shutil.copytree(folder, home.parent / "bundle")


@pytest.fixture(scope="module")
def derived_once() -> Iterator[None]:
    """Let verify derive the same section once: most tampering leaves the entries as they are."""
    build, known = verify.statements.build, {}

    def remembered(entries: list, **rest) -> dict:
        key = json.dumps([entries, rest])
        if key not in known:
            known[key] = build(entries, **rest)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify.statements, "build", remembered)
        yield


@pytest.fixture
def copy(released, derived_once, tmp_path) -> Path:
    return shutil.copytree(released, tmp_path / "copy")


# -- what it is -------------------------------------------------------------------------------------------------


def test_the_bundle_holds_the_whole_model_its_card_and_nothing_else(released):
    assert {path.name for path in released.iterdir()} == {
        *FILES, "README.md", "weights.json", "trajectory.parquet", "metrics.json", "released.json",
        "settings_mixture.json", "settings_finetune.json", "statement.json", "statement.md", "statement.schema.json",
        "SHA256SUMS",
    }  # fmt: skip
    card = (released / "README.md").read_text()
    stated = statement_of(released)
    assert stated["privacy"]["headline"] in card
    assert "`statement.json`" in card
    assert "privacy.json" not in card, "no such file is in the bundle"
    assert "transformers" in stated["bundle"]["versions"]


def test_plain_transformers_loads_the_bundle_s_folder_and_generates(released, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dpmixmin.models import language

    words, model = (kind.from_pretrained(released) for kind in (AutoTokenizer, AutoModelForCausalLM))
    prompt = words("a public text", return_tensors="pt")
    assert words.decode(prompt["input_ids"][0]) == "a public text"
    with torch.no_grad():
        logits = [each(**prompt).logits for each in (model, language.load(released))]
    torch.testing.assert_close(*logits)
    assert model.generate(**prompt, max_new_tokens=3, do_sample=False).shape == (1, len(prompt["input_ids"][0]) + 3)


def test_the_statement_lists_every_text_with_its_licence_the_tokenizer_and_what_was_left_out(released):
    data = statement_of(released)["data"]
    uses = "the tokenizer, a proxy and pretraining"
    assert data["tables"] == [
        {"name": "letters", "used_for": uses, "licence": "licence of letters"},
        {"name": "manuals", "used_for": uses, "licence": "public domain (works of the United States government)"},
    ]
    assert data["left_out"] == ["verse"]
    assert data["tokenizer"] == artifacts.file_digest(released / "tokenizer.json")
    assert [each["name"] for each in data["artefacts"]] == [
        "public/proxies/source=letters", "public/proxies/source=manuals", "public/settings/finetune/method=dp_mixmin",
        "public/settings/mixture", "public/sources/source=letters", "public/sources/source=manuals",
        "public/tokenizer",
    ]  # fmt: skip
    weights = json.loads((released / "weights.json").read_text())
    assert list(weights["weights"]) == ["letters", "manuals"]
    assert weights["tokenizer"] == data["tokenizer"]
    page = " ".join((released / "statement.md").read_text().split())
    for words in ("licence of letters", "left out, because they could not be had: verse", data["tokenizer"]):
        assert words in page


def test_rule_20_a_bundle_of_texts_names_nothing_private(released, made):
    ledger = Ledger(made.parent / "vault", "clinic")
    secrets = [deployment.PRIVATE_PARENT, "private/predictions", "patients-table", "vault", str(made)]
    secrets += [entry.key for entry in ledger.entries()]
    for path in released.iterdir():
        data = path.read_bytes()
        assert not [secret for secret in secrets if secret.encode() in data], path
    assert statement_of(released)["config"]["private"]["table"]["path"] == "withheld.jsonl"


def test_a_third_party_verifies_it_without_torch_and_transformers(released, tmp_path):
    program = (
        "import sys; from dpmixmin.__main__ import main; status = main(['verify', sys.argv[1]]); "
        "assert not {'torch', 'transformers'} & set(sys.modules); sys.exit(status)"
    )
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", program, str(released)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ok: the model card follows from the statement" in done.stdout


def test_the_page_says_how_many_records_are_kept_and_how_many_enter_a_step(home):
    values = {"private__records_per_step": 5}
    config = validate(raw_text_config(home, **values, privacy__release="second"))
    ledger = Ledger.of(config)
    make_chain(config, ledger)
    text = " ".join((bundle.release(config, ledger, DAY)[0] / "statement.md").read_text().split())
    assert "(at most 15 of them are kept, and at most 5 enter a step)" in text


def test_the_budget_of_texts_names_the_task_and_its_mechanisms(made):
    text = budget.text(budget.report(Ledger(made.parent / "vault", "clinic"), 1e-5))
    rows = [line.split() for line in text.splitlines() if "next_token" in line and "dp_mixmin" in line]
    assert [row[1] for row in rows[:3]] == ["mixture", "dp_sgd", "evaluation"]


# -- tampering --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FILES, "README.md", "weights.json", "trajectory.parquet", "metrics.json",
                                  "released.json", "settings_mixture.json", "settings_finetune.json"])  # fmt: skip
def test_a_changed_byte_or_a_missing_file_is_refused(name, copy):
    data = (copy / name).read_bytes()
    (copy / name).write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
    assert f"SHA256SUMS: {name}: stated" in deployment.refused(copy)
    (copy / name).unlink()
    assert "missing from the bundle" in removed(copy)


def removed(copy: Path) -> str:
    """List what is there, as an expert who took a file out would."""
    name = next(iter(copy.glob("statement.schema.json")))
    return replaced(copy, name.name, name.read_bytes())


def as_json(change):
    """Return an edit of a JSON file."""

    def made(data: bytes) -> bytes:
        value = json.loads(data)
        change(value)
        return artifacts.json_bytes(value)

    return made


def as_tensors(change):
    """Return an edit of a model's parameters."""

    def made(data: bytes) -> bytes:
        tensors = load(data)
        change(tensors)
        return save(tensors)

    return made


WTE = "transformer.wte.weight"
SWAPS = {
    "more layers": ("config.json", as_json(lambda c: c.update(n_layer=2)), "n_layer: stated 2, derived 1"),
    "other heads": ("config.json", as_json(lambda c: c.update(n_head=4)), "n_head: stated 4, derived 2"),
    "another scale of attention": (
        "config.json", as_json(lambda c: c.update(scale_attn_weights=False)), "scale_attn_weights: stated False"),
    "code to run": (
        "config.json", as_json(lambda c: c.update(auto_map={"AutoModel": "evil.M"})), "auto_map: must not be there"),
    "no model type": ("config.json", as_json(lambda c: c.pop("model_type")), "model_type: missing"),
    "a list for a config": ("config.json", lambda _: b"[]", "config.json: not of the form"),
    "another end": (
        "generation_config.json", as_json(lambda c: c.update(eos_token_id=9)), "eos_token_id: stated 9, derived 0"),
    "a tokenizer that runs code": (
        "tokenizer_config.json", as_json(lambda c: c.update(auto_map={"AutoTokenizer": ["evil.T", None]})),
        "auto_map: must not be there"),
    "another tokenizer class": (
        "tokenizer_config.json", as_json(lambda c: c.update(tokenizer_class="GPT2Tokenizer")), "tokenizer_class"),
    "another tokenizer": (
        "tokenizer.json", as_json(lambda t: t["pre_tokenizer"].update(add_prefix_space=True)), "json: stated"),
    "no tokenizer": ("tokenizer.json", lambda _: b"{}", "tokenizer"),
    "a parameter less": ("model.safetensors", as_tensors(lambda t: t.pop(WTE)), f"{WTE}: stated no such parameter"),
    "a parameter more": (
        "model.safetensors", as_tensors(lambda t: t.update(more=np.zeros(1, np.float32))),
        "more: stated (1,), derived none"),
    "another shape": (
        "model.safetensors", as_tensors(lambda t: t.update({WTE: t[WTE][:-1].copy()})), f"{WTE}: stated"),
    "another precision": (
        "model.safetensors", as_tensors(lambda t: t.update({WTE: t[WTE].astype(np.float16)})), "not finite float32"),
    "not a number": (
        "model.safetensors", as_tensors(lambda t: t.update({WTE: t[WTE] * np.nan})), "not finite float32"),
    "no model": ("model.safetensors", lambda _: b"no tensors", "model.safetensors: not readable"),
    "a better card": (
        "README.md", lambda data: data.replace(b"(1, ", b"(0.1, ").replace(b"sensitive", b"public"), "README.md: is"),
    "weights of another tokenizer": (
        "weights.json", as_json(lambda w: w.update(tokenizer="0" * 64)), "weights.json: stated"),
    "weights of another objective": (
        "weights.json", as_json(lambda w: w.update(objective="sequence")), "weights.json: stated"),
    "weight on what was left out": (
        "weights.json", as_json(lambda w: w["weights"].update(verse=0.0)), "for each of letters, manuals"),
    "weight on another source": (
        "weights.json", as_json(lambda w: w["weights"].update(verse=w["weights"].pop("manuals"))),
        "for each of letters, manuals"),
    "other iterates": ("trajectory.parquet", lambda _: b"", "trajectory.parquet: not a readable table"),
    "a better perplexity": (
        "metrics.json", as_json(lambda m: m["perplexity_user"].update(value=1.0)), "perplexity_user.value: stated"),
    "a smaller error": (
        "metrics.json", as_json(lambda m: m["loss"].update(noise_standard_error=0.0)), "noise_standard_error: stated"),
    "metrics of labels": (
        "metrics.json", as_json(lambda m: m.update(auc=m["loss"])), "must have loss, perplexity_user"),
    "another sum": (
        "released.json", as_json(lambda r: r["noisy_sum"].append(0.0)), "`noisy_sum` of 2 finite numbers"),
    "less noise": ("released.json", as_json(lambda r: r.update(noise_std=0.1)), "noise_std: stated 0.1"),
    "other settings": (
        "settings_finetune.json", as_json(lambda s: s["choice"].update(steps=21)), "settings_finetune.json: choice"),
    "not fine-tuned": ("settings_finetune.json", as_json(lambda s: s.update(choice=None)), "settings_finetune.json"),
    "better settings": ("settings_mixture.json", as_json(lambda s: s["choice"].update(clip=1.0)), "choice: stated"),
}  # fmt: skip


@pytest.mark.parametrize("what", SWAPS)
def test_a_file_that_an_expert_swapped_is_refused(what, copy):
    """The tamperer recomputes every hash, the statement's digest and its page."""
    name, change, words = SWAPS[what]
    before = (copy / name).read_bytes()
    after = change(before)
    assert after != before
    assert words in replaced(copy, name, after)


def leave_out_more(stated):
    """Fewer sources, in everything that the statement says of them."""
    stated["data"]["left_out"] = ["manuals", "verse"]


EDITS = {
    "a source that is not named": (lambda s: s["data"]["tables"].pop(0), "data.tables: stated"),
    "another licence": (lambda s: s["data"]["tables"][1].update(licence="mine"), "data.tables.1.licence: stated"),
    "one that was left out after all": (leave_out_more, "fewer than two sources would be mixed"),
    "none left out": (lambda s: s["data"].update(left_out=[]), "data.tables: stated"),
    "left out against the config": (lambda s: s["config"]["text"].update(missing="refuse"), "data.left_out: stated"),
    "left out, though no source": (lambda s: s["data"]["left_out"].append("poems"), "data.left_out: stated"),
    "another tokenizer": (lambda s: s["data"].update(tokenizer="0" * 64), "tokenizer.json: stated in data.tokenizer"),
    "another tokenizer behind the model": (
        lambda s: s["data"]["artefacts"][6].update(sha256="0" * 64), "tokenizer.json: stated for public/tokenizer"),
    "no proxies": (lambda s: s["data"].update(artefacts=s["data"]["artefacts"][2:]), "data.artefacts: stated"),
    "the data of labels": (lambda s: (s["data"].pop("tokenizer"), s["data"].pop("left_out")), "data (keys): stated"),
    "a wider model": (lambda s: s["config"]["text"]["pretrain"].update(width=32), "config.json: n_embd: stated 16"),
    "a longer context": (lambda s: s["config"]["text"].update(context=64), "config.json: n_positions: stated 32"),
    "a smaller vocabulary": (
        lambda s: s["config"]["text"]["tokenizer"].update(vocabulary=300), "tokenizer.json: has"),
    "a higher bound of the loss": (lambda s: s["config"]["evaluation"].update(loss_bound=9.0), "metrics.json: loss"),
    "the other objective": (
        lambda s: s["config"]["mixture"].update(objective="sequence"), "weights.json: stated"),
    "another part of the model": (
        lambda s: s["config"]["finetune"]["trainable"].update(which="biases"), "README.md: is not the card"),
}  # fmt: skip


@pytest.mark.parametrize("what", EDITS)
def test_a_statement_that_an_expert_edited_is_refused(what, copy):
    change, words = EDITS[what]
    assert words in edit(copy, change)


# -- other chains, refusals -------------------------------------------------------------------------------------

NO_TEST = {"mixing": 0.3, "finetune": 0.7, "test": 0.0}


@pytest.mark.parametrize(
    ("changes", "finetune", "names"),
    [
        ({"methods": ["uniform"]}, FINETUNE, ["finetuned", "evaluation"]),
        ({"methods": ["none"], "finetune__settings": None, "private__parts": NO_TEST}, None, []),
        ({"private__parts": NO_TEST, "finetune__settings": None}, None, ["mixture"]),
        ({"mixture__settings": None, "tune": {"mixture": {"clip": [4], "steps": [6]}},
          "private__table": {"kind": "maildir", "path": "/srv/patients-table"}, "private__unit": "user"}, FINETUNE,
         ["mixture", "finetuned", "evaluation"]),
    ],
    ids=["uniform", "none, not fine-tuned", "not fine-tuned", "tuned mixture of a maildir"],
)  # fmt: skip
def test_other_chains_of_texts_release_and_verify(changes, finetune, names, empty):
    config = validate(raw_text_config(empty, **changes))
    ledger = Ledger.of(config)
    tuned = tuple("user_declared" if one.settings else "public_standin" for one in (config.mixture, config.finetune))
    make_chain(config, ledger, finetune=finetune, tuned=tuned)
    folder, _ = bundle.release(config, ledger, DAY)
    stated = statement_of(folder)
    assert [entry["cell"]["stage"] for entry in stated["privacy"]["entries"]] == names
    assert all(line.startswith("ok: ") for line in verify.checks(folder))
    assert stated["data"]["left_out"] == []
    assert len(stated["data"]["tables"]) == 3
    assert ("choosing settings" in stated["data"]["tables"][0]["used_for"]) == ("public_standin" in tuned)
    assert ("then fine-tuned on sensitive text" in (folder / "README.md").read_text()) == (finetune is not None)


def test_a_chain_of_other_sources_than_could_be_had_is_refused(home):
    """The record of what was fetched changed after the mixture was learned."""
    artifacts.write_json("results/clinic_run/public/data/fetched.json", {"left_out": {}})
    with pytest.raises(UserError, match=r"the bundle would not verify, so nothing was published: .*artefacts"):
        release(home, raw=raw_text_config)
    assert not (home / "results/clinic_run/released/bundle").exists()


def test_the_stage_measures_texts_for_a_price_and_its_release_verifies(empty):
    """The whole way of the metrics: private tables, a real model, one entry, the bundle; and again for nothing."""
    config = validate(raw_text_config(empty))
    ledger, paths = Ledger.of(config), Paths(config.experiment)
    make_chain(config, ledger, evaluate=False)
    write_private_tables(config, ledger, paths)
    before = [entry.id for entry in ledger.entries()]
    stage.run(config, None)
    artifacts.unrestrict_for_tests()
    new = [entry for entry in ledger.entries() if entry.id not in before]
    assert [(entry.facts["cell"]["stage"], entry.facts["parts"]) for entry in new] == [("evaluation", ["test"])]
    folder = empty / f"results/clinic_run/released/evaluation/{CELL}"
    metrics = json.loads((folder / "metrics.json").read_text())
    # To a fresh model every token is about as likely as any other; 6 deviations of the noise.
    assert abs(metrics["loss"]["value"] - np.log(vocabulary(paths))) < 6 * metrics["loss"]["noise_standard_error"]
    assert list(verify.checks(bundle.release(config, ledger, DAY)[0]))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    shutil.rmtree(folder)
    shutil.rmtree(paths.records())
    stage.run(config, None)
    artifacts.unrestrict_for_tests()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert len(ledger.entries()) == len(before) + 1


def vocabulary(paths: Paths) -> int:
    return tokenizer.load(paths.tokenizer()).get_vocab_size()


def write_private_tables(config, ledger: Ledger, paths: Paths, units: int = 800) -> None:
    """One short record each; all units are test units."""
    rng, names = np.random.default_rng(0), np.array([f"user{i:04d}" for i in range(units)])
    tokens = [rng.integers(0, vocabulary(paths), size=4).astype(np.int32) for _ in range(units)]
    records = TextRecords(names, names, ["text"] * units, tokens).to_arrow()
    members = pa.table({"unit": names.tolist(), "part": ["test"] * units})
    wanted = partition(ledger.keys, config.private, 0)
    for folder, name, table, made in (
        (paths.records(), "records", records, {"ids": wanted.ids, **corpora.made_with(paths)}),
        (paths.split(0), "split", members, {"ids": wanted.ids, "partition": wanted.name}),
    ):
        manifest = artifacts.manifest("test", config={}, code="c", parents=[], private=True, partition=made)
        artifacts.publish(folder, {f"{name}.parquet": artifacts.parquet_bytes(table)}, manifest)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_model_that_the_ledger_was_not_charged_for_is_refused(name, home):
    folder = home / f"results/clinic_run/released/finetuned/{CELL}"
    (folder / name).write_bytes((folder / name).read_bytes() + b" ")
    with pytest.raises(UserError, match="altered since it was made"):
        release(home, raw=raw_text_config)


TABLES = {
    "maildir": {"kind": "maildir", "path": "/secret/mail"},
    "text": {"kind": "text", "path": "/secret/mail.csv", "record_id": "id"},
    "hub": {"kind": "hub", "name": "/secret/name", "subset": "secret", "split": "secret", "record_id": "id"},
    "spam_assassin": {"kind": "spam_assassin"},
    "images": {"kind": "images", "path": "/secret/scans", "table": "/secret/list.csv", "size": [8, 8],
               "record_id": "id"},
    "image folders": {"kind": "images", "path": "/secret/scans", "classes": ["a", "b"], "size": [8, 8]},
    "parquet": {"kind": "parquet", "path": "/secret/table.parquet", "features": ["x"], "labels": ["label"]},
    "idx": {"kind": "idx", "images": "/secret/images", "labels": "/secret/labels"},
}  # fmt: skip


def test_every_kind_of_private_table_with_places_is_covered():
    assert {table["kind"] for table in TABLES.values()} >= set(PLACES)


@pytest.mark.parametrize("name", TABLES)
def test_rule_20_a_public_config_withholds_every_private_place_and_is_a_config(name, tmp_path):
    raw = raw_config if TABLES[name]["kind"] in ("images", "parquet", "idx") else raw_text_config
    unit = {"maildir": "user", "spam_assassin": "sender"}.get(name, "patient")
    config = validate(raw(tmp_path, private__table=TABLES[name], private__unit=unit))
    shown = derive.public_config(config)
    assert "secret" not in json.dumps(shown)
    assert str(tmp_path) not in json.dumps(shown)
    again = validate(shown)
    assert derive.public_config(again) == shown
    # Verifying derives the partition's name from it.
    assert partition_name("key=x", again.private) == partition_name("key=x", config.private)


def test_the_dimension_is_that_of_the_vectors(tmp_path):
    config = validate(raw_text_config(tmp_path))
    scores, units = [np.array([-1.0, -2.0])], (1, np.array([0]))
    assert evaluation.text_vectors(scores, units, 8.0).shape == (1, evaluation.dimension(config))
    config = validate(raw_config(tmp_path))
    vectors = evaluation.unit_vectors(np.zeros(1), np.ones(1), units, 5.0, config.evaluation.bins)
    assert vectors.shape == (1, evaluation.dimension(config))
