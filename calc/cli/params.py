"""Options and parameter types that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from calc.core.options import CompileOptions

INTS = "INT,..."
F = TypeVar("F", bound=Callable[..., Any])
FORMAT = "calc.format"
"""Key of the output format in the context's `meta`; errors are said in that format too."""


def ints(
    low: int = 1, *, none: bool = False
) -> Callable[[click.Context, click.Parameter, str | None], tuple[int, ...] | None]:
    """A callback that reads ``128,512``: whole numbers of at least `low`, separated by commas.

    With `none` also that word, for no number at all.
    """

    def parse(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
        if value is None:
            return None
        if none and value == "none":
            return ()
        try:
            numbers = tuple(int(part) for part in value.split(","))
        except ValueError as e:
            raise click.BadParameter(f"{value!r} is not a list of whole numbers such as 128,512", ctx, param) from e
        if min(numbers) < low:
            raise click.BadParameter(f"{min(numbers)} is less than {low}", ctx, param)
        return numbers

    return parse


def new_file(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """A callback for a file to write: its directory is looked for at once, not after the work."""
    if value is not None and not value.parent.is_dir():
        raise click.BadParameter(f"there is no directory {str(value.parent)!r}", ctx, param)
    return value


def _remember(ctx: click.Context, param: click.Parameter, value: str) -> str:
    ctx.meta[FORMAT] = value
    return value


format_option = click.option(
    "--format",
    "fmt",
    type=click.Choice(["human", "json"]),
    default="human",
    show_default=True,
    is_eager=True,
    callback=_remember,
    help="How the result is written to stdout; errors on stderr follow it.",
)
OUTPUT = click.Path(dir_okay=False, path_type=Path)
calbin_argument = click.argument("calbin", type=click.Path(path_type=Path))
model_argument = click.argument("model")


def variant_options(f: F) -> F:
    """``--prefill``, ``--batch``, ``--max-seq-len``."""
    for option in (
        click.option(
            "--max-seq-len",
            type=click.IntRange(min=1),
            help="Tokens a KV slot holds.  [default: the model's context, at most 4096]",
        ),
        click.option(
            "--batch",
            callback=ints(none=True),
            metavar=INTS,
            default="1",
            show_default=True,
            help="Decode batches, 1 among them; none for a prefill-only artefact.",
        ),
        click.option(
            "--prefill",
            callback=ints(none=True),
            metavar=INTS,
            default="128",
            show_default=True,
            help="Prefill buckets, tokens. Longer prompts run in chunks; none for a decode-only artefact.",
        ),
    ):
        f = option(f)
    return f


def compile_options(prefill: tuple[int, ...], batch: tuple[int, ...], max_seq_len: int | None) -> CompileOptions:
    """The library's options from the command line's."""
    from calc.core.options import CompileOptions

    return CompileOptions(prefill=prefill, batch=batch, max_seq_len=max_seq_len)


def example(*lines: str) -> str:
    """A help page's last paragraph."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)
