"""Encode: the emitter's tree of instructions and loops to fixed-width records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from calc.core.errors import InternalError
from calc.core.isa import MAX_DIMS, MAX_LOOP_DEPTH, MAX_TERMS, NO_REG, OPERAND_NAMES, RANK_IMM, RECORD, Engine, Op
from calc.core.optable import spec_of
from calc.kernels.program import Dim, Instr, LoopNode, Reg, View


def encode(body: Sequence[Instr | LoopNode]) -> NDArray[np.void]:
    """The program's records, HALT last.

    Raises:
        InternalError: loops nested too deep, an opcode without a row, or an operand whose buffer has no address.
    """
    flat = list(_flatten(body, 0))
    flat.append(Instr(Op.HALT, Engine.CTL, flat[-1].node if flat else 0))
    out = np.zeros(len(flat), RECORD)
    for name in OPERAND_NAMES:
        out[name]["reg"] = NO_REG
    for i, ins in enumerate(flat):
        _fill(out[i : i + 1].squeeze(), ins)
    return out


def _flatten(body: Sequence[Instr | LoopNode], depth: int) -> Iterator[Instr]:
    if depth > MAX_LOOP_DEPTH:
        raise InternalError(f"loops nested deeper than {MAX_LOOP_DEPTH}")
    for item in body:
        if isinstance(item, Instr):
            yield item
        else:
            yield Instr(Op.LOOP, Engine.CTL, item.node, (item.count,), imm=(item.reg.index,))
            yield from _flatten(item.body, depth + 1)
            yield Instr(Op.END, Engine.CTL, item.node)


def _fill(rec: NDArray[np.void], ins: Instr) -> None:
    rec["op"], rec["engine"], rec["sub"], rec["tile"], rec["flags"] = (
        ins.op,
        ins.engine,
        ins.sub,
        ins.tile,
        int(ins.flags),
    )
    rec["node"] = max(ins.node, 0)
    bits = 0
    dims: list[int] = [1] * MAX_DIMS
    for i, d in enumerate(ins.dims):
        dims[i] = _dim(d)
        bits |= (1 << i) if isinstance(d, Reg) else 0
    rec["dims"], rec["dim_regs"] = dims, bits
    imm = list(ins.imm) + [0] * (6 - len(ins.imm))
    if spec_of(ins.op).has_rank:
        imm[RANK_IMM] = len(ins.dims)
    rec["imm"] = imm
    rec["fimm"] = list(ins.fimm) + [0.0] * (2 - len(ins.fimm))
    for name, view in ins.operands.items():
        _operand(rec[name], view)


def _dim(d: Dim) -> int:
    return d.index if isinstance(d, Reg) else d


def _operand(rec: NDArray[np.void], v: View) -> None:
    if v.buf.base is None:
        raise InternalError(f"buffer {v.buf.name} has no address")
    if len(v.terms) > MAX_TERMS:
        raise InternalError(f"{v.buf.name}: an address of {len(v.terms)} register terms")
    rec["base"] = v.buf.base + v.offset
    rec["space"], rec["dtype"] = v.buf.space, v.dtype
    for i, (reg, stride) in enumerate(v.terms):
        rec["reg"][i], rec["stride"][i] = reg.index, stride
    rec["step"][: len(v.steps)] = v.steps
