"""The disassembler: a program's records as lines of text.

A line is: program counter, engine, operation, what it does. Loop bodies are indented; a comment line names the graph
node that the following instructions come from. An operand reads ``space[address]:dtype[dims]/steps``: its address is
affine in scalar registers, its elements are ``steps`` bytes apart along each dimension::

    ; model.layers.0.mlp.down_proj/Linear
      38  mat   gemm.w4        sram[0x5000]:bf16[1,r1,1,64]/0,128,0,2 <- sram[0x0]:bf16[1,r1,1,32]/0,64,0,2, ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from calc.core.isa import CSR_STRIDE, CSRS, OPERANDS, Alu, DType, Engine, Flag, Fn, Op, Red, Space, Tile
from calc.sim.memory import Operand
from calc.sim.program import Ins, decode

SYMBOLS = {Alu.ADD: "+", Alu.SUB: "-", Alu.MUL: "*", Alu.DIV: "//", Alu.MOD: "%"}
D_IS_OUTPUT = (Op.VQUANT, Op.VTOPK, Op.VBUCKET)
Dims = tuple[str, ...]


def disassemble(records: NDArray[np.void], nodes: Sequence[str] = ()) -> Iterator[str]:
    """A program as text.

    Args:
        records: ``[instructions]`` of `calc.core.isa.RECORD`.
        nodes: names that the records' `node` refers to (the manifest's `ChipPart.nodes`).

    Yields:
        lines without line ends.

    Raises:
        RuntimeFault: SIM_BAD_PROGRAM where loops do not match.
    """
    code = decode(records).ins
    depth, node = 0, -1
    for ins in code:
        if ins.node != node:
            node = ins.node
            yield f"; {nodes[node] if node < len(nodes) else f'node {node}'}"
        if ins.op == Op.END:
            depth -= 1
        name, rest = _TEXT.get(ins.op, _data)(ins)
        engine = _name(Engine, ins.engine)
        yield f"{ins.pc:6d}  {engine:<5} {'  ' * depth}{name:<14} {rest}".rstrip()
        if ins.op == Op.LOOP:
            depth += 1


def _name(kind: type[IntEnum], value: int) -> str:
    try:
        return kind(value).name.lower()
    except ValueError:
        return f"{kind.__name__.lower()}{value}"


def _dim(dim: tuple[int, int]) -> str:
    constant, reg = dim
    return str(constant) if reg < 0 else f"r{reg}"


def operand(o: Operand, dims: Dims) -> str:
    """``sram[0x1000 + r3*64]:bf16[16,128]/256,2``."""
    terms = "".join(f" + r{reg}*{stride}" for reg, stride in o.terms)
    steps = ",".join(str(s) for s in o.steps[: len(dims)])
    return f"{_name(Space, o.space)}[{o.base:#x}{terms}]:{_name(DType, o.dtype)}[{','.join(dims)}]/{steps}"


# -- scalar and semaphore records -------------------------------------------------------------------------------------


def _halt(ins: Ins) -> tuple[str, str]:
    return "halt", ""


def _loop(ins: Ins) -> tuple[str, str]:
    return "loop", f"r{ins.imm[0]} in 0..{_dim(ins.dims[0])}"


def _end(ins: Ins) -> tuple[str, str]:
    return "end", ""


def _salu(ins: Ins) -> tuple[str, str]:
    rd, a = f"r{ins.imm[0]}", f"r{ins.imm[1]}"
    b = str(ins.imm[2]) if ins.flags & Flag.IMM else f"r{ins.imm[2]}"
    fn = _name(Alu, ins.sub)
    symbol = SYMBOLS.get(ins.sub)  # type: ignore[call-overload]
    return fn, f"{rd} = {a} {symbol} {b}" if symbol else f"{rd} = {fn}({a}, {b})"


def _csrr(ins: Ins) -> tuple[str, str]:
    rd, index, reg = ins.imm[:3]
    array, element = divmod(index, CSR_STRIDE)
    name = CSRS[array] if 0 <= array < len(CSRS) else f"csr{array}"
    return "csrr", f"r{rd} = {name}[{element}{f' + r{reg}' if reg >= 0 else ''}]"


def _sload(ins: Ins) -> tuple[str, str]:
    rd, m, x, y, _, d = ins.imm
    factors = "".join(f"*r{r}" for r in (x, y) if r >= 0)
    return "sload", f"r{rd} = {operand(ins.operands['a'], ())}  (timing takes {m}{factors}//{d})"


def _semaphore(ins: Ins) -> tuple[str, str]:
    return _name(Op, ins.op), f"s{ins.imm[0]} × {ins.imm[1]}"


# -- data records -----------------------------------------------------------------------------------------------------


def _data(ins: Ins) -> tuple[str, str]:
    present = [n for n in OPERANDS.get(ins.op, ()) if n in ins.operands]
    outputs = [n for n in present if n == "dst" or (n == "d" and ins.op in D_IS_OUTPUT)]
    shown = {n: operand(ins.operands[n], _dims_of(ins, n)) for n in present}
    left = ", ".join(shown[n] for n in outputs)
    right = ", ".join(shown[n] for n in present if n not in outputs)
    arrow = " += " if _adds(ins) else " <- "
    text = f"{left}{arrow if left and right else ''}{right}"
    notes = _NOTES[ins.op](ins) if ins.op in _NOTES else ""
    return _mnemonic(ins), f"{text}  {notes}".rstrip()


def _adds(ins: Ins) -> bool:
    return ins.op == Op.VSCATTER or (ins.op == Op.GEMM and bool(ins.flags & Flag.ACC))


def _mnemonic(ins: Ins) -> str:
    name = _name(Op, ins.op)
    if ins.op == Op.VMAP:
        return f"{name}.{_name(Fn, ins.sub)}"
    if ins.op == Op.VREDUCE:
        return f"{name}.{_name(Red, ins.sub)}"
    if ins.op == Op.GEMM and ins.flags & Flag.PACKED:
        return f"{name}.{_name(Tile, ins.tile)}"
    if ins.op == Op.LOAD and ins.flags & Flag.TILE:
        return f"{name}.tile"
    return name


def _dims_of(ins: Ins, which: str) -> Dims:
    """An operand's dimensions; most have the record's own."""
    dims = tuple(_dim(d) for d in ins.dims)
    special = _OPERAND_DIMS.get((ins.op, which))
    return special(ins, dims) if special else dims


def _gemm_b(ins: Ins, d: Dims) -> Dims:
    return (d[0], d[3], d[4])


_OPERAND_DIMS: dict[tuple[int, str], Callable[[Ins, Dims], Dims]] = {
    (Op.GEMM, "dst"): lambda i, d: d[:4],
    (Op.GEMM, "a"): lambda i, d: (*d[:3], d[4]),
    (Op.GEMM, "b"): _gemm_b,
    (Op.GEMM, "d"): lambda i, d: d[:4],
    (Op.GEMM, "e"): lambda i, d: d[:2],
    (Op.LOADG, "a"): lambda i, d: (str(i.imm[0]), *d[1:]),
    (Op.LOADG, "b"): lambda i, d: d[:1],
    (Op.VREDUCE, "dst"): lambda i, d: d[:-1],
    (Op.VQUANT, "d"): lambda i, d: d[:-1],
    (Op.VTOPK, "dst"): lambda i, d: (*d[:-1], str(i.imm[0])),
    (Op.VTOPK, "d"): lambda i, d: (*d[:-1], str(i.imm[0])),
    (Op.VBUCKET, "d"): lambda i, d: (str(i.imm[0] + 1),),
    (Op.VGATHER, "a"): lambda i, d: (str(i.imm[1]), *d[1:]),
    (Op.VGATHER, "b"): lambda i, d: d[:1],
    (Op.VSCATTER, "dst"): lambda i, d: (str(i.imm[1]), *d[1:]),
    (Op.VSCATTER, "b"): lambda i, d: d[:1],
    (Op.VSCATTER, "d"): lambda i, d: ("*",),
}


def _gemm_notes(ins: Ins) -> str:
    notes = [f"alpha={ins.fimm[0]:g}"] if ins.fimm[0] != 1 else []
    if ins.flags & Flag.PACKED:
        notes += [f"tile={ins.imm[3]}B"]
        notes += [f"group={ins.imm[2]}"] if ins.imm[2] else []
    notes += [name.lower() for name in ("BIAS", "ADDEND") if ins.flags & Flag[name]]
    return " ".join(notes)


def _vmap_notes(ins: Ins) -> str:
    if ins.sub in (Fn.AFFINE, Fn.RSQRT):
        return f"f0={ins.fimm[0]:g} f1={ins.fimm[1]:g}"
    return f"f1={ins.fimm[1]:g}" if ins.sub == Fn.FILL else ""


def _vcmul_notes(ins: Ins) -> str:
    pairs = "interleaved" if ins.flags & Flag.INTERLEAVED else "halves"
    return f"imaginary at a+{ins.imm[0]}, dst+{ins.imm[1]} ({pairs})"


_NOTES: dict[int, Callable[[Ins], str]] = {
    Op.GEMM: _gemm_notes,
    Op.VMAP: _vmap_notes,
    Op.VCMUL: _vcmul_notes,
    Op.VBAND: lambda i: f"axis={i.imm[0]} offset=r{i.imm[1]} width={i.imm[2]} else {i.fimm[0]:g}",
    Op.VGATHER: lambda i: f"rows=b//{i.imm[0]}",
    Op.VSCATTER: lambda i: f"rows=b//{i.imm[0]}",
    Op.SEND: lambda i: f"to chip {i.imm[0]}",
    Op.RECV: lambda i: f"from chip {i.imm[0]}",
}

_TEXT: dict[int, Callable[[Ins], tuple[str, str]]] = {
    Op.HALT: _halt,
    Op.LOOP: _loop,
    Op.END: _end,
    Op.SALU: _salu,
    Op.CSRR: _csrr,
    Op.SLOAD: _sload,
    Op.WAIT: _semaphore,
    Op.SIGNAL: _semaphore,
}
