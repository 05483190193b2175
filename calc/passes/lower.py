"""Lower: a sub-model's calls to one program per chip."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from calc.core.errors import Problem
from calc.core.isa import Alu, Space
from calc.core.packing import align
from calc.core.roles import ROLES
from calc.core.spec import ModelSpec
from calc.core.target import PLACED, Target
from calc.core.tensors import DTYPES
from calc.core.variant import Variant
from calc.kernels import registry
from calc.kernels.base import Call
from calc.kernels.emit import Emitter
from calc.kernels.lowering import ChipMemory, Choices, Lowering, Rows, weight_region
from calc.kernels.program import Buffer
from calc.passes.allocate import SramTooSmallError, allocate, live_ranges
from calc.passes.blocks import Plan, Region, plan_blocks, row_domain
from calc.passes.encode import encode
from calc.passes.sync import Sync

KV_TILE = 512
"""Keys per attention tile at most, for batch 1 decode; prefill's score budget makes it smaller."""


@dataclass(frozen=True)
class ChipProgram:
    """A chip's program.

    Attributes:
        records: the instructions.
        nodes: names of the source nodes.
        sram_peak: bytes of SRAM in use.
        buffers: the SRAM buffers' places and live ranges.
        scratch: bytes of DRAM scratch for spilled activations.
    """

    records: NDArray[np.void]
    nodes: tuple[str, ...]
    sram_peak: int
    buffers: tuple[Buffer, ...]
    scratch: int = 0


@dataclass(frozen=True)
class Lowered:
    """A sub-model's programs by chip, the plan of its row blocks, and the other plans that would have fitted."""

    programs: Mapping[int, ChipProgram]
    plan: Plan
    candidates: tuple[Plan, ...] = ()


def lower(calls: Sequence[Call], variant: Variant, chips: Mapping[int, ChipMemory], target: Target) -> Lowered:
    """Write the programs.

    Args:
        calls: the graph's nodes in topological order, each on its chip.
        variant: the static shape.
        chips: each chip's memory.
        target: tile sizes and SRAM.

    Raises:
        CapacityError: SRAM_TOO_SMALL for each chip on which not even one block of rows fits.
    """
    sizes = {n: h.nbytes for m in chips.values() for n, h in m.weights.items()}

    parts: dict[int, Lowering] = {}

    def probe(plan: Plan) -> None:
        parts.update(_emit(plan, variant, chips, target))
        _allocate_all(parts, variant, target)

    plan, candidates = plan_blocks(calls, variant, target, sizes, probe)
    return Lowered({chip: finish(low) for chip, low in parts.items()}, plan, candidates)


def _allocate_all(parts: Mapping[int, Lowering], variant: Variant, target: Target) -> None:
    """Give every chip's SRAM buffers their places; all chips on which they do not fit are named together."""
    problems: list[Problem] = []
    missing = 0
    for chip, low in parts.items():
        try:
            allocate_sram(low, variant, chip, target)
        except SramTooSmallError as e:
            problems += e.problems
            missing = max(missing, e.missing)
    if problems:
        raise SramTooSmallError(problems, missing)


# -- emitting ---------------------------------------------------------------------------------------------------------


def _emit(plan: Plan, variant: Variant, chips: Mapping[int, ChipMemory], target: Target) -> dict[int, Lowering]:
    """Every region's instructions on every chip; addresses and order come later."""
    parts = {}
    for chip, mem in chips.items():
        em = Emitter(
            weight_region("weights", mem.shard_bytes, 0),
            int(target.tiling.weight_ring.value),
            int(target.tiling.weight_tile.value),
        )
        choices = Choices(int(target.tiling.score_tile.value), KV_TILE)
        parts[chip] = Lowering(em, variant, mem, choices)
    _give_homes(plan, parts, variant)
    later = _needed_later(plan)
    for i, region in enumerate(plan.regions):
        used = sorted({c.chip for c in region.calls})
        with ExitStack() as stack:
            for chip in used:
                stack.enter_context(_block(parts[chip], region, variant))
            for call in region.calls:
                _emit_call(parts[call.chip], call, region, later[i], variant)
    return parts


@contextmanager
def _block(low: Lowering, region: Region, variant: Variant) -> Iterator[None]:
    """The loop over blocks of rows that a region's calls on one chip share."""
    em = low.em
    em.source(f"{region.calls[0].name}:rows")
    with em.scope():
        if variant.seq == 1 or row_domain(region.calls[0]) == "sequences":
            low.begin(low.sequences, None)
            yield
        elif region.block is None:
            low.begin(Rows(em.csr("cur_seq_len"), variant.seq), None)
            yield
        else:
            cur = em.csr("cur_seq_len")
            with em.loop(em.alu(Alu.CDIV, cur, region.block)) as b:
                first = em.alu(Alu.MUL, b, region.block)
                count = em.alu(Alu.MIN, em.alu(Alu.SUB, cur, first), region.block)
                low.begin(Rows(count, region.block), first)
                yield
        low.end()


def _emit_call(low: Lowering, call: Call, region: Region, later: set[str], variant: Variant) -> None:
    kernel = registry()[call.op]
    low.em.source(call.name)
    with low.em.scope():
        for formal, value in call.inputs.items():
            if formal not in kernel.by_row and value in low.spilled and value not in low.acts:
                low.fetch(value)
        kernel.lower(low, call)
        if region.block is not None:
            for value in call.outputs:
                if value in later and value in low.acts:
                    low.spill(value, variant.seq)


def _give_homes(plan: Plan, parts: Mapping[int, Lowering], variant: Variant) -> None:
    """Where a plan is a piece of the whole, what it reads of the rest lies in DRAM."""
    made = {o for r in plan.regions for c in r.calls for o in c.outputs}
    for call in (c for r in plan.regions for c in r.calls):
        low = parts[call.chip]
        for value in call.inputs.values():
            outside = value not in made and value not in low.memory.weights and value not in low.memory.states
            if outside and len(call.shapes[value]) == 3:
                low.give_home(value, call.shapes[value][-1], variant.seq)


def _needed_later(plan: Plan) -> list[set[str]]:
    """For each region the values that later ones read."""
    out: list[set[str]] = []
    seen: set[str] = set(plan.outlive)
    for region in reversed(plan.regions):
        out.append(set(seen))
        seen.update(v for c in region.calls for v in c.inputs.values())
    return out[::-1]


# -- finishing --------------------------------------------------------------------------------------------------------


def allocate_sram(low: Lowering, variant: Variant, chip: int, target: Target) -> None:
    """Give every SRAM buffer of a chip its place.

    Raises:
        SramTooSmallError: they do not fit.
    """
    em = low.em
    live_ranges(em.buffers, em.loops)
    hint = (
        "use a target with more SRAM, or smaller tiles in its [tiling]"
        if variant.seq > 1
        else "compile with a smaller --batch"
    )
    allocate(em.buffers, target.sram_bytes, f"{variant.name} chip {chip}", hint)


def finish(low: Lowering) -> ChipProgram:
    """A chip's program: order and records, once its SRAM buffers have their places."""
    em = low.em
    live_ranges(em.spills, em.loops)
    scratch = allocate(em.spills, 1 << 62, "scratch", "")
    for b in em.spills:
        b.base = low.memory.scratch + (b.base or 0)
    used = tuple(b for b in em.buffers if b.base is not None)
    peak = max((b.base or 0) + b.nbytes for b in used)
    return ChipProgram(encode(Sync().run(em.body)), tuple(em.nodes), peak, used, scratch)


def widths(spec: ModelSpec) -> dict[str, int]:
    """What a role's tensors may be as wide as."""
    return {"vocab": spec.vocab, "hidden": spec.hidden}


def io_buffers(variant: Variant, spec: ModelSpec, base: int) -> tuple[dict[str, Buffer], int]:
    """Input and output buffers of a sub-model from DRAM address `base` on, and the end of them."""
    out: dict[str, Buffer] = {}
    at = base
    role = ROLES[variant.role]
    for tensor in (*role.inputs, *role.outputs):
        size = prod(tensor.shape(variant.batch, variant.seq, widths(spec))) * DTYPES[tensor.dtype].itemsize
        out[tensor.name] = Buffer(tensor.name, Space.DRAM, size, base=at)
        at = align(at + size, PLACED)
    return out, at
