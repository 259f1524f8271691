"""Pixels as PNG data URLs: small, crisp pictures that live inside a chart's own data.

A PNG file is a signature and a few blocks with checksums, its pixels compressed by zlib: the
standard library has all that is needed. Pictures are enlarged by whole numbers beforehand, so that
a 28 × 28 digit shows its pixels and no renderer has a chance to blur them; repeated pixels compress
to nearly nothing.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dualform.errors import QueryError

AT_LEAST = 112
"""Pixels that a small picture is enlarged to, at least: twice the size it is usually shown at."""

Bytes = NDArray[np.uint8]


def data_url(pixels: Any, *, invert: bool = False, span: tuple[float, float] | None = None) -> str:
    """A picture as text that browsers and renderers draw: `data:image/png;base64,…`."""
    shades = as_bytes(pixels, span)
    if invert:
        shades = 255 - shades
    enlarged = _enlarge(shades, AT_LEAST)
    return "data:image/png;base64," + base64.b64encode(png(enlarged)).decode("ascii")


def as_bytes(pixels: Any, span: tuple[float, float] | None = None) -> Bytes:
    """Pixels as bytes [height, width] (grey) or [height, width, 3]; 0 is black.

    Whole numbers are 0 to 255, reals 0 to 1; `span` names another darkest and lightest value. A
    flat vector is a square grey picture; colours may come first, as torch has them, or last.
    """
    values = _as_picture(pixels)
    if span is not None:
        black, white = _ends(span)
    else:
        black, white = (0.0, 255.0) if values.dtype.kind in "iu" else (0.0, 1.0)
        low, high = float(values.min()), float(values.max())
        if not (black <= low and high <= white):
            raise QueryError(
                f"pixels range from {low:g} to {high:g}; expected {black:g} to {white:g}. "
                "Say what is black and what is white with span=(black, white)"
            )
    shades = (values.astype(np.float64) - black) / (white - black)
    return np.round(255 * np.clip(shades, 0.0, 1.0)).astype(np.uint8)


def _ends(span: Any) -> tuple[float, float]:
    """What is black and what is white."""
    try:
        black, white = map(float, span)
    except (TypeError, ValueError):
        black = white = math.nan
    if not (math.isfinite(black) and math.isfinite(white) and black != white):
        raise QueryError(f"span={span!r}: expected two different numbers, black and white")
    return black, white


def _as_picture(pixels: Any) -> NDArray[Any]:
    """Pixels as an array [height, width] or [height, width, 3]."""
    given = pixels.detach().cpu().numpy() if isinstance(pixels, torch.Tensor) else pixels
    values = np.asarray(given)
    seen = values.shape
    if values.dtype.kind == "b":
        values = values.astype(np.float64)
    if values.ndim == 1 and math.isqrt(values.size) ** 2 == values.size:
        values = values.reshape(math.isqrt(values.size), -1)
    if values.ndim == 3 and values.shape[0] in (1, 3) and values.shape[2] not in (1, 3):
        values = np.moveaxis(values, 0, 2)
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    if values.size == 0 or not (values.ndim == 2 or (values.ndim == 3 and values.shape[2] == 3)):
        raise QueryError(
            f"a picture of shape {seen} was given; expected [height, width], [height, width, 3], "
            "[3, height, width] or a flat vector of a square number of pixels"
        )
    if values.dtype.kind not in "iuf" or not np.isfinite(values).all():
        raise QueryError("a picture holds something that is no finite number; expected numbers")
    return values


def _enlarge(shades: Bytes, at_least: int) -> Bytes:
    factor = max(1, -(-at_least // max(shades.shape[:2])))
    return shades.repeat(factor, axis=0).repeat(factor, axis=1)


def png(shades: Bytes) -> bytes:
    """A PNG file of bytes [height, width] or [height, width, 3]."""
    height, width = shades.shape[:2]
    colour = 0 if shades.ndim == 2 else 2
    rows = shades.reshape(height, -1)
    # each row begins with its filter: none, or "as the row above", which repeated rows compress by
    same = np.zeros(height, bool)
    same[1:] = (rows[1:] == rows[:-1]).all(1)
    lines = np.concatenate(
        [np.where(same, 2, 0).astype(np.uint8)[:, None], np.where(same[:, None], 0, rows)], axis=1
    )
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    packed = zlib.compress(lines.astype(np.uint8).tobytes(), 9)
    blocks = [_block(b"IHDR", header), _block(b"IDAT", packed), _block(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(blocks)


def _block(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)
