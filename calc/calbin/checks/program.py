"""Programs: every record is one the ISA has, every constant part is in range, every loop closes and ends.

All checks look at whole columns of records at once; only LOOP and END are walked one by one. What depends on
registers is left to the simulator, which checks each access on its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calc.calbin.codec import Path
from calc.calbin.layout import MAX_STEPS
from calc.calbin.manifest import ChipPart, Section, SubModel
from calc.calbin.report import Context
from calc.core.isa import (
    CSR_STRIDE,
    CSRS,
    ENGINE_OF,
    ITEMSIZE,
    MAX_DIMS,
    MAX_LOOP_DEPTH,
    NO_REG,
    OPERAND_NAMES,
    OPERANDS,
    RECORD,
    REGISTERS,
    SEMAPHORES,
    Alu,
    DType,
    Flag,
    Fn,
    Op,
    Red,
    Space,
    Tile,
)
from calc.core.packing import FORMATS

Mask = NDArray[np.bool_]

_SUBS: dict[int, int] = {Op.SALU: len(Alu), Op.VMAP: len(Fn), Op.VREDUCE: len(Red)}
_FLAGS = sum(Flag)
_SPACES: dict[int, dict[str, Space]] = {
    Op.SLOAD: {"a": Space.SRAM},
    Op.LOAD: {"dst": Space.SRAM, "a": Space.DRAM},
    Op.STORE: {"dst": Space.DRAM, "a": Space.SRAM},
    Op.LOADG: {"dst": Space.SRAM, "a": Space.DRAM, "b": Space.SRAM},
}
"""Where the operands of moves live; all other operands live in SRAM."""

_DIVISORS: tuple[int, ...] = (Op.VTOPK, Op.VBUCKET, Op.VGATHER, Op.VSCATTER)
"""Opcodes whose imm0 counts or divides and must be positive."""


@dataclass
class _Program:
    """One chip's records, and where problems go."""

    ctx: Context
    section: Section
    path: Path
    records: NDArray[np.void]

    def refuse(
        self, bad: Mask | np.bool_, code: str, what: str, expected: object, got: NDArray[np.generic] | None = None
    ) -> None:
        """Report the first record of `bad`, with how many there are."""
        count = int(np.count_nonzero(bad))
        if not count:
            return
        i = int(np.argmax(bad))
        op = int(self.records["op"][i])
        name = Op(op).name if op in set(Op) else f"opcode {op}"
        more = f" ({count} records in all)" if count > 1 else ""
        self.ctx.report.add(
            code,
            self.path,
            f"record {i}, {name}: {what}{more}",
            expected=expected,
            got="" if got is None else got[i].tolist(),
            offset=self.section.offset + i * RECORD.itemsize,
        )

    def is_op(self, *ops: int) -> Mask:
        """Which records have one of these opcodes."""
        return np.isin(self.records["op"], ops)


def check_programs(ctx: Context, data: memoryview) -> None:
    """CALBIN_PROGRAM_SIZE and what the checks of one program find: each of them names its codes."""
    for i, sub in enumerate(ctx.manifest.submodels):
        for j, part in enumerate(sub.chip_map):
            section = ctx.sections[part.program]
            path: Path = ("submodels", i, "chip_map", j, "program")
            if section.nbytes != part.instructions * RECORD.itemsize:
                what = "the program does not have the size of its records"
                expected = part.instructions * RECORD.itemsize
                ctx.report.add("CALBIN_PROGRAM_SIZE", path, what, expected=expected, got=section.nbytes)
                continue
            content = data[section.offset : section.offset + section.nbytes]
            _check(_Program(ctx, section, path, np.frombuffer(content, dtype=RECORD)), sub, part)


def _check(p: _Program, sub: SubModel, part: ChipPart) -> None:
    known = np.isin(p.records["op"], list(Op))
    p.refuse(~known, "CALBIN_OPCODE", "the instruction set has no such opcode", "an opcode of docs/isa.md")
    if not known.all():
        return
    _check_fields(p, part)
    _check_packed(p)
    _check_scalars(p, sub, part)
    for name in OPERAND_NAMES:
        _check_operand(p, name)
    _check_loops(p)


def _check_fields(p: _Program, part: ChipPart) -> None:
    r = p.records
    allowed = np.zeros((256, 256), dtype=np.bool_)
    for op, engines in ENGINE_OF.items():
        allowed[op, list(engines)] = True
    p.refuse(
        ~allowed[r["op"], r["engine"]],
        "CALBIN_ENGINE",
        "this engine cannot run it",
        "an engine of docs/isa.md",
        r["engine"],
    )
    for op, count in _SUBS.items():
        p.refuse(p.is_op(op) & (r["sub"] >= count), "CALBIN_OPCODE", "no such function", f"below {count}", r["sub"])
    p.refuse(r["tile"] >= len(Tile), "CALBIN_RECORD", "no such tile format", f"below {len(Tile)}", r["tile"])
    packed = (r["flags"] & Flag.PACKED) != 0
    p.refuse(
        p.is_op(Op.GEMM) & packed & (r["tile"] == 0),
        "CALBIN_RECORD",
        "a packed operand needs a tile format",
        f"1 to {len(Tile) - 1}",
    )
    p.refuse(
        (r["flags"] & ~np.uint16(_FLAGS)) != 0,
        "CALBIN_RECORD",
        "an unknown flag is set",
        f"within {_FLAGS:#x}",
        r["flags"],
    )
    p.refuse(
        r["dim_regs"] >= 1 << MAX_DIMS, "CALBIN_RECORD", f"only {MAX_DIMS} dimensions exist", "below 32", r["dim_regs"]
    )
    by_register = (r["dim_regs"][:, None] >> np.arange(MAX_DIMS)) & 1 != 0
    dims = r["dims"]
    p.refuse((dims < 0).any(axis=1), "CALBIN_RECORD", "a dimension is negative", "at least 0", dims)
    p.refuse(
        (by_register & (dims >= REGISTERS)).any(axis=1),
        "CALBIN_REGISTER",
        "no such register",
        f"below {REGISTERS}",
        dims,
    )
    nodes = len(part.nodes)
    p.refuse(
        r["node"] >= max(nodes, 1),
        "CALBIN_RECORD",
        "it names a source node the chip lacks",
        f"below {nodes}",
        r["node"],
    )
    p.refuse(np.isnan(r["fimm"]).any(axis=1), "CALBIN_RECORD", "a float immediate is not a number", "no NaN", r["fimm"])


def _check_packed(p: _Program) -> None:
    """A packed GEMM has scales for int8 rows and for no others, and a group size its tile format has."""
    r = p.records
    packed = p.is_op(Op.GEMM) & ((r["flags"] & Flag.PACKED) != 0)
    scaled = r["e"]["space"] != Space.NONE
    p.refuse(
        packed & (scaled != (r["a"]["dtype"] == DType.I8)),
        "CALBIN_OPERAND",
        "operand e is the scales of int8 rows",
        "present where a is i8, and only there",
        r["a"]["dtype"],
    )
    for fmt in FORMATS.values():
        group = r["imm"][:, 2]
        wrong = packed & (r["tile"] == fmt.tile) & ~np.isin(group, fmt.groups)
        p.refuse(wrong, "CALBIN_RECORD", f"a {fmt.name} tile has no such group size", f"one of {fmt.groups}", group)


def _check_scalars(p: _Program, sub: SubModel, part: ChipPart) -> None:
    """Immediates that are registers, semaphores, chips, CSRs or counts."""
    r, imm = p.records, p.records["imm"]

    def register(mask: Mask, k: int, *, optional: bool = False) -> None:
        outside = (imm[:, k] < (-1 if optional else 0)) | (imm[:, k] >= REGISTERS)
        p.refuse(mask & outside, "CALBIN_REGISTER", f"imm{k} is not a register", f"below {REGISTERS}", imm[:, k])

    salu = p.is_op(Op.SALU)
    by_imm = (r["flags"] & Flag.IMM) != 0
    register(p.is_op(Op.LOOP, Op.SALU, Op.CSRR, Op.SLOAD), 0)
    register(salu | p.is_op(Op.VBAND), 1)
    register(salu & ~by_imm, 2)
    sload = p.is_op(Op.SLOAD)
    register(sload, 2, optional=True)
    register(sload, 3, optional=True)
    p.refuse(sload & (imm[:, 5] < 1), "CALBIN_RECORD", "imm5, a divisor, is not positive", "at least 1", imm[:, 5])
    register(p.is_op(Op.CSRR), 2, optional=True)
    divides = salu & by_imm & np.isin(r["sub"], (Alu.DIV, Alu.CDIV, Alu.MOD))
    p.refuse(divides & (imm[:, 2] <= 0), "CALBIN_RECORD", "it divides by zero or less", "at least 1", imm[:, 2])
    p.refuse(p.is_op(*_DIVISORS) & (imm[:, 0] < 1), "CALBIN_RECORD", "imm0 is not positive", "at least 1", imm[:, 0])
    p.refuse(
        p.is_op(Op.VBAND) & ((imm[:, 0] < 0) | (imm[:, 0] >= MAX_DIMS)),
        "CALBIN_RECORD",
        "no such dimension",
        "0 to 4",
        imm[:, 0],
    )

    waits, signals = p.is_op(Op.WAIT), p.is_op(Op.SIGNAL)
    outside = (imm[:, 0] < 0) | (imm[:, 0] >= SEMAPHORES)
    p.refuse((waits | signals) & outside, "CALBIN_SEMAPHORE", "no such semaphore", f"below {SEMAPHORES}", imm[:, 0])
    p.refuse(
        (waits | signals) & (imm[:, 1] < 1), "CALBIN_SEMAPHORE", "a count is not positive", "at least 1", imm[:, 1]
    )
    released = np.isin(imm[:, 0], imm[signals, 0])
    p.refuse(waits & ~released, "CALBIN_SEMAPHORE", "it waits for what nothing signals", "a SIGNAL", imm[:, 0])

    peers = [q.chip for q in sub.chip_map if q.chip != part.chip]
    p.refuse(
        p.is_op(Op.SEND, Op.RECV) & ~np.isin(imm[:, 0], peers),
        "CALBIN_CHIP",
        "no such peer",
        f"one of {peers}",
        imm[:, 0],
    )

    counts = np.zeros(len(CSRS), dtype=np.int64)
    for csr in p.ctx.manifest.csrs:
        if csr.index < len(CSRS):
            counts[csr.index] = csr.count
    array, element = np.divmod(imm[:, 1], CSR_STRIDE)
    exists = (array >= 0) & (array < len(CSRS))
    exists &= element < counts[np.where(exists, array, 0)]
    p.refuse(
        p.is_op(Op.CSRR) & ~exists, "CALBIN_CSR", "no such CSR is declared", "an element of a CSR array", imm[:, 1]
    )


def _check_operand(p: _Program, name: str) -> None:
    r, operand = p.records, p.records[name]
    target = p.ctx.manifest.target
    space, dtype = operand["space"], operand["dtype"]
    p.refuse(space >= len(Space), "CALBIN_OPERAND", f"operand {name}: no such memory", f"below {len(Space)}", space)
    p.refuse(dtype >= len(DType), "CALBIN_OPERAND", f"operand {name}: no such dtype", f"below {len(DType)}", dtype)
    p.refuse(operand["pad"].any(axis=1), "CALBIN_RECORD", f"operand {name}: padding is not zero", 0, operand["pad"])
    present = space != Space.NONE
    takes = np.isin(r["op"], [op for op, names in OPERANDS.items() if name in names])
    p.refuse(present & ~takes, "CALBIN_OPERAND", f"it has no operand {name}", "none", space)
    p.refuse(present & (dtype == DType.NONE), "CALBIN_OPERAND", f"operand {name} has no dtype", "a dtype", dtype)
    if name in ("dst", "a"):
        # A FILL reads nothing.
        needs = takes & ((name == "dst") | ~p.is_op(Op.VMAP))
        p.refuse(~present & needs, "CALBIN_OPERAND", f"operand {name} is missing", "SRAM or DRAM", space)
    in_dram = np.isin(r["op"], [op for op, spaces in _SPACES.items() if spaces.get(name) is Space.DRAM])
    wanted = np.where(in_dram, int(Space.DRAM), int(Space.SRAM))
    p.refuse(
        present & takes & (space != wanted),
        "CALBIN_OPERAND",
        f"operand {name} is in the wrong memory",
        "1 SRAM, 2 DRAM",
        space,
    )
    reg = operand["reg"]
    p.refuse(
        ((reg >= REGISTERS) & (reg != NO_REG)).any(axis=1) & present,
        "CALBIN_REGISTER",
        f"operand {name}: no such register",
        f"below {REGISTERS}, or {NO_REG} for none",
        reg,
    )
    sizes = np.array([0, target.sram_bytes, target.dram_bytes], dtype=np.int64)[np.minimum(space, 2)]
    items = np.array([ITEMSIZE[d] for d in DType], dtype=np.int64)[np.minimum(dtype, len(DType) - 1)]
    outside = (operand["base"] < 0) | (operand["base"] > sizes - items)
    p.refuse(
        present & outside,
        "CALBIN_OPERAND",
        f"operand {name} starts outside its memory",
        "0 up to the memory's size",
        operand["base"],
    )


def _check_loops(p: _Program) -> None:
    """CALBIN_HALT, CALBIN_LOOP, CALBIN_STEPS."""
    r = p.records
    halts = p.is_op(Op.HALT)
    last = np.arange(len(r)) == len(r) - 1
    p.refuse(
        halts != last, "CALBIN_HALT", "a program ends with its one HALT", "HALT as the last record, and only there"
    )
    at = np.flatnonzero(p.is_op(Op.LOOP, Op.END))
    counts = np.where((r["dim_regs"][at] & 1) != 0, 1, r["dims"][at, 0])
    ends = np.full(len(r), -1, dtype=np.int64)
    stack: list[tuple[int, int]] = []
    factor, steps, before = 1, 0, -1
    for i, is_loop, count in zip(at.tolist(), (r["op"][at] == Op.LOOP).tolist(), counts.tolist(), strict=True):
        steps += (i - before) * factor
        before = i
        if is_loop and len(stack) < MAX_LOOP_DEPTH:
            stack.append((i, factor))
            factor *= max(count, 1)
        elif not is_loop and stack:
            start, factor = stack.pop()
            ends[start] = i
        else:
            what = f"loops are nested more than {MAX_LOOP_DEPTH} deep" if is_loop else "an END closes nothing"
            p.refuse(np.arange(len(r)) == i, "CALBIN_LOOP", what, "LOOP ... END")
            return
    steps += (len(r) - 1 - before) * factor
    if stack:
        p.refuse(np.arange(len(r)) == stack[-1][0], "CALBIN_LOOP", "a loop has no END", "LOOP ... END")
        return
    if steps > MAX_STEPS:
        p.refuse(last, "CALBIN_STEPS", "the constant loops make the program too long", f"at most {MAX_STEPS} steps")
    _check_counters(p, ends)


def _check_counters(p: _Program, ends: NDArray[np.int64]) -> None:
    """A loop whose body writes its counter might never end."""
    register = p.records["imm"][:, 0]
    writers = p.is_op(Op.LOOP, Op.SALU, Op.CSRR, Op.SLOAD)
    loops = np.flatnonzero(ends >= 0)
    bad = np.zeros(len(ends), dtype=np.bool_)
    for counter in range(REGISTERS):
        written = np.flatnonzero(writers & (register == counter))
        own = loops[register[loops] == counter]
        first = np.searchsorted(written, own, side="right")
        beyond = np.searchsorted(written, ends[own], side="left")
        bad[own[beyond > first]] = True
    p.refuse(bad, "CALBIN_LOOP", "the body writes the loop's counter", "a counter that only the loop changes")
