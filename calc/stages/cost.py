"""Cost: what one call of each sub-model takes on the target's clock, read off its programs."""

from __future__ import annotations

from collections.abc import Mapping

from calc.calbin.manifest import Workload
from calc.core.roles import CURRENT, PAST, ROLES, SLOT
from calc.core.target import Target
from calc.core.variant import Variant
from calc.passes.lower import ChipProgram, widths
from calc.passes.stages import Programs
from calc.sim.machine import csr_file, time_programs
from calc.sim.timing import Counters


def costs_of(programs: Programs) -> dict[Variant, Counters]:
    """One call of each sub-model at a full bucket, after `full_past` tokens."""
    placed = programs.placed
    return {
        v: cost(low.programs, v, full_past(v, placed.model.context), placed.target)
        for v, low in programs.lowered.items()
    }


def full_past(v: Variant, context: int) -> int:
    """Tokens before the call that its cost is stated for: none for a prompt, all that fit for a decode step."""
    return 0 if ROLES[v.role].several else context - 1


def cost(programs: Mapping[int, ChipProgram], v: Variant, past: int, target: Target) -> Counters:
    """The cost of one call of a sub-model with a full bucket and `past` tokens per sequence before it."""
    csr = csr_file({PAST: [past] * v.batch, CURRENT: [v.seq] * v.batch, SLOT: list(range(v.batch))})
    return time_programs(target, {c: p.records for c, p in programs.items()}, csr)


def workloads_of(programs: Programs, costs: Mapping[Variant, Counters]) -> dict[Variant, Workload]:
    """The manifest's workloads; host bytes are the inputs and outputs."""
    spec = programs.placed.model.spec
    out = {}
    for v, c in costs.items():
        role = ROLES[v.role]
        elements = 0
        for t in (*role.inputs, *role.outputs):
            size = 1
            for n in t.shape(v.batch, v.seq, widths(spec)):
                size *= n
            elements += size
        out[v] = Workload(
            macs=c.macs,
            vector_ops=c.vector_ops,
            dram_bytes=c.dram_bytes,
            host_bytes=4 * elements,
            link_bytes=c.link_bytes,
            cycles=c.cycles,
        )
    return out
