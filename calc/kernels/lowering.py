"""`Lowering`: what a kernel's `lower` works with, and the pieces kernels share.

A program works through the call's rows in *blocks*: as many rows as the SRAM has room for. A kernel sees one block. It
asks its inputs how many rows there are (`Act.rows`) and the lowering where the block starts (`Lowering.position`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from calc.core.errors import InternalError
from calc.core.isa import ITEMSIZE, Alu, DType, Engine, Fn, Op, Red, Space
from calc.core.packing import align
from calc.core.schemes import Scheme
from calc.core.state import StateSpec
from calc.core.target import Tiling
from calc.core.variant import Variant
from calc.kernels.base import Call
from calc.kernels.emit import Emitter
from calc.kernels.program import Buffer, Dim, Packed, Plain, Reg, TileRef, View, dense

ACTIVATIONS = {
    "silu": Fn.SILU,
    "gelu": Fn.GELU,
    "gelu_tanh": Fn.GELU_TANH,
    "sigmoid": Fn.SIGMOID,
    "tanh": Fn.TANH,
}

STATE_TYPES = {"bf16": DType.BF16, "f32": DType.F32, "i8": DType.I8}


@dataclass(frozen=True)
class Rows:
    """Rows of a value in the block that is running: `count` valid ones in memory for `limit`."""

    count: Dim
    limit: int


@dataclass(frozen=True)
class Act:
    """An activation in SRAM or, spilled, in DRAM: [rows, width], rows `row_bytes` apart."""

    buf: Buffer
    width: int
    rows: Rows
    row_bytes: int
    dtype: DType = DType.BF16

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
class StateBuffer:
    """A chip's part of a state in DRAM: slots of `rows` rows, each of `heads` heads.

    Attributes:
        spec: the state.
        buf: its memory.
        heads: heads that this chip holds.
        rows: rows of one slot.
        ring: whether position t lies at row ``t mod rows``.
    """

    spec: StateSpec
    buf: Buffer
    heads: int
    rows: int
    ring: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.spec.row_bytes(self.heads)

    def view(self, slot: Reg, *row: Reg) -> View:
        """Steps (row, element) of a slot, from the row given by a sum of registers."""
        size = self.row_bytes
        terms = ((slot, self.rows * size), *((r, size) for r in row))
        dtype = STATE_TYPES[self.spec.dtype]
        return View(self.buf, dtype, (size, ITEMSIZE[dtype]), 0, terms)


@dataclass(frozen=True)
class ChipMemory:
    """One chip's DRAM as the lowering sees it.

    Attributes:
        weights: handles of the shard's weights by name.
        shard_bytes: size of the shard, which starts at address 0.
        states: states by the name of the graph input that stands for them.
        io: inputs and outputs by semantic name.
        scratch: first address after all of these, where activations may be spilled.
    """

    weights: Mapping[str, Packed | Plain]
    shard_bytes: int
    states: Mapping[str, StateBuffer]
    io: Mapping[str, Buffer]
    scratch: int = 0


@dataclass(frozen=True)
class Choices:
    """Sizes the target asks for, from its `Tiling`.

    Attributes:
        score_bytes: f32 attention scores of one tile, at most this many bytes.
        key_tile: keys per tile at most.
        key_block: keys that a block of queries is sized for.
        activation_row: elements that rows of activations are padded to.
        state_rows: rows that rows of states are padded to; tiles of keys are a multiple.
    """

    score_bytes: int
    key_tile: int
    key_block: int
    activation_row: int
    state_rows: int

    @staticmethod
    def of(tiling: Tiling) -> Choices:
        """A target's."""
        return Choices(
            score_bytes=int(tiling.score_tile.value),
            key_tile=int(tiling.key_tile.value),
            key_block=int(tiling.key_block.value),
            activation_row=int(tiling.activation_row.value),
            state_rows=int(tiling.state_rows.value),
        )


@dataclass
class _Block:
    """The block of rows that is being written: its rows, and where it starts within the call (None: at its start)."""

    tokens: Rows
    first: Reg | None = None
    tables: dict[str, Act] = field(default_factory=dict)


class Lowering:
    """One chip's part of one sub-model while it is being written.

    Attributes:
        em: the emitter.
        variant: the static shape.
        memory: the chip's DRAM.
        sequences: the rows of values that have one row per sequence.
    """

    def __init__(self, em: Emitter, variant: Variant, memory: ChipMemory, choices: Choices) -> None:
        self.em = em
        self.variant = variant
        self.memory = memory
        self.choices = choices
        self.acts: dict[str, Act] = {}
        self.spilled: dict[str, Act] = {}
        self.sequences = Rows(variant.batch, variant.batch)
        self._block = _Block(self.sequences)

    # -- blocks of rows ----------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> Rows:
        """The rows of values that have one row per token, in the block that is running."""
        return self._block.tokens

    def begin(self, tokens: Rows, first: Reg | None) -> None:
        """A block of rows starts.

        Args:
            tokens: its rows.
            first: index of its first row within the call; None where the block is the whole call.
        """
        self._block = _Block(tokens, first)
        # what lies in SRAM whole has the rows of the call, counted by this block's register
        self.acts = {n: a if a.rows == self.sequences else replace(a, rows=tokens) for n, a in self.acts.items()}

    def end(self) -> None:
        """The block has ended: what lies in SRAM row by row is gone with it, unless the block was the whole call."""
        if self._block.first is not None:
            self.acts = {n: a for n, a in self.acts.items() if a.rows == self.sequences}
        self._block = _Block(self._block.tokens)

    def position(self, seq: Dim = 0) -> Reg:
        """Position of the block's first row in sequence `seq`: the tokens of the slot before it."""
        past = self.em.csr("past_kv_cur_seq_len", seq)
        return past if self._block.first is None else self.em.alu(Alu.ADD, past, self._block.first)

    def from_first(self, view: View, row: int) -> View:
        """A view over all rows of the call, moved to the block's first; `row` bytes apart."""
        return view if self._block.first is None else view.at(0, (self._block.first, row))

    # -- values ------------------------------------------------------------------------------------------------------

    def act(self, value: str) -> Act:
        """The activation that holds a graph value.

        Raises:
            InternalError: nothing has put the value into SRAM.
        """
        try:
            return self.acts[value]
        except KeyError as e:
            raise InternalError(f"{self.em.nodes[-1:]}: {value} is not in SRAM") from e

    def new(self, value: str, width: int, rows: Rows | None = None, dtype: DType = DType.BF16) -> Act:
        """An activation for a graph value; one row per token unless told otherwise."""
        out = self.scratch(value, width, dtype, rows)
        self.acts[value] = out
        return out

    def scratch(self, name: str, width: int, dtype: DType = DType.F32, rows: Rows | None = None) -> Act:
        """An activation that lives within one kernel."""
        rows = self.tokens if rows is None else rows
        row = self.row_bytes(width, dtype)
        return Act(self.em.sram(name, rows.limit * row), width, rows, row, dtype)

    def row_bytes(self, width: int, dtype: DType) -> int:
        """Distance between rows of an activation in memory."""
        return align(width, self.choices.activation_row) * ITEMSIZE[dtype]

    def spill(self, value: str, limit: int) -> None:
        """Store the block's rows of a value to DRAM, in memory for `limit` rows of the call."""
        act = self.act(value)
        self.give_home(value, act.width, limit, act.dtype)
        home = self.spilled[value]
        self.em.store(self.from_first(home.view, home.row_bytes), act.view, (act.rows.count, act.width))

    def give_home(self, value: str, width: int, limit: int, dtype: DType = DType.BF16) -> None:
        """Reserve DRAM for `limit` rows of a value, once."""
        if value not in self.spilled:
            row = self.row_bytes(width, dtype)
            self.spilled[value] = Act(self.em.spill(value, limit * row), width, Rows(limit, limit), row, dtype)

    def fetch(self, value: str) -> None:
        """Load the block's rows of a value that an earlier block loop has spilled."""
        home = self.spilled[value]
        act = self.new(value, home.width, dtype=home.dtype)
        self.em.load(act.view, self.from_first(home.view, home.row_bytes), (act.rows.count, act.width))

    def packed(self, call: Call, formal: str) -> Packed:
        """The packed weight behind a formal input."""
        w = self.memory.weights[call.inputs[formal]]
        if not isinstance(w, Packed):
            raise InternalError(f"{call.name}: {formal} is a plain array, not packed tiles")
        return w

    def plain(self, call: Call, formal: str) -> Plain:
        """The plain f32 weight behind a formal input."""
        w = self.memory.weights[call.inputs[formal]]
        if not isinstance(w, Plain):
            raise InternalError(f"{call.name}: {formal} is packed tiles, not a plain array")
        return w

    def state(self, call: Call, formal: str) -> StateBuffer:
        """The state behind a formal input."""
        return self.memory.states[call.inputs[formal]]

    # -- shared pieces -----------------------------------------------------------------------------------------------

    def rms_norm(self, x: Act, gamma: Plain, eps: float, dst: View, residual: View | None = None) -> None:
        """``dst = [residual +] x * rsqrt(mean(x^2) + eps) * gamma`` row by row, rounded once at the store.

        Args:
            x: [rows, width].
            gamma: f32 [width] in the shard.
            eps: added to the mean square.
            dst: steps (row, column).
            residual: added in FP32 before the store, steps (row, column).
        """
        em, rows = self.em, x.rows.count
        scale = self.row_scale(x.view, (x.rows,), x.width, eps)
        g = em.constant(gamma, "gamma")
        wide = View(scale, DType.F32, (4, 0))
        gview = View(g, DType.F32, (0, 4))
        if residual is None:
            em.vmap(Fn.MUL3, (rows, x.width), dst, x.view, wide, gview)
            return
        tmp = self.scratch("normed", x.width, rows=x.rows)
        em.vmap(Fn.MUL3, (rows, x.width), tmp.view, x.view, wide, gview)
        em.vmap(Fn.ADD, (rows, x.width), dst, tmp.view, residual)

    def row_scale(self, x: View, outer: tuple[Rows, ...], width: int, eps: float) -> Buffer:
        """``rsqrt(mean(x^2) + eps)`` over the last dimension: f32, dense over the outer dimensions' limits."""
        em = self.em
        limits = [r.limit for r in outer]
        total = 1
        for n in limits:
            total *= n
        buf = em.sram("row_scale", 4 * total)
        view = dense(buf, DType.F32, *limits)
        counts = tuple(r.count for r in outer)
        em.vreduce(Red.SUMSQ, (*counts, width), view, x)
        em.vmap(Fn.RSQRT, counts, view, view, f=(1.0 / width, eps))
        return buf

    def quantized(self, x: View, rows: Rows, width: int, name: str) -> tuple[View, View]:
        """Dynamic int8 of each row: (codes i8 [rows, width], scales f32 [rows])."""
        codes = self.scratch(f"{name}_codes", width, DType.I8, rows)
        scale = self.em.sram(f"{name}_scale", 4 * rows.limit)
        sview = View(scale, DType.F32, (4,))
        self.em.op(Op.VQUANT, Engine.VEC, (rows.count, width), dst=codes.view, a=x, d=sview)
        return codes.view, sview

    def linear(
        self,
        w: Packed,
        x: MatrixRows,
        dst: View,
        *,
        addend: View | None = None,
        expert: Reg | None = None,
        staged: bool = False,
    ) -> Iterator[TileRef]:
        """A packed weight applied to rows, which are quantized first where the weight's scheme says so."""
        a, scale = x.under(w.scheme)
        count = x.rows.count
        yield from self.em.packed_gemm(w, count, a, dst, a_scale=scale, addend=addend, expert=expert, staged=staged)

    def rope_table(self, call: Call, formal: str) -> Act:
        """The block's rows of a RoPE table, f32 [rows, R / 2]; loaded once per block."""
        name = call.inputs[formal]
        tables = self._block.tables
        if name not in tables:
            em, w = self.em, self.plain(call, formal)
            half = w.shape[1]
            table = self.scratch(name, half)
            row = half * 4
            src = View(em.weights, DType.F32, (row, 4), w.offset)
            # one run of rows where the call's rows are one sequence's, else a row for each sequence
            for b in range(1 if self.variant.seq > 1 else self.variant.batch):
                with em.scope():
                    rows = self.tokens.count if self.variant.seq > 1 else 1
                    em.load(table.view.at(b * table.row_bytes), src.at(0, (self.position(b), row)), (rows, half))
            tables[name] = table
        return tables[name]


class MatrixRows:
    """Rows that go into matrix products: BF16 as they lie in memory, int8 codes once a scheme asks for them.

    Weights of one input share the codes.

    Args:
        low: where the quantization is written.
        view: bf16, steps (row, column).
        rows: how many rows.
        width: number of columns.
    """

    def __init__(self, low: Lowering, view: View, rows: Rows, width: int) -> None:
        self.low = low
        self.view = view
        self.rows = rows
        self.width = width
        self._codes: tuple[View, View] | None = None

    def under(self, scheme: Scheme) -> tuple[View, View | None]:
        """The operand a weight of this scheme takes, and its scale per row if it is int8."""
        if scheme.activations == "bf16":
            return self.view, None
        if self._codes is None:
            self._codes = self.low.quantized(self.view, self.rows, self.width, "x")
        return self._codes


def drain(tiles: Iterator[TileRef]) -> None:
    """Run a tile generator whose tiles nobody consumes one by one."""
    for _ in tiles:
        pass


def weight_region(name: str, nbytes: int, base: int) -> Buffer:
    """A read-only DRAM region."""
    return Buffer(name, Space.DRAM, nbytes, manual=True, base=base)
