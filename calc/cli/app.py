"""The `calc` command: its verbs, loaded when they are asked for, and the exit code of every way they can end."""

from __future__ import annotations

import importlib
import os
import sys

import click

from calc.cli.failures import Failed, failed
from calc.cli.params import FORMAT

VERBS = ("export", "inventory", "compile", "verify", "inspect", "run", "bench")
"""In the order of work; each is the module of that name with its `command`."""

PIPE_CLOSED = 141
"""What a shell reports for a process that SIGPIPE ended. 1 would read as a finding."""


class Verbs(click.Group):
    """A group that loads a verb's module at its first use, and that turns what a verb raises into an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs in the order of work."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A verb's command, or None if there is no such verb."""
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"calc.cli.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> None:
        """Run the verb."""
        try:
            super().invoke(ctx)
            sys.stdout.flush()
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except BrokenPipeError:
            _silence_stdout()
            ctx.exit(PIPE_CLOSED)
        except (Exception, KeyboardInterrupt) as e:  # Python's own exit code for a crash is 1, which means a finding
            end = failed(e)
            _report(end, as_json=ctx.meta.get(FORMAT) == "json")
            ctx.exit(end.exit_code)


def _report(end: Failed, *, as_json: bool) -> None:
    click.echo(end.json() if as_json else end.text(), err=True)


def _silence_stdout() -> None:
    """Let the interpreter's last flush go nowhere: the reader has gone."""
    try:
        fd = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)


@click.command(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nExample:\n  calc compile MODEL -o model.calbin && calc verify model.calbin",
)
@click.version_option(package_name="calc", prog_name="calc", message="%(prog)s %(version)s")
def cli() -> None:
    """Compile language models for the Calculet NPU, and prove and use the result on a simulator.

    Results go to stdout, progress and errors to stderr. Exit codes: 0 ok, 1 findings, 2 usage, 3 bad input,
    4 version, 5 disk, 6 memory or capacity, 70 a bug in calc, 130 interrupted.
    """
