"""Reports: what a compile made, for people and for ``--format json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from calc.calbin.manifest import Rung
from calc.core.options import CompileReport, RowBlock, RungReport, VariantReport
from calc.core.target import Target
from calc.core.variant import Variant
from calc.passes.ladder_run import LadderRun
from calc.passes.lower import Lowered
from calc.passes.place import dynamic_bytes
from calc.passes.recipe import bits
from calc.passes.stages import Programs
from calc.sim.timing import Counters
from calc.stages.cost import full_past


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


def variant_report(low: Lowered, v: Variant, past: int, c: Counters, target: Target) -> VariantReport:
    """A sub-model's cost for people; `seconds` includes the host's time per call."""
    seconds = (c.cycles + target.costs.call.value) / target.rates.clock.value
    return VariantReport(
        name=v.name,
        role=v.role,
        batch=v.batch,
        seq=v.seq,
        past=past,
        instructions=sum(len(p.records) for p in low.programs.values()),
        sram_peak=tuple(p.sram_peak for p in low.programs.values()),
        macs=c.macs,
        vector_ops=c.vector_ops,
        dram_bytes=c.dram_bytes,
        link_bytes=c.link_bytes,
        cycles=c.cycles,
        seconds=seconds,
        tokens_per_second=v.batch * v.seq / seconds,
        bound=c.bound,
        row_blocks=_row_blocks(low, v, target),
    )


def _row_blocks(low: Lowered, v: Variant, target: Target) -> tuple[RowBlock, ...]:
    """The chosen plan first, then what else would have fitted."""
    plans = [low.plan, *(p for p in low.candidates if p != low.plan)]
    return tuple(
        RowBlock(
            kind=p.kind,
            rows=tuple(sorted({r.block for r in p.regions if r.block is not None})) or (v.seq,),
            weight_reads=max((r.blocks(v.seq) for r in p.regions), default=1),
            weight_bytes=p.weight_bytes,
            spill_bytes=p.spill_bytes,
            cycles=p.cycles,
            seconds=p.cycles / target.rates.clock.value,
        )
        for p in plans
    )


def compile_report(
    programs: Programs, costs: Mapping[Variant, Counters], ladder: LadderRun | None, out: Path | None
) -> CompileReport:
    """The whole of a compile."""
    placed = programs.placed
    model, p, t = placed.model, placed.memory, placed.target
    first = model.graphs[model.first]
    shards = tuple(m.shard_bytes for m in p.chips.values())
    scratch = {c: max(low.programs[c].scratch for low in programs.lowered.values()) for c in p.chips}
    layers = {c: {k.layer for k in model.calls[model.first] if k.chip == c and k.layer is not None} for c in p.chips}
    return CompileReport(
        model=model.spec.name,
        family=model.spec.family,
        parameters=_parameters(first.weights),
        target=t.name,
        chips=t.chips,
        quant=bits(first.schemes),
        max_seq_len=p.capacity,
        slots=p.slots,
        layers_per_chip=tuple(len(found) for found in layers.values()),
        shard_bytes=shards,
        kv_bytes=tuple(p.state_bytes.values()),
        dram_bytes=tuple(s + dynamic_bytes(p, c, scratch[c]) for c, s in zip(p.chips, shards, strict=True)),
        dram_capacity=t.dram_bytes,
        sram_capacity=t.sram_bytes,
        variants=tuple(
            variant_report(low, v, full_past(v, p.capacity), costs[v], t) for v, low in programs.lowered.items()
        ),
        rungs=() if ladder is None else tuple(rung_report(r) for r in ladder.ladder.rungs),
        path=None if out is None else str(out),
        nbytes=out.stat().st_size if out is not None else 0,
    )


def _parameters(weights: Mapping[str, object]) -> int:
    """Elements of the checkpoint's tensors, each counted once."""
    sizes: dict[str, int] = {}
    for name, ref in weights.items():
        if not name.startswith("rope.") and not name.endswith("/scale"):
            sizes[name] = int(np.prod(ref.shape))  # type: ignore[attr-defined]
    return sum(sizes.values())
