"""stderr: how far a verb has come and how long it will take.

A terminal gets one live line; a log gets a line whenever a stage begins, and every ten seconds of a long one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from calc.cli.text import clean, duration

if TYPE_CHECKING:
    from calc.core.options import Progress

EVERY = 10.0
"""Seconds between two lines about one stage."""


@contextmanager
def progress(fmt: str) -> Iterator[Progress]:
    """A progress callback for the library.

    Args:
        fmt: with ``json`` stderr holds nothing but an error's JSON, unless it is a terminal.
    """
    if sys.stderr.isatty():
        with _live() as tell:
            yield tell
    else:
        yield _nothing if fmt == "json" else Lines(lambda text: click.echo(text, err=True))


def _nothing(stage: str, done: int, total: int) -> None:
    """Say nothing."""


class Stage:
    """Recognises stages in a stream of (stage, done, total), and tells the seconds left of the current one."""

    def __init__(self) -> None:
        self.done, self.total = 0, -1
        self.begun = 0.0

    def step(self, done: int, total: int, now: float) -> bool:
        """Take one report; whether it begins a new stage."""
        new = total != self.total or done < self.done
        if new:
            self.begun, self.first = now, done
        self.done, self.total = done, total
        return new

    def left(self, now: float) -> float | None:
        """Seconds left, at the stage's mean speed."""
        gone = self.done - self.first
        return (now - self.begun) / gone * (self.total - self.done) if gone and self.total else None


class Lines:
    """Progress for a log.

    Args:
        write: takes a line.
        clock: seconds.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.write, self.clock = write, clock
        self.start = self.last = clock()
        self.word = ""
        self.stage = Stage()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report a step."""
        now = self.clock()
        self.stage.step(done, total, now)
        word = stage.partition(" ")[0]
        if word == self.word and now - self.last < EVERY:
            return
        left = self.stage.left(now)
        more = f", {done * 100 // total}%, {duration(left)} left" if left is not None and left >= 1 else ""
        self.write(f"[{now - self.start:7.1f} s] {clean(stage)}{more}")
        self.word, self.last = word, now


@contextmanager
def _live() -> Iterator[Progress]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as Left

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), TaskProgressColumn())
    console = Console(stderr=True)
    bar = Progress(
        *columns,
        TimeElapsedColumn(),
        TextColumn("left"),
        Left(),
        console=console,
        transient=True,
        redirect_stdout=False,
    )
    stage = Stage()
    with bar:
        task = bar.add_task("starting", total=None)

        def tell(name: str, done: int, total: int) -> None:
            label = escape(clean(name))
            if stage.step(done, total, time.monotonic()):
                bar.reset(task, total=total or None, completed=done, description=label)
            bar.update(task, completed=done, description=label)

        yield tell
