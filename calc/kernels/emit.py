"""`Emitter`: how a kernel writes instructions.

Kernels name buffers, views and registers; addresses are assigned later (`passes/allocate.py`), waits and signals are
put in later (`passes/sync.py`), records are encoded last (`passes/encode.py`). Only the weight ring's own semaphores
are written here, since its slots are reused while other work goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from calc.core.errors import InternalError
from calc.core.isa import (
    CSR_STRIDE,
    CSRS,
    ITEMSIZE,
    REGISTERS,
    RING_FREE,
    RING_FULL,
    Alu,
    DType,
    Engine,
    Flag,
    Fn,
    Op,
    Red,
    Space,
    Tile,
)
from calc.core.packing import TileLayout, align
from calc.core.schemes import Scheme


@dataclass(frozen=True)
class Reg:
    """A scalar register."""

    index: int


Dim = int | Reg
Term = tuple[Reg, int]


@dataclass(eq=False)
class Buffer:
    """A range of SRAM or DRAM.

    Attributes:
        manual: its users synchronise themselves (the weight ring, read-only weights).
        base: address, once assigned; DRAM buffers have it from the start.
        first, last: steps of the program during which it is live.
    """

    name: str
    space: Space
    nbytes: int
    manual: bool = False
    base: int | None = None
    first: int = -1
    last: int = -1

    def touch(self, step: int) -> None:
        """Extend the live range to `step`."""
        self.first = step if self.first < 0 else min(self.first, step)
        self.last = max(self.last, step)


@dataclass(frozen=True)
class View:
    """Elements of a buffer: `steps[j]` bytes apart along dimension j, from `offset` plus register terms."""

    buf: Buffer
    dtype: DType
    steps: tuple[int, ...]
    offset: int = 0
    terms: tuple[Term, ...] = ()

    def at(self, offset: int = 0, *terms: Term) -> View:
        """The same elements, moved by `offset` bytes and register terms."""
        return replace(self, offset=self.offset + offset, terms=self.terms + terms)

    def stepped(self, *steps: int) -> View:
        """The same start with other steps."""
        return replace(self, steps=steps)


@dataclass(eq=False)
class Instr:
    """One record before encoding."""

    op: Op
    engine: Engine
    node: int
    dims: tuple[Dim, ...] = ()
    sub: int = 0
    tile: Tile = Tile.NONE
    flags: int = 0
    imm: tuple[int, ...] = ()
    fimm: tuple[float, ...] = ()
    operands: dict[str, View] = field(default_factory=dict)

    def reads(self) -> list[Buffer]:
        """Buffers whose contents the instruction uses."""
        names = [n for n in self.operands if n != "dst" and not (n == "d" and self.op in _D_IS_OUTPUT)]
        out = [self.operands[n].buf for n in names]
        if (self.op is Op.GEMM and self.flags & Flag.ACC) or self.op is Op.VSCATTER:
            out.append(self.operands["dst"].buf)
        return out

    def writes(self) -> list[Buffer]:
        """Buffers the instruction changes."""
        out = [self.operands["dst"].buf] if "dst" in self.operands else []
        if self.op in _D_IS_OUTPUT:
            out.append(self.operands["d"].buf)
        return out


_D_IS_OUTPUT = frozenset({Op.VQUANT, Op.VTOPK, Op.VBUCKET})


@dataclass(eq=False)
class LoopNode:
    """A loop and its body."""

    reg: Reg
    count: Dim
    node: int
    body: list[Instr | LoopNode] = field(default_factory=list)


@dataclass(frozen=True)
class Packed:
    """A weight in a chip's shard as the lowering sees it: where it is and how it is packed.

    `offset` is relative to the shard; `experts` weights of `layout` lie `expert_stride` bytes apart.
    """

    name: str
    offset: int
    layout: TileLayout
    scheme: Scheme
    experts: int = 0

    @property
    def expert_stride(self) -> int:
        """Distance between experts, bytes."""
        return self.layout.nbytes

    @property
    def nbytes(self) -> int:
        """Size in the shard, bytes."""
        return self.layout.nbytes * max(self.experts, 1)


@dataclass(frozen=True)
class Plain:
    """A small weight in the shard, row-major f32 (norm weights, biases, RoPE tables)."""

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in the shard, bytes."""
        size = 4
        for n in self.shape:
            size *= n
        return size


@dataclass(frozen=True)
class TileRef:
    """The tile a sink is called for: `rows` of it start at column ``first + index * step`` of the output."""

    rows: int
    first: int
    term: tuple[Reg, int] | None

    def columns(self, itemsize: int) -> tuple[int, tuple[Term, ...]]:
        """Offset and register terms of the tile's first output column, for elements of `itemsize` bytes."""
        terms = () if self.term is None else ((self.term[0], self.term[1] * itemsize),)
        return self.first * itemsize, terms


def dense(buf: Buffer, dtype: DType, *shape: int) -> View:
    """A row-major view of the whole buffer."""
    steps, size = [], ITEMSIZE[dtype]
    for n in reversed(shape):
        steps.append(size)
        size *= n
    return View(buf, dtype, tuple(reversed(steps)))


class Emitter:
    """Writes one chip's program."""

    def __init__(self, weights: Buffer, ring_slots: int, ring_bytes: int) -> None:
        self.body: list[Instr | LoopNode] = []
        self.buffers: list[Buffer] = []
        self.weights = weights
        self.nodes: list[str] = []
        self._stack: list[list[Instr | LoopNode]] = [self.body]
        self._free = list(range(REGISTERS - 1, -1, -1))
        self._step = 0
        self._ring_slots = ring_slots
        self._ring_slot_bytes = align(ring_bytes, 64)
        self.ring = Buffer("weight_ring", Space.SRAM, ring_slots * self._ring_slot_bytes, manual=True)
        self.buffers.append(self.ring)
        self.source("weight_ring")
        self._slot = self.const(0)
        self.op(Op.SIGNAL, Engine.MAT, imm=(RING_FREE, ring_slots))

    # -- structure ---------------------------------------------------------------------------------------------------

    def source(self, name: str) -> None:
        """Name the graph node that the following instructions come from."""
        self.nodes.append(name)

    def reg(self) -> Reg:
        """A free register.

        Raises:
            InternalError: all registers are taken.
        """
        if not self._free:
            raise InternalError(f"out of scalar registers at node {self.nodes[-1:]}")
        return Reg(self._free.pop())

    def release(self, *regs: Reg) -> None:
        """Give registers back."""
        self._free.extend(r.index for r in regs)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Registers taken inside are free again afterwards."""
        before = list(self._free)
        yield
        self._free = before

    @contextmanager
    def loop(self, count: Dim) -> Iterator[Reg]:
        """Repeat the body `count` times; the register counts from 0. A count of 0 or less skips it."""
        r = self.reg()
        node = LoopNode(r, count, len(self.nodes) - 1)
        start = self._step
        self._stack[-1].append(node)
        self._stack.append(node.body)
        with self.scope():
            yield r
        self._stack.pop()
        self.release(r)
        self._step += 1
        for b in self.buffers:
            if b.last >= start:
                b.touch(self._step)
                b.first = min(b.first, start)

    def sram(self, name: str, nbytes: int, *, manual: bool = False) -> Buffer:
        """A new SRAM buffer of `nbytes`."""
        b = Buffer(f"{self.nodes[-1] if self.nodes else ''}:{name}", Space.SRAM, align(max(nbytes, 1), 64), manual)
        self.buffers.append(b)
        return b

    def _emit(self, ins: Instr) -> None:
        self._step += 1
        for v in ins.operands.values():
            if v.buf.space is Space.SRAM:
                v.buf.touch(self._step)
        self._stack[-1].append(ins)

    def op(
        self,
        op: Op,
        engine: Engine,
        dims: Sequence[Dim] = (),
        *,
        sub: int = 0,
        tile: Tile = Tile.NONE,
        flags: int = 0,
        imm: Sequence[int] = (),
        fimm: Sequence[float] = (),
        **operands: View | None,
    ) -> None:
        """Emit one record."""
        ops = {k: v for k, v in operands.items() if v is not None}
        self._emit(Instr(op, engine, len(self.nodes) - 1, tuple(dims), sub, tile, flags, tuple(imm), tuple(fimm), ops))

    # -- scalars -----------------------------------------------------------------------------------------------------

    def alu(self, sub: Alu, a: Reg, b: Dim, out: Reg | None = None) -> Reg:
        """``out = a <sub> b`` in scalar registers."""
        out = out or self.reg()
        if isinstance(b, int):
            self.op(Op.SALU, Engine.CTL, sub=sub, flags=Flag.IMM, imm=(out.index, a.index, b))
        else:
            self.op(Op.SALU, Engine.CTL, sub=sub, imm=(out.index, a.index, b.index))
        return out

    def const(self, value: int) -> Reg:
        """A register that holds `value`."""
        r = self.reg()
        self.alu(Alu.MUL, r, 0, r)
        return self.alu(Alu.ADD, r, value, r)

    def csr(self, name: str, seq: Dim = 0) -> Reg:
        """The CSR of sequence `seq` of the batch."""
        r = self.reg()
        base = CSRS.index(name) * CSR_STRIDE
        if isinstance(seq, int):
            self.op(Op.CSRR, Engine.CTL, imm=(r.index, base + seq, -1))
        else:
            self.op(Op.CSRR, Engine.CTL, imm=(r.index, base, seq.index))
        return r

    def sload(self, a: View, assume: tuple[int, Reg | None, Reg | None, int]) -> Reg:
        """Read one i32 of SRAM into a register.

        Args:
            a: the element.
            assume: (m, x, y, d): the timing mode, which has no data, takes ``m * x * y // d``.
        """
        r = self.reg()
        m, x, y, d = assume
        imm = (r.index, m, -1 if x is None else x.index, -1 if y is None else y.index, 0, d)
        self.op(Op.SLOAD, Engine.CTL, imm=imm, a=a)
        return r

    # -- moves -------------------------------------------------------------------------------------------------------

    def load(self, dst: View, src: View, dims: Sequence[Dim]) -> None:
        """DRAM to SRAM."""
        self.op(Op.LOAD, Engine.ADMA, dims, dst=dst, a=src)

    def store(self, dst: View, src: View, dims: Sequence[Dim]) -> None:
        """SRAM to DRAM."""
        self.op(Op.STORE, Engine.ADMA, dims, dst=dst, a=src)

    def constant(self, w: Plain, name: str) -> Buffer:
        """A small weight, copied to SRAM whole."""
        buf = self.sram(name, w.nbytes)
        n = w.nbytes // 4
        self.load(dense(buf, DType.F32, n), View(self.weights, DType.F32, (4,), w.offset), (n,))
        return buf

    # -- vector ------------------------------------------------------------------------------------------------------

    def vmap(
        self,
        fn: Fn,
        dims: Sequence[Dim],
        dst: View,
        a: View,
        b: View | None = None,
        d: View | None = None,
        f: tuple[float, float] = (1.0, 0.0),
    ) -> None:
        """``dst = fn(a, b, d)`` element by element."""
        self.op(Op.VMAP, Engine.VEC, dims, sub=fn, fimm=f, dst=dst, a=a, b=b, d=d)

    def fill(self, dims: Sequence[Dim], dst: View, value: float) -> None:
        """``dst = value``."""
        self.op(Op.VMAP, Engine.VEC, dims, sub=Fn.FILL, fimm=(0.0, value), dst=dst)

    def vreduce(self, red: Red, dims: Sequence[Dim], dst: View, a: View) -> None:
        """``dst = red(a)`` over the last dimension."""
        self.op(Op.VREDUCE, Engine.VEC, dims, sub=red, dst=dst, a=a)

    # -- matrix ------------------------------------------------------------------------------------------------------

    def gemm(
        self,
        dims: tuple[Dim, Dim, Dim, Dim, Dim],
        dst: View,
        a: View,
        b: View,
        *,
        alpha: float = 1.0,
        acc: bool = False,
    ) -> None:
        """``dst[h,i,g,n] (+)= alpha * sum_k a[h,i,g,k] * b[h,n,k]``, b in SRAM as plain elements.

        Args:
            dims: (h, i, g, n, k).
            dst: f32 or bf16, steps (h, i, g, n).
            a: bf16 or f32, steps (h, i, g, k).
            b: bf16, steps (h, n, k).
            alpha: factor of the sum.
            acc: add to what `dst` holds (f32).
        """
        self.op(Op.GEMM, Engine.MAT, dims, flags=Flag.ACC if acc else 0, fimm=(alpha,), dst=dst, a=a, b=b)

    def packed_gemm(
        self,
        w: Packed,
        rows: Dim,
        a: View,
        dst: View,
        *,
        a_scale: View | None = None,
        addend: View | None = None,
        expert: Reg | None = None,
        staged: bool = False,
    ) -> Iterator[TileRef]:
        """Stream a packed weight through the ring: ``dst[:, cols] = a @ w[cols].T (+ bias) (+ addend[:, cols])``.

        A generator: after each tile's GEMM it yields, so that the caller can emit what consumes the tile.

        Args:
            w: the weight [N, K].
            rows: rows of `a`.
            a: bf16 or int8 [rows, K], steps (row, k).
            dst: [rows, N], steps (row, n); with `staged` it holds one tile at a time, [rows, tile_rows].
            a_scale: f32 [rows], step (row,), where `a` is int8.
            addend: bf16 or f32 [rows, N], steps (row, n).
            expert: which expert's weight.
            staged: see `dst`.
        """
        lay = w.layout
        full = lay.rows // lay.tile_rows
        tail = lay.rows - full * lay.tile_rows
        refs = []
        if full == 1:
            refs.append(TileRef(lay.tile_rows, 0, None))
        if tail:
            refs.append(TileRef(tail, full * lay.tile_rows, None))
        if full > 1:
            with self.loop(full) as t:
                ref = TileRef(lay.tile_rows, 0, (t, lay.tile_rows))
                self.packed_tile(w, rows, a, dst, ref, a_scale, expert, addend, staged=staged)
                yield ref
        for ref in refs:
            self.packed_tile(w, rows, a, dst, ref, a_scale, expert, addend, staged=staged)
            yield ref

    def packed_tile(  # noqa: PLR0913
        self,
        w: Packed,
        rows: Dim,
        a: View,
        dst: View,
        ref: TileRef,
        a_scale: View | None = None,
        expert: Reg | None = None,
        addend: View | None = None,
        *,
        staged: bool = True,
    ) -> None:
        """Load one tile into the ring's next slot and multiply by it; see `packed_gemm`."""
        lay = w.layout
        ring, slot = self.ring, self._slot
        nbytes = lay.tile_bytes(ref.rows)
        if nbytes > self._ring_slot_bytes:
            raise InternalError(
                f"{w.name}: a tile of {nbytes} bytes does not fit the ring's slot of {self._ring_slot_bytes}"
            )
        ring_terms = ((slot, self._ring_slot_bytes),)
        terms: tuple[Term, ...] = () if ref.term is None else ((ref.term[0], lay.tile_stride),)
        if expert is not None:
            terms += ((expert, w.expert_stride),)
        offset = w.offset + (ref.first // lay.tile_rows) * lay.tile_stride
        src = View(self.weights, DType.U8, (1,), offset, terms)
        to = View(ring, DType.U8, (1,), 0, ring_terms)
        self.op(Op.WAIT, Engine.WDMA, imm=(RING_FREE, 1))
        self.op(Op.LOAD, Engine.WDMA, (nbytes,), flags=Flag.TILE, dst=to, a=src)
        self.op(Op.SIGNAL, Engine.WDMA, imm=(RING_FULL, 1))
        self.op(Op.WAIT, Engine.MAT, imm=(RING_FULL, 1))
        fmt, code = lay.format.tile, lay.format.dtype
        flags = Flag.PACKED | (Flag.BIAS if lay.bias else 0) | (Flag.ADDEND if addend is not None else 0)

        def columns(v: View) -> View:
            off, col_terms = ref.columns(v.steps[-1])
            return v.at(off, *col_terms).stepped(0, v.steps[0], 0, v.steps[1])

        self.op(
            Op.GEMM,
            Engine.MAT,
            (1, rows, 1, ref.rows, lay.cols),
            tile=fmt,
            flags=flags,
            imm=(lay.scales_offset(ref.rows), lay.bias_offset(ref.rows), lay.group, nbytes),
            fimm=(1.0,),
            dst=dst.stepped(0, dst.steps[0], 0, dst.steps[1]) if staged else columns(dst),
            a=a.stepped(0, a.steps[0], 0, a.steps[1]),
            b=View(ring, code, (0, lay.code_row_bytes, ITEMSIZE[code]), 0, ring_terms),
            d=None if addend is None else columns(addend),
            e=None if a_scale is None else a_scale.stepped(0, a_scale.steps[0]),
        )
        self.op(Op.SIGNAL, Engine.MAT, imm=(RING_FREE, 1))
        self.alu(Alu.ADD, slot, 1, slot)
        self.alu(Alu.MOD, slot, self._ring_slots, slot)
