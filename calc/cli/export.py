"""``calc export``."""

from __future__ import annotations

from pathlib import Path

import click

from calc.cli.output import emit, line, table
from calc.cli.params import compile_options, example, format_option, model_argument, variant_options
from calc.cli.progress import progress
from calc.cli.text import size


@click.command("export", epilog=example("calc export ./Qwen3-0.6B -o graphs --prefill 128,512"))
@model_argument
@click.option("-o", "--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Directory to fill.")
@variant_options
@format_option
def command(
    model: str, out: Path, prefill: tuple[int, ...], batch: tuple[int, ...], max_seq_len: int | None, fmt: str
) -> None:
    """Export a model's prefill and decode graphs to ONNX.

    MODEL is a directory or a hub id. The graphs refer to the checkpoint for their weights.
    """
    import calc
    from calc.cli.reports import ExportedFile, ExportReport

    with progress(fmt) as tell:
        paths = calc.export(model, out, compile_options(prefill, batch, max_seq_len), tell)
    files = tuple(ExportedFile(path=str(p), nbytes=p.stat().st_size) for p in paths)
    if fmt == "json":
        emit(ExportReport(model=model, directory=str(out), files=files))
        return
    line(f"{model}: {len(files)} files in {out}")
    table("", ("file", ">size"), [(f.path, size(f.nbytes)) for f in files])
