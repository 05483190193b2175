"""An opcode is one row and one handler: a made-up one runs through everything, and none can lack a fact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest

from calc.calbin.reader import open_calbin
from calc.core.errors import FormatError, InternalError
from calc.core.isa import DType, Engine, Flag, Fn, Op, Space, Tile
from calc.core.opspec import Access, Cost, Func, Imm, ImmKind, Note, OperandSpec, OpSpec
from calc.core.optable import FUNCTIONS, SPECS, check_complete, check_covered, register, spec_of
from calc.core.target import load_target
from calc.kernels.emit import Buffer, Instr, View
from calc.passes.encode import encode
from calc.passes.sync import Sync
from calc.sim.disasm import disassemble
from calc.sim.engines import HANDLERS, compile_instruction
from calc.sim.machine import Machine, csr_file, time_programs
from calc.sim.program import Ins, Operand
from calc.sim.strict import StrictMemory
from tests.calbin.calbin_tiny import IO_BASE, assemble, tiny

VLERP, ROWS, COLS = 63, 3, 20
ROW = OpSpec(
    VLERP,
    "VLERP",
    (Engine.VEC,),
    Cost.SPECIAL,
    "`dst[i, :] = a[i, :] + f0 * b[i % period]`; with flag ACC added to what `dst` holds. `d` = what it added.",
    dims="rows n",
    operands=(
        OperandSpec("dst", Access.WRITE, "rows n", update_flag=Flag.ACC),
        OperandSpec("a", Access.READ, "rows n"),
        OperandSpec("b", Access.READ, "imm0"),
        OperandSpec("d", Access.WRITE, "rows"),
    ),
    imms=(Imm(0, "period", ImmKind.COUNT), Imm(4, "rank", ImmKind.RANK)),
    floats=("factor",),
    flags=Flag.ACC,
    notes=(Note("by {f0:g}"),),
)


def handler(ins, mem):
    ops, period, factor, acc = ins.operands, ins.imm[0], np.float32(ins.fimm[0]), bool(ins.flags & Flag.ACC)
    dst = mem.update(ops["dst"]) if acc else mem.write(ops["dst"])
    a, b, d = mem.read(ops["a"]), mem.read(ops["b"]), mem.write(ops["d"])

    def run(regs):
        rows, n = ins.shape(regs)
        added = factor * b(regs, (period,))[np.arange(rows) % period]
        out = a(regs, (rows, n)) + added[:, None]
        target = dst(regs, (rows, n))
        target[...] = target + out if acc else out
        d(regs, (rows,))[...] = added

    return run


@pytest.fixture
def vlerp(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The row and the handler, for one test."""
    monkeypatch.setitem(HANDLERS, VLERP, handler)
    register(ROW)
    yield
    del SPECS[VLERP]


def view(base: int, dtype: DType, *steps: int, space: Space = Space.SRAM, nbytes: int = 512) -> View:
    return View(Buffer(f"b{base}", space, nbytes, base=base), dtype, steps)


A, B, DST, D = (
    view(0, DType.F32, 80, 4),
    view(1024, DType.F32, 4),
    view(2048, DType.F32, 80, 4),
    view(4096, DType.F32, 4),
)
SUM, ADDED = view(IO_BASE, DType.F32, 80, 4, space=Space.DRAM), view(IO_BASE + 512, DType.F32, 4, space=Space.DRAM)


def body(*, acc: bool = True, **change: object) -> list[Instr]:
    """Filled operands, the opcode, and its two results stored."""

    def fill(dst: View, value: float, *dims: int) -> Instr:
        return Instr(Op.VMAP, Engine.VEC, 0, dims, sub=Fn.FILL, fimm=(0.0, value), operands={"dst": dst})

    def store(dst: View, a: View, *dims: int) -> Instr:
        return Instr(Op.STORE, Engine.ADMA, 0, dims, operands={"dst": dst, "a": a})

    lerp = Instr(
        VLERP,
        Engine.VEC,
        0,
        (ROWS, COLS),
        flags=Flag.ACC if acc else 0,
        imm=(2,),
        fimm=(0.5,),
        operands={"dst": DST, "a": A, "b": B, "d": D},
    )
    for name, value in change.items():
        setattr(lerp, name, value)
    out = [fill(A, 1.0, ROWS, COLS), fill(B, 4.0, 2), fill(DST, 10.0, ROWS, COLS), lerp]
    return [*out, store(SUM, DST, ROWS, COLS), store(ADDED, D, ROWS)]


def checked(records: np.ndarray, path: Path) -> np.ndarray:
    """The records as a reader of a calbin gives them, after all its checks."""
    parts = tiny(1)
    parts.replace("program.prefill_b1_s8.0", records.tobytes())
    parts.manifest["submodels"][0]["chip_map"][0]["instructions"] = len(records)
    path.write_bytes(assemble(parts))
    with open_calbin(path) as calbin:
        return calbin.program(calbin.manifest.submodels[0].name, 0).copy()


@pytest.mark.usefixtures("vlerp")
@pytest.mark.parametrize("mode", ["fast", "strict"])
@pytest.mark.parametrize(("acc", "want"), [(False, 3.0), (True, 13.0)])
def test_a_made_up_opcode_runs_through_everything(tmp_path: Path, mode: str, acc: bool, want: float) -> None:
    ordered = Sync().run(body(acc=acc))
    # both of its results reach the stores through a semaphore, which strict mode below proves to be needed
    assert [i.op for i in ordered if i.op in (Op.SIGNAL, Op.WAIT)] == [Op.SIGNAL, Op.WAIT]
    records = checked(encode(ordered), tmp_path / "x.calbin")
    text = [line.split(maxsplit=2)[2] for line in disassemble(records) if "vlerp" in line]
    arrow = "+=" if acc else "<-"
    assert text == [
        f"vlerp          sram[0x800]:f32[3,20]/80,4, sram[0x1000]:f32[3]/4 {arrow} "
        "sram[0x0]:f32[3,20]/80,4, sram[0x400]:f32[2]/4  by 0.5"
    ]
    machine = Machine(1 << 16, {0: np.zeros(64, np.uint8)}, {0: 3 << 20}, mode)
    machine.load({0: records}, {0: ("node",)}).run(csr_file({}))
    memory = machine.memories[0]
    assert (memory.host_read(IO_BASE, DType.F32, (ROWS, COLS)) == want).all()
    assert (memory.host_read(IO_BASE + 512, DType.F32, (ROWS,)) == 2.0).all()
    target = load_target("calculet-1chip")
    counters = time_programs(target, {0: records}, csr_file({}))
    fills = 2 * ROWS * COLS + 2
    assert counters.vector_ops == fills + ROWS * COLS
    special = -(-ROWS * COLS // int(target.rates.vector_special.value))
    plain = sum(-(-n // int(target.rates.vector.value)) for n in (ROWS * COLS, 2, ROWS * COLS))
    assert counters.busy["vec"] == 4 * int(target.costs.vector_start.value) + special + plain


@pytest.mark.usefixtures("vlerp")
@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"engine": Engine.MAT}, "CALBIN_ENGINE"),
        ({"imm": (0,)}, "CALBIN_RECORD"),
        ({"flags": Flag.BIAS}, "CALBIN_RECORD"),
        ({"dims": (ROWS,)}, "CALBIN_RECORD"),
        ({"operands": {"dst": DST, "a": A, "b": B}}, "CALBIN_OPERAND"),
        ({"operands": {"dst": DST, "a": A, "b": SUM, "d": D}}, "CALBIN_OPERAND"),
        ({"operands": {"dst": DST, "a": A, "b": B, "d": D, "e": B}}, "CALBIN_OPERAND"),
    ],
)
def test_the_reader_checks_a_made_up_opcode(tmp_path: Path, change: dict[str, object], code: str) -> None:
    with pytest.raises(FormatError) as caught:
        checked(encode(body(**change)), tmp_path / "x.calbin")
    assert caught.value.codes == (code,)
    assert "VLERP" in caught.value.problems[0].what


@pytest.mark.usefixtures("vlerp")
def test_what_the_row_says_of_its_operands_reaches_sync() -> None:
    lerp = body(acc=False)[3]
    assert lerp.reads() == [A.buf, B.buf]
    assert lerp.writes() == [DST.buf, D.buf]
    lerp.flags = Flag.ACC
    assert lerp.reads() == [A.buf, B.buf, DST.buf]
    lerp.operands["e"] = B
    with pytest.raises(InternalError, match="VLERP has no operand e"):
        lerp.reads()


class Recorder:
    """A memory that notes what a handler asks of each operand."""

    def __init__(self) -> None:
        self.seen: dict[object, set[Access]] = {}

    def _note(self, op: object, access: Access) -> None:
        self.seen.setdefault(op.space, set()).add(access)

    def read(self, op: object) -> None:
        self._note(op, Access.READ)

    def write(self, op: object) -> None:
        self._note(op, Access.WRITE)

    def update(self, op: object) -> None:
        self._note(op, Access.UPDATE)

    def tile(self, op: object, spec: object) -> None:
        self._note(op, Access.READ)

    def load_tile(self, dst: object, src: object, nbytes: int) -> None:
        self._note(dst, Access.WRITE)
        self._note(src, Access.READ)

    def moved(self, op: object, offset: int) -> object:
        return op


FORMS = [(op, fn, 0) for op, s in SPECS.items() if s.is_data for fn in (s.functions or (0,))]
FORMS += [(Op.GEMM, 0, Flag.ACC), (Op.GEMM, 0, Flag.PACKED), (Op.GEMM, 0, Flag.PACKED | Flag.ADDEND)]
FORMS += [(Op.LOAD, 0, Flag.TILE)]


@pytest.mark.parametrize(("op", "sub", "flags"), FORMS)
def test_a_handler_does_with_its_operands_what_the_row_says(op: int, sub: int, flags: int) -> None:
    """Sync orders what the row says, so a handler that does more would race."""
    spec = SPECS[op]
    arity = FUNCTIONS[spec.functions][sub].arity if spec.functions else 0
    packed = bool(flags & Flag.PACKED)
    names = [o.name for o in spec.operands if o.always or o.flag & flags or 0 < o.argument <= arity]
    names += ["e"] if packed else []
    # each operand is known by its memory, a number of its own
    operands = {n: Operand(i, DType.F32, 0, (), (4, 4, 4, 4)) for i, n in enumerate(names)}
    dims = tuple((8, -1) for _ in range(max(spec.ranks[0], 2 if spec.has_rank else 5)))
    ins = Ins(0, op, spec.engines[0], sub, Tile.W8 if packed else 0, flags, 0, dims, (1,) * 6, (1.0, 0.0), operands)
    memory = Recorder()
    compile_instruction(ins, memory)
    seen = {names[i]: access for i, access in memory.seen.items()}
    assert seen == {n: {spec.operand(n).access_with(flags)} for n in names}


def test_an_opcode_without_a_row_is_our_bug() -> None:
    for use in (lambda: encode(body()), body()[3].reads, lambda: spec_of(VLERP)):
        with pytest.raises(InternalError, match="opcode 63 has no row"):
            use()


DATA = OperandSpec("a", Access.READ, "rows n")


@pytest.mark.parametrize(
    ("fact", "what"),
    [
        ({"name": ""}, "no name"),
        ({"meaning": ""}, "no meaning"),
        ({"engines": ()}, "no engine"),
        ({"engines": (Engine.CTL,)}, "CTL does not run"),
        ({"code": 6, "cost": Cost.NONE}, "runs on CTL alone"),
        ({"code": 9000}, "outside 0..255"),
        ({"cost": Cost.NONE}, "has a cost class"),
        ({"code": 10}, "only a data opcode has a cost class"),
        ({"cost": Cost.BY_FUNCTION}, "it has none"),
        ({"dims": ""}, "has dimensions"),
        ({"dims": "rows rows"}, "names once each"),
        ({"dims": "rows ..."}, "in front"),
        ({"dims": "... n", "imms": ROW.imms[:1]}, "no immediate that says how many"),
        ({"operands": ()}, "has operands"),
        ({"operands": (DATA, DATA)}, "in the order"),
        ({"operands": (replace(DATA, dims="rows m"),)}, "no dimension 'm'"),
        ({"operands": (replace(DATA, dims="imm3"),)}, "no dimension 'imm3'"),
        ({"operands": (replace(DATA, flag=Flag.BIAS),)}, "depends on a flag"),
        ({"operands": (replace(DATA, update_flag=Flag.ACC),)}, "read in any case"),
        ({"operands": (replace(DATA, name="dst"),)}, "is a result"),
        ({"operands": (replace(DATA, space=Space.NONE),)}, "in no memory"),
        ({"imms": (*ROW.imms, ROW.imms[0])}, "each once"),
        ({"imms": (ROW.imms[0], replace(ROW.imms[1], index=3))}, "number of dimensions"),
        ({"imms": (replace(ROW.imms[0], name=""),)}, "has no name"),
        ({"floats": ("x", "y", "z")}, "two float immediates"),
        ({"forms": ((Flag.TILE, "tile"),)}, "form 'tile' needs a flag"),
        ({"notes": (Note("x", Flag.BIAS),)}, "note 'x' needs a flag"),
    ],
)
def test_a_row_that_lacks_a_fact_is_refused(fact: dict[str, object], what: str) -> None:
    with pytest.raises(InternalError, match=what):
        register(replace(ROW, **fact))
    assert VLERP not in SPECS


def test_every_row_is_needed() -> None:
    with pytest.raises(InternalError, match="opcode 48 has two rows: VMAP and VLERP"):
        register(replace(ROW, code=Op.VMAP))
    check_complete(SPECS.values(), FUNCTIONS)
    for op in Op:
        with pytest.raises(InternalError, match=f"without a row of their name: {op.name}$"):
            check_complete([s for s in SPECS.values() if s.code != op], FUNCTIONS)
    for kind, table in FUNCTIONS.items():
        for fn in kind:
            less = {k: v for k, v in table.items() if k != fn}
            with pytest.raises(InternalError, match=f"functions of {kind.__name__} without a row: {fn.name}$"):
                check_complete(SPECS.values(), FUNCTIONS | {kind: less})


def test_a_reader_that_knows_another_set_is_refused() -> None:
    wanted = [s.code for s in SPECS.values() if s.is_data]
    check_covered("handlers", wanted, HANDLERS)
    with pytest.raises(InternalError, match="handlers: none for 63; surplus for nothing"):
        check_covered("handlers", [*wanted, VLERP], HANDLERS)
    with pytest.raises(InternalError, match="handlers: none for nothing; surplus for 63"):
        check_covered("handlers", wanted, {**HANDLERS, VLERP: handler})


def test_a_made_up_function_needs_a_meaning_and_a_cost() -> None:
    class Blend(IntEnum):
        HALF = 0

    row = replace(ROW, functions=Blend, cost=Cost.BY_FUNCTION)
    rows = [*SPECS.values(), row]
    check_complete(rows, FUNCTIONS | {Blend: {Blend.HALF: Func(1, Cost.VECTOR, "half")}})
    for table in ({}, {Blend.HALF: Func(1, Cost.VECTOR, "")}):
        with pytest.raises(InternalError, match="functions of Blend without a row: HALF"):
            check_complete(rows, FUNCTIONS | {Blend: table})

    for cost in (Cost.NONE, Cost.BY_FUNCTION):
        with pytest.raises(InternalError, match="VLERP: functions without a cost class: half"):
            check_complete(rows, FUNCTIONS | {Blend: {Blend.HALF: Func(1, cost, "half")}})


def test_strict_mode_is_what_the_machine_was_asked_for() -> None:
    machines = {mode: Machine(64, {0: np.zeros(64, np.uint8)}, {0: 64}, mode) for mode in ("fast", "strict")}
    assert [isinstance(m.memories[0], StrictMemory) for m in machines.values()] == [False, True]
