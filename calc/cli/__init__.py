"""The command line: a file per verb, each thin over `calc.api`.

Modules of this package import click and nothing heavier when they are loaded, so that ``calc --help`` is fast.
"""

from __future__ import annotations

import io
import sys


def main() -> None:
    """Run ``calc`` with the process's arguments and exit."""
    from calc.cli.app import cli

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a model may say what the terminal's encoding cannot
            stream.reconfigure(errors="replace")
    cli(prog_name="calc")
