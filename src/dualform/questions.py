"""The commands that ask a memory: `attend` and `contribute`, and the view they are asked in.

A view is the recorded network after some step (`--at`), with some of what patterns wrote taken away
(`--without`, `--only`). Both commands take the same words for it, and list the same kinds of
tables; only what the numbers mean differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click

import dualform
from dualform import arguments, exports, overview, terminal
from dualform.attention import reporting
from dualform.options import (
    absolute_option,
    asking_options,
    json_option,
    listing_options,
    run_argument,
    together,
    view_options,
)


class Question(NamedTuple):
    """The view to ask, and what to ask it with."""

    dual: dualform.DualForm
    positional: tuple[Any, ...]
    named: dict[str, Any]

    @property
    def view(self) -> dict[str, Any]:
        """What --json says of the view."""
        return {"step": self.dual.step, "masks": list(self.dual.masks)}

    @property
    def shown(self) -> list[Any]:
        """What is printed of a view that is not the trained network."""
        return [str(self.dual)] if self.dual.is_masked else []


@click.command()
@together(run_argument, *asking_options)
@click.option("--layer", "layers", multiple=True, help="Only this layer; may be repeated.")
@together(*view_options, *listing_options, absolute_option)
@click.option(
    "--effective",
    is_flag=True,
    help="Also say over how many patterns the attention is spread: (Σ|α|)² / Σα².",
)
@json_option
def attend(
    run: Path,
    layers: tuple[str, ...],
    top: int,
    sign: str,
    by: str | None,
    effective: bool,
    export: Path | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """What each layer looks at: the training patterns whose keys are most like the query.

    Attention weights are key · query, signed and unnormalised; positive means alike. Ask with
    --example (a training example, no model needed) or with --input and --model (any input).
    """
    question = _question(run, export, asked)
    with working("attending"):
        with arguments.running(asked["input_file"]):
            attention = question.dual.attend(
                *question.positional, layers=layers or None, **question.named
            )
        found = {
            name: {
                "top": spotlight.top(top, by=by, sign=sign),
                **_further(spotlight, by, asked),
                **({"effective": _effective(spotlight)} if effective else {}),
            }
            for name, spotlight in attention.items()
        }
    _export(export, {f"{n}-{k}": t for n, tables in found.items() for k, t in tables.items()})
    if as_json:
        answer = {n: {k: t.to_dict() for k, t in tables.items()} for n, tables in found.items()}
        terminal.show_json({"run": str(run), **question.view, "layers": answer})
    else:
        tables = [table for answers in found.values() for table in answers.values()]
        terminal.show(*question.shown, *map(overview.narrow, tables))


@click.command()
@together(run_argument, *asking_options)
@click.option(
    "--target",
    metavar="OUTPUT",
    help="Which output, counted from 0; or 'margin': the true class (--label) minus the best "
    "other, or the predicted minus the runner-up. With --input the largest output by default.",
)
@click.option("--label", type=int, help="The true class, for --target margin.")
@click.option(
    "--direction",
    metavar="FILE.safetensors",
    type=click.Path(path_type=Path),
    help="Instead of --target, one tensor: what each output counts for.",
)
@click.option(
    "--layer",
    help="By default the layer that produces the output. Through an earlier layer contributions "
    "are to first order.",
)
@together(*view_options, *listing_options, absolute_option, json_option)
def contribute(
    run: Path,
    target: str | None,
    label: int | None,
    direction: Path | None,
    layer: str | None,
    top: int,
    sign: str,
    by: str | None,
    export: Path | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """What each training pattern wrote into an output, in the output's own units.

    Positive raises the output. Together with the initial weights' part the contributions add up to
    what the network says. They are an accounting of this run, not what retraining would give.
    """
    if target is not None and direction is not None:
        raise click.UsageError("either --target OUTPUT or --direction FILE.safetensors")
    if target is None and direction is None and asked["example"] is not None:
        raise click.UsageError("--example needs --target: which output of the layer")
    aim: Any = None if target is None else arguments.target_of(target)
    aim = aim if direction is None else arguments.read_direction(direction)
    question = _question(run, export, asked)
    dual, positional, named = question
    with working("adding up"), arguments.running(asked["input_file"]):
        if aim is None:
            aim = arguments.largest_output(dual(*positional, **named))
        answer = dual.contribute(*positional, target=aim, layer=layer, label=label, **named)
        listed = {"top": answer.top(top, sign=sign, by=by), **_further(answer, by, asked)}
    _export(export, listed)
    if as_json:
        tables = {name: table.to_dict() for name, table in listed.items()}
        terminal.show_json({"run": str(run), **question.view, **answer.to_dict(), **tables})
    else:
        tables_shown = map(overview.narrow, listed.values())
        terminal.show(*question.shown, overview.draw_sum(answer), *tables_shown)


def _question(run: Path, export: Path | None, asked: dict[str, Any]) -> Question:
    """The view that was asked for, and what to ask it with."""
    example, file, model = asked["example"], asked["input_file"], asked["model"]
    if (example is None) == (file is None):
        raise click.UsageError("ask with either --example ID or --input FILE.safetensors")
    if file is not None and model is None:
        raise click.UsageError("--input needs --model, which turns it into each layer's queries")
    if export is not None:
        exports.check_ending(export)
    memory = dualform.Memory.open(run)
    positional, named = arguments.read_input(file)
    dual = dualform.DualForm(None if model is None else arguments.build_model(model), memory)
    dual = _view(dual, asked)
    if example is not None:
        return Question(dual, (), {"example": arguments.example_id(memory, example)})
    return Question(dual, positional, dict(named))


def _view(dual: dualform.DualForm, asked: dict[str, Any]) -> dualform.DualForm:
    """The network after some step, under some masks."""
    without, only, strength = asked["without"], asked["only"], asked["strength"]
    layers = asked["mask_layers"] or None
    if strength is not None and not without:
        raise click.UsageError("--strength belongs to --without: how much of it is taken away")
    if layers is not None and not (without or only):
        raise click.UsageError("--mask-layer belongs to --without or --only")
    dual = dual if asked["at"] is None else dual.at(asked["at"])
    for text in without:
        where = arguments.condition(dual.memory, "--without", text)
        taken = 1.0 if strength is None else strength
        dual = dual.without(strength=taken, layers=layers, **where)
    for text in only:
        dual = dual.only(layers=layers, **arguments.condition(dual.memory, "--only", text))
    return dual


def _further(
    answer: dualform.Spotlight | dualform.Contribution, by: str | None, asked: dict[str, Any]
) -> dict[str, dualform.Table]:
    """The tables that were asked for besides the top."""
    tables: dict[str, dualform.Table] = {}
    if asked["sum_by"]:
        tables["sum_by"] = answer.sum_by(*asked["sum_by"])
    if asked["over"] is not None:
        tables["over"] = answer.over(asked["over"], bins=asked["bins"], by=by)
    if asked["by_example"]:
        tables["by_example"] = answer.by_example(absolute=asked["absolute"])
    return tables


def _effective(spotlight: dualform.Spotlight) -> dualform.Table:
    numbers = spotlight.effective
    patterns = [len(spotlight.rows)] * len(numbers)
    return dualform.Table(
        {"query": list(range(len(numbers))), "effective": numbers, "patterns": patterns},
        f"layer {spotlight.layer}: over how many patterns attention is spread, (Σ|α|)² / Σα²: 1 if "
        "one has it all, all of them if each has the same",
    )


def _export(file: Path | None, tables: dict[str, dualform.Table]) -> None:
    for path in [] if file is None else exports.export(file, tables):
        click.echo(f"written: {path}", err=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """A bar that follows every pass over a layer's patterns."""
    with terminal.progress_bar() as bar, reporting(lambda done, total: bar(what, done, total)):
        yield
