"""A program made ready to run: records as plain Python values, loops matched."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calc.core.errors import Problem, RuntimeFault
from calc.core.isa import MAX_TERMS, NO_REG, OPERAND_NAMES, Alu, Flag, Op, Space
from calc.core.optable import FUNCTIONS, SPECS, check_covered

Regs = list[int]
"""Values of the scalar registers."""


@dataclass(frozen=True)
class Operand:
    """One decoded operand of a record."""

    space: int
    dtype: int
    base: int
    terms: tuple[tuple[int, int], ...]
    steps: tuple[int, ...]

    def address(self, regs: Regs) -> int:
        """Byte address for the registers' values."""
        a = self.base
        for r, s in self.terms:
            a += regs[r] * s
        return a


@dataclass(frozen=True)
class Ins:
    """One decoded record. `dims` holds (constant, register or -1)."""

    pc: int
    op: int
    engine: int
    sub: int
    tile: int
    flags: int
    node: int
    dims: tuple[tuple[int, int], ...]
    imm: tuple[int, ...]
    fimm: tuple[float, float]
    operands: dict[str, Operand]

    def shape(self, regs: Regs) -> tuple[int, ...]:
        """Dimensions for the registers' values."""
        return tuple(c if r < 0 else regs[r] for c, r in self.dims)


_ALU: dict[int, Callable[[int, int], int]] = {
    Alu.ADD: operator.add,
    Alu.SUB: operator.sub,
    Alu.MUL: operator.mul,
    Alu.DIV: operator.floordiv,
    Alu.CDIV: lambda a, b: -(-a // b),
    Alu.MIN: min,
    Alu.MAX: max,
    Alu.MOD: operator.mod,
}
check_covered("scalar operations", FUNCTIONS[Alu], _ALU)

Scalar = tuple[Callable[[int, int], int], int, int, int, bool]
"""A SALU record: function, destination, first operand's register, second operand, whether that is a constant."""


@dataclass(frozen=True)
class Code:
    """A decoded program: instructions, opcodes, the partner of each LOOP and END, and the SALU records."""

    ins: list[Ins]
    ops: list[int]
    partner: list[int]
    scalars: dict[int, Scalar]


Program = NDArray[np.void] | Code
"""A program as records, or decoded."""


def decoded(program: Program) -> Code:
    """A program ready to run, whatever it was given as."""
    return program if isinstance(program, Code) else decode(program)


def decode(records: NDArray[np.void]) -> Code:
    """Records to a program.

    Raises:
        RuntimeFault: SIM_BAD_PROGRAM where loops do not match.
    """
    out: list[Ins] = []
    partner = [-1] * len(records)
    stack: list[int] = []
    cols = {
        n: records[n].tolist()
        for n in ("op", "engine", "sub", "tile", "flags", "node", "dim_regs", "dims", "imm", "fimm")
    }
    ops = {}
    for name in OPERAND_NAMES:
        o = records[name]
        ops[name] = (
            o["space"].tolist(),
            o["dtype"].tolist(),
            o["base"].tolist(),
            o["reg"].tolist(),
            o["stride"].tolist(),
            o["step"].tolist(),
        )
    for pc in range(len(records)):
        operands = {}
        for name, (space, dtype, base, reg, stride, step) in ops.items():
            if space[pc] != Space.NONE:
                terms = tuple((reg[pc][j], stride[pc][j]) for j in range(MAX_TERMS) if reg[pc][j] != NO_REG)
                operands[name] = Operand(space[pc], dtype[pc], base[pc], terms, tuple(step[pc]))
        op, regs = cols["op"][pc], cols["dim_regs"][pc]
        imm = cols["imm"][pc]
        spec = SPECS.get(op)  # the disassembler also shows what the instruction set has no opcode for
        rank = spec.rank(imm) if spec is not None else 0
        dims = tuple((d, d if regs >> j & 1 else -1) for j, d in enumerate(cols["dims"][pc][:rank]))
        if op == Op.LOOP:
            stack.append(pc)
        elif op == Op.END:
            if not stack:
                raise RuntimeFault(Problem("SIM_BAD_PROGRAM", f"instruction {pc}", "END without LOOP"))
            partner[pc] = stack[-1]
            partner[stack.pop()] = pc
        out.append(
            Ins(
                pc,
                op,
                cols["engine"][pc],
                cols["sub"][pc],
                cols["tile"][pc],
                cols["flags"][pc],
                cols["node"][pc],
                dims,
                tuple(imm),
                tuple(cols["fimm"][pc]),
                operands,
            )
        )
    if stack:
        raise RuntimeFault(Problem("SIM_BAD_PROGRAM", f"instruction {stack[-1]}", "LOOP without END"))
    scalars = {
        i.pc: (_ALU[i.sub], i.imm[0], i.imm[1], i.imm[2], bool(i.flags & Flag.IMM)) for i in out if i.op == Op.SALU
    }
    return Code(out, cols["op"], partner, scalars)
