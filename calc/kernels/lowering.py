"""`Lowering`: what a kernel's `lower` works with, and the pieces kernels share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from calc.core.isa import ITEMSIZE, DType, Engine, Fn, Op, Red, Space
from calc.core.packing import align
from calc.core.schemes import Scheme
from calc.core.variant import Variant
from calc.kernels.base import Call
from calc.kernels.emit import Buffer, Dim, Emitter, Packed, Plain, Reg, TileRef, View, dense

ACTIVATIONS = {"silu": Fn.SILU, "gelu": Fn.GELU, "gelu_tanh": Fn.GELU_TANH}


@dataclass(frozen=True)
class Act:
    """An activation in SRAM: [rows, width], rows `row_bytes` apart."""

    buf: Buffer
    width: int
    dtype: DType = DType.BF16

    @property
    def row_bytes(self) -> int:
        """Distance between rows."""
        return align(self.width, 32) * ITEMSIZE[self.dtype]

    @property
    def view(self) -> View:
        """Steps (row, column)."""
        return View(self.buf, self.dtype, (self.row_bytes, ITEMSIZE[self.dtype]))

    @property
    def heads(self) -> Callable[[int], View]:
        """``heads(d)``: steps (row, head, column) for heads of width d."""
        size = ITEMSIZE[self.dtype]
        return lambda d: View(self.buf, self.dtype, (self.row_bytes, d * size, size))


@dataclass(frozen=True)
class KvBuffers:
    """One layer's KV cache in DRAM. Rows are tokens; slots are `slot_stride` bytes apart."""

    key: Buffer
    value: Buffer
    key_row: int
    value_row: int
    rows: int

    def view(self, which: str, slot: Reg, row: tuple[Reg, ...]) -> View:
        """Steps (token, element) of a slot, from the row given by a sum of registers."""
        buf, width = (self.key, self.key_row) if which == "key" else (self.value, self.value_row)
        terms = ((slot, self.rows * width), *((r, width) for r in row))
        return View(buf, DType.BF16, (width, 2), 0, terms)


@dataclass(frozen=True)
class Choices:
    """Tile sizes the target asks for.

    Attributes:
        score_bytes: f32 attention scores of one tile, at most this many bytes.
        kv_tile: keys per tile at most.
    """

    score_bytes: int
    kv_tile: int


class Lowering:
    """One chip's part of one sub-model while it is being written.

    Attributes:
        em: the emitter.
        rows: valid activation rows: the batch for decode, the CSR ``cur_seq_len`` for prefill.
        max_rows: rows of the static shape.
    """

    def __init__(
        self,
        em: Emitter,
        variant: Variant,
        weights: Mapping[str, Packed | Plain],
        kv: Mapping[int, KvBuffers],
        io: Mapping[str, Buffer],
        choices: Choices,
    ) -> None:
        self.em = em
        self.variant = variant
        self.weights = weights
        self.kv = kv
        self.io = io
        self.choices = choices
        self.acts: dict[str, Act] = {}
        self._tables: dict[str, Act] = {}
        self.max_rows = variant.batch * variant.seq
        self.rows: Dim = em.csr("cur_seq_len", 0) if variant.role == "prefill" else variant.batch

    # -- values ------------------------------------------------------------------------------------------------------

    def act(self, value: str) -> Act:
        """The activation that holds a graph value."""
        return self.acts[value]

    def new(self, value: str, width: int, dtype: DType = DType.BF16, rows: int | None = None) -> Act:
        """An activation for a graph value."""
        out = self.scratch(value, width, dtype, rows)
        self.acts[value] = out
        return out

    def scratch(self, name: str, width: int, dtype: DType = DType.F32, rows: int | None = None) -> Act:
        """An activation that lives within one kernel."""
        n = self.max_rows if rows is None else rows
        return Act(self.em.sram(name, n * align(width, 32) * ITEMSIZE[dtype]), width, dtype)

    def packed(self, call: Call, formal: str) -> Packed:
        """The packed weight behind a formal input."""
        w = self.weights[call.inputs[formal]]
        assert isinstance(w, Packed)
        return w

    def plain(self, call: Call, formal: str) -> Plain:
        """The plain f32 weight behind a formal input."""
        w = self.weights[call.inputs[formal]]
        assert isinstance(w, Plain)
        return w

    # -- shared pieces -----------------------------------------------------------------------------------------------

    def rms_norm(
        self, x: View, rows: Dim, width: int, gamma: Plain, eps: float, dst: View, d: View | None = None
    ) -> None:
        """``dst = x * rsqrt(mean(x^2) + eps) * gamma`` row by row, FP32 inside, rounded once at the store.

        Args:
            x: steps (row, column).
            rows: number of rows.
            width: number of columns.
            gamma: f32 [width] in the shard.
            eps: added to the mean square.
            dst: steps (row, column).
            d: added in FP32 before the store (a residual), steps (row, column).
        """
        em = self.em
        scale = self.row_scale(x, (rows,), width, eps)
        g = em.constant(gamma, "gamma")
        wide = View(scale, DType.F32, (4, 0))
        gview = View(g, DType.F32, (0, 4))
        if d is None:
            em.vmap(Fn.MUL3, (rows, width), dst, x, wide, gview)
            return
        tmp = self.scratch("normed", width)
        em.vmap(Fn.MUL3, (rows, width), tmp.view, x, wide, gview)
        em.vmap(Fn.ADD, (rows, width), dst, tmp.view, d)

    def row_scale(self, x: View, outer: tuple[Dim, ...], width: int, eps: float) -> Buffer:
        """``rsqrt(mean(x^2) + eps)`` over the last dimension: f32, dense over the outer dimensions' maxima."""
        em = self.em
        limits = [self.max_rows if isinstance(n, Reg) else n for n in outer]
        total = 1
        for n in limits:
            total *= n
        buf = em.sram("row_scale", 4 * total)
        view = dense(buf, DType.F32, *limits)
        em.vreduce(Red.SUMSQ, (*outer, width), view, x)
        em.vmap(Fn.RSQRT, outer, view, view, f=(1.0 / width, eps))
        return buf

    def quantized(self, x: View, rows: Dim, width: int, name: str, max_rows: int | None = None) -> tuple[View, View]:
        """Dynamic int8 of each row: (codes i8 [rows, width], scales f32 [rows])."""
        n = self.max_rows if max_rows is None else max_rows
        codes = self.scratch(f"{name}_codes", width, DType.I8, n)
        scale = self.em.sram(f"{name}_scale", 4 * n)
        sview = View(scale, DType.F32, (4,))
        self.em.op(Op.VQUANT, Engine.VEC, (rows, width), dst=codes.view, a=x, d=sview)
        return codes.view, sview

    def linear(
        self,
        w: Packed,
        x: Rows,
        dst: View,
        *,
        addend: View | None = None,
        expert: Reg | None = None,
        staged: bool = False,
    ) -> Iterator[TileRef]:
        """A packed weight applied to rows, which are quantized first where the weight's scheme says so."""
        a, scale = x.under(w.scheme)
        yield from self.em.packed_gemm(w, x.count, a, dst, a_scale=scale, addend=addend, expert=expert, staged=staged)

    def rope_table(self, call: Call, formal: str) -> Act:
        """This call's rows of a RoPE table, f32 [rows, R / 2]; loaded once per program."""
        name = call.inputs[formal]
        if name not in self._tables:
            em, w = self.em, self.plain(call, formal)
            half = w.shape[1]
            table = self.scratch(name, half)
            row = half * 4
            src = View(em.weights, DType.F32, (row, 4), w.offset)
            if self.variant.role == "prefill":
                with em.scope():
                    past = em.csr("past_kv_cur_seq_len", 0)
                    em.load(table.view, src.at(0, (past, row)), (self.rows, half))
            else:
                for b in range(self.variant.batch):
                    with em.scope():
                        past = em.csr("past_kv_cur_seq_len", b)
                        em.load(table.view.at(b * table.row_bytes), src.at(0, (past, row)), (1, half))
            self._tables[name] = table
        return self._tables[name]


class Rows:
    """The rows that weights are applied to: BF16 as they lie in memory, int8 codes once a scheme asks for them.

    Weights of one input share the codes.

    Args:
        low: where the quantization is written.
        view: bf16, steps (row, column).
        count: number of rows.
        width: number of columns.
        max_rows: most rows there can be; None for those of the static shape.
    """

    def __init__(self, low: Lowering, view: View, count: Dim, width: int, max_rows: int | None = None) -> None:
        self.low = low
        self.view = view
        self.count = count
        self.width = width
        self.max_rows = max_rows
        self._codes: tuple[View, View] | None = None

    def under(self, scheme: Scheme) -> tuple[View, View | None]:
        """The operand a weight of this scheme takes, and its scale per row if it is int8."""
        if scheme.activations == "bf16":
            return self.view, None
        if self._codes is None:
            self._codes = self.low.quantized(self.view, self.count, self.width, "x", self.max_rows)
        return self._codes


def drain(tiles: Iterator[TileRef]) -> None:
    """Run a tile generator whose tiles nobody consumes one by one."""
    for _ in tiles:
        pass


def weight_region(name: str, nbytes: int, base: int) -> Buffer:
    """A read-only DRAM region."""
    return Buffer(name, Space.DRAM, nbytes, manual=True, base=base)
