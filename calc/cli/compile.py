"""``calc compile``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from calc.cli.output import emit, line, table
from calc.cli.params import OUTPUT, example, format_option, model_argument, new_file, variant_options
from calc.cli.progress import progress
from calc.cli.text import count, gated, ms, rate, size

if TYPE_CHECKING:
    from calc.core.options import CompileReport

EXAMPLES = (
    "calc compile ./Qwen3-0.6B -o qwen3.calbin --quant w4a16 --prefill 128,512 --batch 1,4",
    "calc compile Qwen/Qwen3-30B-A3B --target calculet-2chip --quant w4a16 --dry-run",
)


@click.command("compile", epilog=example(*EXAMPLES))
@model_argument
@click.option("-o", "--out", type=OUTPUT, callback=new_file, help="The calbin to write; --dry-run needs none.")
@click.option("--target", default="calculet-1chip", show_default=True, help="A bundled target, or a TOML file.")
@click.option(
    "--quant", default="bf16", show_default=True, help="A scheme (bf16, w8a8, w4a16, ...) or a recipe's TOML file."
)
@click.option("--split", help="How several chips share the model: layers or tensor.  [default: the target's way]")
@variant_options
@click.option("--jobs", type=click.IntRange(1, 256), default=1, show_default=True, help="Threads that pack weights.")
@click.option(
    "--keep-graphs",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for the ONNX graphs between the passes.",
)
@click.option("--dry-run", is_flag=True, help="Plan and report; write nothing.")
@click.option(
    "--check-passes/--no-check-passes",
    default=None,
    help="Run the graph after every pass.  [default: for models under 50 M parameters]",
)
@click.option("--no-golden", is_flag=True, help="Leave out the golden vectors; the calbin cannot be verified then.")
@format_option
def command(
    *,
    model: str,
    out: Path | None,
    target: str,
    quant: str,
    split: str | None,
    prefill: tuple[int, ...],
    batch: tuple[int, ...],
    max_seq_len: int | None,
    jobs: int,
    keep_graphs: Path | None,
    dry_run: bool,
    check_passes: bool | None,
    no_golden: bool,
    fmt: str,
) -> None:
    """Compile a model to a calbin, checked stage by stage.

    MODEL is a directory or a hub id. Nothing is written when a stage fails.
    """
    if out is None and not dry_run:
        raise click.UsageError("give -o OUT.calbin, or --dry-run")
    if dry_run and keep_graphs is not None:
        raise click.UsageError("--dry-run writes nothing; leave out --keep-graphs")
    import calc

    options = calc.CompileOptions(
        target=target,
        quant=quant,
        prefill=prefill,
        batch=batch,
        max_seq_len=max_seq_len,
        jobs=jobs,
        golden=not no_golden,
        check_passes=check_passes,
        split=split,
    )
    with progress(fmt) as tell:
        report = calc.compile(model, None if dry_run else out, options, tell, keep_graphs=keep_graphs)
    if fmt == "json":
        emit(report)
    else:
        _show(report)


def _show(r: CompileReport) -> None:
    line(
        f"{r.model} ({r.family}, {count(r.parameters)} parameters) for {r.target}: "
        f"{r.quant}, {r.max_seq_len} tokens × {r.slots} {'slot' if r.slots == 1 else 'slots'}"
    )
    table(
        "Sub-models, one call at a full bucket",
        ("name", ">past", ">instructions", ">SRAM peak", ">MACs", ">DRAM", ">ms", ">tok/s", "bound"),
        [
            (
                v.name,
                v.past,
                v.instructions,
                " + ".join(size(n) for n in v.sram_peak),
                count(v.macs),
                size(v.dram_bytes),
                ms(v.seconds),
                rate(v.tokens_per_second),
                v.bound,
            )
            for v in r.variants
        ],
    )
    blocked = [v for v in r.variants if v.row_blocks and v.row_blocks[0].weight_reads > 1]
    if blocked:
        table(
            "Row blocks, the plan in use first",
            ("name", "cut", "rows", ">weight reads", ">weights", ">spilled", ">ms"),
            [
                (
                    v.name if i == 0 else "",
                    b.kind,
                    ", ".join(map(str, b.rows)),
                    b.weight_reads,
                    size(b.weight_bytes),
                    size(b.spill_bytes),
                    ms(b.seconds),
                )
                for v in blocked
                for i, b in enumerate(v.row_blocks)
            ],
        )
    table(
        f"DRAM per chip, {size(r.dram_capacity)} each; SRAM {size(r.sram_capacity)}",
        (">chip", ">layers", ">weights", ">states", ">used", ">free"),
        [
            (chip, layers, size(shard), size(kv), size(used), size(r.dram_capacity - used))
            for chip, (layers, shard, kv, used) in enumerate(
                zip(r.layers_per_chip, r.shard_bytes, r.kv_bytes, r.dram_bytes, strict=True)
            )
        ],
    )
    if r.rungs:
        table(
            "Verification ladder",
            ("rung", "against", "metric", "logits", "KV", ""),
            [
                (
                    g.name,
                    g.reference,
                    g.metric,
                    *(
                        ("by calc verify", f"gate {g.gate_logits:.3g}", "")
                        if g.logits is None
                        else (
                            gated(g.logits, g.gate_logits, ok=g.logits <= g.gate_logits),
                            gated(g.kv, g.gate_kv, ok=g.kv is None or g.kv <= g.gate_kv),
                            "ok" if g.ok else "FAILED",
                        )
                    ),
                )
                for g in r.rungs
            ],
        )
    line()
    line("dry run: nothing was written" if r.path is None else f"{r.path}: {size(r.nbytes)}")
