"""What each data instruction does, as a closure over decoded operands. One body for fast and strict.

The arithmetic is the numerics contract's: operands are widened to FP32, results rounded once at the store.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import special

from calc.core.errors import InternalError, Problem, RuntimeFault
from calc.core.isa import DType, Flag, Fn, Op, Red
from calc.core.numerics import quant_rows_int8
from calc.core.optable import FUNCTIONS, SPECS, check_covered
from calc.sim.memory import INT8_EXACT_K, FastMemory, Run, TileSpec
from calc.sim.program import Ins, Regs

Shape = Callable[[Regs], tuple[int, ...]]
F = NDArray[np.float32]

SQRT_HALF = np.float32(0.7071067811865476)
GELU_C = np.float32(0.7978845608028654)
F32 = np.float32


def wide(x: NDArray[np.generic]) -> F:
    """FP32 values of an operand."""
    return x if x.dtype == np.float32 else x.astype(np.float32)  # type: ignore[return-value]


def _erf(x: F) -> F:
    """Erf in FP64, rounded to FP32 once."""
    return np.asarray(special.erf(x.astype(np.float64)), dtype=np.float32)


def _sigmoid(x: F) -> F:
    with np.errstate(over="ignore"):
        return np.asarray(F32(1) / (F32(1) + np.exp(-x)), dtype=np.float32)


def _gelu_tanh(x: F) -> F:
    return np.asarray(F32(0.5) * x * (F32(1) + np.tanh(GELU_C * (x + F32(0.044715) * x * x * x))), dtype=np.float32)


UNARY: dict[int, Callable[[F, np.float32, np.float32], F]] = {
    Fn.COPY: lambda a, f0, f1: a,
    Fn.AFFINE: lambda a, f0, f1: a * f0 + f1,
    Fn.EXP: lambda a, f0, f1: np.exp(a),
    Fn.RSQRT: lambda a, f0, f1: F32(1) / np.sqrt(a * f0 + f1),
    Fn.TANH: lambda a, f0, f1: np.tanh(a),
    Fn.SIGMOID: lambda a, f0, f1: _sigmoid(a),
    Fn.SILU: lambda a, f0, f1: a * _sigmoid(a),
    Fn.GELU: lambda a, f0, f1: F32(0.5) * a * (F32(1) + _erf(a * SQRT_HALF)),
    Fn.GELU_TANH: lambda a, f0, f1: _gelu_tanh(a),
}
BINARY: dict[int, Callable[[F, F], F]] = {
    Fn.ADD: np.add,
    Fn.SUB: np.subtract,
    Fn.MUL: np.multiply,
    Fn.DIV: np.divide,
    Fn.MAX: np.maximum,
    Fn.EXPSUB: lambda a, b: np.exp(a - b),
}
TERNARY: dict[int, Callable[[F, F, F], F]] = {
    Fn.MUL3: lambda a, b, d: a * b * d,
    Fn.MADD: lambda a, b, d: a * b + d,
}
REDUCE: dict[int, Callable[[F], F]] = {
    Red.MAX: lambda a: a.max(axis=-1),
    Red.SUM: lambda a: a.sum(axis=-1),
    Red.SUMSQ: lambda a: np.einsum("...k,...k->...", a, a),
}
for _arity, _table in ((0, (Fn.FILL,)), (1, UNARY), (2, BINARY), (3, TERNARY)):
    _rows = [fn for fn, row in FUNCTIONS[Fn].items() if row.arity == _arity]
    check_covered(f"element functions of {_arity} operands", _rows, _table)
check_covered("reductions", FUNCTIONS[Red], REDUCE)


def _shape(ins: Ins) -> Shape:
    if all(r < 0 for _, r in ins.dims):
        fixed = tuple(c for c, _ in ins.dims)
        return lambda regs: fixed
    return ins.shape


def _copy(ins: Ins, mem: FastMemory) -> Run:
    dst, src, shape = mem.write(ins.operands["dst"]), mem.read(ins.operands["a"]), _shape(ins)

    def run(regs: Regs) -> None:
        s = shape(regs)
        data = src(regs, s)
        dst(regs, s)[...] = data

    return run


def _load(ins: Ins, mem: FastMemory) -> Run:
    if ins.flags & Flag.TILE:
        return mem.load_tile(ins.operands["dst"], ins.operands["a"], ins.dims[0][0])
    return _copy(ins, mem)


def _gather_rows(ins: Ins, mem: FastMemory) -> Run:
    table, index = mem.read(ins.operands["a"]), mem.read(ins.operands["b"])
    dst, shape, limit = mem.write(ins.operands["dst"]), _shape(ins), ins.imm[0]

    def run(regs: Regs) -> None:
        rows, width = shape(regs)
        ids = index(regs, (rows,))
        mem.check_index(ids, limit)
        data = table(regs, (limit, width))[ids]
        dst(regs, (rows, width))[...] = data

    return run


def _vmap(ins: Ins, mem: FastMemory) -> Run:
    return _VMAP[FUNCTIONS[Fn][ins.sub].arity](ins, mem)


def _fill(ins: Ins, mem: FastMemory) -> Run:
    shape, dst, value = _shape(ins), mem.write(ins.operands["dst"]), F32(ins.fimm[1])

    def run(regs: Regs) -> None:
        dst(regs, shape(regs))[...] = value

    return run


def _unary(ins: Ins, mem: FastMemory) -> Run:
    shape, fn, ops = _shape(ins), UNARY[ins.sub], ins.operands
    dst, a = mem.write(ops["dst"]), mem.read(ops["a"])
    f0, f1 = F32(ins.fimm[0]), F32(ins.fimm[1])

    def run(regs: Regs) -> None:
        s = shape(regs)
        r = fn(wide(a(regs, s)), f0, f1)
        dst(regs, s)[...] = r

    return run


def _binary(ins: Ins, mem: FastMemory) -> Run:
    shape, fn, ops = _shape(ins), BINARY[ins.sub], ins.operands
    dst, a, b = mem.write(ops["dst"]), mem.read(ops["a"]), mem.read(ops["b"])

    def run(regs: Regs) -> None:
        s = shape(regs)
        r = fn(wide(a(regs, s)), wide(b(regs, s)))
        dst(regs, s)[...] = r

    return run


def _ternary(ins: Ins, mem: FastMemory) -> Run:
    shape, fn, ops = _shape(ins), TERNARY[ins.sub], ins.operands
    dst, a, b, d = mem.write(ops["dst"]), mem.read(ops["a"]), mem.read(ops["b"]), mem.read(ops["d"])

    def run(regs: Regs) -> None:
        s = shape(regs)
        r = fn(wide(a(regs, s)), wide(b(regs, s)), wide(d(regs, s)))
        dst(regs, s)[...] = r

    return run


_VMAP = (_fill, _unary, _binary, _ternary)
"""By the function's number of operands."""


def _vreduce(ins: Ins, mem: FastMemory) -> Run:
    shape, fn = _shape(ins), REDUCE[ins.sub]
    dst, a = mem.write(ins.operands["dst"]), mem.read(ins.operands["a"])

    def run(regs: Regs) -> None:
        s = shape(regs)
        if s[-1] <= 0:
            return  # nothing to reduce: what dst holds stays
        r = fn(wide(a(regs, s)))
        dst(regs, s[:-1])[...] = r

    return run


def _vcmul(ins: Ins, mem: FastMemory) -> Run:
    shape = _shape(ins)
    ops = ins.operands
    x, y = mem.read(ops["a"]), mem.write(ops["dst"])
    x2 = mem.read(mem.moved(ops["a"], ins.imm[0]))
    y2 = mem.write(mem.moved(ops["dst"], ins.imm[1]))
    cos, sin = mem.read(ops["b"]), mem.read(ops["d"])

    def run(regs: Regs) -> None:
        s = shape(regs)
        re, im = wide(x(regs, s)), wide(x2(regs, s))
        c, sn = cos(regs, s), sin(regs, s)
        r, i = re * c - im * sn, re * sn + im * c
        y(regs, s)[...] = r
        y2(regs, s)[...] = i

    return run


def _vband(ins: Ins, mem: FastMemory) -> Run:
    shape, fill = _shape(ins), F32(ins.fimm[0])
    dst, a = mem.write(ins.operands["dst"]), mem.read(ins.operands["a"])
    axis, reg, width = ins.imm[0], ins.imm[1], ins.imm[2]

    def run(regs: Regs) -> None:
        s = shape(regs)
        ahead = np.arange(s[axis])[:, None] + regs[reg] - np.arange(s[-1])[None, :]
        keep = (ahead >= 0) & (ahead < width)
        view = [1] * len(s)
        view[axis], view[-1] = s[axis], s[-1]
        r = np.where(keep.reshape(view), a(regs, s), fill)
        dst(regs, s)[...] = r

    return run


def _vquant(ins: Ins, mem: FastMemory) -> Run:
    shape = _shape(ins)
    dst, a, d = mem.write(ins.operands["dst"]), mem.read(ins.operands["a"]), mem.write(ins.operands["d"])

    def run(regs: Regs) -> None:
        s = shape(regs)
        codes, scale = quant_rows_int8(wide(a(regs, s)))
        dst(regs, s)[...] = codes
        d(regs, s[:-1])[...] = scale

    return run


def _vtopk(ins: Ins, mem: FastMemory) -> Run:
    shape, k = _shape(ins), ins.imm[0]
    dst, a, d = mem.write(ins.operands["dst"]), mem.read(ins.operands["a"]), mem.write(ins.operands["d"])

    def run(regs: Regs) -> None:
        s = shape(regs)
        x = a(regs, s)
        ids = np.argsort(-x, axis=-1, kind="stable")[..., :k].astype(np.int32)
        values = np.take_along_axis(x, ids, axis=-1)
        dst(regs, (*s[:-1], k))[...] = values
        d(regs, (*s[:-1], k))[...] = ids

    return run


def _vbucket(ins: Ins, mem: FastMemory) -> Run:
    shape, buckets = _shape(ins), ins.imm[0]
    dst, a, d = mem.write(ins.operands["dst"]), mem.read(ins.operands["a"]), mem.write(ins.operands["d"])

    def run(regs: Regs) -> None:
        s = shape(regs)
        keys = a(regs, s)
        mem.check_index(keys, buckets)
        order = np.argsort(keys, kind="stable").astype(np.int32)
        offsets = np.zeros(buckets + 1, np.int32)
        np.cumsum(np.bincount(keys, minlength=buckets), out=offsets[1:])
        dst(regs, s)[...] = order
        d(regs, (buckets + 1,))[...] = offsets

    return run


def _vgather(ins: Ins, mem: FastMemory) -> Run:
    shape, div, limit = _shape(ins), ins.imm[0], ins.imm[1]
    dst, a, b = mem.write(ins.operands["dst"]), mem.read(ins.operands["a"]), mem.read(ins.operands["b"])

    def run(regs: Regs) -> None:
        rows, width = shape(regs)
        ids = b(regs, (rows,)) // div
        mem.check_index(ids, limit)
        top = int(ids.max()) + 1 if rows else 0
        data = a(regs, (top, width))[ids]
        dst(regs, (rows, width))[...] = data

    return run


def _vscatter(ins: Ins, mem: FastMemory) -> Run:
    shape, div, limit = _shape(ins), ins.imm[0], ins.imm[1]
    ops = ins.operands
    dst, a, b, d = mem.update(ops["dst"]), mem.read(ops["a"]), mem.read(ops["b"]), mem.read(ops["d"])

    def run(regs: Regs) -> None:
        rows, width = shape(regs)
        pairs = b(regs, (rows,))
        ids = pairs // div
        mem.check_index(ids, limit)
        if not rows:
            return
        weights = d(regs, (int(pairs.max()) + 1,))[pairs]
        target = dst(regs, (int(ids.max()) + 1, width))
        # a token meets an expert once, so the rows of one call are distinct
        target[ids] += wide(a(regs, (rows, width))) * weights[:, None]

    return run


def _exact_int8(a: F, b: F) -> F:
    """Products of int8 codes summed exactly in int32, as FP32 (rounded once)."""
    k = a.shape[1]
    if k <= INT8_EXACT_K:
        return a @ b.T
    total = np.zeros((a.shape[0], b.shape[0]), np.int32)
    for i in range(0, k, INT8_EXACT_K):
        total += (a[:, i : i + INT8_EXACT_K] @ b[:, i : i + INT8_EXACT_K].T).astype(np.int32)
    return total.astype(np.float32)


def _gemm_packed(ins: Ins, mem: FastMemory) -> Run:
    ops, shape = ins.operands, _shape(ins)
    n, k = ins.dims[3][0], ins.dims[4][0]
    spec = TileSpec(
        ins.tile, n, k, ops["b"].steps[1], ins.imm[0], ins.imm[1], bool(ins.flags & Flag.BIAS), ins.imm[2], ins.imm[3]
    )
    tile = mem.tile(ops["b"], spec)
    a, dst = mem.read(ops["a"]), mem.write(ops["dst"])
    addend = mem.read(ops["d"]) if ins.flags & Flag.ADDEND else None
    row_scale = mem.read(ops["e"]) if "e" in ops else None
    is_int8 = ops["a"].dtype == DType.I8

    def run(regs: Regs) -> None:
        h, i, g, _, _ = shape(regs)
        w = tile(regs)
        x = wide(a(regs, (h, i, g, k)).reshape(i, k))
        # both operands are whole numbers only where the weight's scales come after the sum
        out = _exact_int8(x, w.values) if is_int8 and w.row_scale is not None else x @ w.values.T
        if row_scale is not None:
            out = out * row_scale(regs, (h, i)).reshape(i, 1)
        if w.row_scale is not None:
            out = out * w.row_scale
        if w.bias is not None:
            out = out + w.bias
        if addend is not None:
            out = out + wide(addend(regs, (h, i, g, n)).reshape(i, n))
        dst(regs, (h, i, g, n))[...] = out.reshape(h, i, g, n)

    return run


def _gemm(ins: Ins, mem: FastMemory) -> Run:
    if ins.flags & Flag.PACKED:
        return _gemm_packed(ins, mem)
    ops, shape = ins.operands, _shape(ins)
    a, b = mem.read(ops["a"]), mem.read(ops["b"])
    acc = bool(ins.flags & Flag.ACC)
    dst = mem.update(ops["dst"]) if acc else mem.write(ops["dst"])
    alpha = F32(ins.fimm[0])

    def run(regs: Regs) -> None:
        h, i, g, n, k = shape(regs)
        x = wide(a(regs, (h, i, g, k))).reshape(h, i * g, k)
        w = wide(b(regs, (h, n, k)))
        out = np.matmul(x, w.transpose(0, 2, 1))
        if alpha != 1:
            out *= alpha
        target = dst(regs, (h, i, g, n))
        if acc:
            target += out.reshape(h, i, g, n)
        else:
            target[...] = out.reshape(h, i, g, n)

    return run


def _send(ins: Ins, mem: FastMemory) -> Run:
    src, shape, peer = mem.read(ins.operands["a"]), _shape(ins), ins.imm[0]

    def run(regs: Regs) -> None:
        mem.link_out(peer).append(src(regs, shape(regs)).copy())

    return run


def _recv(ins: Ins, mem: FastMemory) -> Run:
    dst, shape, peer = mem.write(ins.operands["dst"]), _shape(ins), ins.imm[0]

    def run(regs: Regs) -> None:
        data, target = mem.link_in(peer).popleft(), dst(regs, shape(regs))
        if (data.shape, data.dtype) != (target.shape, target.dtype):
            raise RuntimeFault(
                Problem(
                    "SIM_LINK_MISMATCH",
                    f"chip {mem.chip} instruction {ins.pc}",
                    f"receives something else than chip {peer} has sent",
                    f"{target.dtype} {target.shape}",
                    f"{data.dtype} {data.shape}",
                )
            )
        target[...] = data

    return run


HANDLERS: dict[int, Callable[[Ins, FastMemory], Run]] = {
    Op.LOAD: _load,
    Op.STORE: _copy,
    Op.LOADG: _gather_rows,
    Op.SEND: _send,
    Op.RECV: _recv,
    Op.GEMM: _gemm,
    Op.VMAP: _vmap,
    Op.VREDUCE: _vreduce,
    Op.VCMUL: _vcmul,
    Op.VBAND: _vband,
    Op.VQUANT: _vquant,
    Op.VTOPK: _vtopk,
    Op.VBUCKET: _vbucket,
    Op.VGATHER: _vgather,
    Op.VSCATTER: _vscatter,
}
"""What executes each data opcode."""

check_covered("handlers of data opcodes", (s.code for s in SPECS.values() if s.is_data), HANDLERS)


def compile_instruction(ins: Ins, mem: FastMemory) -> Run:
    """The closure that executes a data instruction on a memory.

    Raises:
        InternalError: an opcode without a handler (the reader refuses such programs).
    """
    try:
        return HANDLERS[ins.op](ins, mem)
    except KeyError as e:
        raise InternalError(f"no handler for opcode {ins.op}") from e
