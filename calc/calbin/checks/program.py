"""Programs: every record is one the ISA has, every constant part is in range, every loop closes and ends.

All checks look at whole columns of records at once; only LOOP and END are walked one by one. What depends on
registers is left to the simulator, which checks each access on its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from calc.calbin.codec import Path
from calc.calbin.layout import MAX_STEPS
from calc.calbin.manifest import ChipPart, Section, SubModel
from calc.calbin.report import Context
from calc.core.isa import (
    CSR_STRIDE,
    CSRS,
    ITEMSIZE,
    MAX_DIMS,
    MAX_LOOP_DEPTH,
    NO_REG,
    OPERAND_NAMES,
    RANK_IMM,
    RECORD,
    REGISTERS,
    SEMAPHORES,
    DType,
    Flag,
    Op,
    Space,
    Tile,
)
from calc.core.opspec import ImmKind
from calc.core.optable import SPECS, functions_of
from calc.core.packing import FORMATS
from calc.core.target import parse_target

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class _Facts:
    """Rows of the instruction table as arrays over opcodes, so that whole columns of records are looked up at once.

    Attributes:
        known: [256] whether there is such an opcode.
        engines: [256, 256] whether an engine may run it.
        functions: [256] how many functions it has; 0 where `sub` says nothing.
        arity: [256, 256] operands that a function takes.
        divides: [256, 256] whether a function divides by its second operand.
        flags: [256] flags it takes.
        ranks: [256, 2] least and largest number of dimensions where the record says it, else 0.
        kinds: [256, 6] what its immediates are, as indices into `ImmKind`.
    """

    known: Mask
    engines: Mask
    functions: NDArray[np.int64]
    arity: NDArray[np.int64]
    divides: Mask
    flags: NDArray[np.int64]
    ranks: NDArray[np.int64]
    kinds: NDArray[np.int64]


_KINDS = {kind: i + 1 for i, kind in enumerate(ImmKind)}


def _facts() -> _Facts:
    f = _Facts(
        np.zeros(256, np.bool_),
        np.zeros((256, 256), np.bool_),
        np.zeros(256, np.int64),
        np.zeros((256, 256), np.int64),
        np.zeros((256, 256), np.bool_),
        np.zeros(256, np.int64),
        np.zeros((256, 2), np.int64),
        np.zeros((256, 6), np.int64),
    )
    for op, spec in SPECS.items():
        f.known[op] = True
        f.engines[op, list(spec.engines)] = True
        f.flags[op] = spec.flags
        f.ranks[op] = spec.ranks if spec.has_rank else (0, 0)
        functions = functions_of(spec)
        f.functions[op] = len(functions)
        for sub, function in functions.items():
            f.arity[op, sub], f.divides[op, sub] = function.arity, function.divides
        for imm in spec.imms:
            f.kinds[op, imm.index] = _KINDS[imm.kind]
    return f


@dataclass
class _Program:
    """One chip's records, and where problems go."""

    ctx: Context
    section: Section
    path: Path
    records: NDArray[np.void]
    alignment: int

    def refuse(
        self, bad: Mask | np.bool_, code: str, what: str, expected: object, got: NDArray[np.generic] | None = None
    ) -> None:
        """Report the first record of `bad`, with how many there are."""
        count = int(np.count_nonzero(bad))
        if not count:
            return
        i = int(np.argmax(bad))
        op = int(self.records["op"][i])
        name = SPECS[op].name if op in SPECS else f"opcode {op}"
        more = f" ({count} records in all)" if count > 1 else ""
        self.ctx.report.add(
            code,
            self.path,
            f"record {i}, {name}: {what}{more}",
            expected=expected,
            got="" if got is None else got[i].tolist(),
            offset=self.section.offset + i * RECORD.itemsize,
        )

    @cached_property
    def facts(self) -> _Facts:
        """The instruction table."""
        return _facts()

    def imm(self, k: int, *kinds: ImmKind) -> Mask:
        """Records whose immediate `k` is of one of these kinds."""
        return np.isin(self.facts.kinds[self.records["op"], k], [_KINDS[kind] for kind in kinds])

    def is_op(self, *ops: int) -> Mask:
        """Which records have one of these opcodes."""
        return np.isin(self.records["op"], ops)


def check_programs(ctx: Context, data: memoryview) -> None:
    """CALBIN_PROGRAM_SIZE and what the checks of one program find: each of them names its codes."""
    target = ctx.manifest.target
    alignment = int(parse_target(target.toml, target.name).memory.alignment.value)
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
            _check(_Program(ctx, section, path, np.frombuffer(content, dtype=RECORD), alignment), sub, part)


def _check(p: _Program, sub: SubModel, part: ChipPart) -> None:
    known = p.facts.known[p.records["op"]]
    p.refuse(~known, "CALBIN_OPCODE", "the instruction set has no such opcode", "an opcode of docs/isa.md")
    if not known.all():
        return
    _check_fields(p, part)
    _check_packed(p)
    _check_registers(p)
    _check_counts(p)
    _check_semaphores(p)
    _check_outside(p, sub, part)
    for name in OPERAND_NAMES:
        _check_operand(p, name)
    _check_tiles(p)
    _check_loops(p)


def _check_fields(p: _Program, part: ChipPart) -> None:
    r, facts = p.records, p.facts
    p.refuse(
        ~facts.engines[r["op"], r["engine"]],
        "CALBIN_ENGINE",
        "this engine cannot run it",
        "an engine of docs/isa.md",
        r["engine"],
    )
    functions = facts.functions[r["op"]]
    wrong = (functions > 0) & (r["sub"] >= functions)
    p.refuse(wrong, "CALBIN_OPCODE", "no such function", "a function of docs/isa.md", r["sub"])
    p.refuse(r["tile"] >= len(Tile), "CALBIN_RECORD", "no such tile format", f"below {len(Tile)}", r["tile"])
    packed = (r["flags"] & Flag.PACKED) != 0
    p.refuse(
        p.is_op(Op.GEMM) & packed & (r["tile"] == 0),
        "CALBIN_RECORD",
        "a packed operand needs a tile format",
        f"1 to {len(Tile) - 1}",
    )
    p.refuse(
        (r["flags"] & ~facts.flags[r["op"]]) != 0,
        "CALBIN_RECORD",
        "a flag is set that it does not take",
        "flags of docs/isa.md",
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
    """A packed GEMM has a group size that its tile format has."""
    r = p.records
    packed = p.is_op(Op.GEMM) & ((r["flags"] & Flag.PACKED) != 0)
    group = r["imm"][:, 2]
    for fmt in FORMATS.values():
        wrong = packed & (r["tile"] == fmt.tile) & ~np.isin(group, fmt.groups)
        p.refuse(wrong, "CALBIN_RECORD", f"a {fmt.name} tile has no such group size", f"one of {fmt.groups}", group)


def _check_registers(p: _Program) -> None:
    """Immediates that are registers."""
    by_imm = (p.records["flags"] & Flag.IMM) != 0
    for k in range(p.records["imm"].shape[1]):
        value = p.records["imm"][:, k]
        plain = p.imm(k, ImmKind.RESULT, ImmKind.REGISTER) | (p.imm(k, ImmKind.REGISTER_OR_CONSTANT) & ~by_imm)
        for mask, low in ((plain, 0), (p.imm(k, ImmKind.OPTIONAL_REGISTER), -1)):
            outside = (value < low) | (value >= REGISTERS)
            p.refuse(mask & outside, "CALBIN_REGISTER", f"imm{k} is not a register", f"below {REGISTERS}", value)


def _check_counts(p: _Program) -> None:
    """Immediates that count, divide, or name a dimension."""
    r, facts = p.records, p.facts
    divides = facts.divides[r["op"], r["sub"]] & ((r["flags"] & Flag.IMM) != 0)
    low, high = facts.ranks[r["op"]].T
    for k in range(r["imm"].shape[1]):
        value = r["imm"][:, k]
        zero = p.imm(k, ImmKind.REGISTER_OR_CONSTANT) & divides & (value <= 0)
        p.refuse(zero, "CALBIN_RECORD", "it divides by zero or less", "at least 1", value)
        few = p.imm(k, ImmKind.COUNT) & (value < 1)
        p.refuse(few, "CALBIN_RECORD", f"imm{k}, a count or divisor, is not positive", "at least 1", value)
        negative = p.imm(k, ImmKind.LIMIT) & (value < 0)
        p.refuse(negative, "CALBIN_RECORD", f"imm{k}, a limit, is negative", "at least 0", value)
        axis = p.imm(k, ImmKind.AXIS) & ((value < 0) | (value >= r["imm"][:, RANK_IMM]))
        p.refuse(axis, "CALBIN_RECORD", "no such dimension", "below the number of dimensions", value)
        rank = p.imm(k, ImmKind.RANK) & ((value < low) | (value > high))
        p.refuse(rank, "CALBIN_RECORD", f"imm{k}, the number of dimensions, is wrong", "as docs/isa.md says", value)


def _check_semaphores(p: _Program) -> None:
    released = p.records["imm"][p.is_op(Op.SIGNAL), 0]
    for k in range(p.records["imm"].shape[1]):
        value = p.records["imm"][:, k]
        outside = p.imm(k, ImmKind.SEMAPHORE) & ((value < 0) | (value >= SEMAPHORES))
        p.refuse(outside, "CALBIN_SEMAPHORE", "no such semaphore", f"below {SEMAPHORES}", value)
        few = p.imm(k, ImmKind.SIGNALS) & (value < 1)
        p.refuse(few, "CALBIN_SEMAPHORE", "a count is not positive", "at least 1", value)
    value = p.records["imm"][:, 0]
    waits = p.is_op(Op.WAIT) & ~np.isin(value, released)
    p.refuse(waits, "CALBIN_SEMAPHORE", "it waits for what nothing signals", "a SIGNAL", value)


def _check_outside(p: _Program, sub: SubModel, part: ChipPart) -> None:
    """Immediates that name what lies outside the program: chips and CSRs."""
    peers = [q.chip for q in sub.chip_map if q.chip != part.chip]
    counts = np.zeros(len(CSRS), dtype=np.int64)
    for csr in p.ctx.manifest.csrs:
        if csr.index < len(CSRS):
            counts[csr.index] = csr.count
    for k in range(p.records["imm"].shape[1]):
        value = p.records["imm"][:, k]
        lost = p.imm(k, ImmKind.CHIP) & ~np.isin(value, peers)
        p.refuse(lost, "CALBIN_CHIP", "no such peer", f"one of {peers}", value)
        array, element = np.divmod(value, CSR_STRIDE)
        exists = (array >= 0) & (array < len(CSRS))
        exists &= element < counts[np.where(exists, array, 0)]
        missing = p.imm(k, ImmKind.CSR) & ~exists
        p.refuse(missing, "CALBIN_CSR", "no such CSR is declared", "an element of a CSR array", value)


def _expected(p: _Program, name: str) -> tuple[Mask, Mask, NDArray[np.int64]]:
    """For each record whether its opcode has the operand, whether this form of it needs it, and the memory."""
    takes, always, codes = (np.zeros(256, np.bool_) for _ in range(3))
    flag, argument, space = (np.zeros(256, np.int64) for _ in range(3))
    for op, spec in SPECS.items():
        if (o := spec.operand(name)) is not None:
            takes[op], always[op], codes[op] = True, o.always, o.codes
            flag[op], argument[op], space[op] = o.flag, o.argument, o.space
    r = p.records
    ops = r["op"]
    needs = always[ops] | ((r["flags"] & flag[ops]) != 0) | (codes[ops] & (r["a"]["dtype"] == DType.I8))
    needs |= (argument[ops] > 0) & (p.facts.arity[ops, r["sub"]] >= argument[ops])
    return takes[ops], needs, space[ops]


def _check_operand(p: _Program, name: str) -> None:
    operand = p.records[name]
    target = p.ctx.manifest.target
    space, dtype = operand["space"], operand["dtype"]
    p.refuse(space >= len(Space), "CALBIN_OPERAND", f"operand {name}: no such memory", f"below {len(Space)}", space)
    p.refuse(dtype >= len(DType), "CALBIN_OPERAND", f"operand {name}: no such dtype", f"below {len(DType)}", dtype)
    p.refuse(operand["pad"].any(axis=1), "CALBIN_RECORD", f"operand {name}: padding is not zero", 0, operand["pad"])
    present = space != Space.NONE
    takes, needs, wanted = _expected(p, name)
    p.refuse(present & ~takes, "CALBIN_OPERAND", f"it has no operand {name}", "none", space)
    p.refuse(present & takes & ~needs, "CALBIN_OPERAND", f"this form of it has no operand {name}", "none", space)
    p.refuse(present & (dtype == DType.NONE), "CALBIN_OPERAND", f"operand {name} has no dtype", "a dtype", dtype)
    p.refuse(~present & needs, "CALBIN_OPERAND", f"operand {name} is missing", "SRAM or DRAM", space)
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


def _check_tiles(p: _Program) -> None:
    """CALBIN_MISALIGNED: a packed tile is moved whole, from and to where the target's DMA can begin."""
    tiles = (p.records["flags"] & Flag.TILE) != 0
    for name in ("dst", "a"):
        operand = p.records[name]
        odd = (operand["base"] % p.alignment != 0) | (
            (operand["stride"] % p.alignment != 0) & (operand["reg"] != NO_REG)
        ).any(axis=1)
        p.refuse(
            tiles & odd,
            "CALBIN_MISALIGNED",
            f"operand {name}: a tile starts off the target's alignment",
            f"multiples of {p.alignment}",
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
    writers = p.imm(0, ImmKind.RESULT)
    loops = np.flatnonzero(ends >= 0)
    bad = np.zeros(len(ends), dtype=np.bool_)
    for counter in range(REGISTERS):
        written = np.flatnonzero(writers & (register == counter))
        own = loops[register[loops] == counter]
        first = np.searchsorted(written, own, side="right")
        beyond = np.searchsorted(written, ends[own], side="left")
        bad[own[beyond > first]] = True
    p.refuse(bad, "CALBIN_LOOP", "the body writes the loop's counter", "a counter that only the loop changes")
