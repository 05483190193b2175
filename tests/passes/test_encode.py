"""Records: what the emitter writes is what the simulator decodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calc.core.errors import InternalError
from calc.core.isa import (
    MAX_LOOP_DEPTH,
    REGISTERS,
    Alu,
    DType,
    Engine,
    Fn,
    Op,
    Space,
)
from calc.core.optable import SPECS
from calc.core.packing import TileLayout
from calc.core.schemes import scheme
from calc.kernels.emit import Emitter
from calc.kernels.lowering import weight_region
from calc.kernels.program import Buffer, Instr, LoopNode, Packed, Reg, TileRef, View
from calc.passes.encode import encode
from calc.sim.program import decode

BIG = st.integers(-(2**40), 2**40)
REG = st.builds(Reg, st.integers(0, REGISTERS - 1))
OPS = [Op(op) for op in sorted(SPECS) if op not in (Op.HALT, Op.LOOP, Op.END)]


@st.composite
def views(draw: st.DrawFn) -> View:
    space = draw(st.sampled_from([Space.SRAM, Space.DRAM]))
    buf = Buffer("b", space, 64, base=draw(st.integers(0, 2**40)))
    steps = draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=0, max_size=4))
    terms = draw(st.lists(st.tuples(REG, BIG), max_size=3))
    dtype = draw(st.sampled_from([d for d in DType if d]))
    return View(buf, dtype, tuple(steps), draw(st.integers(0, 2**30)), tuple(terms))


@st.composite
def instructions(draw: st.DrawFn) -> Instr:
    spec = SPECS[op := draw(st.sampled_from(OPS))]
    rank = draw(st.integers(1, 4)) if spec.has_rank else spec.ranks[0]
    dims = tuple(draw(st.one_of(st.integers(0, 2**31 - 1), REG)) for _ in range(rank))
    imm = tuple(draw(BIG) for _ in range(4))
    sub = draw(st.sampled_from(list(Alu))) if op == Op.SALU else draw(st.sampled_from(list(Fn)))
    names = draw(st.sets(st.sampled_from([o.name for o in spec.operands]))) if spec.operands else set()
    return Instr(
        op,
        draw(st.sampled_from(spec.engines)),
        draw(st.integers(0, 1000)),
        dims,
        sub,
        flags=draw(st.integers(0, 2**16 - 1)),
        imm=imm,
        fimm=(draw(st.floats(allow_nan=False)), draw(st.floats(allow_nan=False))),
        operands={n: draw(views()) for n in sorted(names)},
    )


@st.composite
def bodies(draw: st.DrawFn, depth: int = 0) -> list[Instr | LoopNode]:
    out: list[Instr | LoopNode] = []
    for _ in range(draw(st.integers(0, 3))):
        if depth < 3 and draw(st.booleans()):
            count = draw(st.one_of(st.integers(-5, 1000), REG))
            out.append(LoopNode(draw(REG), count, 1, draw(bodies(depth + 1))))
        else:
            out.append(draw(instructions()))
    return out


def flat(body: list[Instr | LoopNode]) -> list[Instr | LoopNode | None]:
    """In program order, a loop's end as None."""
    out: list[Instr | LoopNode | None] = []
    for item in body:
        out.append(item)
        if isinstance(item, LoopNode):
            out += [*flat(item.body), None]
    return out


@given(bodies())
def test_records_round_trip(body: list[Instr | LoopNode]) -> None:
    code = decode(encode(body))
    want = flat(body)
    assert [i.op for i in code.ins] == [
        Op.END if w is None else Op.LOOP if isinstance(w, LoopNode) else w.op for w in want
    ] + [Op.HALT]
    stack = []
    for ins, w in zip(code.ins, want, strict=False):
        if isinstance(w, LoopNode):
            stack.append(ins.pc)
            assert ins.imm[0] == w.reg.index
            assert ins.dims[0][1] == (w.count.index if isinstance(w.count, Reg) else -1)
            assert isinstance(w.count, Reg) or ins.dims[0][0] == w.count
        elif w is None:
            start = stack.pop()
            assert (code.partner[start], code.partner[ins.pc]) == (ins.pc, start)
        else:
            _same(ins, w)
    assert not stack


def _same(ins: object, w: Instr) -> None:
    assert (ins.engine, ins.sub, ins.flags, ins.node, ins.fimm) == (w.engine, w.sub, w.flags, w.node, w.fimm)
    assert ins.imm[:4] == w.imm
    if w.op >= Op.LOAD:
        assert len(ins.dims) == len(w.dims)
        for (constant, reg), d in zip(ins.dims, w.dims, strict=True):
            assert (constant if reg < 0 else Reg(reg)) == d
    assert set(ins.operands) == set(w.operands)
    for name, view in w.operands.items():
        got = ins.operands[name]
        assert (got.space, got.dtype, got.base) == (view.buf.space, view.dtype, view.buf.base + view.offset)
        assert got.terms == tuple((r.index, stride) for r, stride in view.terms)
        assert got.steps[: len(view.steps)] == view.steps
        regs = list(range(REGISTERS))
        assert got.address(regs) == view.buf.base + view.offset + sum(r.index * s for r, s in view.terms)


def test_what_cannot_be_encoded() -> None:
    body: list[Instr | LoopNode] = []
    for _ in range(MAX_LOOP_DEPTH):
        body = [LoopNode(Reg(0), 1, 0, body)]
    assert len(encode(body)) == 2 * MAX_LOOP_DEPTH + 1
    with pytest.raises(InternalError, match="nested deeper"):
        encode([LoopNode(Reg(0), 1, 0, body)])
    view = View(Buffer("lost", Space.SRAM, 64), DType.F32, (4,))
    with pytest.raises(InternalError, match="lost has no address"):
        encode([Instr(Op.VMAP, Engine.VEC, 0, (1,), operands={"dst": view})])
    view.buf.base = 0
    with pytest.raises(InternalError, match="4 register terms"):
        encode([Instr(Op.VMAP, Engine.VEC, 0, (1,), operands={"dst": view.at(0, *[(Reg(1), 4)] * 4)})])


def test_what_the_emitter_refuses() -> None:
    em = Emitter(weight_region("weights", 1 << 20, 0), 2, 1024)
    with em.scope():
        taken = [em.reg() for _ in range(REGISTERS - 1)]
        assert len({r.index for r in taken}) == REGISTERS - 1
        with pytest.raises(InternalError, match="out of scalar registers"):
            em.reg()
    em.reg()
    w = Packed("wide", 0, TileLayout("bf16", 16, 64, 16), scheme("bf16"))
    x = View(em.sram("x", 128), DType.BF16, (128, 2))
    with pytest.raises(InternalError, match="wide: a tile of 2048 bytes"):
        em.packed_tile(w, 1, x, x, TileRef(16, 0, None))
