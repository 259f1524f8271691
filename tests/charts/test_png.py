"""Pictures inside charts: what is encoded is what was given, pixel by pixel."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualform
from dualform import charts
from dualform.charts.png import as_bytes, data_url, png


def decode(data: bytes) -> np.ndarray[Any, Any]:
    """A PNG read by the book: blocks and checksums first, then the filters of every row."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, packed, header = 8, b"", b""
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        (checksum,) = struct.unpack(">I", data[at + 8 + size : at + 12 + size])
        assert zlib.crc32(kind + content) == checksum
        header = content if kind == b"IHDR" else header
        packed += content if kind == b"IDAT" else b""
        at += 12 + size
    assert kind == b"IEND"
    width, height, depth, colour, *rest = struct.unpack(">IIBBBBB", header)
    assert (depth, rest) == (8, [0, 0, 0])
    channels = {0: 1, 2: 3, 6: 4}[colour]
    raw = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + width * channels)
    rows = np.zeros((height + 1, width + 1, channels), np.int64)  # zeros above and at the left
    for i, line in enumerate(raw, start=1):
        for j, pixel in enumerate(line[1:].reshape(width, channels).astype(int), start=1):
            rows[i, j] = (
                pixel + guessed(line[0], rows[i, j - 1], rows[i - 1, j - 1 : j + 1])
            ) % 256
    shades = rows[1:, 1:].astype(np.uint8)
    return shades[:, :, 0] if channels == 1 else shades


def guessed(kind: int, left: Any, above: Any) -> Any:
    """What a PNG's filter takes a pixel for, from the one at its left and the two above."""
    corner, up = above
    if kind == 4:
        near = np.abs(np.stack([up - corner, left - corner, left + up - 2 * corner]))
        return np.choose(near.argmin(0), [left, up, corner])
    return [0 * left, left, up, (left + up) // 2][kind]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
)
def test_a_png_holds_the_bytes_it_was_made_of(
    height: int, width: int, coloured: bool, seed: int, levels: int
) -> None:
    shape = (height, width, 3) if coloured else (height, width)
    # few levels: rows that repeat, which are stored differently
    shades = np.random.default_rng(seed).integers(0, levels, shape).astype(np.uint8) * 80
    assert np.array_equal(decode(png(shades)), shades)


def test_a_small_picture_is_enlarged_by_whole_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (28, 28)).astype(np.uint8)
    url = data_url(pixels)
    decoded = decode(base64.b64decode(url.removeprefix("data:image/png;base64,")))
    assert decoded.shape == (112, 112)
    assert np.array_equal(decoded[::4, ::4], pixels)
    assert np.array_equal(decoded, pixels.repeat(4, 0).repeat(4, 1))
    turned = decode(base64.b64decode(data_url(pixels, invert=True).partition(",")[2]))
    assert np.array_equal(turned, 255 - decoded)


def test_a_rendered_picture_is_crisp_and_at_its_place(tmp_path: Path) -> None:
    """The renderer draws what was given, pixel by pixel, in the middle of the chart."""
    pixels = np.random.default_rng(1).integers(0, 256, (8, 8)).astype(np.uint8)
    chart = charts.images([pixels], size=32)
    drawn = decode(charts.save(chart, tmp_path / "chart.png", scale=2).read_bytes())[:, :, :3]
    # the white around it: 4 pixels of padding, and half of the 10 between columns
    left, top = 2 * (4 + 5), 2 * 4
    inside = drawn[top : top + 64, left : left + 64]
    middles = inside[4::8, 4::8].astype(int)
    assert np.abs(middles - pixels[:, :, None]).max() <= 1
    assert np.abs(inside[2::8, 5::8].astype(int) - pixels[:, :, None]).max() <= 1
    assert (drawn[: top - 1] == 255).all()
    assert (drawn[:, : left - 1] == 255).all()


def test_every_way_to_hold_a_picture_gives_the_same_bytes() -> None:
    shades = np.arange(16, dtype=np.uint8).reshape(4, 4) * 17
    expected = as_bytes(shades)
    assert np.array_equal(expected, shades)
    for same in (
        shades.reshape(-1),
        shades.tolist(),
        shades[None],
        shades[:, :, None],
        shades / 255.0,
        torch.from_numpy(shades),
        torch.from_numpy(shades / 255.0).float(),
    ):
        assert np.array_equal(as_bytes(same), expected)
    assert np.array_equal(as_bytes(shades / 255.0 * 4 - 2, span=(-2, 2)), expected)
    assert np.array_equal(as_bytes(shades / 255.0, span=(1, 0)), 255 - expected)
    coloured = np.stack([shades, shades.T, 255 - shades], axis=2)
    assert np.array_equal(as_bytes(coloured), coloured)
    assert np.array_equal(as_bytes(np.moveaxis(coloured, 2, 0)), coloured)


def test_beyond_the_span_there_is_only_black_and_white() -> None:
    assert as_bytes([[-3.0, 0.0], [1.0, 9.0]], span=(0, 1)).tolist() == [[0, 0], [255, 255]]


@pytest.mark.parametrize(
    ("pixels", "asked", "message"),
    [
        ([[0.0, 1.5]], {}, r"range from 0 to 1.5; expected 0 to 1. Say what is black"),
        ([[0, 256]], {}, "range from 0 to 256; expected 0 to 255"),
        (np.zeros(5), {}, r"shape \(5,\) was given"),
        (np.zeros((2, 2, 4)), {}, r"shape \(2, 2, 4\)"),
        (np.zeros((0, 0)), {}, "shape"),
        ([[float("nan"), 0.0]], {}, "no finite number"),
        ([["a", "b"]], {}, "no finite number|expected numbers"),
        ([[0.0, 1.0]], {"span": (1, 1)}, "two different numbers"),
    ],
)
def test_what_is_no_picture_is_refused(pixels: Any, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(dualform.QueryError, match=message):
        as_bytes(pixels, **asked)
