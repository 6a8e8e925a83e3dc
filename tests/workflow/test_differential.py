"""Rule 20, the differential run: the pipeline on D, and on D without one patient, with the same frozen randomness.

Everything outside ``private/``, ``study/`` and what mechanisms declare as their output is byte-identical, once random
ids, times and the hashes of released files are masked: logs, exit texts, file names, manifests, ``.snakemake``.
"""

from __future__ import annotations

import json
import re
import shutil

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from checkout import Checkout
from test_own_data import as_study, checkout, write_data  # noqa: F401

MECHANISM_OUTPUTS = {"weights.json", "trajectory.parquet", "model.safetensors", "loss.parquet"}
"""Released files that may differ: noisy releases, and models made from them."""

TIMES = re.compile(
    rb"\d{4}-\d\d-\d\dT\d{6}\.\d+|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?|"
    rb"[A-Z][a-z]{2} [A-Z][a-z]{2} +\d+ \d\d:\d\d:\d\d \d{4}|\d+:\d\d:\d\d\.\d+"
)
HEX = re.compile(rb"\b[0-9a-f]{32,64}\b")


def masked(name: str, content: bytes) -> bytes:
    """Remove times everywhere; hashes and ids only where a random id or a released file's hash may stand."""
    content = TIMES.sub(b"TIME", content)
    if name.endswith(("manifest.json", "privacy.json")):
        content = HEX.sub(b"HEX", content)
    return content


def visible(run: Checkout) -> dict[str, bytes]:
    """Return what somebody sees who may not look into private/ and study/."""
    base = run.path / "results/mine"
    found = {}
    for path in sorted(base.rglob("*")):
        name = str(path.relative_to(base))
        room = name.split("/")[0]
        if room == "private" or room == "study" or not path.is_file():
            continue
        content = path.read_bytes()
        declared = room == "released" and path.name in MECHANISM_OUTPUTS
        found[name] = b"declared output" if declared else masked(name, content)
    return found


def snakemake_records(run: Checkout) -> dict[str, dict]:
    """Return Snakemake's own records of jobs, without times and checksums of released and private files."""
    found = {}
    for path in sorted((run.path / ".snakemake/metadata").iterdir()):
        record = json.loads(path.read_text())
        for key in ("starttime", "endtime", "job_hash", "input_checksums"):
            record.pop(key, None)
        found[path.name] = record
    return found


@pytest.mark.slow
def test_rule_20_one_patient_less_changes_nothing_that_is_visible(checkout, tmp_path):  # noqa: F811
    as_study(checkout, privacy={"insecure_seed": 3})
    write_data(checkout.path, bad_values=True)
    other = Checkout(tmp_path / "a folder" / "other")
    shutil.copytree(checkout.path, other.path)
    table = pq.read_table(other.path / "private.parquet")
    # Patient 0 has the broken records: a NaN row and a row of another length.
    pq.write_table(table.filter(pc.not_equal(table["patient_id"], 0)), other.path / "private.parquet")
    texts = [
        run.snakemake("finetuned", "-c1", "--quiet", "reason", "host", config="mine.yaml").stdout
        for run in (checkout, other)
    ]
    clean = [re.sub(rb"checkout|other", b"X", TIMES.sub(b"TIME", text.encode())).decode() for text in texts]
    # Sorted: in which order Snakemake says that a job ended depends on how long others took.
    assert sorted(clean[0].splitlines()) == sorted(clean[1].splitlines())
    one, two = visible(checkout), visible(other)
    assert sorted(one) == sorted(two)
    assert len(one) > 40
    different = [name for name in one if one[name] != two[name]]
    assert different == []
    assert snakemake_records(checkout) == snakemake_records(other)
    private = [(run.path / "results/mine/private/records/counts.json").read_text() for run in (checkout, other)]
    assert json.loads(private[0])["units"] == json.loads(private[1])["units"] + 1, "the two runs did differ"
    entries = [sorted((run.path / ".ledger/my_hospital/entries").iterdir()) for run in (checkout, other)]
    assert len(entries[0]) == len(entries[1]) > 0
