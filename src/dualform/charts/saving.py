"""Charts as files: SVG, PNG, PDF, HTML or JSON, without a browser and without a network.

The same chart gives the same SVG, byte for byte, so that a figure under version control changes
only when its numbers do. Two things stand in the way. The renderer numbers the clipping paths of
all drawings it ever made: they are numbered anew here. And it writes places with fifteen digits, in
which the rounding of another processor shows: they are written to a thousandth of a pixel.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

from dualform.charts.style import altair, is_chart, missing
from dualform.errors import DualFormError

ENDINGS = (".svg", ".png", ".pdf", ".html", ".json")

PLACES = re.compile(r' (?:d|transform|points|width|height|[xy][12]?|c[xy]|r)="[^"]*"')
LONG = re.compile(r"-?\d+\.\d{4,}(?:e-?\d+)?")
NUMBERED = re.compile(r"\b(clip|gradient_)(\d+)\b")


def save(chart: Any, path: str | Path, *, scale: float = 2.0) -> Path:
    """Write a chart to a file; its ending says as what: .svg, .png, .pdf, .html or .json.

    `scale` is how many pixels of a PNG stand for one of the chart. HTML brings its own JavaScript
    (about 1 MB) and opens anywhere; JSON is the Vega-Lite specification with its data.

    Example:
        >>> from dualform import charts
        >>> digit = charts.images([[[0, 255], [255, 0]]], captions=["a test image"])
        >>> charts.save(digit, "digit.svg").name
        'digit.svg'
    """
    if not is_chart(chart):
        raise DualFormError(
            f"save was given {type(chart).__name__} as the chart; expected what a function of "
            "dualform.charts gives: save(chart, path)"
        )
    if not isinstance(path, str | os.PathLike):
        raise DualFormError(f"save was given {path!r} as the path; expected a file's name")
    if not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise DualFormError(f"scale={scale!r}: expected a number above 0, pixels of a PNG per one")
    path = Path(path)
    if path.suffix.lower() not in ENDINGS:
        raise DualFormError(
            f"{path} was named to save a chart to; expected a name ending in {', '.join(ENDINGS)}"
        )
    if not path.parent.is_dir():
        raise DualFormError(
            f"{path} cannot be written: there is no directory {path.parent}; make it first"
        )
    content = _content(chart, path.suffix.lower(), scale)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        raise DualFormError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _content(chart: Any, ending: str, scale: float) -> bytes:
    alt = altair()
    specification = chart.to_dict()
    if ending == ".json":
        text = json.dumps(specification, sort_keys=True, ensure_ascii=False)
        return f"{text}\n".encode()
    try:
        import vl_convert
    except ImportError as error:
        raise missing("vl-convert-python") from error
    version = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    if ending == ".html":
        page = vl_convert.vegalite_to_html(specification, vl_version=version, bundle=True)
        return page.encode()
    # nothing may be fetched: all data is inside the specification
    svg = vl_convert.vegalite_to_svg(specification, vl_version=version, allowed_base_urls=[])
    svg = rounded(renumbered(svg))
    if ending == ".svg":
        return f"{svg}\n".encode()
    if ending == ".png":
        return bytes(vl_convert.svg_to_png(svg, scale=scale, ppi=72))
    return bytes(vl_convert.svg_to_pdf(svg))


def renumbered(svg: str) -> str:
    """The same drawing, its clipping paths and gradients numbered in order of appearance."""
    seen: dict[str, str] = {}
    names = NUMBERED.finditer(svg)
    for match in names:
        seen.setdefault(match[0], f"{match[1]}{len(seen)}")
    return NUMBERED.sub(lambda match: seen[match[0]], svg)


def rounded(svg: str) -> str:
    """The same drawing, its places to a thousandth of a pixel; text and data stay as they are."""

    def short(number: re.Match[str]) -> str:
        text = f"{float(number[0]):.3f}".rstrip("0").rstrip(".")
        return "0" if text == "-0" else text

    return PLACES.sub(lambda places: LONG.sub(short, places[0]), svg)
