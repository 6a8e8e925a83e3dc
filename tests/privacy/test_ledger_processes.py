"""The ledger among processes that die at the worst moment, and processes that meet (rule 18)."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_ledger import event_files, states

from dpmixmin import artifacts
from dpmixmin.privacy.ledger import Ledger

WORKER = """
import json, os, sys, time
from pathlib import Path
from dpmixmin.privacy.ledger import Ledger, Mechanism
from dpmixmin.privacy.log import EventLog
from dpmixmin.privacy.mechanisms import GridGaussian
from dpmixmin.privacy.noise import NoiseSource

root, folder, die, wait, signal = sys.argv[1:]
spec = GridGaussian(13.0, 30.0, 50, 1.0, 100, 1.0, 1e-5)
purpose = Mechanism(spec, {"task": "odd"}, {}, {}, "code")
ledger = Ledger(root, "clinic")
append = EventLog.append

def dying(self, event, check=None):
    if event["event"] == "committed" and die == "after rename":
        os._exit(9)
    append(self, event, check)

EventLog.append = dying
draws = 0
Path(signal).with_suffix(f".ready{os.getpid()}").touch()
while wait == "yes" and not Path(signal).exists():
    time.sleep(0.002)
with ledger.open(("mixing",), purpose, "seed=0") as release:
    if die == "after reserve":
        os._exit(9)
    if not release.committed:
        draws += 1
        drawn = NoiseSource().random_bytes(16)
        if die == "mid-work":
            (ledger.root / "tmp" / release.entry).mkdir()
            (ledger.root / "tmp" / release.entry / "weights").write_bytes(drawn)
            os._exit(9)
        time.sleep(0.3 if wait == "yes" else 0)
        release.commit({"weights": drawn}, {"stage": "mix"})
    if die == "after commit":
        os._exit(9)
    release.publish(folder, {})
    print(json.dumps({"draws": draws, "bytes": release.stored("weights").hex(), "entry": release.entry}))
"""


def start(script: str, *arguments) -> subprocess.Popen:
    """Run a script in a Python of its own."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    source = str(Path(artifacts.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen, status: int = 0) -> dict:
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    return json.loads(out) if out else {}


@pytest.mark.parametrize(
    ("die", "voids", "drawn_again"),
    [("after reserve", 1, 1), ("mid-work", 1, 1), ("after rename", 0, 0), ("after commit", 0, 0)],
)
def test_rule_18_killed_anywhere_the_count_is_right(die, voids, drawn_again, ledger, tmp_path):
    """os._exit(9): no handler runs, as under SIGKILL. The rename into the store is the commit point."""
    root, folder = ledger.root.parent, tmp_path / "results" / "exp" / "released" / "m"
    finish(start(WORKER, root, folder, die, "no", tmp_path / "go"), status=9)
    stored = sorted((ledger.root / "store").glob("*/weights"))
    assert len(stored) == (0 if voids else 1)
    assert not folder.exists()
    again = finish(start(WORKER, root, folder, "nowhere", "no", tmp_path / "go"))
    assert again["draws"] == drawn_again
    assert states(ledger) == ["committed"] + ["void"] * voids
    assert [entry.id for entry in ledger.entries() if entry.state == "committed"] == [again["entry"]]
    assert (folder / "weights").read_bytes().hex() == again["bytes"]
    if stored:
        assert stored[0].read_bytes().hex() == again["bytes"]
    third = finish(start(WORKER, root, folder, "nowhere", "no", tmp_path / "go"))
    assert third == {**again, "draws": 0}
    assert len(ledger.entries()) == 1 + voids


def test_rule_18_two_processes_that_ask_at_once_share_one_release(ledger, tmp_path):
    root, go = ledger.root.parent, tmp_path / "go"
    both = [start(WORKER, root, tmp_path / f"out{i}", "nowhere", "yes", go) for i in range(2)]
    while len(list(tmp_path.glob("go.ready*"))) < 2:
        time.sleep(0.01)
    go.touch()
    one, other = (finish(process) for process in both)
    assert one["draws"] + other["draws"] == 1
    assert (one["bytes"], one["entry"]) == (other["bytes"], other["entry"])
    assert states(ledger) == ["committed"]


APPENDER = """
import sys, time
from pathlib import Path
from dpmixmin.privacy.ledger import Ledger

root, name, signal = sys.argv[1:]
ledger = Ledger(root, "clinic")
Path(signal).with_suffix(f".ready{name}").touch()
while not Path(signal).exists():
    time.sleep(0.002)
for i in range(12):
    ledger.log.append({"event": "reserved", "entry": f"{name}-{i}", "key": name})
"""


def test_rule_18_eight_processes_append_under_exclusive_numbers(ledger, tmp_path):
    go = tmp_path / "go"
    processes = [start(APPENDER, ledger.root.parent, name, go) for name in "abcdefgh"]
    while len(list(tmp_path.glob("go.ready*"))) < 8:
        time.sleep(0.01)
    go.touch()
    for process in processes:
        finish(process)
    assert [path.name for path in event_files(ledger)] == [f"{i:06d}.json" for i in range(1, 97)]
    found = [entry.id for entry in ledger.entries()]
    assert len(set(found)) == 96
    for name in "abcdefgh":
        assert [entry for entry in found if entry[0] == name] == [f"{name}-{i}" for i in range(12)]


def test_rule_18_eight_threads_that_create_one_ledger_agree_on_its_id(tmp_path):
    ids, barrier = [], threading.Barrier(8)

    def create():
        barrier.wait()
        ids.append(Ledger(tmp_path / "ledger", "clinic").dataset_id)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 8
    assert len(set(ids)) == 1
