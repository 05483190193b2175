"""``calc verify``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from calc.cli.output import emit, line, table
from calc.cli.params import OUTPUT, calbin_argument, example, format_option, new_file
from calc.cli.progress import progress
from calc.cli.text import gated, ms
from calc.core.errors import CalcError

if TYPE_CHECKING:
    from calc.sim.verify import VerifyReport


@click.command("verify", epilog=example("calc verify model.calbin --strict --junit report.xml"))
@calbin_argument
@click.option("--strict", is_flag=True, help="Check every memory access, and that both modes agree bit for bit.")
@click.option("--junit", type=OUTPUT, callback=new_file, help="Also write the checks as JUnit XML.")
@format_option
@click.pass_context
def command(ctx: click.Context, calbin: Path, strict: bool, junit: Path | None, fmt: str) -> None:
    """Prove that a calbin computes what its model computes.

    Runs its golden vectors on the simulator. Needs the file alone: neither the checkpoint nor torch. Exits with 1
    when a check fails.
    """
    import calc
    from calc.cli.junit import error_suite, suite, write

    try:
        with progress(fmt) as tell:
            report = calc.verify(calbin, strict=strict, progress=tell)
    except CalcError as e:
        if junit is not None:
            write(error_suite(str(calbin), e), junit)
        raise
    if junit is not None:
        write(suite(report), junit)
    if fmt == "json":
        emit(report)
    else:
        _show(report)
    ctx.exit(0 if report.ok else 1)


def _show(report: VerifyReport) -> None:
    line(f"{report.calbin}: {report.model}, {report.mode} mode")
    table(
        "",
        ("check", "metric", "value", "", ">ms", "detail"),
        [
            (c.name, c.metric, gated(c.value, c.gate, ok=c.ok), "ok" if c.ok else "FAILED", ms(c.seconds), c.detail)
            for c in report.checks
        ],
    )
    bad = sum(not c.ok for c in report.checks)
    line()
    line(f"FAILED: {bad} of {len(report.checks)} checks" if bad else f"ok: {len(report.checks)} checks")
