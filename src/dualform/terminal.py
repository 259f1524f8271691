"""How the command line behaves, whatever the command: errors, Ctrl-C, pipes, progress, JSON.

Results go to standard output, everything else to standard error. An error of ours is one paragraph
and exit status 2, never a traceback; a reader that goes away (`| head`) ends the command quietly.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dualform.errors import DualFormError

FAILED, REFUSED, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141

PATIENCE = 0.7
"""Seconds of silence before a progress bar appears."""

NOT_A_TERMINAL = 100
"""Columns to assume where the output has none of its own (a pipe, a file)."""


class Shell(click.Group):
    """A group of commands that end as a Unix command should."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except DualFormError as error:
            click.echo(paragraph(f"dualform: {error}"), err=True)
            ctx.exit(REFUSED)
        except KeyboardInterrupt:
            click.echo("dualform: interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            _silence_stdout()
            ctx.exit(BROKEN_PIPE)


class _Quiet(Console):
    """A console that leaves a broken pipe to the shell above."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _silence_stdout() -> None:
    """Nobody reads any more: let what is still buffered go nowhere, without complaint."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, sys.stdout.fileno())
    except (OSError, ValueError):  # not a real file (tests)
        sys.stdout = open(devnull, "w", closefd=False)  # noqa: SIM115


def paragraph(text: str) -> str:
    """A message as one paragraph, in the terminal's width."""
    width = console(stderr=True).width if sys.stderr.isatty() else 10_000
    return textwrap.fill(" ".join(text.split()), width, break_long_words=False)


def console(*, stderr: bool = False) -> Console:
    """The console for results, or for everything else; in a pipe as wide as COLUMNS says."""
    stream = sys.stderr if stderr else sys.stdout
    piped = None if stream.isatty() or "COLUMNS" in os.environ else NOT_A_TERMINAL
    return _Quiet(file=stream, width=piped, highlight=False, soft_wrap=False)


def show(*parts: RenderableType) -> None:
    """Print results; where nobody pads lines for a screen, without blanks at their ends."""
    out = console()
    if out.is_terminal:
        for part in parts:
            out.print(part)
        return
    with out.capture() as captured:
        for part in parts:
            out.print(part)
    click.echo("\n".join(line.rstrip() for line in captured.get().split("\n")), nl=False)


def show_json(value: Any) -> None:
    """Print one JSON document, and nothing else, on standard output."""
    click.echo(json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False))


class Bar:
    """A progress bar on standard error; shown only on a terminal, and only after a moment."""

    def __init__(self) -> None:
        self._live: Progress | None = None
        self._since = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        """So much of something is done."""
        if self._live is None:
            if not sys.stderr.isatty() or time.monotonic() - self._since < PATIENCE:
                return
            columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
            self._live = Progress(*columns, console=console(stderr=True), transient=True)
            self._live.add_task("")
            self._live.start()
        self._live.update(self._live.task_ids[0], description=what, completed=done, total=total)

    def clear(self) -> None:
        """Take the bar off the screen, so that something else can be printed."""
        if self._live is not None:
            self._live.stop()
        self._live, self._since = None, time.monotonic()


@contextmanager
def progress_bar() -> Iterator[Bar]:
    """A bar for what may take longer than a moment; call it with (what, done, total)."""
    bar = Bar()
    try:
        yield bar
    finally:
        bar.clear()


@contextmanager
def busy(what: str) -> Iterator[None]:
    """A spinner on standard error while something without a measure of progress takes its time."""
    status = console(stderr=True).status(what)
    timer = threading.Timer(PATIENCE, status.start)
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        status.stop()
