"""Artefact: everything the passes made, written as one calbin."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from calc.calbin.layout import FORMAT
from calc.calbin.manifest import (
    Array,
    ChipPart,
    Compatibility,
    Csr,
    File,
    Golden,
    Location,
    Manifest,
    MemoryRegion,
    Provenance,
    QuantEntry,
    Section,
    ShardDesc,
    StateDesc,
    StateLayout,
    StatePart,
    SubModel,
    TargetDesc,
    TensorDesc,
    TensorPart,
    ValidRange,
    WeightDesc,
    Workload,
)
from calc.calbin.writer import CalbinWriter, SectionWriter
from calc.core.errors import InternalError
from calc.core.isa import CSRS, ISA_NAME, ISA_VERSION
from calc.core.numerics import Loss, bf16_loss, to_bf16
from calc.core.options import Progress
from calc.core.roles import ROLES, Tensor, is_kv
from calc.core.spec import ModelSpec
from calc.core.state import StateSpec
from calc.core.tensors import DTYPES
from calc.core.variant import Variant
from calc.kernels import registry
from calc.kernels.base import Call
from calc.kernels.program import Packed, Plain
from calc.passes.finite import Finite
from calc.passes.ladder import DECODE_STEPS, GoldenPlan, Ladder
from calc.passes.ladder_run import LadderRun
from calc.passes.lower import Lowered, io_buffers, widths
from calc.passes.pack import Check, Placed, shard_pieces
from calc.passes.place import Placement
from calc.passes.stages import Programs

RUNTIME_MIN = (1, 0)
DRIVER_MIN = (0, 7)
VERSIONS = ("numpy", "onnx", "onnx-ir", "onnxruntime", "onnxscript", "ml-dtypes")


@dataclass(frozen=True)
class Compiled:
    """What goes into a calbin."""

    programs: Programs
    workloads: Mapping[Variant, Workload]
    passes: tuple[str, ...]
    options: Mapping[str, str]
    golden: tuple[GoldenPlan, Ladder, Mapping[str, NDArray[np.generic]]] | None
    files: Mapping[str, bytes]
    graphs: Mapping[str, bytes]

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self.programs.placed.model.spec

    @property
    def placement(self) -> Placement:
        """Where everything lies."""
        return self.programs.placed.memory

    @property
    def lowered(self) -> Mapping[Variant, Lowered]:
        """Every variant's programs."""
        return self.programs.lowered


class _Losses:
    """Checks weights while they are packed, and counts what rounding them to BF16 loses. Workers share it."""

    def __init__(self) -> None:
        self.finite = Finite()
        self._lost: dict[int, Loss] = {}
        self._lock = Lock()

    def checker(self, item: Placed) -> Check:
        """A check for one weight's rows."""
        rounds = isinstance(item.handle, Packed) and item.handle.scheme.name == "bf16"

        def check(source: str, rows: NDArray[np.float32], *, matrix: bool) -> None:
            if self.finite.check(source, rows) and rounds and matrix:
                more = bf16_loss(rows)
                with self._lock:
                    old = self.of(item)
                    self._lost[id(item)] = Loss(old.flushed + more.flushed, old.saturated + more.saturated)

        return check

    def of(self, item: Placed) -> Loss:
        """What one weight has lost."""
        return self._lost.get(id(item), Loss(0, 0))


def write(c: Compiled, out: Path, jobs: int, progress: Progress) -> Manifest:
    """Stream the artefact to disk.

    Args:
        c: what to write.
        out: the file.
        jobs: threads that read and pack weights.
        progress: told the weight bytes done.

    Raises:
        ModelError: MODEL_NOT_FINITE.
        DiskError: the disk is full or cannot be written.
    """
    losses = _Losses()
    placement = c.placement
    need = sum(m.shard_bytes for m in placement.chips.values())
    with CalbinWriter(out, reserve=need) as w:
        for variant, lowered in c.lowered.items():
            for chip, prog in lowered.programs.items():
                with w.section(_program(variant, chip), "program") as s:
                    s.write(prog.records)
        weights: list[WeightDesc] = []
        done = 0
        for chip, items in placement.weights.items():
            with w.section(f"weights.{chip}", "weights") as s:
                for item in items:
                    s.align(64)
                    if s.tell() != item.handle.offset:
                        raise InternalError(f"{item.handle.name} is placed at {item.handle.offset}, not at {s.tell()}")
                    _stream(item, losses, jobs, s)
                    weights.append(_weight(item, chip))
                    progress("weights", done + s.tell(), need)
                s.align(4096)
                done += s.tell()
        losses.finite.raise_if_any()
        arrays = _golden(w, c)
        files = _files(w, c)
        return w.finish(lambda sections: _manifest(c, sections, weights, arrays, files, losses))


def _stream(item: Placed, losses: _Losses, jobs: int, s: SectionWriter) -> None:
    pieces = iter(shard_pieces(item, losses.checker(item)))
    if jobs == 1:
        for piece in pieces:
            s.write(piece())
        return
    with ThreadPoolExecutor(jobs) as pool:
        # a bounded window: at most two pieces per worker are in memory
        while window := list(islice(pieces, 2 * jobs)):
            for data in pool.map(lambda p: p(), window):
                s.write(data)


def _program(variant: Variant, chip: int) -> str:
    return f"program.{variant.name}.{chip}"


def _weight(item: Placed, chip: int) -> WeightDesc:
    h = item.handle
    sources = item.ref.sources + (item.bias.sources if item.bias is not None else ())
    if isinstance(h, Plain):
        return WeightDesc(
            name=h.name,
            chip=chip,
            offset=h.offset,
            nbytes=h.nbytes,
            format="f32",
            shape=h.shape,
            padded_shape=h.shape,
            sources=sources or (h.name,),
        )
    lay = h.layout
    lead = (h.experts,) if h.experts else ()
    return WeightDesc(
        name=h.name,
        chip=chip,
        offset=h.offset,
        nbytes=h.nbytes,
        format=lay.fmt,
        shape=(*lead, lay.rows, lay.cols),
        padded_shape=(*lead, lay.rows, lay.cols_padded),
        tile_rows=lay.tile_rows,
        group=lay.group,
        bias=lay.bias,
        experts=h.experts,
        sources=sources or (h.name,),
    )


def _golden(w: CalbinWriter, c: Compiled) -> list[Array]:
    if c.golden is None:
        return []
    out: list[Array] = []
    with w.section("golden", "golden") as s:
        for name, data in c.golden[2].items():
            s.align(64)
            kind = {"float32": "f32", "int32": "i32"}.get(data.dtype.name, "bf16")
            out.append(Array(name=name, dtype=kind, shape=data.shape, offset=s.tell(), nbytes=data.nbytes))  # type: ignore[arg-type]
            s.write(data)
    return out


def _files(w: CalbinWriter, c: Compiled) -> list[File]:
    out: list[File] = []
    for section, kind, content in (
        ("tokenizer", "tokenizer", dict(c.files)),
        ("graphs", "graph", dict(c.graphs)),
    ):
        if not content:
            continue
        with w.section(section, kind) as s:  # type: ignore[arg-type]
            for name, data in content.items():
                s.align(64)
                out.append(File(name=name, section=section, offset=s.tell(), nbytes=len(data)))
                s.write(data)
    return out


def golden_arrays(run: LadderRun) -> dict[str, NDArray[np.generic]]:
    """The arrays of the golden section: transformers' logits and KV, each rung's logits, the last rung's KV."""
    out: dict[str, NDArray[np.generic]] = {"hf/logits": run.hf_logits}
    ladder = run.ladder
    last = list(ladder.results)[-1]
    for name, result in ladder.results.items():
        if name != "hf":
            out[f"{name}/logits"] = result.logits
        if name in ("hf", last):
            for i, (k, v) in enumerate(zip(result.keys, result.values, strict=True)):
                # the NPU's KV is BF16: storing it so loses nothing
                out[f"{name}/key.{i}"], out[f"{name}/value.{i}"] = (k, v) if name == "hf" else (to_bf16(k), to_bf16(v))
    return out


def _manifest(
    c: Compiled,
    sections: tuple[Section, ...],
    weights: Sequence[WeightDesc],
    arrays: Sequence[Array],
    files: Sequence[File],
    losses: _Losses,
) -> Manifest:
    p, t, spec = c.placement, c.programs.placed.target, c.spec
    shards = tuple(
        ShardDesc(chip=chip, section=f"weights.{chip}", dram_offset=0, nbytes=m.shard_bytes)
        for chip, m in p.chips.items()
    )
    # a weight on several chips has one entry
    packed = {h.name: (h, i) for items in p.weights.values() for i in items if isinstance(h := i.handle, Packed)}
    quant = tuple(
        QuantEntry(
            weight=n,
            scheme=h.scheme.name,
            group=h.scheme.group,
            flushed=losses.of(i).flushed,
            saturated=losses.of(i).saturated,
        )
        for n, (h, i) in packed.items()
    )
    golden = None
    if c.golden is not None:
        plan, ladder, _ = c.golden
        golden = Golden(
            section="golden",
            tokens=plan.tokens,
            prompt=plan.prompt,
            steps=DECODE_STEPS,
            logits_rows=plan.rows,
            kv_layers=tuple(sorted({s.layer for s in _specs(c) if s.layer is not None and is_kv(s.name)})),
            rungs=tuple(ladder.rungs),
        )
    return Manifest(
        format=FORMAT,
        model=spec,
        target=TargetDesc(
            name=t.name, chips=t.chips, sram_bytes=t.sram_bytes, dram_bytes=t.dram_bytes, digest=t.digest, toml=t.toml
        ),
        sections=sections,
        submodels=tuple(_submodel(c, v) for v in c.lowered),
        shards=shards,
        weights=tuple(weights),
        states=_states(c),
        csrs=tuple(Csr(name=n, index=i, count=max(v.batch for v in c.lowered)) for i, n in enumerate(CSRS)),
        quantization=quant,
        golden=golden,
        arrays=tuple(arrays),
        files=tuple(files),
        dram=_dram(c),
        provenance=Provenance(
            source_sha256=spec.source_sha256,
            calc=importlib.metadata.version("calc"),
            versions={n: importlib.metadata.version(n) for n in VERSIONS},
            passes=c.passes,
            options=dict(c.options),
        ),
        compatibility=Compatibility(
            isa=ISA_NAME, isa_version=ISA_VERSION, calbin=FORMAT, runtime_min=RUNTIME_MIN, driver_min=DRIVER_MIN
        ),
    )


def _specs(c: Compiled) -> list[StateSpec]:
    """Every state once, in order of its name's first appearance on any chip."""
    return list({s.spec.name: s.spec for m in c.placement.chips.values() for s in m.states.values()}.values())


def _states(c: Compiled) -> StateLayout:
    p = c.placement
    out = []
    for spec in _specs(c):
        parts, rows, ring = [], 1, False
        for chip, memory in p.chips.items():
            for value, state in memory.states.items():
                if state.spec.name == spec.name:
                    first = p.parts[value].first if value in p.parts else 0
                    parts.append(StatePart(chip=chip, offset=state.buf.base or 0, first_head=first, heads=state.heads))
                    rows = state.rows
                    ring = state.ring
        growth = spec.growth if spec.growth != "ring" or ring else "token"
        out.append(
            StateDesc(
                name=spec.name,
                layer=spec.layer,
                dtype=spec.dtype,
                heads=spec.heads,
                dim=spec.dim,
                growth=growth,
                window=spec.window if growth == "ring" else None,
                rows=rows,
                parts=tuple(parts),
            )
        )
    return StateLayout(slots=p.slots, capacity=p.capacity, tile=p.state_rows, states=tuple(out))


def _dram(c: Compiled) -> tuple[MemoryRegion, ...]:
    out = []
    for chip, m in c.placement.chips.items():
        if m.shard_bytes:
            out.append(MemoryRegion(name=f"weights.{chip}", space="dram", chip=chip, offset=0, nbytes=m.shard_bytes))
        out += [
            MemoryRegion(name=s.buf.name, space="dram", chip=chip, offset=s.buf.base or 0, nbytes=s.buf.nbytes)
            for s in m.states.values()
        ]
        io = m.io["io"]
        out.append(MemoryRegion(name=f"io.{chip}", space="dram", chip=chip, offset=io.base or 0, nbytes=io.nbytes))
        scratch = max((low.programs[chip].scratch for low in c.lowered.values()), default=0)
        if scratch:
            out.append(MemoryRegion(name=f"scratch.{chip}", space="dram", chip=chip, offset=m.scratch, nbytes=scratch))
    return tuple(out)


def _submodel(c: Compiled, v: Variant) -> SubModel:
    parts = []
    for chip, prog in c.lowered[v].programs.items():
        regions = tuple(
            MemoryRegion(
                name=f"{i}:{b.name}"[:256],
                space="sram",
                chip=chip,
                offset=b.base or 0,
                nbytes=b.nbytes,
                first=max(b.first, 0),
                last=max(b.last, 0),
            )
            for i, b in enumerate(prog.buffers)
        )
        calls = c.programs.placed.model.calls[v]
        layers = tuple(sorted({k.layer for k in calls if k.chip == chip and k.layer is not None}))
        parts.append(
            ChipPart(
                chip=chip,
                layers=layers,
                program=_program(v, chip),
                instructions=len(prog.records),
                nodes=prog.nodes,
                sram_peak=prog.sram_peak,
                regions=regions,
            )
        )
    return SubModel(
        name=v.name,
        role=v.role,
        model_type=ROLES[v.role].model_type,
        batch=v.batch,
        seq=v.seq,
        workload=c.workloads[v],
        target_chips=tuple(c.lowered[v].programs),
        chip_map=tuple(parts),
        inputs=tuple(_input(c, v, t, chip) for t in ROLES[v.role].inputs for chip in _loaders(c, v, t.name)),
        outputs=tuple(d for t in ROLES[v.role].outputs for d in _outputs(c, v, t)),
    )


def _loaders(c: Compiled, v: Variant, name: str) -> list[int]:
    """The chips whose programs read an input."""
    calls = c.programs.placed.model.calls[v]
    return sorted({k.chip for k in calls if registry()[k.op].loads == name})


def _input(c: Compiled, v: Variant, t: Tensor, chip: int) -> TensorDesc:
    shape = t.shape(v.batch, v.seq, widths(c.spec))
    valid = (ValidRange(axis=1, csr=t.valid),) if t.valid else ()
    return _tensor(c, v, t, shape, chip, valid=valid)


def _outputs(c: Compiled, v: Variant, t: Tensor) -> list[TensorDesc]:
    """An output, or the parts of it that the chips write."""
    calls = sorted((k for k in c.programs.placed.model.calls[v] if registry()[k.op].stores == t.name), key=_chip)
    whole = t.shape(v.batch, v.seq, widths(c.spec))
    if len(calls) == 1:
        return [_tensor(c, v, t, whole, calls[0].chip)]
    out, start = [], 0
    for call in calls:
        width = call.shapes[call.outputs[0]][-1]
        part = TensorPart(axis=len(whole) - 1, start=start, size=whole[-1])
        out.append(_tensor(c, v, t, (*whole[:-1], width), call.chip, part=part))
        start += width
    return out


def _chip(call: Call) -> int:
    return call.chip


def _tensor(
    c: Compiled,
    v: Variant,
    t: Tensor,
    shape: tuple[int, ...],
    chip: int,
    valid: tuple[ValidRange, ...] = (),
    part: TensorPart | None = None,
) -> TensorDesc:
    base = c.placement.chips[chip].io["io"].base or 0
    buf = io_buffers(v, c.spec, base)[0][t.name]
    nbytes = prod(shape) * DTYPES[t.dtype].itemsize
    return TensorDesc(
        name=t.name,
        dtype=t.dtype,
        shape=shape,
        layout="row_major",
        tile=(1,) * len(shape),
        padded_shape=shape,
        valid=valid,
        part=part,
        at=Location(space="dram", chip=chip, offset=buf.base, nbytes=nbytes),
    )
