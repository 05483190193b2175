"""The stages between an exported model and its programs, each a value that says what it is.

::

    Exported -> Fused -> Partitioned -> Quantized -> Placed -> Programs

A stage's function checks what it made (`passes/verify.py`) before it hands it on, so that a later stage can rely on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from calc.core.errors import CapacityError, ModelError, Problem, UnsupportedError
from calc.core.options import Progress
from calc.core.roles import is_state, is_state_input
from calc.core.spec import ModelSpec
from calc.core.target import Target
from calc.core.variant import Variant
from calc.kernels import registry
from calc.kernels.base import Call
from calc.kernels.lowering import ChipMemory
from calc.passes.base import Graph, Refusal, Rule, Watcher
from calc.passes.calls import bind_schemes, calls
from calc.passes.lower import Lowered, io_buffers, lower
from calc.passes.order import fusion_passes
from calc.passes.partition import Board, strategy
from calc.passes.place import Placement, check_capacity, place, weight_bytes
from calc.passes.recipe import Recipe, assign
from calc.passes.verify import verify_calls, verify_chips, verify_placement, verify_program, verify_schemes


@dataclass(frozen=True)
class Fused:
    """Graphs of calc nodes only, one per variant, all reading the same weights; `context` is a slot's capacity."""

    spec: ModelSpec
    context: int
    graphs: Mapping[Variant, Graph]
    calls: Mapping[Variant, Sequence[Call]]

    @property
    def first(self) -> Variant:
        """The variant that weights and states are read off."""
        return next(iter(self.graphs))

    @property
    def slots(self) -> int:
        """Slots of the states: as many as the largest batch."""
        return max(v.batch for v in self.graphs)


class Partitioned(Fused):
    """Every call has its chip, and chips exchange values by transfer nodes only."""


class Quantized(Partitioned):
    """Every matrix has its scheme, written into its nodes."""


@dataclass(frozen=True)
class Placed:
    """Everything that outlives a call has an address."""

    model: Quantized
    target: Target
    memory: Placement


@dataclass(frozen=True)
class Programs:
    """Every variant's programs."""

    placed: Placed
    lowered: Mapping[Variant, Lowered]


def fuse(
    spec: ModelSpec,
    context: int,
    graphs: Mapping[Variant, Graph],
    watchers: Mapping[Variant, Watcher],
    progress: Progress,
) -> Fused:
    """Run the fusions on every graph.

    Args:
        spec: the model.
        context: tokens that a slot holds.
        graphs: the exported graphs; they are changed.
        watchers: who is told about the passes over a variant's graph.
        progress: told each pass.

    Raises:
        UnsupportedError: OP_UNSUPPORTED, OP_CONSTRAINT for every node that no kernel takes.
        ModelError: ONNX_INPUTS when the graphs do not read the same weights.
    """
    made = {v: _fuse(g, watchers.get(v, Watcher()), progress) for v, g in graphs.items()}
    _check_same_weights(made)
    for v, todo in made.items():
        verify_calls(v.name, graphs[v], todo)
    return Fused(spec, context, graphs, made)


def _fuse(g: Graph, watcher: Watcher, progress: Progress) -> list[Call]:
    passes = fusion_passes()
    watcher.before_passes(g)
    for i, p in enumerate(passes):
        changed = p.run(g)
        progress(f"pass {p.name}", i + 1, len(passes))
        if changed:
            watcher.after_pass(g, p.name)
    refusals = [r for p in passes if isinstance(p, Rule) for r in p.refusals]
    todo = calls(g, refusals)
    _check_outputs(g, todo, refusals)
    return todo


HEADS = ("fuse-lm-head",)
"""Rules that make the calls that write outputs: their refusals say why one is missing."""


def _check_outputs(g: Graph, todo: Sequence[Call], refusals: Sequence[Refusal]) -> None:
    """Every output but the states must be stored to DRAM by a kernel that does so."""
    stored = {v for c in todo if registry()[c.op].stores is not None for v in c.outputs}
    reasons = [f"{r.rule}: {r.reason}" for r in refusals if r.rule in HEADS]
    problems = [
        Problem(
            "OUTPUT_UNSUPPORTED",
            out.name or "?",
            "; ".join(["no NPU kernel writes this output", *dict.fromkeys(reasons)]),
            hint="`calc inventory` lists every op with its class and why it did not fuse",
        )
        for out in g.model.graph.outputs
        if not is_state(out.name) and out.name not in stored
    ]
    if problems:
        raise UnsupportedError(problems)


def _check_same_weights(fused: Mapping[Variant, Sequence[Call]]) -> None:
    """Every sub-model reads the same weights: they are stored once."""
    used = {v: {name for c in todo for name in c.inputs.values()} - _made(todo) for v, todo in fused.items()}
    first, *others = fused
    problems = [
        Problem(
            "ONNX_INPUTS",
            v.name,
            f"the graph's weights are not those of {first.name}",
            got=", ".join(sorted(w for w in used[v] ^ used[first] if not is_state_input(w)))[:300],
            hint="all graphs of a model use the same weights under the same names",
        )
        for v in others
        if used[v] != used[first]
    ]
    if problems:
        raise ModelError(problems)


def _made(todo: Sequence[Call]) -> set[str]:
    return {o for c in todo for o in c.outputs}


def choose_schemes(fused: Fused, recipe: Recipe) -> None:
    """Give every matrix of the graphs its scheme, by the recipe.

    Raises:
        UsageError: RECIPE_… what the recipe gets wrong about this model.
    """
    schemes = assign(recipe, fused.calls[fused.first])
    for g in fused.graphs.values():
        g.schemes = dict(schemes)


def split(fused: Fused, target: Target, how: str | None = None) -> Partitioned:
    """Give every node its chip; parts of split weights inherit their scheme.

    Raises:
        UsageError: TARGET_SPLIT.
        CapacityError: TILE_TOO_LARGE.
    """
    chosen = strategy(how, "--split") if how else strategy(target.split, f"target {target.name}: split")
    board = Board(target.chips, weight_bytes(fused.calls[fused.first], fused.graphs[fused.first], target))
    for g in fused.graphs.values():
        chosen.partition(g, board)
    todo = {v: calls(g) for v, g in fused.graphs.items()}
    for v, t in todo.items():
        verify_chips(v.name, t, target.chips)
    return Partitioned(fused.spec, fused.context, fused.graphs, todo)


def quantize(model: Partitioned) -> Quantized:
    """Write every weight's scheme into its nodes."""
    for g in model.graphs.values():
        bind_schemes(g, g.schemes)
    todo = {v: calls(g) for v, g in model.graphs.items()}
    for v, t in todo.items():
        verify_schemes(v.name, model.graphs[v], t)
    return Quantized(model.spec, model.context, model.graphs, todo)


def place_model(model: Quantized, target: Target) -> Placed:
    """Give addresses to weights, states, inputs and outputs.

    Raises:
        CapacityError: DRAM_TOO_SMALL, TILE_TOO_LARGE.
    """
    g, todo = model.graphs[model.first], model.calls[model.first]
    memory = place(g, todo, target, tuple(model.graphs), model.spec, model.context, model.slots)
    verify_placement(memory)
    return Placed(model, target, memory)


def lower_model(placed: Placed, progress: Progress) -> Programs:
    """Write every variant's programs.

    Raises:
        CapacityError: SRAM_TOO_SMALL for every variant and chip where not even one block of rows fits; DRAM_TOO_SMALL
            where spilled activations do not.
    """
    out: dict[Variant, Lowered] = {}
    problems: list[Problem] = []
    model, memory = placed.model, placed.memory
    for i, (v, todo) in enumerate(model.calls.items()):
        progress(f"lower {v.name}", i, len(model.calls))
        try:
            out[v] = lower(todo, v, _memories(placed, v), placed.target)
        except CapacityError as e:
            problems += e.problems
    if problems:
        raise CapacityError(problems)
    scratch = {c: max(low.programs[c].scratch for low in out.values()) for c in memory.chips}
    check_capacity(memory, scratch, placed.target, max(v.seq for v in out))
    for v, low in out.items():
        for chip, program in low.programs.items():
            verify_program(f"{v.name} chip {chip}", program, placed.target)
    return Programs(placed, out)


def _memories(placed: Placed, v: Variant) -> dict[int, ChipMemory]:
    """Each chip's memory with the variant's own inputs and outputs."""
    out = {}
    for chip, m in placed.memory.chips.items():
        io, _ = io_buffers(v, placed.model.spec, m.io["io"].base or 0)
        out[chip] = ChipMemory(m.weights, m.shard_bytes, m.states, io, m.scratch)
    return out
