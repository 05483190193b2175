"""What `calc inspect` says about a manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from calc.cli.output import line, table
from calc.cli.text import count, gated, ms, rate, size

if TYPE_CHECKING:
    from calc.calbin.manifest import Manifest, MemoryRegion, SubModel, TensorDesc
    from calc.calbin.reader import Calbin


def version(v: tuple[int, int]) -> str:
    """``1.0``."""
    return f"{v[0]}.{v[1]}"


def clock(m: Manifest) -> tuple[float, float]:
    """Cycles per second of the target, and the host's cycles per call."""
    from calc.core.target import parse_target

    t = parse_target(m.target.toml, m.target.name)
    return t.rates.clock.value, t.costs.call.value


def largest(regions: Iterable[MemoryRegion], limit: int | None) -> list[MemoryRegion]:
    """The largest regions first, at most `limit`."""
    return sorted(regions, key=lambda r: (-r.nbytes, r.offset, r.name))[:limit]


def dram_rows(m: Manifest, chip: int) -> list[tuple[str, int, int]]:
    """A chip's DRAM by use: (what, regions, bytes)."""
    regions = [r for r in m.dram if r.chip == chip]
    kinds: dict[str, list[int]] = {}
    for r in regions:
        kinds.setdefault(r.name.partition(".")[0], []).append(r.nbytes)
    return [(kind, len(sizes), sum(sizes)) for kind, sizes in kinds.items()]


def weight_rows(m: Manifest) -> list[tuple[str, str, int, int]]:
    """Weights by scheme: (scheme, format in memory, weights, bytes)."""
    schemes = {q.weight: q.scheme + (f", group {q.group}" if q.group else "") for q in m.quantization}
    sums: dict[tuple[str, str], list[int]] = {}
    for w in m.weights:
        sums.setdefault((schemes.get(w.name, "not quantized"), w.format), []).append(w.nbytes)
    return [(scheme, fmt, len(sizes), sum(sizes)) for (scheme, fmt), sizes in sorted(sums.items())]


def summary(m: Manifest, nbytes: int, limit: int) -> None:
    """The page of `calc inspect`."""
    s, p, c = m.model, m.provenance, m.compatibility
    line(f"{s.name} ({s.family}, {len(s.layers)} layers, hidden {s.hidden}, vocabulary {s.vocab}) for {m.target.name}")
    line(f"calbin {version(m.format)}, {size(nbytes)}, {m.states.capacity} tokens × {m.states.slots} slots")
    _submodels(m)
    table("Weights", ("scheme", "format", ">count", ">size"), [(a, b, n, size(k)) for a, b, n, k in weight_rows(m)])
    table(
        f"DRAM, {size(m.target.dram_bytes)} per chip",
        (">chip", "region", ">count", ">size"),
        [(chip, kind, n, size(k)) for chip in range(m.target.chips) for kind, n, k in dram_rows(m, chip)],
    )
    _sram(m, limit)
    _rungs(m)
    table(
        "Sections",
        ("name", "kind", ">offset", ">size", "sha256"),
        [(x.name, x.kind, x.offset, size(x.nbytes), x.sha256[:16]) for x in m.sections],
    )
    line()
    line(f"source {p.source_sha256[:16]}, calc {p.calc}, {_pairs(p.options)}")
    line(
        f"needs ISA {c.isa} {version(c.isa_version)}, runtime {version(c.runtime_min)}, driver {version(c.driver_min)}"
    )


def manifest(m: Manifest, limit: int | None) -> None:
    """Everything but memory and programs, digests in full."""
    s, p, c = m.model, m.provenance, m.compatibility
    facts = [(k, v) for k, v in s.model_dump(exclude={"layers", "tokens", "tokenizer", "dynamic_dims"}).items()]
    facts += [("layers", len(s.layers)), ("eos", s.tokens.eos), ("bos", s.tokens.bos), ("tokenizer", s.tokenizer.kind)]
    facts += [("chat template", "yes" if s.tokenizer.chat_template else "no"), *s.dynamic_dims.items()]
    table("Model", ("field", "value"), facts)
    facts = [("calbin", version(m.format)), ("target", m.target.name), ("target sha256", m.target.digest)]
    facts += [("calc", p.calc), ("passes", " ".join(p.passes)), *p.options.items(), *p.versions.items()]
    facts += [("ISA", f"{c.isa} {version(c.isa_version)}"), ("runtime", f">= {version(c.runtime_min)}")]
    table("Provenance and compatibility", ("field", "value"), [*facts, ("driver", f">= {version(c.driver_min)}")])
    table("Inputs and outputs", ("sub-model", "tensor", "dtype", "shape", "valid", "chip", ">offset"), _tensors(m))
    table(
        "Quantization",
        ("weight", "scheme", ">group", ">flushed", ">saturated"),
        [(q.weight, q.scheme, q.group or "", q.flushed, q.saturated) for q in m.quantization[:limit]],
    )
    _rungs(m)
    table(
        "Sections",
        ("name", "kind", ">offset", ">bytes", "sha256"),
        [(x.name, x.kind, x.offset, x.nbytes, x.sha256) for x in m.sections],
    )
    table("Files", ("name", "section", ">bytes"), [(f.name, f.section, f.nbytes) for f in m.files])


def memory(m: Manifest, limit: int | None) -> None:
    """DRAM regions in order, SRAM buffers by size."""
    table(
        f"DRAM, {size(m.target.dram_bytes)} per chip",
        (">chip", "region", ">offset", ">bytes"),
        [
            (r.chip, r.name, f"{r.offset:#x}", r.nbytes)
            for r in sorted(m.dram, key=lambda r: (r.chip, r.offset))[:limit]
        ],
    )
    _sram(m, limit)


def programs(artefact: Calbin) -> None:
    """Instructions of every program by engine and operation."""
    from calc.core.isa import Engine, Op

    for sub in artefact.manifest.submodels:
        rows: list[Sequence[object]] = []
        for part in sub.chip_map:
            records = artefact.program(sub.name, part.chip)
            seen = Counter(zip(records["engine"].tolist(), records["op"].tolist(), strict=True))
            for e in Engine:
                ops = {Op(o).name.lower(): n for (engine, o), n in sorted(seen.items()) if engine == e}
                if ops:
                    text = ", ".join(f"{n} {name}" for name, n in ops.items())
                    rows.append((part.chip, e.name.lower(), sum(ops.values()), text))
        total = sum(p.instructions for p in sub.chip_map)
        table(f"{sub.name}: {total} instructions", (">chip", "engine", ">count", "operations"), rows)


def submodel_rows(m: Manifest) -> list[tuple[SubModel, float]]:
    """Sub-models with their seconds per call at a full bucket."""
    hz, call = clock(m)
    return [(s, (s.workload.cycles + call) / hz) for s in m.submodels]


def _submodels(m: Manifest) -> None:
    table(
        "Sub-models, one call at a full bucket",
        ("name", "role", ">batch", ">tokens", "chips", ">instructions", ">MACs", ">DRAM", ">ms", ">tok/s"),
        [
            (
                s.name,
                s.role,
                s.batch,
                s.seq,
                " ".join(str(c) for c in s.target_chips),
                sum(p.instructions for p in s.chip_map),
                count(s.workload.macs),
                size(s.workload.dram_bytes),
                ms(t),
                rate(s.batch * s.seq / t),
            )
            for s, t in submodel_rows(m)
        ],
    )


def _sram(m: Manifest, limit: int | None) -> None:
    parts = [(s, p) for s in m.submodels for p in s.chip_map]
    table(
        f"SRAM, {size(m.target.sram_bytes)} per chip",
        ("sub-model", ">chip", ">buffers", ">peak", ">of SRAM"),
        [
            (s.name, p.chip, len(p.regions), size(p.sram_peak), f"{p.sram_peak / m.target.sram_bytes:.1%}")
            for s, p in parts
        ],
    )
    for s, p in parts if limit is None else parts[:1]:
        rows = [(r.name, f"{r.offset:#x}", size(r.nbytes), f"{r.first}..{r.last}") for r in largest(p.regions, limit)]
        if rows:
            table(f"Largest buffers of {s.name}, chip {p.chip}", ("buffer", ">offset", ">size", ">live, steps"), rows)


def _rungs(m: Manifest) -> None:
    if m.golden is None:
        line()
        line("No golden vectors: calc verify cannot check this file")
        return
    rows = []
    for r in m.golden.rungs:
        ok = r.logits is not None and r.logits <= r.gate_logits, r.kv is not None and r.kv <= r.gate_kv
        measured = (gated(r.logits, r.gate_logits, ok=ok[0]), gated(r.kv, r.gate_kv, ok=ok[1]))
        waiting = ("by calc verify", f"gate {r.gate_logits:.3g}")
        rows.append((r.name, r.reference, r.metric, *(waiting if r.logits is None else measured)))
    title = f"Verification ladder, {m.golden.prompt} tokens and {m.golden.steps} decode steps"
    table(title, ("rung", "against", "metric", "logits", "KV"), rows)


def _tensors(m: Manifest) -> list[Sequence[object]]:
    def row(s: SubModel, t: TensorDesc) -> Sequence[object]:
        valid = " ".join(f"axis {v.axis} < {v.csr}" for v in t.valid)
        return (
            s.name,
            t.name,
            t.dtype,
            list(t.shape),
            valid,
            t.at.chip,
            "" if t.at.offset is None else f"{t.at.offset:#x}",
        )

    return [row(s, t) for s in m.submodels for t in (*s.inputs, *s.outputs)]


def _pairs(values: dict[str, str]) -> str:
    return ", ".join(f"{k} {v[:16] if k.endswith('sha256') else v}" for k, v in values.items())
