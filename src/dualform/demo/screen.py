"""How the demo's chapters look in a terminal: from 80 columns up, with or without colour.

Everything is drawn with characters that keep their meaning in a pipe or a log file: shades for a
test digit, half blocks for training digits, bars for sums. Colour only repeats what is said.
"""

from __future__ import annotations

import shlex
from functools import singledispatch
from pathlib import Path

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from dualform.demo.chapters import (
    Certified,
    Chapter,
    Digit,
    LayerAttention,
    Masked,
    Recorded,
    TimeTravel,
    Without,
)

ACCENT, GOOD, BAD, QUIET = "cyan", "green", "red", "dim"
SHADES = " ░▒▓█"
EIGHTHS = " ▁▂▃▄▅▆▇█"
LEFT_EIGHTHS = " ▏▎▍▌▋▊▉█"
BAR_ROWS = 4
CELL = 11
"""Columns per training digit: its 8 pixels and a gap."""

LEGEND = (
    "Each layer's attention over all its training patterns: α = key · query, signed, unnormalised. "
    "Left: the training digits with the largest α, each by its strongest visit. Right: α summed "
    "over all patterns of a class, bars from zero."
)


@singledispatch
def draw(chapter: Chapter) -> RenderableType:
    """The chapter as something `rich` prints.

    Example:
        >>> import rich
        >>> from dualform.demo import draw
        >>> rich.print(draw(chapter))                        # doctest: +SKIP
    """
    raise TypeError(f"no drawing for {type(chapter).__name__}")


@draw.register
def _(chapter: Recorded) -> RenderableType:
    twin = "bit-identical" if chapter.identical_without_recorder else "DIFFERENT"
    facts = {
        "network": "64-128-64-10 with ReLU, scikit-learn's 8×8 digits: "
        f"{chapter.training_digits:,} to train on, {chapter.test_digits} to test",
        "training": f"{chapter.steps:,} steps of {chapter.batch}, SGD with lr "
        f"{chapter.learning_rate:g}, momentum {chapter.momentum:g}, weight decay "
        f"{chapter.weight_decay:g}, "
        f"gradients clipped at norm {chapter.clip:g} ({chapter.clipped_steps} steps were)",
        "accuracy": f"{chapter.training_accuracy:.1%} in training, "
        f"{chapter.test_accuracy:.1%} in test",
        "memory": f"{sum(chapter.layers.values()):,} patterns in {len(chapter.layers)} layers, "
        f"{chapter.megabytes:.1f} MB on disk",
        "recorder": f"the same training without it gives {twin} weights",
    }
    table = Table.grid(padding=(0, 2))
    table.add_column(style=QUIET, no_wrap=True)
    table.add_column()
    for name, fact in facts.items():
        style = "" if name != "recorder" else GOOD if chapter.identical_without_recorder else BAD
        table.add_row(name, Text(fact, style=style))
    return _section("1  Train, and record", table)


@draw.register
def _(chapter: Certified) -> RenderableType:
    table = _table()
    for head in ("parameter", "verdict", "stretches replayed"):
        table.add_column(head)
    for name, verdict in chapter.verdicts.items():
        walked, ways = chapter.replayed[name]
        table.add_row(name, verdict, f"{walked} of {ways}")
    outputs = [
        Text(f"{name}: residual {residual:.1e}, bound {chapter.bounds[name]:.1e}")
        for name, residual in chapter.residuals.items()
    ]
    said = Text(
        f"{'PASSED' if chapter.passed else 'FAILED'}, {chapter.verdict}",
        style=f"bold {GOOD if chapter.passed else BAD}",
    )
    note = (
        "Torch's own optimizer, given nothing but the recorded patterns, takes the steps again, "
        "from one kept state of the weights to the next. Bit for bit: it reaches the very bits of "
        "every one. Also checked: every step's patterns against what training saw of its gradient. "
        "Residual: largest difference, relative to the largest output."
    )
    return _section("2  Certify: primal = dual", table, Text(), *outputs, said, _note(note))


@draw.register
def _(chapter: Digit) -> RenderableType:
    right = chapter.predicted == chapter.label
    verdict = f"right, a {chapter.label}" if right else f"wrong, it is a {chapter.label}"
    title = (
        f"3.{chapter.number}  Test digit {chapter.example}: the network says {chapter.predicted} "
        f"({verdict})"
    )
    layers = [_LayerPicture(layer, chapter) for layer in chapter.attention]
    attention = Group(*(part for layer in layers for part in (layer, Text())))
    columns = Table.grid(padding=(0, 3))
    columns.add_column(no_wrap=True, width=16)
    columns.add_column(ratio=1)
    columns.add_row(Group(_picture(chapter.pixels), Text(), _logits(chapter)), attention)
    legend = [_note(LEGEND), Text()] if chapter.number == 1 else []
    parts = (*legend, columns, _contribution(chapter))
    return _section(title, *parts, style=GOOD if right else BAD)


@draw.register
def _(chapter: Masked) -> RenderableType:
    table = _table(gap=1)
    table.add_column("what is left out", no_wrap=True)
    for head in ("all", f"{chapter.dropped}s", "rest"):
        table.add_column(head, justify="right", no_wrap=True, min_width=5)
    for example, label in zip(chapter.examples, chapter.labels, strict=True):
        table.add_column(f"{example}\na {label}", justify="right", no_wrap=True)
    for row in chapter.rows:
        table.add_row(*_left(row, chapter.labels))
    table.add_section()
    table.add_row(*_left(chapter.retrained, chapter.labels))
    note = (
        "Accuracy on the test digits, then what is said of the digits above. A mask is not "
        "retraining: it takes out of the finished weights what some patterns wrote, and "
        "leaves everything else as it was learned in their presence. Contributions are large and "
        "cancel, so masking a class can wreck what retraining without it (last line) keeps."
    )
    return _section("4  Take part of the training away", table, Text(), _note(note))


@draw.register
def _(chapter: TimeTravel) -> RenderableType:
    table = _table()
    for head in ("step", "rebuilt", "checkpoint", "weights differ by"):
        table.add_column(head, justify="right")
    table.add_column("test accuracy")
    for moment in chapter.moments:
        table.add_row(
            f"{moment.step:,}",
            f"{moment.accuracy:.1%}",
            f"{moment.checkpoint_accuracy:.1%}",
            f"{moment.difference:.1e}",
            Text(_bar(moment.accuracy, 16), style=ACCENT),
        )
    note = (
        "dual.at(step) rebuilds the network of any step from the one memory; here its test "
        "accuracy and weights against checkpoints this demo kept on the side. Difference: relative "
        "to the largest weight."
    )
    return _section("5  Travel back in time", table, Text(), _note(note))


def opening(steps: int) -> RenderableType:
    """What is about to happen."""
    title = Text("dualform demo", style=f"bold {ACCENT}")
    text = (
        "A network trained by gradient descent is an attention over its own training. This trains "
        f"a small digit classifier for {steps:,} steps, records every pattern its layers saw, "
        "proves the record exact and looks into it."
    )
    return Group(title, Text(text))


def farewell(path: Path | None) -> RenderableType:
    """Where the memory is, and what to ask it next."""
    if path is None:
        kept = "The memory was temporary and is gone. To keep one: dualform demo --path RUN"
        return _section("Your turn", Text(kept))
    run = shlex.quote(str(path))
    commands = (
        f"dualform info {run}",
        f"dualform attend {run} --example 17 --sum-by label",
        f"dualform contribute {run} --example 17 --target 7",
        f"dualform verify {run} --model dualform.demo:network",
    )
    text = Text(f"The memory is at {path}. Ask it more:", overflow="fold")
    return _section("Your turn", text, *(Text(f"  {c}", overflow="fold") for c in commands))


# Pieces -------------------------------------------------------------------------------------------


def _section(title: str, *parts: RenderableType, style: str = ACCENT) -> RenderableType:
    rule = Rule(Text(title, style=f"bold {style}"), align="left", style=QUIET)
    return Group(Text(), rule, Padding(Group(*parts), (1, 0, 0, 2)))


def _table(gap: int = 2) -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))


def _note(text: str) -> RenderableType:
    return Text(text, style=QUIET)


def _picture(pixels: list[list[float]]) -> Text:
    """A digit, two characters per pixel, in five shades."""
    lines = ("".join(2 * _shade(value) for value in row) for row in pixels)
    return Text("\n".join(lines), style="bold")


def _shade(value: float) -> str:
    return SHADES[min(len(SHADES) - 1, int(value * len(SHADES)))]


def _thumbnail(pixels: list[list[float]]) -> list[str]:
    """A digit in 8 × 4 characters: each half block is one pixel, on or off."""
    on = [[value >= 0.4 for value in row] for row in pixels]
    return [
        "".join(" ▄▀█"[2 * above + below] for above, below in zip(*pair, strict=True))
        for pair in zip(on[::2], on[1::2], strict=True)
    ]


def _logits(chapter: Digit) -> Text:
    lines = [
        f"logit {chapter.predicted}  {chapter.logits[chapter.predicted]:+.2f}",
        f"logit {chapter.runner_up}  {chapter.logits[chapter.runner_up]:+.2f}",
    ]
    if chapter.label not in (chapter.predicted, chapter.runner_up):
        lines.append(f"logit {chapter.label}  {chapter.logits[chapter.label]:+.2f}")
    return Text("\n".join(lines), style=QUIET)


class _LayerPicture:
    """One layer's attention: as many training digits as fit, then the sums by class."""

    def __init__(self, attention: LayerAttention, digit: Digit) -> None:
        self.attention, self.digit = attention, digit

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(50, options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        count = max(1, min(len(self.attention.top), (options.max_width - 22) // CELL))
        yield Text.assemble((self.attention.layer, "bold"), (" looked at", QUIET))
        lines = [Text() for _ in range(BAR_ROWS + 2)]
        for shown in self.attention.top[:count]:
            caption = [f"a {shown.label} α{shown.weight:.3g}", f"step {shown.step}"]
            for line, piece in zip(lines, [*_thumbnail(shown.pixels), *caption], strict=True):
                line.append(f"{piece:<{CELL}}"[:CELL], style="" if piece not in caption else QUIET)
        for line, bars in zip(lines, self._sums(), strict=True):
            line.append_text(bars)
        yield from lines

    def _sums(self) -> list[Text]:
        """Ten upright bars from zero, the classes below, predicted and true class coloured."""
        highest = max(map(abs, self.attention.sums)) or 1.0
        rows = [Text("  ") for _ in range(BAR_ROWS + 2)]
        for label, value in enumerate(self.attention.sums):
            style = self._style(label)
            filled = round(max(0.0, value) / highest * BAR_ROWS * 8)
            for row in range(BAR_ROWS):
                level = min(8, max(0, filled - 8 * (BAR_ROWS - 1 - row)))
                rows[row].append(EIGHTHS[level] + " ", style=style)
            rows[BAR_ROWS].append(f"{label} ", style=style)
        rows[BAR_ROWS + 1].append("Σα by class", style=QUIET)
        return rows

    def _style(self, label: int) -> str:
        if label == self.digit.predicted:
            return f"bold {GOOD if label == self.digit.label else BAD}"
        return f"bold {GOOD}" if label == self.digit.label else ""


def _contribution(chapter: Digit) -> RenderableType:
    """What wrote the winning logit: signed bars by class, and the sum that adds up."""
    highest = max(map(abs, chapter.written_by_class)) or 1.0
    table = Table.grid(padding=(0, 1))
    for _ in range(2):
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True, width=9)
        table.add_column(no_wrap=True, width=18)
    for left in range(5):
        cells: list[RenderableType] = []
        for label in (left, left + 5):
            value = chapter.written_by_class[label]
            bar = Text(_bar(abs(value) / highest, 16), style=GOOD if value > 0 else BAD)
            cells += [f"the {label}s", f"{value:+.3f}", bar]
        table.add_row(*cells)
    head = Text(f"What wrote the logit of {chapter.predicted}", style="bold")
    head.append("  (fc3, in logits; + raises, − lowers it)", style=QUIET)
    parts = [
        f"{name} {value:+.{'3f' if abs(value) > 5e-4 else '0e'}}"
        for name, value in chapter.initial.items()
    ]
    parts.append(f"all training digits {sum(chapter.written_by_class):+.3f}")
    line = " · ".join(parts)
    total = (
        f"{line}\n= {chapter.total:+.5f}; the network itself gives {chapter.primal:+.5f} "
        f"(residual {chapter.residual:+.0e})"
    )
    return Group(head, table, Text(total))


def _bar(share: float, width: int) -> str:
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    partial = LEFT_EIGHTHS[eighths % 8] if eighths % 8 else ""
    return "█" * (eighths // 8) + partial


def _left(row: Without, labels: list[int]) -> list[RenderableType]:
    accuracies = (row.accuracy, row.accuracy_on_dropped, row.accuracy_on_others)
    cells: list[RenderableType] = [row.name, *(f"{value:.1%}" for value in accuracies)]
    for said, label in zip(row.predictions, labels, strict=True):
        cells.append(Text(str(said), style=GOOD if said == label else BAD))
    return cells
