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

from calc.core.isa import CSR_STRIDE, CSRS, DType, Engine, Flag, Op, Space, Tile
from calc.core.opspec import Access, Note, OpSpec
from calc.core.optable import SPECS, check_covered, functions_of, spec_of
from calc.sim.program import Ins, Operand, decode

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
    spec = spec_of(ins.op)
    fn, symbol = _function(spec, ins.sub), functions_of(spec)[ins.sub].symbol
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
    return spec_of(ins.op).name.lower(), f"s{ins.imm[0]} × {ins.imm[1]}"


# -- data records -----------------------------------------------------------------------------------------------------


def _data(ins: Ins) -> tuple[str, str]:
    spec = SPECS.get(ins.op)
    if spec is None:
        return f"op{ins.op}", ""
    present = [o for o in spec.operands if o.name in ins.operands]
    dims = tuple(_dim(d) for d in ins.dims)
    shown = {o.name: operand(ins.operands[o.name], spec.operand_dims(o.name, dims, ins.imm)) for o in present}
    access = {o.name: o.access_with(ins.flags) for o in present}
    left = ", ".join(shown[n] for n, kind in access.items() if kind is not Access.READ)
    right = ", ".join(shown[n] for n, kind in access.items() if kind is Access.READ)
    arrow = " += " if Access.UPDATE in access.values() else " <- "
    text = f"{left}{arrow if left and right else ''}{right}"
    return _mnemonic(spec, ins), f"{text}  {_notes(spec, ins)}".rstrip()


def _function(spec: OpSpec, sub: int) -> str:
    return _name(spec.functions, sub) if spec.functions is not None else ""


def _mnemonic(spec: OpSpec, ins: Ins) -> str:
    forms = [text.format(tile=_name(Tile, ins.tile)) for flag, text in spec.forms if ins.flags & flag]
    return ".".join(part for part in (spec.name.lower(), _function(spec, ins.sub), *forms) if part)


def _notes(spec: OpSpec, ins: Ins) -> str:
    values: dict[str, object] = {f"imm{i}": v for i, v in enumerate(ins.imm)} | {"f0": ins.fimm[0], "f1": ins.fimm[1]}
    function = functions_of(spec).get(ins.sub)
    notes = [n for n in (*spec.notes, Note(function.note if function else "")) if not n.flag or n.flag & ins.flags]
    shown = [n.text for n in notes if n.text and (n.unless is None or values[n.unless[0]] != n.unless[1])]
    if any("{pairs}" in text for text in shown):
        values["pairs"] = _pairs(ins)
    return " ".join(text.format(**values) for text in shown)


def _pairs(ins: Ins) -> str:
    """How the pairs of a complex product lie: two elements that are one step of pairs apart share it."""
    a = ins.operands.get("a")
    return "interleaved" if a is not None and ins.dims and a.steps[len(ins.dims) - 1] == 2 * ins.imm[0] else "halves"


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
check_covered("text of control records", (s.code for s in SPECS.values() if not s.is_data), _TEXT)
