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
"""Columns of a stdout that is no terminal: a table in a log is not wrapped."""


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
    for name in head:
        right = name.startswith(">")
        out.add_column(Text(name.removeprefix(">")), justify="right" if right else "left", overflow="fold")
    for row in rows:
        out.add_row(*(Text(clean(str(cell))) for cell in row))
    console = Console(width=None if tty else WIDE, highlight=False, file=sys.stdout, no_color=None if tty else True)
    with console.capture() as captured:
        console.print(out)
    click.echo()
    for text in captured.get().splitlines():
        click.echo(text.rstrip())
