"""Fields of a file that is not trusted: every one is checked for what it should be.

Why it is hard: a manifest or a line may be damaged, of a newer kind, or made by hand to do harm. So
each field is read by one of these functions, which give back what was expected or raise one of
`WRONG`; the reader of a file turns that into a `MemoryFileError` that names it. Texts are sealed:
what does not match its checksum to the last character is not even parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from dualform.memory.checksums import crc32

T = TypeVar("T")

WRONG = (
    KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError,
)  # fmt: skip
"""What reading a field that is not what it should be can raise."""

DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16,
    "bfloat16": torch.bfloat16, "complex128": torch.complex128, "complex64": torch.complex64,
    "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8,
    "uint64": torch.uint64, "uint32": torch.uint32, "uint16": torch.uint16, "uint8": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip


def exactly(kind: type[T], value: Any) -> T:
    """Read a value that is of one type and of no other."""
    if type(value) is not kind:
        raise TypeError(f"{value!r:.100} is no {kind.__name__}")
    return value


def count(value: Any) -> int:
    """Read a number of things."""
    if not 0 <= exactly(int, value) < 1 << 62:
        raise ValueError(f"{value!r:.100} is not a count")
    return int(value)


def chosen(value: Any, choices: Iterable[str]) -> str:
    """Read one of some words."""
    if exactly(str, value) not in choices:
        raise ValueError(f"{value!r:.100} is none of {', '.join(choices)}")
    return str(value)


def texts(value: Any) -> list[str]:
    return [exactly(str, text) for text in exactly(list, value)]


def shape(value: Any) -> tuple[int, ...]:
    """Read a tensor's shape."""
    if len(exactly(list, value)) > 64:
        raise ValueError(f"a shape of {len(value)} dimensions")
    return tuple(map(count, value))


def dtype(value: Any) -> torch.dtype:
    return DTYPES[exactly(str, value)]


def blocks(value: Any) -> NDArray[np.int64]:
    """Read the checksums of a file: [n, 2], bytes and crc32 of one block after the other."""
    found = np.array(exactly(list, value))
    if found.dtype != np.int64 or found.ndim != 2 or found.shape[1] != 2:
        raise ValueError("the checksums of a file are not pairs of numbers")
    if found[:, 0].min() < 1 or found[:, 0].max() > 1 << 40 or found[:, 1].min() < 0:
        raise ValueError("the checksums of a file are not of blocks")
    return found


def as_runs(numbers: Sequence[int]) -> list[list[int]]:
    """Write rising numbers down as [first, how many, stride]: short however many there are."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs:
            first, known, stride = runs[-1]
            if known == 1 or number == first + known * stride:
                runs[-1] = [first, known + 1, stride if known > 1 else number - first]
                continue
        runs.append([number, 1, 1])
    return runs


def from_runs(value: Any, low: int, high: int) -> list[range]:
    """Read rising numbers from `low` to `high`, without writing them out."""
    found: list[range] = []
    for first, known, stride in exactly(list, value):
        run = range(count(first), first + count(known) * count(stride), stride)
        if not run or not low <= run[0] <= run[-1] <= high or (found and found[-1][-1] >= run[0]):
            raise ValueError(f"{run} is not after {found[-1:]} and from {low} to {high}")
        found.append(run)
    return found


def seal(what: str, content: dict[str, Any]) -> bytes:
    """Write content as one line of JSON that begins with its own checksum."""
    body = json.dumps(content, separators=(",", ":")).encode()
    return b'{"crc32":%d,"%s":%s}\n' % (crc32(body), what.encode(), body)


def unseal(what: str, line: bytes) -> dict[str, Any]:
    """Read a sealed line; one of `WRONG` unless every character is as it was written."""
    start = re.match(rb'\{"crc32":(0|[1-9][0-9]{0,9}),"%s":' % what.encode(), line)
    if start is None or not line.endswith(b"}\n"):
        raise ValueError("it is not one line of sealed JSON")
    body = line[start.end() : -2]
    if crc32(body) != int(start[1]):
        raise ValueError("its content does not match its own checksum")
    return exactly(dict, json.loads(body))


def quoted(name: str) -> str:
    """Write a name so that it has no slash: the names of tensors are parts between slashes."""
    return name.replace("%", "%25").replace("/", "%2F")


def unquoted(name: str) -> str:
    return name.replace("%2F", "/").replace("%25", "%")
