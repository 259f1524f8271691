"""Fields of a file that is not trusted: every one is checked for what it should be.

Each is read by one of these functions, which give back what was expected or raise one of `WRONG`;
`reading` turns that into a `MemoryFileError` that names the file. Texts are sealed: what does not
match its checksum to the last character is not even parsed. Why it is hard: a manifest or a line
may be damaged, of a newer kind, or made by hand to do harm.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from dualform.errors import MemoryFileError, QueryError

try:
    from isal.isal_zlib import crc32 as crc32  # the extra `fast`: the same numbers, sooner
except ImportError:
    from zlib import crc32 as crc32

T = TypeVar("T")

WRONG = (
    KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError,
)  # fmt: skip
"""What reading a field that is not what it should be can raise."""

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "complex128", "complex64", "int64", "int32",
        "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
    )
}  # fmt: skip


def damaged(what: object, why: object) -> MemoryFileError:
    """The error for a file that is not what it should be."""
    return MemoryFileError(
        f"{what} is damaged, or made by another program: {why}. Restore it from a copy; the other "
        "files may be unharmed"
    )


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Turn whatever a wrong field raises into the error that names the file."""
    try:
        yield
    except WRONG as error:
        raise damaged(what, f"{error!r:.300}") from error


def named(known: Mapping[str, T], name: str, what: str) -> T:
    """Find something by its name; `QueryError` says which names there are."""
    if not isinstance(name, str) or name not in known:
        raise QueryError(f"there is no {what} {name!r}; there are {', '.join(known) or 'none'}")
    return known[name]


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


def counts(value: Any) -> dict[str, int]:
    return {name: count(n) for name, n in exactly(dict, value).items()}


def shape(value: Any) -> tuple[int, ...]:
    """Read a tensor's shape."""
    if len(exactly(list, value)) > 64:
        raise ValueError(f"a shape of {len(value)} dimensions")
    return tuple(map(count, value))


def dtype(value: Any) -> torch.dtype:
    return DTYPES[exactly(str, value)]


def seal(what: str, content: dict[str, Any], after: int = 0) -> bytes:
    """Write content as a line of JSON that begins with its checksum, which goes on from `after`."""
    body = json.dumps(content, separators=(",", ":")).encode()
    return b'{"crc32":%d,"%s":%s}\n' % (crc32(body, after), what.encode(), body)


def unseal(what: str, line: bytes, after: int = 0) -> tuple[dict[str, Any], int]:
    """Read a sealed line and its checksum; one of `WRONG` unless it is as it was written."""
    start = re.match(rb'\{"crc32":(0|[1-9][0-9]{0,9}),"%s":' % what.encode(), line)
    if start is None or not line.endswith(b"}\n"):
        raise ValueError("it is not one line of sealed JSON")
    body, said = line[start.end() : -2], int(start[1])
    if crc32(body, after) != said:
        raise ValueError("its content, or the line before it, does not match its checksum")
    return exactly(dict, json.loads(body)), said


def quoted(name: str) -> str:
    """Write a name so that it has no slash: the names of tensors are parts between slashes."""
    return name.replace("%", "%25").replace("/", "%2F")


def unquoted(name: str) -> str:
    return name.replace("%2F", "/").replace("%25", "%")
