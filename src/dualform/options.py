"""The options that several commands share: what they are called, and what --help says of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Command = Callable[..., Any]

run_argument = click.argument("run", type=click.Path(path_type=Path))
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document instead of text."
)
model_option = click.option(
    "--model",
    metavar="PACKAGE.MODULE:FACTORY",
    help="A function without arguments that builds the architecture; its weights come from the "
    "memory. It is imported (the current directory counts) and called: name only code you trust.",
)
input_option = click.option(
    "--input",
    "input_file",
    metavar="FILE.safetensors",
    type=click.Path(path_type=Path),
    help="A model input. One tensor: the positional argument; several: keyword arguments by their "
    "names. Needs --model.",
)
example_option = click.option(
    "--example", metavar="ID", help="A recorded example, asked by its last recorded keys."
)
without_option = click.option(
    "--without",
    metavar="COLUMN=VALUE",
    multiple=True,
    help="Take away what these patterns wrote: label=7, label=1,7, step=0:3000; repeatable. It is "
    "not retraining.",
)
only_option = click.option(
    "--only",
    metavar="COLUMN=VALUE",
    multiple=True,
    help="Keep the initial part and what these patterns wrote, and nothing else; repeatable.",
)
strength_option = click.option(
    "--strength", type=float, help="How much --without takes away: 1 is all of it, the default."
)
mask_layer_option = click.option(
    "--mask-layer",
    "mask_layers",
    metavar="NAME",
    multiple=True,
    help="Mask this layer only; may be repeated. By default all of them.",
)
at_option = click.option(
    "--at", metavar="STEP", type=int, help="Ask the network as it was after so many updates."
)
top_option = click.option(
    "--top", default=10, show_default=True, help="How many patterns to list (20 shown as text)."
)
sign_option = click.option(
    "--sign",
    type=click.Choice(["most", "least", "absolute"]),
    default="most",
    show_default=True,
    help="Most positive, most negative, or largest either way.",
)
by_option = click.option(
    "--by",
    metavar="COLUMN",
    help="List the top patterns, and the sums of --over, of every value of a column.",
)
sum_by_option = click.option(
    "--sum-by",
    metavar="COLUMN",
    multiple=True,
    help="Also add up by the values of a column, such as label; given twice, by both together.",
)
over_option = click.option(
    "--over", metavar="COLUMN", help="Also add up over ranges of a number, such as step."
)
bins_option = click.option("--bins", default=20, show_default=True, help="How many ranges.")
by_example_option = click.option(
    "--by-example", is_flag=True, help="Also add up all visits of each training example."
)
absolute_option = click.option(
    "--absolute",
    type=click.Choice(["before", "after"]),
    default="before",
    show_default=True,
    help="With --by-example: absolute values before or after visits are added up.",
)
export_option = click.option(
    "--export",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Also write the whole answer to FILE.csv or FILE.parquet; several tables to several "
    "files, named after it.",
)

asking_options = (example_option, input_option, model_option)
view_options = (
    at_option,
    without_option,
    only_option,
    strength_option,
    mask_layer_option,
)
listing_options = (
    top_option,
    sign_option,
    by_option,
    sum_by_option,
    over_option,
    bins_option,
    by_example_option,
    export_option,
)

destination_argument = click.argument("destination", type=click.Path(path_type=Path))
kept_layers_option = click.option(
    "--layers", multiple=True, help="Keep the patterns of these only: a name or 'fc*'; repeatable."
)
to_dtype_option = click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="Store patterns in 16 bits; float32 (as trained) for those that still are.",
)
replace_option = click.option(
    "--overwrite", is_flag=True, help="Replace a memory that is already at DESTINATION."
)


def together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options at once, in the order in which --help lists them."""

    def apply(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return apply
