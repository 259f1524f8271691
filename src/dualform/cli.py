"""The command line: the library's questions in the library's words, and nothing of its own.

Each command opens a memory, asks one question, and prints the answer as text or as JSON. The two
that ask about patterns are in `questions.py`; what the arguments name is found by `arguments.py`;
errors, progress and pipes are `terminal.py`'s.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

import dualform
from dualform import arguments, overview, questions, terminal
from dualform.options import (
    destination_argument,
    input_option,
    json_option,
    kept_layers_option,
    model_option,
    replace_option,
    run_argument,
    to_dtype_option,
    together,
)


@click.group(cls=terminal.Shell, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(dualform.__version__, prog_name="dualform")
def main() -> None:
    """A network trained by gradient descent is an attention over its own training.

    Record a run in Python (with dualform.record(model, "RUN"): ...), then ask RUN here.
    New? Start with:  dualform demo

    Exit status: 0 fine, 1 a verification failed, 2 the question cannot be answered.
    """


# The commands -------------------------------------------------------------------------------------


@main.command()
@click.option(
    "--path",
    type=click.Path(path_type=Path),
    help="Keep the memory in this directory; by default a temporary one, removed afterwards.",
)
@click.option("--overwrite", is_flag=True, help="Replace a memory that is already at --path.")
@click.option("--seed", default=0, show_default=True, help="Another seed, another network.")
@click.option("--steps", default=1000, show_default=True, help="How many updates to train.")
@json_option
def demo(path: Path | None, overwrite: bool, seed: int, steps: int, as_json: bool) -> None:
    """Record a small digit classifier and look into it: about half a minute.

    Trains a network on scikit-learn's bundled digits (momentum, weight decay, clipping) while
    recording; certifies that primal = dual; shows for a few test digits what each layer attended to
    and what wrote the winning logit; takes part of the training away; travels back in time.
    """
    from dualform.demo import draw, farewell, opening, tell

    told = []
    if not as_json:
        terminal.show(opening(steps))
    with tempfile.TemporaryDirectory(prefix="dualform-") as temporary:
        place = Path(temporary) / "demo" if path is None else path
        with terminal.progress_bar() as progress:
            story = tell(place, seed=seed, steps=steps, overwrite=overwrite, progress=progress)
            for chapter in story:
                told.append(chapter.to_dict())
                progress.clear()
                if not as_json:
                    terminal.show(draw(chapter))
    if as_json:
        terminal.show_json({"path": None if path is None else str(path), "chapters": told})
    else:
        terminal.show(farewell(path))
    if not all(c.get("passed", True) and c.get("identical_without_recorder", True) for c in told):
        click.get_current_context().exit(terminal.FAILED)


@main.command()
@together(run_argument, json_option)
def info(run: Path, as_json: bool) -> None:
    """What a memory holds, and what patterns do not explain of every parameter.

    What is kept of each layer, columns and their values, steps, size on disk, environment, and what
    happened besides explained updates: events and remarks.
    """
    with terminal.busy("reading"):
        facts = overview.facts(dualform.Memory.open(run))
    if as_json:
        terminal.show_json(facts)
    else:
        terminal.show(*overview.draw(facts))


@main.command()
@together(run_argument, model_option)
@click.option(
    "--weights",
    metavar="FILE.safetensors",
    type=click.Path(path_type=Path),
    help="Your own checkpoint of the trained model, to compare with; by default the weights that "
    "were kept at the end of the recording. Needs --model.",
)
@together(input_option)
@click.option(
    "--every-step",
    is_flag=True,
    help="Replay every update to the bit, not only the last stretch and eight more: about half as "
    "long as training was.",
)
@json_option
def verify(
    run: Path,
    model: str | None,
    weights: Path | None,
    input_file: Path | None,
    every_step: bool,
    as_json: bool,
) -> None:
    """Whether the memory explains the network: bit for bit, within rounding, or not.

    Says for every parameter which verdict holds, and why no better one. Reads every byte against
    its checksum. With --model and --weights your checkpoint is compared too, and with --model and
    --input the outputs. Exit status 1 if anything does not pass.
    """
    if model is None and (input_file is not None or weights is not None):
        raise click.UsageError("--input and --weights need --model, to know what to run")
    memory = dualform.Memory.open(run)
    positional, named = arguments.read_input(input_file)
    net = None if model is None else arguments.build_model(model)
    if net is not None:
        net = arguments.trained_model(net, memory, weights)
    with terminal.progress_bar() as progress, arguments.running(input_file):
        memory.check(progress=lambda done, total: progress("checksums", done, total))
        certificate = dualform.DualForm(net, memory).verify(
            *positional,
            every_step=every_step,
            progress=lambda done, total: progress("verifying", done, total),
            **named,
        )
    if as_json:
        terminal.show_json({"run": str(run), **certificate.to_dict()})
    else:
        click.echo(repr(certificate))
    if not certificate.passed:
        click.get_current_context().exit(terminal.FAILED)


main.add_command(questions.attend)
main.add_command(questions.contribute)


@main.command()
@model_option
@click.option("--batch", required=True, type=int, help="Examples per update.")
@click.option("--steps", required=True, type=int, help="How many updates.")
@input_option
@click.option("--examples", type=int, help="Different examples, if they come again as they are.")
@click.option(
    "--keep",
    metavar="[LAYERS=]WORD",
    multiple=True,
    help="What will be kept: patterns, keys, examples or values (auto, the default, chooses); of "
    "some layers only: 'fc*=patterns', the first that fits counts; repeatable.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    default="float32",
    show_default=True,
    help="What patterns will be stored in; float32 is exact.",
)
@click.option(
    "--every", default=1, show_default=True, help="Patterns of every so many steps will be kept."
)
@json_option
def estimate(
    model: str | None,
    batch: int,
    steps: int,
    input_file: Path | None,
    examples: int | None,
    keep: tuple[str, ...],
    dtype: str,
    every: int,
    as_json: bool,
) -> None:
    """Bytes on disk before you start, layer by layer, and RAM for buffers.

    Two steps of a copy are recorded, and carried on to all of them. Without a sample batch
    (--input) one is made up from the first layer: one pattern per example.
    """
    if model is None:
        raise click.UsageError("--model is needed: what will be trained")
    positional, named = arguments.read_input(input_file)
    net = arguments.build_model(model)
    with arguments.running(input_file):
        found = dualform.estimate(
            net,
            named or positional or None,
            batch=batch,
            steps=steps,
            keep=arguments.keep_of(keep),
            dtype=dtype,
            every=every,
            examples=examples,
        )
    if as_json:
        terminal.show_json(found.to_dict())
    else:
        click.echo(repr(found))


@main.command()
@together(run_argument, destination_argument, to_dtype_option, kept_layers_option)
@click.option(
    "--error-signals",
    multiple=True,
    metavar="LAYERS",
    help="Keep the error signals of these only: a name or 'fc*'; repeatable.",
)
@click.option("--no-error-signals", is_flag=True, help="Keep keys alone.")
@together(replace_option, json_option)
def export(
    run: Path,
    destination: Path,
    error_signals: tuple[str, ...],
    no_error_signals: bool,
    as_json: bool,
    layers: tuple[str, ...],
    **choices: Any,
) -> None:
    """Write a smaller memory made from RUN: fewer bits, or less of it. RUN stays as it is.

    Patterns that stay keep their examples, labels and steps. Parameters whose patterns go are kept
    as values. What 16 bits lost is measured. Exit status 1 if the new memory does not verify.
    """
    if error_signals and no_error_signals:
        raise click.UsageError("either --error-signals LAYERS or --no-error-signals")
    with terminal.progress_bar() as progress:
        found = dualform.compact(
            run,
            destination,
            layers=layers or None,
            error_signals=error_signals or not no_error_signals,
            progress=lambda done, total: progress("converting", done, total),
            **choices,
        )
    if as_json:
        terminal.show_json(found.to_dict())
    else:
        click.echo(repr(found))
    if not found.passed:
        click.get_current_context().exit(terminal.FAILED)


if __name__ == "__main__":
    main(prog_name="dualform")
