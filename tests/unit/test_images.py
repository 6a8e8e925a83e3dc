"""Image files: decoded one at a time; a bad public one is named, a bad private one is a row of NaN (rule 6)."""

import json

import numpy as np
import pytest
from loading import load_private
from PIL import Image

from dpmixmin.data.loaders import load_public
from dpmixmin.errors import UserError
from dpmixmin.sections import Inputs, Private
from dpmixmin.table_sections import ImageTable

RAW, KEY = Inputs(bound=1e6), b"key of the ids"


def refused(call, *arguments) -> str:
    """Return the one line that a call is refused with."""
    with pytest.raises(UserError) as caught:
        call(*arguments)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture
def folder(tmp_path, rng):
    """Two images of each class, of several sizes."""
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i, shape in enumerate(((4, 6, 3), (9, 5, 3))):
            Image.fromarray(rng.integers(0, 256, shape).astype(np.uint8)).save(tmp_path / name / f"{i}.png")
    return tmp_path


def table_of(folder, **options) -> ImageTable:
    options.setdefault("size", (4, 6))
    if "table" not in options:
        options.setdefault("classes", ("cat", "dog"))
    return ImageTable(kind="images", path=str(folder), **options)


def listed(folder, text: str, **options) -> ImageTable:
    (folder / "list.csv").write_text(text)
    return table_of(folder, table=str(folder / "list.csv"), **options)


def private_of(table, **options) -> Private:
    return Private(name="pets", table=table, nominal_units=10, **options)


def load(table, width=24, **options):
    return load_private(private_of(table, **options), RAW, KEY, width)


def test_classes_are_positions_in_the_config_and_pixels_are_channel_first(folder):
    found = load_public(table_of(folder, colour="rgb"), RAW)
    assert found.labels["label"].tolist() == [0, 0, 1, 1]
    assert found.features.shape == (4, 3 * 4 * 6)
    pixels = np.asarray(Image.open(folder / "dog/0.png"), dtype=np.float32)
    for channel in range(3):
        for y in range(4):
            for x in range(6):
                assert found.features[2][channel * 24 + y * 6 + x] == pixels[y, x, channel]
    turned = load_public(table_of(folder, classes=("dog", "cat"), colour="rgb"), RAW)
    assert turned.features[0].tolist() == found.features[2].tolist()


def test_grey_is_luma_and_values_are_scaled_by_public_constants(folder):
    found = load_public(table_of(folder), Inputs(offset=100.0, scale=50.0, bound=1.5))
    r, g, b = np.moveaxis(np.asarray(Image.open(folder / "cat/0.png"), dtype=np.float64), 2, 0)
    grey = np.clip((0.299 * r + 0.587 * g + 0.114 * b - 100) / 50, -1.5, 1.5)
    assert np.abs(found.features[0].reshape(4, 6) - grey).max() <= 1 / 50 + 1e-6, "rounded to one of 256 greys"


def test_images_are_resized_to_height_and_width(tmp_path):
    (tmp_path / "a").mkdir()
    Image.fromarray(np.repeat(np.asarray([[10, 200]], dtype=np.uint8), 40, axis=0).repeat(40, axis=1)).save(
        tmp_path / "a/1.png"
    )
    found = load_public(table_of(tmp_path, classes=("a",), size=(2, 8)), RAW).features.reshape(2, 8)
    assert found[0].tolist() == found[1].tolist()
    assert found[0, :3].tolist() == [10, 10, 10]
    assert found[0, 5:].tolist() == [200, 200, 200]


@pytest.mark.parametrize("colour", ["grey", "rgb"])
def test_sixteen_bits_become_0_to_255_and_are_not_cut_off(colour, tmp_path):
    (tmp_path / "a").mkdir()
    Image.fromarray(np.asarray([[0, 257 * 100], [257 * 200, 65535]], dtype=np.uint16)).save(tmp_path / "a/1.png")
    found = load_public(table_of(tmp_path, classes=("a",), size=(2, 2), colour=colour), RAW).features[0]
    assert found.tolist() == [0, 100, 200, 255] * (1 if colour == "grey" else 3)


def test_a_csv_lists_files_with_labels_ids_and_units(folder):
    text = "file,extra,sick,age,who,id\ncat/0.png,x,1,30,ann,7\ndog/1.png,y,0,41.5,,8\ncat/1.png,z,1,30,ann,9\n"
    table = listed(folder, text, labels=("sick", "age"), record_id="id")
    public = load_public(table, RAW)
    assert public.labels["sick"].tolist() == [1, 0, 1]
    assert public.labels["age"].tolist() == [30, 41.5, 30]
    found = load(table, unit="who")
    assert found.units()[0] == 2
    assert sorted(map(tuple, found.features.tolist())) == sorted(map(tuple, public.features.tolist()))


@pytest.mark.parametrize(
    "bad", ["missing.png", "", "/etc/hostname", "../list.csv", "broken.png", "cut.png", "list.csv"]
)
@pytest.mark.filterwarnings("error")
def test_rule_6_a_bad_public_image_is_named_and_a_bad_private_one_is_nan(bad, folder, capfd):
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"x" * 40)
    (folder / "cut.png").write_bytes((folder / "cat/0.png").read_bytes()[:60])
    table = listed(folder, f"file,label\ncat/0.png,1\n{bad},0\ndog/0.png,\n")
    assert f"{bad}: missing, or no image" in refused(load_public, table, RAW)
    found = load(table)
    assert len(found) == 3
    assert np.isnan(found.features).all(axis=1).sum() == 1
    assert np.isnan(found.features).any(axis=1).sum() == 1
    assert np.isnan(found.labels["label"]).sum() == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.filterwarnings("error")
def test_rule_20_an_image_of_absurd_size_raises_no_warning(folder, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)
    assert np.isfinite(load(table_of(folder)).features).all(axis=1).sum() == 2, "45 pixels are an error, 24 a warning"


def test_bad_labels_are_an_error_in_public_and_nan_in_private(folder):
    table = listed(folder, "file,label\ncat/0.png,yes\n")
    assert "row 0 has NaN or infinity in label" in refused(load_public, table, RAW)
    assert np.isnan(load(table).labels["label"]).all()


def test_what_does_not_fit_the_schema_is_refused_in_one_line(folder):
    text = "file,label\ncat/0.png,1\n"
    assert "no column `sick`; it has: file, label" in refused(load_public, listed(folder, text, labels=("sick",)), RAW)
    assert "no column `who`" in refused(lambda: load(listed(folder, text), unit="who"))
    assert "list them in a CSV" in refused(lambda: load(table_of(folder), unit="who"))
    assert "cow: no such folder" in refused(load_public, table_of(folder, classes=("cat", "cow")), RAW)
    assert "no such folder of images" in refused(load_public, table_of(folder / "none"), RAW)
    assert "24 features a record, the public sources have 25" in refused(lambda: load(table_of(folder), width=25))
    assert "no rows" in refused(load_public, listed(folder, "file,label\n"), RAW)


def test_rules_5_and_10_a_private_class_without_images_changes_no_shape(folder):
    whole = load(table_of(folder, classes=("cat", "cow", "dog")))
    assert whole.labels["label"].tolist().count(2) == 2
    for path in sorted(folder.glob("*/*.png")):
        path.unlink()
    (folder / "cat").rmdir()
    nobody = load(table_of(folder))
    assert nobody.to_arrow().schema == whole.to_arrow().schema
    assert nobody.features.shape == (0, 24)


@pytest.mark.parametrize("form", ["csv", "folders"])
def test_rules_11_and_25_deleting_an_image_leaves_every_other_record_untouched(form, folder):
    """Duplicates in play: the same file for two people, and twice for one."""
    (folder / "dog/2.png").write_bytes((folder / "dog/0.png").read_bytes())
    files = sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/*.png"))
    rows = [(name, name[0] == "d", who) for name in files for who in ("ann", "bob")] + [(files[0], False, "ann")]

    def prepared(keep):
        if form == "csv":
            kept = [rows[i] for i in keep]
            table = listed(folder, "file,label,who\n" + "".join(f"{n},{int(y)},{w}\n" for n, y, w in kept))
        else:
            table = table_of(folder)
        records = load(table, **({"unit": "who"} if form == "csv" else {}))
        columns = (records.record.tolist(), records.unit.tolist(), records.labels["label"].tolist())
        return {json.dumps(row) for row in zip(*columns, records.features.tolist(), strict=True)}

    everything = list(range(len(rows)))
    before = prepared(everything)
    assert len(before) == (len(rows) if form == "csv" else len(files))
    if form == "csv":
        for gone in everything:
            after = prepared(everything[:gone] + everything[gone + 1 :])
            assert after < before
            assert len(before - after) == 1
    else:
        for name in files:
            data = (folder / name).read_bytes()
            (folder / name).unlink()
            after = prepared(everything)
            assert after < before
            assert len(before - after) == 1
            (folder / name).write_bytes(data)
