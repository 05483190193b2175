"""The compiler's table of contents: one function, a line per stage."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from calc.core.exported import Exported
from calc.core.options import CompileOptions, CompileReport, Progress, no_progress
from calc.core.target import load_target
from calc.core.variant import Variant
from calc.kernels.base import Numerics
from calc.passes.artefact import Compiled, golden_arrays, write
from calc.passes.base import Graph
from calc.passes.calls import bind_functions
from calc.passes.inventory import InventoryReport, report, take_stock
from calc.passes.onnx_files import load_exported, load_graph, without_weights, write_files
from calc.passes.order import fusion_passes
from calc.passes.recipe import Recipe, bits, load_recipe
from calc.passes.stages import Programs, choose_schemes, fuse, lower_model, place_model, quantize, split
from calc.stages.cost import costs_of, workloads_of
from calc.stages.golden import start_ladder
from calc.stages.reports import compile_report
from calc.stages.source import Source, check_has_weights, open_source


def compile_model(
    source: Path | Exported,
    out: Path | None,
    options: CompileOptions,
    progress: Progress = no_progress,
    keep_graphs: Path | None = None,
) -> CompileReport:
    """Compile a model to a calbin.

    Args:
        source: a Hugging Face directory, or graphs exported already.
        out: the calbin to write; None plans only (no golden vectors, nothing written).
        options: see `CompileOptions`.
        progress: told stages and steps.
        keep_graphs: a directory for the fused and the quantized graphs, weights as inputs.

    Returns:
        What was made, with its cost on the target's clock.

    Raises:
        CalcError: every kind a stage can find; nothing is written then.
    """
    target, recipe = load_target(options.target), load_recipe(options.quant)
    model = open_source(source, options, progress)
    if out is not None:
        check_has_weights(model)
    graphs = model.graphs()
    ladder = None if out is None else start_ladder(model, graphs, options, progress)
    watchers = {} if ladder is None else dict.fromkeys(ladder.variants, ladder)

    fused = fuse(model.exported.spec, model.context, graphs, watchers, progress)
    kept = _graph_files(graphs, "fused", "fp32") if keep_graphs is not None else {}
    choose_schemes(fused, recipe)
    if ladder is not None:
        ladder.check_fused(progress)
    partitioned = split(fused, target, options.split)
    if ladder is not None:
        ladder.check_bf16(progress)
    quantized = quantize(partitioned)
    if ladder is not None:
        ladder.check_quantized(progress)
    placed = place_model(quantized, target)
    programs = lower_model(placed, progress)
    costs = costs_of(programs)

    made = _graph_files(graphs, "quantized", "npu") if out is not None or keep_graphs is not None else {}
    if keep_graphs is not None:
        write_files(keep_graphs, {**kept, **made})
    if out is not None:
        golden = None if ladder is None else (ladder.plan, ladder.ladder, golden_arrays(ladder))
        compiled = Compiled(
            programs=programs,
            workloads=workloads_of(programs, costs),
            passes=(*(p.name for p in fusion_passes()), *STAGES),
            options=_provenance(recipe, programs),
            golden=golden,
            files=model.exported.files,
            graphs=made,
        )
        write(compiled, out, options.jobs, progress)
    return compile_report(programs, costs, ladder, out)


STAGES = ("partition", "quantize", "place", "lower", "allocate", "sync", "encode")
"""What follows the fusions, for the artefact's provenance."""


def _provenance(recipe: Recipe, programs: Programs) -> dict[str, str]:
    placed = programs.placed
    return {
        "quant": bits(placed.model.graphs[placed.model.first].schemes),
        "recipe_sha256": hashlib.sha256(recipe.model_dump_json().encode()).hexdigest(),
        "target": placed.target.name,
    }


def _graph_files(graphs: Mapping[Variant, Graph], stage: str, numerics: Numerics) -> dict[str, bytes]:
    """Each sub-model's graph as it is now, weights as inputs."""
    for g in graphs.values():
        bind_functions(g, numerics)
    return {f"{v.name}.{stage}.onnx": without_weights(g) for v, g in graphs.items()}


def compile_onnx(
    graphs: Sequence[Path], spec: Path, out: Path | None, options: CompileOptions, progress: Progress = no_progress
) -> CompileReport:
    """Compile graphs in the exported form, made by `calc export` or by other means."""
    return compile_model(load_exported(graphs, spec), out, options, progress)


def export_model(
    source: Path, out_dir: Path, options: CompileOptions, progress: Progress = no_progress
) -> tuple[Path, ...]:
    """Export graphs and ``model_spec.json`` to a directory; see `calc.frontend.save`."""
    from calc.frontend.save import save

    return save(open_source(source, options, progress).exported, out_dir)


def inventory_model(source: Path, options: CompileOptions, progress: Progress = no_progress) -> InventoryReport:
    """Export and take stock; a directory with only config.json will do."""
    model: Source = open_source(source, options, progress)
    return report(model.exported.spec.name, [take_stock(v.name, g) for v, g in model.graphs().items()])


def inventory_onnx(path: Path) -> InventoryReport:
    """Take stock of an ONNX file; needs neither torch nor transformers."""
    return report(path.name, [take_stock(path.stem, load_graph(path))])
