"""Runs one kernel call twice: its ONNX body in ONNX Runtime, its program on the simulator."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as rt
from onnx import TensorProto, helper

from calc.core.isa import Space
from calc.core.packing import TileLayout
from calc.core.schemes import Scheme
from calc.core.target import load_target
from calc.core.variant import Variant
from calc.kernels.base import Call, Example, Kernel, Numerics
from calc.kernels.emit import Buffer, Packed, Plain
from calc.kernels.functions import function_proto
from calc.kernels.lowering import KvBuffers
from calc.passes.lower import ChipMemory, lower
from calc.passes.pack import pack_plain, pack_rows
from calc.sim.machine import Machine, csr_file

INT = {"ids", "cur", "past"}
PLAIN = {"gamma", "q_gamma", "k_gamma", "cos", "sin"}


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
        elif name in PLAIN:
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


def make_call(kernel: Kernel, ex: Example, attrs: dict, ort: dict) -> Call:
    _, outs = kernel.formals(attrs)
    shapes = {k: tuple(v.shape) for k, v in ort.items()}
    return Call(kernel.name, "node", attrs, {k: k for k in ort}, outs, shapes, 0, kernel.schemes(attrs))


def run_ort(kernel: Kernel, attrs: dict, numerics: Numerics, values: dict) -> dict[str, np.ndarray]:
    fn = function_proto(kernel, attrs, numerics)
    ins, outs = kernel.formals(attrs)
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


def _pack(weight_names, values, schemes, tile_rows):
    """Every weight's handle, and the shard that holds them."""
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
        elif name in PLAIN:
            blob = pack_plain(v)
            handles[name] = Plain(name, at, v.shape)
        else:
            continue
        blob += bytes(-len(blob) % 64)
        blobs.append(blob)
        at += len(blob)
    shard = np.frombuffer(b"".join(blobs) or bytes(64), np.uint8)
    return handles, shard


def run_sim(kernel: Kernel, ex: Example, attrs: dict, values: dict, schemes, mode: str, tile_rows: int = 32):
    """The kernel's program alone on a machine; returns its outputs as f32."""
    target = load_target("calculet-1chip")
    weight_names = kernel.weights(attrs)
    handles, shard = _pack(weight_names, values, schemes, tile_rows)
    x = next(v for k, v in values.items() if k in ("x", "q", "ids"))
    variant = Variant("decode" if x.shape[1] == 1 else "prefill", x.shape[0], x.shape[1])
    base = len(shard)
    kv = {}
    if "past_k" in values:
        _, h, c, d = values["past_k"].shape
        row = h * d * 2
        kv[0] = KvBuffers(
            Buffer("k", Space.DRAM, c * row, base=base),
            Buffer("v", Space.DRAM, c * row, base=base + c * row),
            row,
            row,
            c,
        )
        base += 2 * c * row
    io, end = {}, base
    vocab = values["w"].shape[0] if "w" in values else 8
    for n, size in (("input_ids", 4 * x.shape[0] * x.shape[1]), ("logits", 4 * vocab * x.shape[0])):
        io[n] = Buffer(n, Space.DRAM, size, base=end)
        end += -(-size // 64) * 64
    call = make_call(kernel, ex, attrs, values)
    acts = {
        k: v
        for k, v in values.items()
        if v.dtype == np.float32 and v.ndim == 3 and k not in weight_names and k not in PLAIN
    }
    acts = {k: v for k, v in acts.items() if not k.startswith("past_")}
    src = {
        k: Buffer(f"in:{k}", Space.DRAM, v.size * 2, base=end + i * (1 << 20)) for i, (k, v) in enumerate(acts.items())
    }
    out_shapes = {}
    end += (len(acts) + 4) << 20
    import calc.passes.lower as lower_module

    programs = _lower_one(
        lower_module, kernel, call, variant, ChipMemory(handles, len(shard), kv, io), target, src, acts, end, out_shapes
    )
    machine = Machine(target.sram_bytes, {0: shard}, {0: end + (8 << 20) - len(shard)}, mode)
    mem = machine.memories[0]
    if "ids" in values:
        mem.host_write(io["input_ids"].base, values["ids"].astype(np.int32))
    for k, b in src.items():
        mem.host_write(b.base, acts[k].astype(ml_dtypes.bfloat16))
    past = int(values["past"][0]) if "past" in values else 0
    if kv:
        for n, buf in (("past_k", kv[0].key), ("past_v", kv[0].value)):
            rows = values[n][0].transpose(1, 0, 2)[:past].astype(ml_dtypes.bfloat16)
            if past:
                mem.host_write(buf.base, rows.reshape(past, -1))
    cur = int(values["cur"][0]) if "cur" in values else x.shape[1]
    machine.load({0: programs.records}, {0: programs.nodes}).run(
        csr_file({"past_kv_cur_seq_len": [past], "cur_seq_len": [cur], "kv_slot": [0]})
    )
    out = {}
    for name, (addr, shape, dtype) in out_shapes.items():
        out[name] = mem.host_read(addr, dtype, shape).astype(np.float32)
    if "logits" in call.outputs:
        out["logits"] = mem.host_read(io["logits"].base, 1, (x.shape[0], vocab))
    if kv:
        for n, buf in (("kv_k", kv[0].key), ("kv_v", kv[0].value)):
            _, h, c, d = values["past_k"].shape
            out[n] = mem.host_read(buf.base, 2, (1, c, h, d)).astype(np.float32).transpose(0, 2, 1, 3)
    return out, cur, past


def _lower_one(lower_module, kernel, call, variant, chip, target, src, acts, end, out_shapes):
    """Lower one call, with its activations loaded before and its results stored after it."""
    from calc.core.isa import DType
    from calc.kernels.emit import Emitter, View
    from calc.kernels.lowering import Choices, Lowering, weight_region

    em = Emitter(weight_region("weights", chip.shard_bytes, 0), 3, 1 << 20)
    low = Lowering(em, variant, chip.weights, chip.kv, chip.io, Choices(8192, 32))
    for k, v in acts.items():
        a = low.new(k, v.shape[-1])
        em.load(a.view, View(src[k], DType.BF16, (v.shape[-1] * 2, 2)), (low.rows, v.shape[-1]))
    em.source(call.name)
    with em.scope():
        kernel.lower(low, call)
    for i, name in enumerate(call.outputs):
        if name in low.acts:
            a = low.acts[name]
            dst = Buffer(f"out:{name}", Space.DRAM, low.max_rows * a.width * 2, base=end + (i << 20))
            em.store(View(dst, DType.BF16, (a.width * 2, 2)), a.view, (low.rows, a.width))
            out_shapes[name] = (dst.base, (variant.batch, variant.seq, a.width), 2)
    return lower_module._finish(low, variant, 0, target)


__all__ = ["draw", "lower", "onnx", "quantize", "run_ort", "run_sim"]
