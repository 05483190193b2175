"""``calc inspect``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from calc.cli.output import emit, line
from calc.cli.params import OUTPUT, calbin_argument, example, format_option, new_file

if TYPE_CHECKING:
    from calc.calbin.reader import Calbin

EXAMPLES = (
    "calc inspect model.calbin --html model.html",
    "calc inspect model.calbin --disassemble prefill_b1_s128:0 --limit 40",
)


@click.command("inspect", epilog=example(*EXAMPLES))
@calbin_argument
@click.option(
    "--section",
    type=click.Choice(["manifest", "memory", "programs"]),
    help="One part in full instead of the summary.",
)
@click.option("--disassemble", metavar="SUBMODEL[:CHIP]", help="Print a sub-model's programs instead.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    help="Rows of long lists, instructions of a program.  [default: all, 8 in the summary]",
)
@click.option(
    "--html", type=OUTPUT, callback=new_file, help="Also write the summary and the memory maps as one HTML page."
)
@format_option
def command(
    calbin: Path, section: str | None, disassemble: str | None, limit: int | None, html: Path | None, fmt: str
) -> None:
    """Show what a calbin holds.

    The summary: sub-models, weights, memory, checks, sections, provenance.

    With --format json: the whole manifest (schemas/calbin-manifest.schema.json).
    """
    if section and disassemble:
        raise click.UsageError("--section and --disassemble exclude each other")
    if fmt == "json" and (section or disassemble):
        raise click.UsageError("--format json writes the whole manifest; leave out --section and --disassemble")
    import calc
    from calc.cli import describe

    artefact = calc.open(calbin)
    if html is not None:
        from calc.cli.page import page

        html.write_text(page(artefact.manifest, artefact.nbytes, str(calbin)), encoding="utf-8")
        line(f"wrote {html}", err=True)
    m = artefact.manifest
    if fmt == "json":
        emit(m)
    elif disassemble:
        for text in islice(_programs(artefact, disassemble), limit):
            line(text)
    elif section == "manifest":
        describe.manifest(m, limit)
    elif section == "memory":
        describe.memory(m, limit)
    elif section == "programs":
        describe.programs(artefact)
    else:
        describe.summary(m, artefact.nbytes, 8 if limit is None else limit)


def _programs(artefact: Calbin, which: str) -> Iterator[str]:
    from calc.sim.disasm import disassemble

    name, _, chip = which.rpartition(":")
    if not chip.isdecimal() or not name:
        name, chip = which, ""
    parts = [p for s in artefact.manifest.submodels if s.name == name for p in s.chip_map]
    chips = [int(chip or 0)] if chip or not parts else [p.chip for p in parts]
    for c in chips:
        records = artefact.program(name, c)
        nodes = next(p.nodes for p in parts if p.chip == c)
        yield f"; {name}, chip {c}: {len(records)} instructions"
        yield from disassemble(records, nodes)
