"""The instruction set, one row per opcode and one per function.

Sync, encode, decode, the reader's checks, the disassembler, the clock and ``docs/isa.md`` read these rows; the code
that executes an opcode is `calc.sim.engines`. A row that lacks a fact, and an opcode without a row, fail at import.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum

from calc.core.errors import InternalError
from calc.core.isa import RANK_IMM, Alu, Engine, Flag, Fn, Op, Red, Space
from calc.core.opspec import Access, Cost, Func, Imm, ImmKind, Note, OperandSpec, OpSpec, faults

READ, WRITE, UPDATE = Access.READ, Access.WRITE, Access.UPDATE
_CTL, _VEC, _ADMA, _LINK = (Engine.CTL,), (Engine.VEC,), (Engine.ADMA,), (Engine.LINK,)
_ANY = tuple(Engine)
_RANK = Imm(RANK_IMM, "rank", ImmKind.RANK)
_RD = Imm(0, "rd", ImmKind.RESULT)
_NOTE_ROWS = Note("rows=b//{imm0}")

FUNCTIONS: dict[type[IntEnum], dict[int, Func]] = {
    Alu: {
        Alu.ADD: Func(2, Cost.NONE, "a + b", symbol="+"),
        Alu.SUB: Func(2, Cost.NONE, "a - b", symbol="-"),
        Alu.MUL: Func(2, Cost.NONE, "a * b", symbol="*"),
        Alu.DIV: Func(2, Cost.NONE, "a / b, rounded down", symbol="//", divides=True),
        Alu.CDIV: Func(2, Cost.NONE, "a / b, rounded up", divides=True),
        Alu.MIN: Func(2, Cost.NONE, "the smaller"),
        Alu.MAX: Func(2, Cost.NONE, "the larger"),
        Alu.MOD: Func(2, Cost.NONE, "a - b * (a / b rounded down)", symbol="%", divides=True),
    },
    Fn: {
        Fn.COPY: Func(1, Cost.VECTOR, "a"),
        Fn.ADD: Func(2, Cost.VECTOR, "a + b"),
        Fn.SUB: Func(2, Cost.VECTOR, "a - b"),
        Fn.MUL: Func(2, Cost.VECTOR, "a * b"),
        Fn.DIV: Func(2, Cost.SPECIAL, "a / b"),
        Fn.MAX: Func(2, Cost.VECTOR, "the larger of a and b"),
        Fn.AFFINE: Func(1, Cost.VECTOR, "a * f0 + f1", note="f0={f0:g} f1={f1:g}"),
        Fn.EXP: Func(1, Cost.SPECIAL, "exp(a)"),
        Fn.EXPSUB: Func(2, Cost.SPECIAL, "exp(a - b)"),
        Fn.RSQRT: Func(1, Cost.SPECIAL, "1 / sqrt(a * f0 + f1)", note="f0={f0:g} f1={f1:g}"),
        Fn.TANH: Func(1, Cost.SPECIAL, "tanh(a)"),
        Fn.SIGMOID: Func(1, Cost.SPECIAL, "1 / (1 + exp(-a))"),
        Fn.SILU: Func(1, Cost.SPECIAL, "a * sigmoid(a)"),
        Fn.GELU: Func(1, Cost.SPECIAL, "0.5 a (1 + erf(a / sqrt 2))"),
        Fn.GELU_TANH: Func(1, Cost.SPECIAL, "0.5 a (1 + tanh(0.7978845608 (a + 0.044715 a^3)))"),
        Fn.MUL3: Func(3, Cost.VECTOR, "a * b * d"),
        Fn.MADD: Func(3, Cost.VECTOR, "a * b + d"),
        Fn.FILL: Func(0, Cost.VECTOR, "f1; reads nothing", note="f1={f1:g}"),
    },
    Red: {
        Red.MAX: Func(1, Cost.VECTOR, "the largest"),
        Red.SUM: Func(1, Cost.VECTOR, "the sum"),
        Red.SUMSQ: Func(1, Cost.VECTOR, "the sum of squares"),
    },
}
"""For each enumeration that a `sub` field holds, its functions."""

_CONTROL = (
    OpSpec(Op.HALT, "HALT", _CTL, Cost.NONE, "The program has ended."),
    OpSpec(
        Op.LOOP,
        "LOOP",
        _CTL,
        Cost.NONE,
        "`R[rd] = 0`; run the body up to the matching END `count` times. A count of 0 or less skips it.",
        dims="count",
        imms=(_RD,),
    ),
    OpSpec(
        Op.END,
        "END",
        _CTL,
        Cost.NONE,
        "`R[rd] += 1` of the matching LOOP; back to the body while `R[rd] < count`. The count is read once, at LOOP.",
    ),
    OpSpec(
        Op.SALU,
        "SALU",
        _CTL,
        Cost.NONE,
        "`R[rd] = R[ra] f b`, f by `sub` (Alu). Dividing by 0 is SIM_DIVISION.",
        imms=(_RD, Imm(1, "ra", ImmKind.REGISTER), Imm(2, "b", ImmKind.REGISTER_OR_CONSTANT)),
        functions=Alu,
        flags=Flag.IMM,
    ),
    OpSpec(
        Op.CSRR,
        "CSRR",
        _CTL,
        Cost.NONE,
        "`R[rd] = CSR[index + (R[element] if element >= 0)]`.",
        imms=(_RD, Imm(1, "index", ImmKind.CSR), Imm(2, "element", ImmKind.OPTIONAL_REGISTER)),
    ),
    OpSpec(
        Op.SLOAD,
        "SLOAD",
        _CTL,
        Cost.NONE,
        "`R[rd]` = the i32 at `a` in SRAM. m, x, y, d are for the timing mode, which has no data: it takes "
        "`m * R[x] * R[y] // d` (x or y of -1 count as 1).",
        operands=(OperandSpec("a", READ, ""),),
        imms=(
            _RD,
            Imm(1, "m", ImmKind.PLAIN),
            Imm(2, "x", ImmKind.OPTIONAL_REGISTER),
            Imm(3, "y", ImmKind.OPTIONAL_REGISTER),
            Imm(5, "d", ImmKind.COUNT),
        ),
    ),
    OpSpec(
        Op.WAIT,
        "WAIT",
        _ANY,
        Cost.NONE,
        "Wait for n signals.",
        imms=(Imm(0, "semaphore", ImmKind.SEMAPHORE), Imm(1, "n", ImmKind.SIGNALS)),
    ),
    OpSpec(
        Op.SIGNAL,
        "SIGNAL",
        _ANY,
        Cost.NONE,
        "n signals, once everything before it in this engine's queue is done.",
        imms=(Imm(0, "semaphore", ImmKind.SEMAPHORE), Imm(1, "n", ImmKind.SIGNALS)),
    ),
)

_MOVES = (
    OpSpec(
        Op.LOAD,
        "LOAD",
        (Engine.WDMA, Engine.ADMA),
        Cost.DMA,
        "`dst = a`, DRAM to SRAM. With flag TILE, dims = (bytes) and the source is a packed weight tile.",
        dims="...",
        operands=(OperandSpec("dst", WRITE, "..."), OperandSpec("a", READ, "...", Space.DRAM)),
        imms=(_RANK,),
        flags=Flag.TILE,
        forms=((Flag.TILE, "tile"),),
    ),
    OpSpec(
        Op.STORE,
        "STORE",
        _ADMA,
        Cost.DMA,
        "`dst = a`, SRAM to DRAM.",
        dims="...",
        operands=(OperandSpec("dst", WRITE, "...", Space.DRAM), OperandSpec("a", READ, "...")),
        imms=(_RANK,),
    ),
    OpSpec(
        Op.LOADG,
        "LOADG",
        _ADMA,
        Cost.DMA,
        "`dst[i, :] = a[b[i], :]`; b is i32. An index outside 0..limit-1 is SIM_BAD_INDEX.",
        dims="rows width",
        operands=(
            OperandSpec("dst", WRITE, "rows width"),
            OperandSpec("a", READ, "imm0 width", Space.DRAM),
            OperandSpec("b", READ, "rows"),
        ),
        imms=(Imm(0, "limit", ImmKind.LIMIT, "rows of the table"), _RANK),
    ),
    OpSpec(
        Op.SEND,
        "SEND",
        _LINK,
        Cost.SEND,
        "Put a copy of `a` on the link to the peer.",
        dims="...",
        operands=(OperandSpec("a", READ, "..."),),
        imms=(Imm(0, "peer", ImmKind.CHIP), _RANK),
        notes=(Note("to chip {imm0}"),),
    ),
    OpSpec(
        Op.RECV,
        "RECV",
        _LINK,
        Cost.RECEIVE,
        "`dst` = the oldest message from the peer.",
        dims="...",
        operands=(OperandSpec("dst", WRITE, "..."),),
        imms=(Imm(0, "peer", ImmKind.CHIP), _RANK),
        notes=(Note("from chip {imm0}"),),
    ),
)

_MATRIX = (
    OpSpec(
        Op.GEMM,
        "GEMM",
        (Engine.MAT,),
        Cost.MATRIX,
        "`dst[h,i,g,n] (+)= alpha * sum_k a[h,i,g,k] * b[h,n,k]`; with flag PACKED b is a weight tile, see below.",
        dims="h i g n k",
        operands=(
            OperandSpec("dst", WRITE, "h i g n", update_flag=Flag.ACC),
            OperandSpec("a", READ, "h i g k"),
            OperandSpec("b", READ, "h n k"),
            OperandSpec("d", READ, "h i g n", flag=Flag.ADDEND),
            OperandSpec("e", READ, "h i", codes=True),
        ),
        imms=(
            Imm(0, "scales", ImmKind.PLAIN, "offset of the tile's scales"),
            Imm(1, "bias", ImmKind.PLAIN, "offset of the tile's bias"),
            Imm(2, "group", ImmKind.PLAIN, "columns of a group, or 0"),
            Imm(3, "bytes", ImmKind.PLAIN, "size of the tile"),
        ),
        floats=("alpha",),
        flags=Flag.ACC | Flag.PACKED | Flag.BIAS | Flag.ADDEND,
        forms=((Flag.PACKED, "{tile}"),),
        notes=(
            Note("alpha={f0:g}", unless=("f0", 1.0)),
            Note("tile={imm3}B", Flag.PACKED),
            Note("group={imm2}", Flag.PACKED, unless=("imm2", 0)),
            Note("bias", Flag.BIAS),
            Note("addend", Flag.ADDEND),
        ),
    ),
)

_VECTOR = (
    OpSpec(
        Op.VMAP,
        "VMAP",
        _VEC,
        Cost.BY_FUNCTION,
        "`dst = f(a, b, d)` element by element, f by `sub` (Fn).",
        dims="...",
        operands=(
            OperandSpec("dst", WRITE, "..."),
            OperandSpec("a", READ, "...", argument=1),
            OperandSpec("b", READ, "...", argument=2),
            OperandSpec("d", READ, "...", argument=3),
        ),
        imms=(_RANK,),
        floats=("f0", "f1"),
        functions=Fn,
    ),
    OpSpec(
        Op.VREDUCE,
        "VREDUCE",
        _VEC,
        Cost.BY_FUNCTION,
        "`dst` = the last dimension of `a` reduced, by `sub` (Red). A last dimension of 0 leaves `dst` as it is.",
        dims="... k",
        operands=(OperandSpec("dst", WRITE, "..."), OperandSpec("a", READ, "... k")),
        imms=(_RANK,),
        functions=Red,
    ),
    OpSpec(
        Op.VCMUL,
        "VCMUL",
        _VEC,
        Cost.VECTOR,
        "Complex product of pairs, with cos = b and sin = d: `dst = a*cos - a2*sin`, `dst2 = a*sin + a2*cos`; a2 and "
        "dst2 are imm0 and imm1 bytes further on. Rotary embedding; neighbours or halves is a matter of steps.",
        dims="... pairs",
        operands=(
            OperandSpec("dst", WRITE, "... pairs"),
            OperandSpec("a", READ, "... pairs"),
            OperandSpec("b", READ, "... pairs"),
            OperandSpec("d", READ, "... pairs"),
        ),
        imms=(
            Imm(0, "a2 - a", ImmKind.PLAIN, "bytes"),
            Imm(1, "dst2 - dst", ImmKind.PLAIN, "bytes"),
            _RANK,
        ),
        notes=(Note("imaginary at a+{imm0}, dst+{imm1} ({pairs})"),),
    ),
    OpSpec(
        Op.VBAND,
        "VBAND",
        _VEC,
        Cost.VECTOR,
        "With `x = i + R[offset] - j`, i along the axis and j along the last dimension: `dst = a` where "
        "`0 <= x < width`, else f0. Causal mask and window.",
        dims="... j",
        operands=(OperandSpec("dst", WRITE, "... j"), OperandSpec("a", READ, "... j")),
        imms=(
            Imm(0, "axis", ImmKind.AXIS),
            Imm(1, "offset", ImmKind.REGISTER),
            Imm(2, "width", ImmKind.PLAIN),
            _RANK,
        ),
        floats=("fill",),
        notes=(Note("axis={imm0} offset=r{imm1} width={imm2} else {f0:g}"),),
    ),
    OpSpec(
        Op.VQUANT,
        "VQUANT",
        _VEC,
        Cost.VECTOR,
        "`dst` = int8 codes of `a`, `d` = f32 scale per row ([numerics.md](numerics.md#quantization)).",
        dims="... k",
        operands=(OperandSpec("dst", WRITE, "... k"), OperandSpec("a", READ, "... k"), OperandSpec("d", WRITE, "...")),
        imms=(_RANK,),
    ),
    OpSpec(
        Op.VTOPK,
        "VTOPK",
        _VEC,
        Cost.SPECIAL,
        "`dst` = f32 values and `d` = i32 indices of the k largest of the last dimension, descending; of equal values "
        "the lower index comes first.",
        dims="... n",
        operands=(
            OperandSpec("dst", WRITE, "... imm0"),
            OperandSpec("a", READ, "... n"),
            OperandSpec("d", WRITE, "... imm0"),
        ),
        imms=(Imm(0, "k", ImmKind.COUNT), _RANK),
    ),
    OpSpec(
        Op.VBUCKET,
        "VBUCKET",
        _VEC,
        Cost.SPECIAL,
        "`dst` = i32, a stable order of the i32 keys `a`; `d` = i32, the start of each bucket. A key outside is "
        "SIM_BAD_INDEX.",
        dims="n",
        operands=(OperandSpec("dst", WRITE, "n"), OperandSpec("a", READ, "n"), OperandSpec("d", WRITE, "imm0+1")),
        imms=(Imm(0, "buckets", ImmKind.COUNT), _RANK),
    ),
    OpSpec(
        Op.VGATHER,
        "VGATHER",
        _VEC,
        Cost.VECTOR,
        "`dst[i, :] = a[b[i] // div, :]`; an index at or above the limit is SIM_BAD_INDEX.",
        dims="rows width",
        operands=(
            OperandSpec("dst", WRITE, "rows width"),
            OperandSpec("a", READ, "imm1 width"),
            OperandSpec("b", READ, "rows"),
        ),
        imms=(Imm(0, "div", ImmKind.COUNT), Imm(1, "limit", ImmKind.LIMIT), _RANK),
        notes=(_NOTE_ROWS,),
    ),
    OpSpec(
        Op.VSCATTER,
        "VSCATTER",
        _VEC,
        Cost.VECTOR,
        "`dst[b[i] // div, :] += a[i, :] * d[b[i]]`; the target rows of one record are distinct.",
        dims="rows width",
        operands=(
            OperandSpec("dst", UPDATE, "imm1 width"),
            OperandSpec("a", READ, "rows width"),
            OperandSpec("b", READ, "rows"),
            OperandSpec("d", READ, "*"),
        ),
        imms=(Imm(0, "div", ImmKind.COUNT), Imm(1, "limit", ImmKind.LIMIT), _RANK),
        notes=(_NOTE_ROWS,),
    ),
)

SPECS: dict[int, OpSpec] = {}
"""Opcode to its row; filled by `register`."""


def register(spec: OpSpec) -> None:
    """Add an opcode's row.

    Raises:
        InternalError: the row lacks a fact or contradicts itself, or the opcode has one already.
    """
    if spec.code in SPECS:
        raise InternalError(f"opcode {spec.code} has two rows: {SPECS[spec.code].name} and {spec.name}")
    if wrong := faults(spec):
        raise InternalError(f"opcode {spec.name or spec.code}: {'; '.join(wrong)}")
    SPECS[spec.code] = spec


def spec_of(op: int) -> OpSpec:
    """An opcode's row.

    Raises:
        InternalError: it has none.
    """
    try:
        return SPECS[op]
    except KeyError as e:
        raise InternalError(f"opcode {op} has no row in the instruction table") from e


def functions_of(spec: OpSpec) -> Mapping[int, Func]:
    """The functions that an opcode's `sub` chooses from; empty if it has none."""
    return FUNCTIONS[spec.functions] if spec.functions is not None else {}


def cost_of(spec: OpSpec, sub: int) -> Cost:
    """The cost class of a record."""
    return functions_of(spec)[sub].cost if spec.cost is Cost.BY_FUNCTION else spec.cost


def check_complete(specs: Iterable[OpSpec], functions: Mapping[type[IntEnum], Mapping[int, Func]]) -> None:
    """Every opcode and every function has its row, under its own name.

    Raises:
        InternalError: which have none.
    """
    rows = {s.code: s for s in specs}
    lost = [op.name for op in Op if op not in rows or rows[op].name != op.name]
    if lost:
        raise InternalError(f"opcodes without a row of their name: {', '.join(lost)}")
    for kind in {s.functions for s in rows.values() if s.functions}:
        table = functions.get(kind, {})
        names = [m.name for m in kind if m not in table or not table[m].meaning]
        if names:
            raise InternalError(f"functions of {kind.__name__} without a row: {', '.join(names)}")
    for s in rows.values():
        free = [
            f.meaning
            for f in (functions[s.functions].values() if s.functions else ())
            if f.cost in (Cost.NONE, Cost.BY_FUNCTION)
        ]
        if s.cost is Cost.BY_FUNCTION and free:
            raise InternalError(f"{s.name}: functions without a cost class: {', '.join(free)}")


def check_covered(what: str, wanted: Iterable[int | str], given: Iterable[int | str]) -> None:
    """A reader's own table has an entry for each row it must know, and no other.

    Args:
        what: the table, for the message.
        wanted: opcodes, functions or cost classes that rows name.
        given: the table's keys.

    Raises:
        InternalError: which differ.
    """
    need, have = set(wanted), set(given)
    if need != have:
        lost, extra = (", ".join(sorted(map(str, keys))) or "nothing" for keys in (need - have, have - need))
        raise InternalError(f"{what}: none for {lost}; surplus for {extra}")


for _spec in (*_CONTROL, *_MOVES, *_MATRIX, *_VECTOR):
    register(_spec)
check_complete(SPECS.values(), FUNCTIONS)
