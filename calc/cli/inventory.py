"""``calc inventory``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from calc.cli.output import emit, line, table
from calc.cli.params import compile_options, example, format_option, model_argument, variant_options
from calc.cli.progress import progress
from calc.cli.text import count, size

if TYPE_CHECKING:
    from calc.passes.inventory import GraphInventory, InventoryReport

FINDINGS = 40
"""Findings listed per graph; JSON has all."""


@click.command("inventory", epilog=example("calc inventory ./Qwen3-0.6B", "calc inventory graphs/prefill.onnx"))
@model_argument
@variant_options
@format_option
@click.pass_context
def command(
    ctx: click.Context,
    model: str,
    prefill: tuple[int, ...],
    batch: tuple[int, ...],
    max_seq_len: int | None,
    fmt: str,
) -> None:
    """List a model's ops and how the NPU runs each.

    MODEL is a directory (config.json is enough), a hub id, or an ONNX file. Exits with 1 when an op is unsupported.
    """
    import calc

    with progress(fmt) as tell:
        report = calc.inventory(model, compile_options(prefill, batch, max_seq_len), tell)
    if fmt == "json":
        emit(report)
    else:
        _show(report)
    ctx.exit(0 if report.ok else 1)


def _show(report: InventoryReport) -> None:
    line(f"{report.model}: {'every op runs on the NPU' if report.ok else 'NOT SUPPORTED, see the findings'}")
    for graph in report.graphs:
        _show_graph(graph)


def _share(share: float, klass: str) -> str:
    """A share of what will run; ops that were fused or resolved away have none."""
    return "" if klass in ("fusable", "composed") else f"{share:.1%}"


def _show_graph(graph: GraphInventory) -> None:
    table(
        graph.name,
        ("class", "op", ">count", ">MACs", ">share", ">bytes", ">share", "dtypes", "inputs"),
        [
            (
                o.klass,
                f"{o.domain}.{o.op}" if o.domain else o.op,
                o.count,
                count(o.macs),
                _share(o.macs_share, o.klass),
                size(o.bytes),
                _share(o.bytes_share, o.klass),
                " ".join(o.dtypes),
                "; ".join(o.shapes[:1]) + (" …" if len(o.shapes) > 1 else ""),
            )
            for o in graph.ops
        ],
    )
    findings = [(o.klass, o.op, f.where, f.reason) for o in graph.ops for f in o.findings]
    if findings:
        table(f"{graph.name}: findings", ("class", "op", "where", "reason"), findings[:FINDINGS])
    if len(findings) > FINDINGS:
        line(f"{len(findings) - FINDINGS} more: --format json lists all")
