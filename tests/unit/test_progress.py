"""Progress: lines that tell the public nothing of private loops, and a live-status file for the owner alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dpmixmin import progress
from dpmixmin.paths import Paths


class Clock:
    """Time that passes when a test says so."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(progress.time, "time", lambda: 1e9 + self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    yield Path(progress.folder_of(Paths("exp", str(tmp_path / "results"))))
    progress.end()


def live(folder: Path) -> dict:
    (path,) = folder.iterdir()
    return json.loads(path.read_text())


def test_a_public_loop_has_a_line_every_ten_seconds_with_its_end(clock, capsys):
    loop = progress.Steps(5000)
    for step in range(1, 41):
        clock.now += 1.0
        loop.at(step, lambda: "public loss 0.2311")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "  step 10/5000, public loss 0.2311, about 83 min left"
    assert [line.split(",")[0] for line in lines] == [f"  step {n}/5000" for n in (10, 20, 30, 40)]


def test_the_estimated_end_follows_the_speed_of_now_and_counts_no_step_of_a_dead_process(clock):
    loop = progress.Steps(1000, start=900)
    assert loop.seconds_left() is None
    clock.now += 100
    loop.at(901)
    assert loop.seconds_left() == pytest.approx(99 * 100)
    for step in range(902, 982):
        clock.now += 3
        loop.at(step)
    # The slow first step is out of the window by now.
    assert loop.seconds_left() == pytest.approx(19 * 3)


def private_lines(clock, capsys, seconds: float, total: int) -> str:
    loop = progress.Steps(total, private=True, epsilon=lambda step: step / 300)
    for step in range(1, total + 1):
        clock.now += seconds
        loop.at(step, lambda: pytest.fail("a note of a private loop was asked for"))
    return capsys.readouterr().err


def test_rule_20_the_lines_of_a_private_loop_are_the_same_at_any_speed(clock, capsys, folder):
    progress.begin(folder, "job")
    fast, slow = (private_lines(clock, capsys, seconds, 600) for seconds in (0.0, 47.3))
    assert fast == slow
    lines = fast.splitlines()
    assert lines[1] == "  step 120/600, epsilon of the steps so far 0.4"
    assert [re.match(r" *step (\d+/\d+)", line)[1] for line in lines] == [f"{60 * n}/600" for n in range(1, 11)]
    assert private_lines(clock, capsys, 47.3, 99) == ""


def test_the_live_file_is_the_owner_s_and_has_the_times(clock, capsys, folder):
    before = os.umask(0o022)
    try:
        progress.begin(folder, "finetune_a", ["one", "two"], stage="finetune")
    finally:
        os.umask(before)
    progress.cell("two")
    loop = progress.Steps(200, private=True, epsilon=lambda step: 0.5)
    for step in range(1, 31):
        clock.now += 2
        loop.at(step)
    assert oct(folder.stat().st_mode & 0o777) == oct(folder.parent.stat().st_mode & 0o777) == "0o700"
    assert oct(next(folder.iterdir()).stat().st_mode & 0o777) == "0o600"
    found = live(folder)
    assert (found["job"], found["stage"], found["cells"]) == ("finetune_a", "finetune", 2)
    assert (found["cell"], found["cell_number"], found["epsilon"], found["epsilon_step"]) == ("two", 1, 0.5, 20)
    assert found["loops"] == [{"unit": "step", "step": 30, "total": 200}]
    assert found["estimated_end"] == pytest.approx(1e9 + clock.now + 340)
    assert (found["pid"], found["ended"]) == (os.getpid(), None)
    assert found["started"] < found["updated"]


def test_the_live_file_shows_the_loop_and_those_around_it_until_they_are_left(clock, folder):
    progress.begin(folder, "tune")
    trials = progress.Steps(4, unit="trial")
    trials.at(1)
    steps = progress.Steps(50)
    clock.now += 10
    steps.at(7)
    assert [loop["unit"] for loop in live(folder)["loops"]] == ["trial", "step"]
    clock.now += 10
    steps.at(50)
    trials.at(2)
    clock.now += 10
    another = progress.Steps(9)
    another.at(1)
    assert [loop["step"] for loop in live(folder)["loops"]] == [2, 1]
    del steps, another
    clock.now += 10
    trials.at(2)
    assert live(folder)["loops"] == [{"unit": "trial", "step": 2, "total": 4}]


def test_the_live_file_is_written_by_time_and_is_whole_whenever_it_is_read(clock, folder, monkeypatch):
    progress.begin(folder, "job")
    loop = progress.Steps(1000)
    stamps = set()
    for step in range(1, 101):
        clock.now += 0.5
        loop.at(step)
        stamps.add(live(folder)["updated"])
    assert len(stamps) == 11
    whole = live(folder)

    def die(*_args, **_options):
        raise OSError("No space left on device")

    monkeypatch.setattr(progress.json, "dump", die)
    clock.now += 100
    loop.at(101)
    assert live(folder) == whole


def test_a_finished_job_leaves_nothing_and_another_is_marked(clock, folder):
    progress.begin(folder, "job")
    progress.end()
    assert list(folder.iterdir()) == []
    progress.begin(folder, "job")
    progress.end(finished=False)
    assert live(folder)["ended"] == 1e9 + clock.now
    progress.begin(folder, "job")
    assert live(folder)["ended"] is None


def test_a_process_that_ends_without_a_word_marks_its_job(tmp_path):
    folder = tmp_path / "private/progress"
    script = f"from dpmixmin import progress; progress.begin({str(folder)!r}, 'job'); raise SystemExit(143)"
    subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert live(folder)["ended"] is not None


def test_nothing_here_ends_a_training(clock, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    progress.begin(tmp_path / "file" / "progress", "job")

    class Closed:
        def write(self, text):
            raise BrokenPipeError

        flush = write

    def fail(*_args):
        raise RuntimeError("a bug in what is said")

    for stream in (Closed(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        for private in (False, True):
            loop = progress.Steps(100, private=private, epsilon=fail if private else None)
            for step in range(1, 101):
                clock.now += 11
                loop.at(step, fail if step % 2 else lambda: "fine")
    progress.cell("x")
    progress.end()


def test_lines_are_single_and_printable(clock, capsys):
    loop = progress.Steps(10)
    clock.now += 11
    loop.at(1, lambda: "a\rb\x1b[2Kc\nd")
    assert re.fullmatch(r"[ -~]+\n", capsys.readouterr().err)


def test_of_processes_that_train_together_one_speaks(clock, capsys, folder, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    progress.begin(folder, "job")
    assert private_lines(clock, capsys, 11, 200) == ""
    assert not folder.exists()


def test_a_job_is_called_like_its_log():
    assert progress.job_of("text_finetune", {"method": "none", "task": "a", "part": (2, 3)}) == "finetune_a_none_2of3"
    assert progress.job_of("text_proxy", {"source": "tldr"}) == "train_proxy_tldr"
    assert progress.job_of("split", {}) == "assign_parts"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1 s"), (89, "89 s"), (200, "3 min"), (9000, "2.5 h"), (3e5, "3 days")]
)
def test_durations_are_short(seconds, text):
    assert progress.duration(seconds) == text


def test_a_mechanism_that_is_tried_on_public_records_says_nothing(capsys):
    for _ in range(2):
        with progress.rehearsal():
            for step in range(1, 101):
                progress.Steps(100, private=True).at(step)
        assert capsys.readouterr().err == ""
    progress.Steps(100, private=True).at(10)
    assert capsys.readouterr().err == "  step 10/100\n"
