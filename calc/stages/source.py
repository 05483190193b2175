"""Sources: a Hugging Face directory or graphs from files, as one `Exported` with its variants and its context."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from calc.core.errors import CapacityError, ModelError, Problem, UsageError
from calc.core.exported import Exported
from calc.core.options import CompileOptions, Progress
from calc.core.roles import ROLES, is_state_input
from calc.core.tensors import ArrayTensor, ShapeOnlyTensor, TensorRef
from calc.core.variant import Variant
from calc.passes.base import Graph
from calc.passes.onnx_files import host_files

if TYPE_CHECKING:
    from calc.frontend.spec import Opened

DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class Source:
    """What a compile starts from.

    Attributes:
        exported: graphs and lazy weights.
        variants: the sub-models, in the order of the artefact.
        context: tokens that a slot holds.
        opened: the Hugging Face directory, read and probed; None where graphs were given.
    """

    exported: Exported
    variants: tuple[Variant, ...]
    context: int
    opened: Opened | None

    def graphs(self) -> dict[Variant, Graph]:
        """A graph per variant, for the passes to change."""
        return {v: _graph(self.exported, v) for v in self.variants}

    @property
    def shape_only(self) -> list[str]:
        """Weights that are known by shape alone."""
        return [n for n, r in self.exported.weights.items() if isinstance(r, ShapeOnlyTensor)]


def open_source(source: Path | Exported, options: CompileOptions, progress: Progress) -> Source:
    """Export a directory, or take given graphs.

    Raises:
        CalcError: what the frontend finds; USAGE_BUCKET, USAGE_BATCH, USAGE_NO_ROLE, ONNX_VARIANTS,
            BUCKET_TOO_LONG, CONTEXT_TOO_LONG.
    """
    if isinstance(source, Path):
        return _export(source, options, progress)
    return _given(source, options)


def check_has_weights(source: Source) -> None:
    """Refuse to write an artefact without weights.

    Raises:
        UsageError: USAGE_NO_WEIGHTS.
    """
    if source.shape_only:
        raise UsageError(
            Problem(
                "USAGE_NO_WEIGHTS",
                source.exported.spec.name,
                "the model has a config but no weights",
                "a checkpoint",
                f"{len(source.shape_only)} weights known by shape alone",
                "plan with --dry-run, or add the checkpoint",
            )
        )


def variants_of(options: CompileOptions) -> tuple[Variant, ...]:
    """Prefill buckets at batch 1, then decode batches, ascending; batch 1 is there whenever one is asked for.

    Raises:
        UsageError: USAGE_BUCKET, USAGE_BATCH for a size below 1, USAGE_NO_ROLE when nothing is asked for.
    """
    largest = ROLES["decode"].max_batch
    problems = [
        Problem("USAGE_BUCKET", "--prefill", "a bucket holds at least one token", ">= 1", str(s))
        for s in options.prefill
        if s < 1
    ]
    problems += [
        Problem("USAGE_BATCH", "--batch", f"a batch is 1 to {largest} sequences", f"1..{largest}", str(b))
        for b in options.batch
        if not 1 <= b <= largest
    ]
    if not options.prefill and not options.batch:
        what = "an artefact needs a sub-model"
        problems.append(Problem("USAGE_NO_ROLE", "--prefill, --batch", what, "a bucket or a batch", "none of either"))
    if problems:
        raise UsageError(problems)
    prefill = [Variant("prefill", 1, s) for s in sorted(set(options.prefill))]
    batches = sorted({1, *options.batch}) if options.batch else []
    return (*prefill, *(Variant("decode", b, 1) for b in batches))


def _export(directory: Path, options: CompileOptions, progress: Progress) -> Source:
    variants = variants_of(options)
    from calc.frontend.export import export
    from calc.frontend.spec import open_model

    opened = open_model(directory, lambda line: progress(f"open: {line}", 0, 1))
    spec = opened.spec
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
        opened, variants, context, progress=lambda line: progress(f"export: {line}", min(next(count), steps), steps)
    )
    return Source(replace(made, files=host_files(directory)), variants, context, opened)


def _given(source: Exported, options: CompileOptions) -> Source:
    """Graphs that came as files: their own shapes are the variants, their buffers bound the context."""
    order = list(ROLES)
    given = tuple(sorted(source.graphs, key=lambda v: (order.index(v.role), v)))
    problems = [
        Problem(
            "ONNX_VARIANTS",
            v.name,
            "the graph's batch cannot be compiled",
            "1 for prefill, 1 to 64 for decode",
            str(v.batch),
        )
        for v in given
        if not 1 <= v.batch <= ROLES[v.role].max_batch
    ]
    if not given:
        problems.append(Problem("ONNX_VARIANTS", "graphs", "an artefact needs a sub-model", "a graph", "none"))
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
    return Source(source, given, context, None)


def _context_of(exported: Exported, v: Variant) -> int:
    """Tokens that fit a graph's KV buffer beside a whole bucket; the bucket itself where nothing is kept."""
    if not ROLES[v.role].stateful:
        return v.seq
    states = [x for x in exported.graphs[v].graph.inputs if is_state_input(x.name)]
    grows = next((x.shape for x in states if x.shape is not None and len(x.shape) == 4), None)
    if not states or (grows is not None and not isinstance(grows[2], int)):
        raise ModelError(
            Problem("ONNX_INPUTS", v.name, "the graph has no static past_kv.0.key", "[batch, heads, capacity, dim]")
        )
    return exported.spec.max_position_embeddings if grows is None else int(grows[2]) - v.seq  # type: ignore[arg-type]


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
