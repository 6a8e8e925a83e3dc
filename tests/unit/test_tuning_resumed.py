"""A killed tuning goes on after its last finished trial, and chooses what an uninterrupted one chooses."""

from __future__ import annotations

import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from dpmixmin import artifacts
from dpmixmin.config import load, validate
from dpmixmin.data import corpora, tokenizer
from dpmixmin.data.records import Records
from dpmixmin.interrupt import Interrupted
from dpmixmin.paths import Paths
from dpmixmin.stages import (
    proxy,
    text_proxy,
    text_tune_finetune,
    text_tune_mixture,
    tune_finetune,
    tune_mixture,
)
from dpmixmin.tuning import mixture, trials

ROOT = Path(__file__).resolve().parents[2]


class Counted:
    """A function that counts its calls, and is interrupted before one of them."""

    def __init__(self, function):
        self.function, self.calls, self.last = function, 0, 10**9

    def __call__(self, *args, **options):
        if self.calls >= self.last:
            raise Interrupted
        self.calls += 1
        return self.function(*args, **options)


def counted(monkeypatch, module, name: str) -> Counted:
    found = Counted(getattr(module, name))
    monkeypatch.setattr(module, name, found)
    return found


def publish(folder: str, files: dict[str, bytes]) -> None:
    artifacts.publish(folder, files, artifacts.manifest("made up", config={}, code="", parents=[]))


@pytest.fixture
def labels(tmp_path, monkeypatch):
    """An experiment with prepared public tables and a proxy."""
    monkeypatch.chdir(tmp_path)
    config = load(ROOT / "config/test.yaml")
    rng = np.random.default_rng(1)
    for name, n in (("sources", 300), ("standins", 900)):
        ids = np.asarray([f"{i:05d}" for i in range(n)])
        digits = rng.integers(0, 10, n).astype(np.float32)
        features = (rng.normal(size=(n, 49)) + digits[:, None] / 5).astype(np.float32)
        table = Records(ids, ids, features, {"digit": digits}).to_arrow()
        publish(Paths("mini").source(name), {"records.parquet": artifacts.parquet_bytes(table)})
    proxy.run(config, Namespace())
    return config


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """An experiment with prepared texts, a tokenizer and proxies."""
    monkeypatch.chdir(tmp_path)
    whole = load(ROOT / "config/test_mail.yaml").dump()
    whole["text"]["proxy"]["tokens"] = whole["text"]["pretrain"]["tokens"] = 600
    config = validate(whole, "config")
    paths, rng = Paths("mini_mail"), np.random.default_rng(1)
    artifacts.write_json(paths.fetched(), {"left_out": ["learned", "news"]})
    words = [f"w{i}" for i in range(60)]
    documents = {
        name: [" ".join(rng.choice(words, 40, p=rng.dirichlet(np.full(60, 0.2)))) for _ in range(30)]
        for name in corpora.present(config, paths)
    }
    trained = tokenizer.train((text for many in documents.values() for text in many), 300)
    publish(paths.tokenizer(), tokenizer.files(trained))
    for name, many in documents.items():
        table = corpora.documents_table(many, [tokenizer.encode(trained, text) for text in many], 0.1)
        publish(paths.text(name), {"documents.parquet": artifacts.parquet_bytes(table)})
        text_proxy.run(config, Namespace(source=name))
    return config


def content(folder: str) -> dict[str, bytes]:
    return {name: (Path(folder) / name).read_bytes() for name in ("settings.json", "curve.parquet")}


def check(run, folder: str, base: str, attempt: Counted, trainings: list[tuple[Counted, int]] = ()) -> None:
    """Compare an uninterrupted run with one that is interrupted in its middle."""
    run()
    whole, total = content(folder), attempt.calls
    states = Path(base) / "public/states"
    assert not states.exists(), "a finished tuning keeps nothing"
    assert [training.calls for training, _ in trainings] == [calls for _, calls in trainings]
    shutil.rmtree(folder)

    attempt.calls, attempt.last = 0, total // 2
    with pytest.raises(Interrupted):
        run()
    assert not (Path(folder) / "manifest.json").exists()
    done, attempt.calls, attempt.last = attempt.calls, 0, 10**9
    run()
    assert 0 < done < total
    assert attempt.calls == total - done
    # Together, the two runs trained each model once.
    assert [training.calls for training, _ in trainings] == [2 * calls for _, calls in trainings]
    assert content(folder) == whole
    assert not states.exists()


def test_tuning_the_mixture_goes_on(labels, monkeypatch):
    attempt = counted(monkeypatch, mixture, "learn")
    check(lambda: tune_mixture.run(labels, None), Paths("mini").settings("mixture"), "results/mini", attempt)


def test_tuning_the_fine_tuning_goes_on_with_its_pretrained_models(labels, monkeypatch):
    tune_mixture.run(labels, None)
    attempt = counted(monkeypatch, tune_finetune, "fine_tune")
    training = counted(monkeypatch, tune_finetune, "train_public")
    check(
        lambda: tune_finetune.run(labels, Namespace(method="dp_mixmin")),
        Paths("mini").finetune_settings("dp_mixmin"), "results/mini", attempt, [(training, 1)],
    )  # fmt: skip


def test_tuning_the_mixture_of_texts_goes_on(texts, monkeypatch):
    attempt = counted(monkeypatch, mixture, "learn")
    folder = Paths("mini_mail").settings("mixture")
    check(lambda: text_tune_mixture.run(texts, None), folder, "results/mini_mail", attempt)


def test_tuning_the_fine_tuning_of_texts_pretrains_once(texts, monkeypatch):
    attempt = counted(monkeypatch, text_tune_finetune, "fine_tune")
    training = counted(monkeypatch, text_tune_finetune, "train_mixture")
    check(
        lambda: text_tune_finetune.run(texts, None),
        Paths("mini_mail").finetune_settings("dp_mixmin"), "results/mini_mail", attempt, [(training, 1)],
    )  # fmt: skip


# -- the store ------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Return what opens the trials of a tuning with given parents, as a new process would."""
    monkeypatch.chdir(tmp_path)
    config = load(ROOT / "config/test.yaml")

    living = []

    def new(parents=()) -> trials.Trials:
        for one in living:
            one._alone.close()  # what the operating system does when a process dies
        found = trials.Trials(config, "tune_mixture", Paths("mini").settings("mixture"), list(parents))
        living.append(found.__enter__())
        found.expect(9)
        return found

    return new


def kept(name: str = "*") -> list[Path]:
    return list(Path("results/mini/public/states/settings/mixture").glob(f"trials=*/{name}"))


def test_what_a_power_cut_leaves_is_read_again_whatever_its_numbers(opened, monkeypatch):
    monkeypatch.setattr(trials, "_SECONDS", 0.0)
    first = opened()
    values = [0.1 + 0.2, float("inf"), [{"a": 1 / 3}], None]
    for number, value in enumerate(values):
        first.result({"trial": number}, lambda value=value: value)
    again = opened()
    for number, value in enumerate(values):
        assert again.result({"trial": number}, lambda: pytest.fail("computed again")) == value


def test_quick_trials_share_a_file(opened):
    first = opened()
    for number in range(5):
        first.result({"trial": number}, lambda: 1.0)
    assert first.__exit__(Interrupted, Interrupted(), None) is None
    assert len(kept("*.json")) == 1
    again = opened()
    assert [again.result({"trial": number}, lambda: 2.0) for number in range(6)] == [1.0] * 5 + [2.0]


def test_a_file_that_is_not_whole_is_computed_again(opened, monkeypatch):
    from torch import nn

    monkeypatch.setattr(trials, "_SECONDS", 0.0)
    first, model, trained = opened(), nn.Linear(2, 2), []
    first.result({"trial": 1}, lambda: 1.0)
    first.model({"model": 1}, model, trained.append)
    for path in kept():
        path.write_bytes(path.read_bytes()[:-1])
    again = opened()
    assert again.result({"trial": 1}, lambda: 2.0) == 2.0
    again.model({"model": 1}, model, trained.append)
    other = nn.Linear(2, 2)
    opened().model({"model": 1}, other, lambda state: pytest.fail("trained again"))
    assert len(trained) == 2
    assert (other.weight == model.weight).all()


def test_trials_of_other_data_or_code_are_not_used_but_deleted(opened, monkeypatch):
    monkeypatch.setattr(trials, "_SECONDS", 0.0)
    opened().result({"trial": 1}, lambda: 1.0)
    other = [{"path": "x", "sha256": "0"}]
    assert opened(other).result({"trial": 1}, lambda: 2.0) == 2.0
    assert len(kept()) == 1
    monkeypatch.setattr(trials.provenance, "code_digest", lambda stage: "edited")
    assert opened(other).result({"trial": 1}, lambda: 3.0) == 3.0
    assert len(kept()) == 1


def test_a_model_half_trained_goes_on_from_its_state(opened):
    from torch import nn

    def die(state) -> None:
        state.save(3, lambda: b"after three steps")
        raise Interrupted

    model, found = nn.Linear(2, 2), []
    with pytest.raises(Interrupted):
        opened().model({"model": 1}, model, die)
    opened().model({"model": 1}, model, lambda state: found.append(state.load()))
    assert found == [(3, b"after three steps")]
    assert [path.suffix for path in kept()] == [".model"]


def test_a_second_job_waits_for_the_first(opened):
    first = opened()
    script = (
        f"from dpmixmin.config import load; from dpmixmin.tuning.trials import Trials; "
        f"config = load({str(ROOT / 'config/test.yaml')!r}); "
        f"Trials(config, 'tune_mixture', {Paths('mini').settings('mixture')!r}, []).__enter__(); print('entered')"
    )
    second = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert "waiting for another job" in second.stderr.readline()
        assert second.poll() is None
        first._alone.close()
        assert second.communicate(timeout=30)[0] == "entered\n"
    finally:
        second.kill()
        second.wait()


def test_the_progress_line_says_the_trial_and_what_it_found(opened, capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(trials.progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(trials, "_SECONDS", 1e9)

    def slow() -> float:
        now[0] += 30
        return 83.125

    about = {"start": "none", "stand-in": "news", "candidate": {"learning_rate": 0.5, "steps": 20}}
    opened().result(about, slow)
    line = "  trial 1/9, none, news, learning_rate 0.5, steps 20: 83.12, about 4 min left\n"
    assert capsys.readouterr().err == line
