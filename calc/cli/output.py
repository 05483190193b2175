"""stdout: tables and lines for people, a report's JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from calc.cli.text import clean

if TYPE_CHECKING:
    from pydantic import BaseModel

WIDE = 10_000
"""Width of a stdout that is no terminal: a table in a log is not wrapped."""

GAP, LAST = 3, 24
"""Characters between two columns, and the least that the last column gets."""


def emit(report: BaseModel) -> None:
    """A report as JSON."""
    click.echo(report.model_dump_json(indent=2))


def line(text: str = "", *, err: bool = False) -> None:
    """A line of text, with control characters escaped."""
    click.echo(clean(text), err=err)


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table, preceded by an empty line. Columns whose heading starts with ``>`` are flushed right.

    Colour and width adapt to a terminal; elsewhere the table is plain text as wide as it needs to be.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    tty = sys.stdout.isatty()
    out = Table(
        title=Text(title) if title else None,
        title_style="bold",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    cells = [[clean(str(cell)) for cell in row] for row in rows]
    for i, name in enumerate(head):
        right = name.startswith(">")
        last = i == len(head) - 1
        out.add_column(
            Text(name.removeprefix(">")), justify="right" if right else "left", no_wrap=not last, overflow="fold"
        )
    for row in cells:
        out.add_row(*(Text(cell) for cell in row))
    console = Console(file=sys.stdout, highlight=False, no_color=None if tty else True)
    # only the last column wraps; a narrower terminal wraps lines itself, and nothing is cut off
    widths = [max(len(row[i]) for row in (head, *cells)) + GAP for i in range(len(head))]
    console.width = max(console.width, sum(widths[:-1]) + min(widths[-1], LAST)) if tty else WIDE
    with console.capture() as captured:
        console.print(out)
    click.echo()
    for text in captured.get().splitlines():
        click.echo(text.rstrip())
