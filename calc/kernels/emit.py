"""`Emitter`: how a kernel writes instructions.

Kernels name buffers, views and registers; addresses are assigned later (`passes/allocate.py`), waits and signals are
put in later (`passes/sync.py`), records are encoded last (`passes/encode.py`). Only the weight ring's own semaphores
are written here, since its slots are reused while other work goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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
from calc.core.packing import align
from calc.core.target import PLACED
from calc.kernels.program import Buffer, Dim, Instr, LoopNode, Packed, Plain, Reg, Term, TileRef, View, dense


class Emitter:
    """Writes one chip's program."""

    def __init__(self, weights: Buffer, ring_slots: int, ring_bytes: int) -> None:
        self.body: list[Instr | LoopNode] = []
        self.buffers: list[Buffer] = []
        self.spills: list[Buffer] = []
        self.loops: list[tuple[int, int]] = []
        self.weights = weights
        self.nodes: list[str] = []
        self._stack: list[list[Instr | LoopNode]] = [self.body]
        self._free = list(range(REGISTERS - 1, -1, -1))
        self._step = 0
        self._ring_slots = ring_slots
        self._ring_slot_bytes = align(ring_bytes, PLACED)
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
        self.loops.append((start + 1, self._step))

    def sram(self, name: str, nbytes: int, *, manual: bool = False) -> Buffer:
        """A new SRAM buffer of `nbytes`."""
        b = Buffer(f"{self.nodes[-1] if self.nodes else ''}:{name}", Space.SRAM, align(max(nbytes, 1), PLACED), manual)
        self.buffers.append(b)
        return b

    def spill(self, name: str, nbytes: int) -> Buffer:
        """A new buffer in the chip's DRAM scratch, `nbytes` long."""
        b = Buffer(f"{self.nodes[-1] if self.nodes else ''}:{name}", Space.DRAM, align(max(nbytes, 1), PLACED))
        self.spills.append(b)
        return b

    def _emit(self, ins: Instr) -> None:
        self._step += 1
        for v in ins.operands.values():
            if v.buf.base is None:
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
