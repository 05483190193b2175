"""The compiler's table of contents: one function, a line per stage."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from calc.calbin.manifest import Rung, Workload
from calc.core.errors import CapacityError, ModelError, Problem, UsageError
from calc.core.exported import Exported
from calc.core.isa import CSR_STRIDE
from calc.core.options import CompileOptions, CompileReport, Progress, RungReport, VariantReport, no_progress
from calc.core.spec import ModelSpec
from calc.core.target import Target, load_target
from calc.core.tensors import ArrayTensor, ShapeOnlyTensor, TensorRef
from calc.core.variant import Variant
from calc.kernels.base import Call, Numerics
from calc.passes.artefact import Compiled, golden_arrays, write
from calc.passes.base import Graph, Rule
from calc.passes.calls import bind_functions, bind_schemes, calls
from calc.passes.execute import Replayed
from calc.passes.inventory import InventoryReport, report, take_stock
from calc.passes.ladder import DECODE_STEPS, Ladder, golden_plan
from calc.passes.ladder_run import LadderRun
from calc.passes.lower import ChipMemory, ChipProgram, io_buffers, lower
from calc.passes.onnx_files import host_files, load_exported, load_graph, without_weights, write_files
from calc.passes.order import fusion_passes
from calc.passes.place import Placement, place
from calc.passes.recipe import assign, bits, load_recipe
from calc.sim.machine import csr_file, time_programs
from calc.sim.timing import Counters

if TYPE_CHECKING:
    from calc.frontend.spec import Opened

logging.getLogger("onnx_ir").setLevel(logging.ERROR)

DEFAULT_CONTEXT = 4096
MIN_DISTINCT = 8
"""Different tokens that a golden text has at least."""

CHECK_LIMIT = 50_000_000
"""Models with fewer parameters are checked after every pass unless told otherwise."""


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
    opened = _open(source, options, progress)
    exported, variants, context = _export(opened, options, progress)
    _check_has_weights(exported, out)
    spec = exported.spec
    graphs = {v: _graph(exported, v) for v in variants}
    ladder = (
        _start_ladder(opened, exported, graphs, options, context, progress)
        if out is not None and options.golden
        else None
    )
    fused = {v: _fuse(g, ladder if _is_replayed(v, graphs) else None, progress) for v, g in graphs.items()}
    first = fused[variants[0]]
    _check_same_weights(fused)
    kept = _graph_files(graphs, "fused", "fp32") if keep_graphs is not None else {}
    schemes, groups = assign(recipe, first)
    if ladder is not None:
        ladder.check_numerics(graphs, schemes, groups, progress)
    for g in graphs.values():
        g.schemes, g.groups = dict(schemes), dict(groups)
        bind_schemes(g)
    if ladder is not None:
        ladder.check_quantized(graphs, schemes, groups, progress)
    slots = max(v.batch for v in variants)
    refs = graphs[variants[0]].weights
    placement = place(spec, first, refs, schemes, groups, target, variants, context, slots)
    programs: dict[Variant, dict[int, ChipProgram]] = {}
    problems: list[Problem] = []
    for i, v in enumerate(variants):
        try:
            programs[v] = _lower(v, calls(graphs[v]), placement, spec, target, progress, i, len(variants))
        except CapacityError as e:
            problems += e.problems
    if problems:
        raise CapacityError(problems)
    costs = {v: cost(programs[v], v, _full_past(v, context), target) for v in variants}
    compiled = Compiled(
        spec=spec,
        target=target,
        placement=placement,
        programs=programs,
        workloads={v: _workload(costs[v], v, spec) for v in variants},
        max_seq_len=context,
        passes=(*(p.name for p in fusion_passes()), "quantize", "place", "lower", "allocate", "sync", "encode"),
        options={
            "quant": bits(schemes),
            "recipe_sha256": hashlib.sha256(recipe.model_dump_json().encode()).hexdigest(),
            "target": target.name,
        },
        golden=None
        if ladder is None
        else (ladder.plan, ladder.ladder, golden_arrays(ladder.plan, ladder.ladder, ladder.hf_logits)),
        files=exported.files,
        graphs=_graph_files(graphs, "quantized", "npu") if out is not None or keep_graphs is not None else {},
    )
    if keep_graphs is not None:
        write_files(keep_graphs, {**kept, **compiled.graphs})
    if out is not None:
        write(compiled, out, options.jobs, progress)
    rungs = () if ladder is None else tuple(rung_report(r) for r in ladder.ladder.rungs)
    return _report(compiled, costs, refs, bits(schemes), rungs, out)


def export_model(
    source: Path, out_dir: Path, options: CompileOptions, progress: Progress = no_progress
) -> tuple[Path, ...]:
    """Export graphs and ``model_spec.json`` to a directory; see `calc.frontend.save`."""
    from calc.frontend.save import save

    exported, _, _ = _export(_open(source, options, progress), options, progress)
    return save(exported, out_dir)


def inventory_model(source: Path, options: CompileOptions, progress: Progress = no_progress) -> InventoryReport:
    """Export and take stock; a directory with only config.json will do."""
    exported, variants, _ = _export(_open(source, options, progress), options, progress)
    return report(exported.spec.name, [take_stock(v.name, _graph(exported, v)) for v in variants])


def inventory_onnx(path: Path) -> InventoryReport:
    """Take stock of an ONNX file; needs neither torch nor transformers."""
    g = load_graph(path)
    return report(path.name, [take_stock(path.stem, g)])


def compile_onnx(
    graphs: Sequence[Path], spec: Path, out: Path | None, options: CompileOptions, progress: Progress = no_progress
) -> CompileReport:
    """Compile graphs in the exported form, made by `calc export` or by other means."""
    return compile_model(load_exported(graphs, spec), out, options, progress)


# -- stages -----------------------------------------------------------------------------------------------------------


def variants_of(options: CompileOptions) -> tuple[Variant, ...]:
    """Prefill buckets at batch 1, then decode batches, 1 among them; ascending.

    Raises:
        UsageError: USAGE_BUCKET, USAGE_BATCH for a size below 1.
    """
    problems = [
        Problem("USAGE_BUCKET", "--prefill", "a bucket holds at least one token", ">= 1", str(s))
        for s in options.prefill
        if s < 1
    ]
    problems += [
        Problem("USAGE_BATCH", "--batch", "a batch is 1 to 64 sequences", "1..64", str(b))
        for b in options.batch
        if not 1 <= b <= 64
    ]
    if problems:
        raise UsageError(problems)
    prefill = [Variant("prefill", 1, s) for s in sorted(set(options.prefill))]
    return (*prefill, *(Variant("decode", b, 1) for b in sorted({1, *options.batch})))


def _open(source: Path | Exported, options: CompileOptions, progress: Progress) -> Opened | Exported:
    """The model, read and probed once for all that a compile asks of it; sizes that make no sense are refused first."""
    variants_of(options)
    if not isinstance(source, Path):
        return source
    from calc.frontend.spec import open_model

    return open_model(source, lambda line: progress(f"open: {line}", 0, 1))


def _export(
    source: Opened | Exported, options: CompileOptions, progress: Progress
) -> tuple[Exported, tuple[Variant, ...], int]:
    variants = variants_of(options)
    if isinstance(source, Exported):
        return _given(source, options)
    from calc.frontend.export import export

    spec = source.spec
    context = options.max_seq_len or min(spec.max_position_embeddings, DEFAULT_CONTEXT)
    too_long = [v for v in variants if v.seq > context]
    if too_long:
        raise CapacityError(
            [
                Problem(
                    "BUCKET_TOO_LONG",
                    v.name,
                    "the bucket is longer than the context",
                    f"<= {context}",
                    str(v.seq),
                    "use a smaller --prefill or a larger --max-seq-len",
                )
                for v in too_long
            ]
        )
    if context > spec.max_position_embeddings:
        raise CapacityError(
            Problem(
                "CONTEXT_TOO_LONG",
                "--max-seq-len",
                "longer than the context the model was trained for",
                f"<= {spec.max_position_embeddings}",
                str(context),
            )
        )
    steps = len(variants)
    count = iter(range(10 * steps))
    made = export(
        source, variants, context, progress=lambda line: progress(f"export: {line}", min(next(count), steps), steps)
    )
    return replace(made, files=host_files(source.loaded.model_dir)), variants, context


def _check_has_weights(exported: Exported, out: Path | None) -> None:
    missing = [n for n, r in exported.weights.items() if isinstance(r, ShapeOnlyTensor)]
    if out is not None and missing:
        raise UsageError(
            Problem(
                "USAGE_NO_WEIGHTS",
                exported.spec.name,
                "the model has a config but no weights",
                "a checkpoint",
                f"{len(missing)} weights known by shape alone",
                "plan with --dry-run, or add the checkpoint",
            )
        )


def _check_same_weights(fused: Mapping[Variant, Sequence[Call]]) -> None:
    """Every sub-model reads the same weights: they are stored once."""
    used = {v: {name for c in todo for name in c.inputs.values()} - _made(todo) for v, todo in fused.items()}
    first, *others = fused
    problems = [
        Problem(
            "ONNX_INPUTS",
            v.name,
            f"the graph's weights are not those of {first.name}",
            got=", ".join(sorted(w for w in used[v] ^ used[first] if not w.startswith("past_kv")))[:300],
            hint="all graphs of a model use the same weights under the same names",
        )
        for v in others
        if used[v] != used[first]
    ]
    if problems:
        raise ModelError(problems)


def _made(todo: Sequence[Call]) -> set[str]:
    return {o for c in todo for o in c.outputs}


def _given(source: Exported, options: CompileOptions) -> tuple[Exported, tuple[Variant, ...], int]:
    """Graphs that came as files: their own shapes are the variants, their buffers bound the context."""
    given = tuple(sorted(source.graphs, key=lambda v: (v.role != "prefill", v)))
    problems = [
        Problem(
            "ONNX_VARIANTS",
            f"{role} graphs",
            "a calbin needs both roles",
            "at least one prefill and one decode graph",
            "none",
        )
        for role in ("prefill", "decode")
        if not any(v.role == role for v in given)
    ]
    problems += [
        Problem(
            "ONNX_VARIANTS",
            v.name,
            "the graph's batch cannot be compiled",
            "1 for prefill, 1 to 64 for decode",
            str(v.batch),
        )
        for v in given
        if not 1 <= v.batch <= (1 if v.role == "prefill" else CSR_STRIDE)
    ]
    if problems:
        raise UsageError(problems)
    room = min(_context_of(source, v) for v in given)
    context = options.max_seq_len or room
    if context > room:
        raise CapacityError(
            Problem(
                "CONTEXT_TOO_LONG", "--max-seq-len", "longer than the graphs' KV buffers", f"<= {room}", str(context)
            )
        )
    return source, given, context


def _context_of(exported: Exported, v: Variant) -> int:
    """Tokens that fit a graph's KV buffer beside a whole bucket."""
    kv = next((x for x in exported.graphs[v].graph.inputs if x.name == "past_kv.0.key"), None)
    if kv is None or kv.shape is None or not isinstance(kv.shape[2], int):
        raise ModelError(
            Problem("ONNX_INPUTS", v.name, "the graph has no static past_kv.0.key", "[batch, heads, capacity, dim]")
        )
    return kv.shape[2] - v.seq


def _graph(exported: Exported, v: Variant) -> Graph:
    """The graph with the weights it alone has: its RoPE tables are as long as its own buffers."""
    model = exported.graphs[v]
    refs: dict[str, TensorRef] = {}
    for name, value in model.graph.initializers.items():
        if name not in exported.weights:
            continue
        data = value.const_value
        own = data is not None and not isinstance(data, ir.ExternalTensor) and name.startswith("rope.")
        refs[name] = ArrayTensor(np.asarray(data.numpy())) if own and data is not None else exported.weights[name]
    return Graph(model, refs)


def _is_replayed(v: Variant, graphs: Mapping[Variant, Graph]) -> bool:
    return v == min(g for g in graphs if g.role == "prefill") or (v.role == "decode" and v.batch == 1)


def _fuse(g: Graph, ladder: LadderRun | None, progress: Progress) -> list[Call]:
    passes = fusion_passes()
    if ladder is not None:
        ladder.before_passes(g)
    for i, p in enumerate(passes):
        changed = p.run(g)
        progress(f"pass {p.name}", i + 1, len(passes))
        if changed and ladder is not None:
            ladder.after_pass(g, p.name)
    return calls(g, [r for p in passes if isinstance(p, Rule) for r in p.refusals])


def _lower(
    v: Variant,
    todo: Sequence[Call],
    placement: Placement,
    spec: ModelSpec,
    target: Target,
    progress: Progress,
    i: int,
    n: int,
) -> dict[int, ChipProgram]:
    progress(f"lower {v.name}", i, n)
    chips = {}
    for chip, m in placement.chips.items():
        io, _ = io_buffers(v, spec.vocab, m.io["io"].base or 0)
        chips[chip] = ChipMemory(m.weights, m.shard_bytes, m.kv, io)
    return lower(todo, {c.name: placement.chip_of(c) for c in todo}, v, chips, target)


def _full_past(v: Variant, context: int) -> int:
    return 0 if v.role == "prefill" else context - 1


def cost(programs: Mapping[int, ChipProgram], v: Variant, past: int, target: Target) -> Counters:
    """The cost of one call of a sub-model with a full bucket and `past` tokens per sequence before it."""
    csr = csr_file(
        {
            "past_kv_cur_seq_len": [past] * v.batch,
            "cur_seq_len": [v.seq] * v.batch,
            "kv_slot": list(range(v.batch)),
        }
    )
    return time_programs(target, {c: p.records for c, p in programs.items()}, csr)


def _workload(c: Counters, v: Variant, spec: ModelSpec) -> Workload:
    host = v.batch * (v.seq + spec.vocab) * 4
    return Workload(
        macs=c.macs,
        vector_ops=c.vector_ops,
        dram_bytes=c.dram_bytes,
        host_bytes=host,
        link_bytes=c.link_bytes,
        cycles=c.cycles,
    )


def _graph_files(graphs: Mapping[Variant, Graph], stage: str, numerics: Numerics) -> dict[str, bytes]:
    """Each sub-model's graph as it is now, weights as inputs."""
    for g in graphs.values():
        bind_functions(g, numerics)
    return {f"{v.name}.{stage}.onnx": without_weights(g) for v, g in graphs.items()}


# -- the ladder -------------------------------------------------------------------------------------------------------


def _start_ladder(
    source: Opened | Exported,
    exported: Exported,
    graphs: Mapping[Variant, Graph],
    options: CompileOptions,
    context: int,
    progress: Progress,
) -> LadderRun | None:
    """Golden tokens, transformers' answer, and the first rung: the exported graphs."""
    if isinstance(source, Exported) or any(isinstance(r, ShapeOnlyTensor) for r in exported.weights.values()):
        return None
    from calc.frontend.reference import reference

    buckets = [v.seq for v in graphs if v.role == "prefill"]
    plan = golden_plan(
        golden_tokens(source.loaded.model_dir, exported.spec, max(buckets) + DECODE_STEPS + 1), buckets, context
    )
    progress("reference: transformers fp32", 0, 1)
    every = sorted({*plan.rows})
    ref = reference(source, plan.tokens, every)
    picked = [every.index(r) for r in plan.replay_rows]
    end = plan.prompt + DECODE_STEPS
    # copies: a view would keep every token's KV of the longest bucket
    ground = Replayed(ref.logits[picked], [k[:end].copy() for k in ref.keys], [v[:end].copy() for v in ref.values])
    params = sum(int(np.prod(r.shape)) for r in exported.weights.values())
    run = LadderRun(
        plan,
        Ladder(),
        ref.logits,
        min(v for v in graphs if v.role == "prefill"),
        Variant("decode", 1, 1),
        params < CHECK_LIMIT if options.check_passes is None else options.check_passes,
        graphs,
    )
    run.ladder.start("hf", ground)
    run.ladder.climb("exported", "hf", run.replay("raw", {}, {}, "exported graph", progress))
    return run


def golden_tokens(source: Path, spec: ModelSpec, count: int) -> list[int]:
    """Tokens of the bundled text under the model's tokenizer, repeated to `count`.

    Seeded ids where there is no tokenizer, or one that knows so little of the text that nearly all of it is one token:
    attention over equal values gives the same whatever the queries are, so that no rung would see a fault in them.
    """
    path = source / "tokenizer.json"
    if path.is_file():
        from tokenizers import Tokenizer

        text = resources.files("calc").joinpath("data/golden_text.txt").read_text(encoding="utf-8")
        ids = Tokenizer.from_file(str(path)).encode(text, add_special_tokens=True).ids
        if len(set(ids[:count])) >= min(count, MIN_DISTINCT):
            return (ids * (count // len(ids) + 1))[:count]
    return [int(t) for t in np.random.default_rng(0).integers(0, spec.vocab, count)]


# -- reports ----------------------------------------------------------------------------------------------------------


def rung_report(r: Rung) -> RungReport:
    """A rung for people."""
    ok = r.logits is None or (r.logits <= r.gate_logits and (r.kv or 0.0) <= r.gate_kv)
    return RungReport(
        name=r.name,
        reference=r.reference,
        metric=r.metric,
        logits=r.logits,
        kv=r.kv,
        gate_logits=r.gate_logits,
        gate_kv=r.gate_kv,
        ok=ok,
    )


def variant_report(
    programs: Mapping[int, ChipProgram], v: Variant, past: int, c: Counters, target: Target
) -> VariantReport:
    """A sub-model's cost for people; `seconds` includes the host's time per call."""
    seconds = (c.cycles + target.costs.call.value) / target.rates.clock.value
    return VariantReport(
        name=v.name,
        role=v.role,
        batch=v.batch,
        seq=v.seq,
        past=past,
        instructions=sum(len(p.records) for p in programs.values()),
        sram_peak=tuple(p.sram_peak for p in programs.values()),
        macs=c.macs,
        vector_ops=c.vector_ops,
        dram_bytes=c.dram_bytes,
        link_bytes=c.link_bytes,
        cycles=c.cycles,
        seconds=seconds,
        tokens_per_second=v.batch * v.seq / seconds,
        bound=c.bound,
    )


def _report(
    c: Compiled,
    costs: Mapping[Variant, Counters],
    refs: Mapping[str, TensorRef],
    quant: str,
    rungs: tuple[RungReport, ...],
    out: Path | None,
) -> CompileReport:
    p, t = c.placement, c.target
    shards = tuple(m.shard_bytes for m in p.chips.values())
    return CompileReport(
        model=c.spec.name,
        family=c.spec.family,
        parameters=sum(int(np.prod(r.shape)) for n, r in refs.items() if not n.startswith("rope.")),
        target=t.name,
        chips=t.chips,
        quant=quant,
        max_seq_len=c.max_seq_len,
        slots=p.slots,
        layers_per_chip=tuple(p.layer_chip.count(k) for k in p.chips),
        shard_bytes=shards,
        kv_bytes=tuple(p.kv_bytes.values()),
        dram_bytes=tuple(s + p.dynamic[k] for k, s in zip(p.chips, shards, strict=True)),
        dram_capacity=t.dram_bytes,
        sram_capacity=t.sram_bytes,
        variants=tuple(variant_report(c.programs[v], v, _full_past(v, c.max_seq_len), costs[v], t) for v in c.programs),
        rungs=rungs,
        path=None if out is None else str(out),
        nbytes=out.stat().st_size if out is not None else 0,
    )
