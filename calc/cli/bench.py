"""``calc bench``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from calc.cli.output import emit, line, table
from calc.cli.params import INTS, calbin_argument, example, format_option, ints
from calc.cli.text import ms, rate, size

if TYPE_CHECKING:
    from calc.api import BenchReport


@click.command("bench", epilog=example("calc bench model.calbin --prompts 27,512 --outputs 246"))
@calbin_argument
@click.option(
    "--prompts",
    callback=ints(),
    metavar=INTS,
    default="1,16,128,512,2048",
    show_default=True,
    help="Prompt lengths, tokens.",
)
@click.option(
    "--outputs", callback=ints(), metavar=INTS, default="32,128", show_default=True, help="Output lengths, tokens."
)
@format_option
def command(calbin: Path, prompts: tuple[int, ...], outputs: tuple[int, ...], fmt: str) -> None:
    """Predict times over prompt and output lengths.

    From the programs and the target's rates; no data is computed.

    TTFT is the time to the first token, TPOT the time per output token of each sequence of the batch.
    """
    import calc
    from calc.core.errors import CapacityError, Problem

    report = calc.bench(calc.open(calbin), prompts, outputs)
    if not report.rows:
        raise CapacityError(
            [
                Problem("BENCH_NOTHING_FITS", s, "no case fits the KV cache", hint="use shorter lengths")
                for s in report.skipped
            ]
        )
    if fmt == "json":
        emit(report)
    else:
        _show(report)


def _show(r: BenchReport) -> None:
    line(f"{r.model} ({r.quant}) on {r.target}, predicted")
    table(
        "",
        (
            ">prompt",
            ">output",
            ">batch",
            ">calls",
            ">TTFT ms",
            ">tok/s",
            "bound",
            ">TPOT ms",
            ">tok/s",
            "bound",
            ">DRAM/step",
        ),
        [
            (
                b.prompt,
                b.output,
                b.batch,
                b.chunks,
                ms(b.ttft),
                rate(b.prefill_tokens_per_second),
                b.prefill_bound,
                ms(b.tpot),
                rate(b.decode_tokens_per_second),
                b.decode_bound,
                size(b.decode_dram_bytes),
            )
            for b in r.rows
        ],
    )
    if r.skipped:
        line()
    for s in r.skipped:
        line(f"skipped: {s}")
