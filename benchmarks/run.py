"""Run every benchmark and refresh its table in docs/benchmarks.md.

    make bench                   # all of them
    make bench ONLY=recording    # one of them: the other tables stay as they were measured

Each benchmark prints one JSON line per row: {"bench": ..., "ratio": ..., "target": ..., "ok": ...};
a target is an upper bound unless the row says "at_least".
Ratios only: both sides of each are measured in one process, taking turns. A row without a target is
there for comparison. The exit code is 1 if a target was missed.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"


def rows_of(script: Path) -> list[dict[str, Any]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-W", "ignore", str(script)]
    rows = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            rows.append(json.loads(line))
    if process.returncode:
        raise SystemExit(f"{script.name} failed with exit code {process.returncode}")
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| what | ratio (median) | range | target | met |", "|---|---|---|---|---|"]
    for row in rows:
        low, high = row.get("range", (None, None))
        span = "" if low is None else f"{low:.2f} to {high:.2f}"
        sign = "≥" if row.get("at_least") else "≤"
        target = "" if row["target"] is None else f"{sign} {row['target']:g}"
        met = {True: "yes", False: "**no**", None: ""}[row["ok"]]
        lines.append(f"| {row['bench']} | {row['ratio']} | {span} | {target} | {met} |")
    return "\n".join(lines)


def conditions() -> str:
    import torch

    import dualform

    today = datetime.date.today().isoformat()
    return (
        f"Measured {today} on {os.cpu_count()} shared cores ({platform.machine()}), Python "
        f"{platform.python_version()}, torch {torch.__version__}, dualform {dualform.__version__}, "
        "one training thread."
    )


def refresh(name: str, rows: list[dict[str, Any]]) -> None:
    """Put a benchmark's table in the place of the one that the page has."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, rest = PAGE.read_text(encoding="utf-8").split(begin)
    _, tail = rest.split(end)
    content = f"{begin}\n{conditions()}\n\n{table(rows)}\n{end}"
    PAGE.write_text(head + content + tail, encoding="utf-8")


def main() -> None:
    known = sorted(script.stem for script in HERE.glob("*.py") if script.name != "run.py")
    chosen = sys.argv[1:] or known
    if unknown := [name for name in chosen if name not in known]:
        raise SystemExit(f"no benchmark is called {unknown[0]!r}; there are {', '.join(known)}")
    missed = []
    for name in chosen:
        rows = rows_of(HERE / f"{name}.py")
        refresh(name, rows)
        missed += [row["bench"] for row in rows if row["ok"] is False]
    if missed:
        raise SystemExit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
