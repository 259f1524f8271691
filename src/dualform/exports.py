"""Answers as files for other tools: CSV, or Parquet (extra `tables`), by the name's ending.

A file appears whole or not at all, also if the command is interrupted while writing it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from dualform.errors import DualFormError
from dualform.table import Table

ENDINGS = (".csv", ".parquet")


def check_ending(file: Path) -> None:
    """Refuse a name whose ending says nothing, before anything is computed."""
    if file.suffix.lower() not in ENDINGS:
        raise DualFormError(
            f"{file} was named to export to; expected a name ending in {' or '.join(ENDINGS)}"
        )


def export(file: Path, tables: Mapping[str, Table]) -> list[Path]:
    """Write one table to the file, several to files named after it and after each table."""
    check_ending(file)
    if len(tables) == 1:
        return [_write(file, table) for table in tables.values()]
    written = []
    for name, table in tables.items():
        plain = re.sub(r"[^\w.-]+", "-", name)
        written.append(_write(file.with_name(f"{file.stem}-{plain}{file.suffix}"), table))
    return written


def _write(path: Path, table: Table) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.suffix.lower() == ".csv":
            table.to_csv(temporary)
        else:
            table.to_parquet(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise DualFormError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return path
