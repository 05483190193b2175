"""Artefact: everything the passes made, written as one calbin."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
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
    KvLayer,
    KvLayout,
    Location,
    Manifest,
    MemoryRegion,
    Provenance,
    QuantEntry,
    Section,
    ShardDesc,
    SubModel,
    TargetDesc,
    TensorDesc,
    ValidRange,
    WeightDesc,
    Workload,
)
from calc.calbin.writer import CalbinWriter, SectionWriter
from calc.core.isa import CSRS, ISA_NAME, ISA_VERSION
from calc.core.numerics import Loss, bf16_loss, to_bf16
from calc.core.options import Progress
from calc.core.spec import ModelSpec
from calc.core.target import Target
from calc.core.variant import Variant
from calc.kernels.emit import Packed, Plain
from calc.passes.finite import Finite
from calc.passes.ladder import DECODE_STEPS, GoldenPlan, Ladder
from calc.passes.lower import ChipProgram, io_buffers
from calc.passes.pack import Check, Placed, shard_pieces
from calc.passes.place import Placement

RUNTIME_MIN = (1, 0)
DRIVER_MIN = (0, 7)
VERSIONS = ("numpy", "onnx", "onnx-ir", "onnxruntime", "onnxscript", "ml-dtypes")
MODEL_TYPES = {"prefill": "llm_prefill", "decode": "llm_decode"}


@dataclass(frozen=True)
class Compiled:
    """What goes into a calbin."""

    spec: ModelSpec
    target: Target
    placement: Placement
    programs: Mapping[Variant, Mapping[int, ChipProgram]]
    workloads: Mapping[Variant, Workload]
    max_seq_len: int
    passes: tuple[str, ...]
    options: Mapping[str, str]
    golden: tuple[GoldenPlan, Ladder, Mapping[str, NDArray[np.generic]]] | None
    files: Mapping[str, bytes]
    graphs: Mapping[str, bytes]


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
        for variant, parts in c.programs.items():
            for chip, prog in parts.items():
                with w.section(_program(variant, chip), "program") as s:
                    s.write(prog.records)
        weights: list[WeightDesc] = []
        done = 0
        for chip, items in placement.weights.items():
            with w.section(f"weights.{chip}", "weights") as s:
                for item in items:
                    s.align(64)
                    assert s.tell() == item.handle.offset
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


def golden_arrays(plan: GoldenPlan, ladder: Ladder, hf_logits: NDArray[np.float32]) -> dict[str, NDArray[np.generic]]:
    """The arrays of the golden section: transformers' logits and KV, each rung's logits, the last rung's KV."""
    out: dict[str, NDArray[np.generic]] = {"hf/logits": hf_logits}
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
    p, t, spec = c.placement, c.target, c.spec
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
            kv_layers=tuple(range(len(spec.layers))),
            rungs=tuple(ladder.rungs),
        )
    return Manifest(
        format=FORMAT,
        model=spec,
        target=TargetDesc(
            name=t.name, chips=t.chips, sram_bytes=t.sram_bytes, dram_bytes=t.dram_bytes, digest=t.digest, toml=t.toml
        ),
        sections=sections,
        submodels=tuple(_submodel(c, v) for v in c.programs),
        shards=shards,
        weights=tuple(weights),
        kv=_kv(c),
        csrs=tuple(Csr(name=n, index=i, count=max(v.batch for v in c.programs)) for i, n in enumerate(CSRS)),
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


def _kv(c: Compiled) -> KvLayout:
    p = c.placement
    layers = []
    for i, layer in enumerate(c.spec.layers):
        chip = p.layer_chip[i]
        kv = p.chips[chip].kv[i]
        layers.append(
            KvLayer(
                layer=i,
                chip=chip,
                key_offset=kv.key.base or 0,
                value_offset=kv.value.base or 0,
                kv_heads=layer.kv_heads,
                key_dim=layer.key_dim,
                value_dim=layer.value_dim,
                window=layer.window,
            )
        )
    return KvLayout(dtype="bf16", slots=p.slots, capacity=c.max_seq_len, rows=p.rows, tile=16, layers=tuple(layers))


def _dram(c: Compiled) -> tuple[MemoryRegion, ...]:
    out = []
    for chip, m in c.placement.chips.items():
        if m.shard_bytes:
            out.append(MemoryRegion(name=f"weights.{chip}", space="dram", chip=chip, offset=0, nbytes=m.shard_bytes))
        for kv in m.kv.values():
            out += [
                MemoryRegion(name=b.name, space="dram", chip=chip, offset=b.base or 0, nbytes=b.nbytes)
                for b in (kv.key, kv.value)
            ]
        io = m.io["io"]
        out.append(MemoryRegion(name=f"io.{chip}", space="dram", chip=chip, offset=io.base or 0, nbytes=io.nbytes))
    return tuple(out)


def _submodel(c: Compiled, v: Variant) -> SubModel:
    parts = []
    for chip, prog in c.programs[v].items():
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
        layers = tuple(i for i, k in enumerate(c.placement.layer_chip) if k == chip)
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
        model_type=MODEL_TYPES[v.role],  # type: ignore[arg-type]
        batch=v.batch,
        seq=v.seq,
        workload=c.workloads[v],
        target_chips=tuple(c.programs[v]),
        chip_map=tuple(parts),
        inputs=(_io(c, v, "input_ids", 0),),
        outputs=(_io(c, v, "logits", max(c.placement.chips)),),
    )


def _io(c: Compiled, v: Variant, name: str, chip: int) -> TensorDesc:
    base = c.placement.chips[chip].io["io"].base or 0
    buf = io_buffers(v, c.spec.vocab, base)[0][name]
    shape = (v.batch, v.seq) if name == "input_ids" else (v.batch, c.spec.vocab)
    return TensorDesc(
        name=name,
        dtype="i32" if name == "input_ids" else "f32",
        shape=shape,
        layout="row_major",
        tile=(1, 1),
        padded_shape=shape,
        valid=(ValidRange(axis=1, csr="cur_seq_len"),) if name == "input_ids" else (),
        at=Location(space="dram", chip=chip, offset=buf.base, nbytes=buf.nbytes),
    )
