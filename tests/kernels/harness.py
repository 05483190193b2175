"""Runs one kernel call twice: its ONNX body in ONNX Runtime, its program on the simulator."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as rt
from onnx import TensorProto, helper

from calc.core.isa import Alu, DType, Space
from calc.core.packing import TileLayout
from calc.core.schemes import Scheme
from calc.core.target import Target, load_target
from calc.core.variant import Variant
from calc.kernels.base import Attrs, Call, Example, Kernel, Numerics
from calc.kernels.emit import Emitter
from calc.kernels.functions import function_proto
from calc.kernels.lowering import ChipMemory, Choices, Lowering, Rows, StateBuffer, weight_region
from calc.kernels.program import Buffer, Packed, Plain, View
from calc.passes.lower import ChipProgram, allocate_sram, finish
from calc.passes.pack import pack_plain, pack_rows
from calc.sim.machine import Machine, csr_file

INT = {"ids", "cur", "past"}


def bf16(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def draw(kernel: Kernel, ex: Example, seed: int = 0) -> dict[str, np.ndarray]:
    """Values for every formal input."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, shape in ex.shapes.items():
        if name in ex.values:
            out[name] = np.asarray(ex.values[name], np.int64)
        elif name == "ids":
            out[name] = rng.integers(0, ex.shapes["table"][0], shape).astype(np.int64)
        elif name in kernel.vectors(ex.attrs):
            out[name] = (rng.standard_normal(shape) * 0.2 + 1).astype(np.float32)
        elif name in kernel.weights(ex.attrs):
            out[name] = bf16(rng.standard_normal(shape).astype(np.float32) / np.sqrt(shape[-1]))
        elif name.startswith("b") and name[1:].isdigit():
            out[name] = rng.standard_normal(shape).astype(np.float32)
        else:
            out[name] = bf16(rng.standard_normal(shape).astype(np.float32))
    return out


def quantize(kernel: Kernel, ex: Example, values: dict, schemes: tuple[Scheme, ...]) -> dict:
    """The values ORT computes with, scales among them."""
    ort = dict(values)
    for name, scheme in zip(kernel.weights(ex.attrs), schemes, strict=True):
        w = values[name]
        given, scale = scheme.ort_values(w.reshape(-1, w.shape[-1]))
        ort[name] = given.reshape(w.shape)
        if scale is not None:
            ort[f"{name}_scale"] = scale.reshape(w.shape[:-1])
    return ort


def names_of(schemes) -> tuple[str, ...] | None:
    """What a node's ``schemes`` attribute says."""
    return tuple(map(str, schemes)) or None


def make_call(kernel: Kernel, attrs: Attrs, schemes, ort: dict) -> Call:
    _, outs = kernel.formals(attrs)
    shapes = {k: tuple(v.shape) for k, v in ort.items()}
    bound = kernel.schemes(attrs, names_of(schemes))
    return Call(kernel.name, "node", attrs, {k: k for k in ort}, outs, shapes, 0, schemes=bound)


def run_ort(kernel: Kernel, attrs: Attrs, numerics: Numerics, values: dict, schemes=()) -> dict[str, np.ndarray]:
    fn = function_proto(kernel, attrs, names_of(schemes), numerics)
    ins = kernel.inputs(attrs, kernel.schemes(attrs, names_of(schemes)))
    outs = kernel.formals(attrs)[1]
    node = helper.make_node(kernel.name, list(ins), list(outs), domain="calc")
    node.overload = fn.overload
    graph = helper.make_graph(
        [node],
        "one",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(values[n].dtype), values[n].shape)
            for n in ins
        ],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outs],
    )
    model = helper.make_model(
        graph,
        functions=[fn],
        ir_version=10,
        opset_imports=[helper.make_opsetid("", 25), helper.make_opsetid("calc", 1)],
    )
    so = rt.SessionOptions()
    so.log_severity_level = 3
    so.intra_op_num_threads = 1
    sess = rt.InferenceSession(model.SerializeToString(), so)
    return dict(zip(outs, sess.run(list(outs), {n: values[n] for n in ins}), strict=True))


def _pack(kernel: Kernel, attrs: Attrs, values, schemes, tile_rows):
    """Every weight's handle, and the shard that holds them."""
    weight_names, vectors = kernel.weights(attrs), kernel.vectors(attrs)
    handles, blobs, at = {}, [], 0
    for name, v in values.items():
        if name in weight_names:
            scheme = schemes[weight_names.index(name)]
            shape = v.shape[-2:]
            bias = values.get(f"b{name[1:]}") if name[0] == "w" and name[1:].isdigit() else None
            lay = TileLayout(scheme.format.name, shape[0], shape[1], tile_rows, scheme.group, bias is not None)
            experts = v.shape[0] if v.ndim == 3 else 0
            blob = b"".join(pack_rows(scheme, lay, e, bias) for e in (v if experts else [v]))
            handles[name] = Packed(name, at, lay, scheme, experts)
        elif name in vectors:
            blob = pack_plain(v)
            handles[name] = Plain(name, at, v.shape)
        else:
            continue
        blob += bytes(-len(blob) % 64)
        blobs.append(blob)
        at += len(blob)
    shard = np.frombuffer(b"".join(blobs) or bytes(64), np.uint8)
    return handles, shard


def small_tiles(target: Target) -> Choices:
    """The target's sizes with small attention tiles, so that an example has several."""
    return replace(Choices.of(target.tiling), score_bytes=8192, key_tile=32)


class Bench:
    """One kernel call on a machine of one chip: its inputs in DRAM, its program, its outputs.

    Args:
        kernel, attrs, values: the call.
        schemes: of its weights.
        tile_rows: rows of a packed tile.
        block: rows that the program works on at once; None for all.
        ring: states of a windowed attention as rings of the window, as the compiler would place them.
        ring_tile: keys that are read at once at most, as far as placing knows; the kernel's own tiles are at most 32.
    """

    def __init__(
        self,
        kernel: Kernel,
        attrs: Attrs,
        values: dict,
        schemes,
        *,
        tile_rows: int = 32,
        block: int | None = None,
        ring: bool = False,
        ring_tile: int = 32,
    ) -> None:
        self.kernel, self.values, self.target = kernel, values, load_target("calculet-1chip")
        handles, self.shard = _pack(kernel, attrs, values, schemes, tile_rows)
        self.call = make_call(kernel, attrs, schemes, values)
        x = next(v for k, v in values.items() if k in ("x", "a", "q", "ids"))
        seq = x.shape[1] if x.ndim == 3 or "ids" in values else 1
        self.variant = Variant("decode" if seq == 1 else "prefill", x.shape[0], seq)
        self.past = int(values["past"][0]) if "past" in values else 0
        self.cur = int(values["cur"][0]) if "cur" in values else seq
        at = len(self.shard)
        states = {}
        for formal, spec in kernel.states(self.call).items():
            _, heads, capacity, _ = values[formal].shape
            rows = spec.rows(capacity, ring_tile, 16) if ring else capacity
            buf = Buffer(formal, Space.DRAM, rows * spec.row_bytes(), base=at)
            states[formal] = StateBuffer(spec, buf, heads, rows, ring and rows < capacity)
            at += -(-buf.nbytes // 64) * 64
        io, vocab = {}, values["w"].shape[0] if "w" in values else 8
        for n, size in (("input_ids", 4 * x.shape[0] * seq), ("logits", 4 * vocab * x.shape[0])):
            io[n] = Buffer(n, Space.DRAM, size, base=at)
            at += -(-size // 64) * 64
        skip = {*kernel.weights(attrs), *kernel.vectors(attrs), *kernel.states(self.call)}
        self.acts = {k: v for k, v in values.items() if v.dtype == np.float32 and v.ndim in (2, 3) and k not in skip}
        self.acts = {k: v for k, v in self.acts.items() if not (k[0] == "b" and k[1:].isdigit())}
        self.src = {}
        for k, v in self.acts.items():
            self.src[k] = Buffer(f"in:{k}", Space.DRAM, v.size * 2, base=at)
            at += -(-v.size * 2 // 64) * 64
        self.memory = ChipMemory(handles, len(self.shard), states, io, at + (8 << 20))
        self.out: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.end = at
        self.program = self._lower(block)

    def _lower(self, block: int | None) -> ChipProgram:
        em = Emitter(weight_region("weights", len(self.shard), 0), 3, 1 << 20)
        low = Lowering(em, self.variant, self.memory, small_tiles(self.target))
        seq = self.variant.seq
        if seq == 1:
            low.begin(low.sequences, None)
            self._body(low, None)
        elif block is None:
            low.begin(Rows(em.csr("cur_seq_len"), seq), None)
            self._body(low, None)
        else:
            cur = em.csr("cur_seq_len")
            with em.loop(em.alu(Alu.CDIV, cur, block)) as b:
                first = em.alu(Alu.MUL, b, block)
                low.begin(Rows(em.alu(Alu.MIN, em.alu(Alu.SUB, cur, first), block), block), first)
                self._body(low, first)
        low.end()
        allocate_sram(low, self.variant, 0, self.target)
        return finish(low)

    def _body(self, low: Lowering, first) -> None:
        em = low.em
        for k, v in self.acts.items():
            a = low.new(k, v.shape[-1], low.sequences if v.ndim == 2 else None)
            row = v.shape[-1] * 2
            em.load(a.view, low.from_first(View(self.src[k], DType.BF16, (row, 2)), row), (a.rows.count, a.width))
        em.source(self.call.name)
        with em.scope():
            self.kernel.lower(low, self.call)
        for name in self.call.outputs:
            if name in low.acts:
                a = low.acts[name]
                limit = self.variant.batch if a.rows == low.sequences else self.variant.batch * self.variant.seq
                row = a.width * 2
                dst = Buffer(f"out:{name}", Space.DRAM, limit * row, base=self.end)
                em.store(low.from_first(View(dst, DType.BF16, (row, 2)), row), a.view, (a.rows.count, a.width))
                self.out[name] = (self.end, (limit, a.width))
                self.end += -(-dst.nbytes // 64) * 64

    def run(self, mode: str) -> dict[str, np.ndarray]:
        """The outputs as f32, of valid rows; of a state what it holds, position by position."""
        values, base = self.values, len(self.shard)
        machine = Machine(self.target.sram_bytes, {0: self.shard}, {0: self.memory.scratch + (8 << 20) - base}, mode)
        mem = machine.memories[0]
        if "ids" in values:
            mem.host_write(self.memory.io["input_ids"].base, values["ids"].astype(np.int32))
        for k, b in self.src.items():
            mem.host_write(b.base, self.acts[k].astype(ml_dtypes.bfloat16))
        for formal, state in self.memory.states.items():
            rows = values[formal][0].transpose(1, 0, 2).astype(ml_dtypes.bfloat16).reshape(-1, state.row_bytes // 2)
            for t in range(max(0, self.past - state.rows), self.past):
                mem.host_write(state.buf.base + (t % state.rows) * state.row_bytes, rows[t])
        csr = csr_file({"past_kv_cur_seq_len": [self.past], "cur_seq_len": [self.cur], "kv_slot": [0]})
        machine.load({0: self.program.records}, {0: self.program.nodes}).run(csr)
        out = {n: mem.host_read(at, 2, shape).astype(np.float32) for n, (at, shape) in self.out.items()}
        if "logits" in self.call.outputs:
            w = values["w"]
            out["logits"] = mem.host_read(self.memory.io["logits"].base, 1, (self.variant.batch, w.shape[0]))
        for (formal, state), name in zip(self.memory.states.items(), ("kv_k", "kv_v"), strict=False):
            dim = values[formal].shape[-1]
            held = mem.host_read(state.buf.base, 2, (state.rows, state.heads, dim)).astype(np.float32)
            total = self.past + self.cur
            kept = np.arange(max(0, total - (state.spec.window or total if state.ring else total)), total)
            out[name] = held[kept % state.rows].transpose(1, 0, 2)
        return out


def run_sim(kernel, attrs, values, schemes, mode, tile_rows=32, **more):
    """The kernel's program alone on a machine; its outputs as f32."""
    return Bench(kernel, attrs, values, schemes, tile_rows=tile_rows, **more).run(mode)


__all__ = ["draw", "onnx", "quantize", "run_ort", "run_sim"]
