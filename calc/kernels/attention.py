"""Flash attention over KV tiles with the KV write fused in. GQA heads are never expanded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from calc.core.errors import InternalError
from calc.core.isa import Alu, DType, Engine, Fn, Op, Red
from calc.core.numerics import MASKED
from calc.core.roles import state_of
from calc.core.schemes import Scheme
from calc.core.state import StateSpec
from calc.kernels.base import Attrs, Call, Constraint, Example, Kernel, Numerics, Work, softcap_positive, store
from calc.kernels.program import Dim, Reg, View, dense

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering

NO_WINDOW = 2**31 - 1


def heads_divide(call: Call[AttentionAttrs]) -> str | None:
    """Query heads are a multiple of KV heads."""
    h, kv = call.attrs.heads, call.attrs.kv_heads
    return None if h % kv == 0 else f"{h} query heads over {kv} KV heads"


@dataclass(frozen=True)
class AttentionAttrs(Attrs):
    """Attributes of `Attention`.

    Attributes:
        heads: query heads.
        kv_heads: heads of keys and values.
        head_dim: elements of a head of queries and keys.
        value_dim: elements of a head of values.
        scale: factor of the scores.
        softcap: what the scores stay below, 0 for none.
        window: keys that a query sees, its own among them; 0 for all.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    softcap: float
    window: int


class Attention(Kernel[AttentionAttrs]):
    """Writes k and v into the cache at ``past``, then ``y = softmax(scale * q k^T, causal, window) v``.

    q [B, S, heads * Dk], k [B, S, kv_heads * Dk], v [B, S, kv_heads * Dv], past_k [B, kv_heads, C, Dk],
    past_v [B, kv_heads, C, Dv], past int64 [B]; y [B, S, heads * Dv], kv_k and kv_v the updated caches.

    Scores, probabilities and the running sums stay in FP32 (the matrix engine takes the FP32 probabilities); y is
    rounded once. Online softmax after Milakov and Gimelshein 2018 (arXiv 1805.02867).
    """

    name = "Attention"
    attributes = AttentionAttrs
    constraints: tuple[Constraint[AttentionAttrs], ...] = (heads_divide, softcap_positive)

    def formals(self, attrs: AttentionAttrs) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("q", "k", "v", "past_k", "past_v", "past"), ("y", "kv_k", "kv_v")

    def weights(self, attrs: AttentionAttrs) -> tuple[str, ...]:
        return ()

    def states(self, call: Call[AttentionAttrs]) -> Mapping[str, StateSpec]:
        window = call.attrs.window
        return {
            formal: StateSpec(
                name=state_of(call.inputs[formal]),
                layer=call.layer,
                heads=call.attrs.kv_heads,
                dim=dim,
                growth="ring" if window else "token",
                window=window or None,
            )
            for formal, dim in (("past_k", call.attrs.head_dim), ("past_v", call.attrs.value_dim))
        }

    def body(self, attrs: AttentionAttrs, schemes: Mapping[str, Scheme], numerics: Numerics) -> str:
        lines = []
        for x, heads, dim in (
            ("q", attrs.heads, attrs.head_dim),
            ("k", attrs.kv_heads, attrs.head_dim),
            ("v", attrs.kv_heads, attrs.value_dim),
        ):
            lines += [
                f"{x}_split = Constant<value_ints: ints = [0, 0, {heads}, {dim}]>()",
                f"{x}_heads = Reshape({x}, {x}_split)",
                f"{x}_t = Transpose<perm: ints = [0, 2, 1, 3]>({x}_heads)",
            ]
        window = attrs.window
        left = f", left_window_size: int = {window - 1}" if window else ""
        lines += [
            "kv_k = TensorScatter<axis: int = 2>(past_k, k_t, past)",
            "kv_v = TensorScatter<axis: int = 2>(past_v, v_t, past)",
            "shape = Shape(q)",
            "one = Constant<value_int: int = 1>()",
            "seq = Gather<axis: int = 0>(shape, one)",
            "valid = Add(past, seq)",
            f"a = Attention<is_causal: int = 1, scale: float = {attrs.scale!r}, "
            f"softcap: float = {attrs.softcap!r}{left}>(q_t, kv_k, kv_v, , , , valid)",
            "a_t = Transpose<perm: ints = [0, 2, 1, 3]>(a)",
            "a_join = Constant<value_ints: ints = [0, 0, -1]>()",
            "a_flat = Reshape(a_t, a_join)",
            store("a_flat", "y", numerics),
        ]
        return "\n".join(lines)

    def work(self, call: Call[AttentionAttrs], rows: int, context: int) -> Work:
        per_key = call.attrs.heads * (call.attrs.head_dim + call.attrs.value_dim)
        return Work(rows * context * per_key, rows * context * call.attrs.heads * 4)

    def lower(self, low: Lowering, call: Call[AttentionAttrs]) -> None:
        _Flash(low, call).emit()

    def examples(self) -> tuple[Example[AttentionAttrs], ...]:
        base = AttentionAttrs(4, 2, head_dim=16, value_dim=16, scale=0.25, softcap=0.0, window=0)
        cache = {"past_k": (1, 2, 96, 16), "past_v": (1, 2, 96, 16), "past": (1,)}
        prefill = {"q": (1, 24, 64), "k": (1, 24, 32), "v": (1, 24, 32), **cache}
        decode = {"q": (1, 1, 64), "k": (1, 1, 32), "v": (1, 1, 32), **cache}
        return (
            Example(base, prefill, {"past": [0]}),
            Example(base, prefill, {"past": [37]}),
            Example(replace(base, softcap=5.0), prefill, {"past": [11]}),
            Example(replace(base, window=9), prefill, {"past": [30]}),
            Example(base, decode, {"past": [50]}),
            Example(replace(base, window=8), decode, {"past": [50]}),
        )


@dataclass
class _Flash:
    """One attention call while it is being written. Scores are [kv head, query, group, key].

    Keys come from two places: the state in DRAM, and, where that is a ring, the block's own rows in SRAM. A ring has
    no room for them beside the keys that the block's first query still sees; they are written to it at the end.
    """

    low: Lowering
    call: Call[AttentionAttrs]

    def __post_init__(self) -> None:
        c, low = self.call, self.low
        self.heads, self.kv_heads = c.attrs.heads, c.attrs.kv_heads
        self.group = self.heads // self.kv_heads
        self.dk, self.dv = c.attrs.head_dim, c.attrs.value_dim
        self.window = c.attrs.window
        self.decode = low.variant.seq == 1
        self.keys, self.values = low.state(c, "past_k"), low.state(c, "past_v")
        per_key = self.heads * 4
        choices, limit = low.choices, low.tokens.limit
        self.q_block = 1 if self.decode else min(limit, max(1, choices.score_bytes // (per_key * choices.key_block)))
        fits = min(choices.key_tile, choices.score_bytes // (per_key * self.q_block), self.keys.rows)
        unit = choices.state_rows
        self.tile = max(unit, fits // unit * unit)
        while self.keys.ring and self.keys.rows % self.tile:
            self.tile -= unit  # a tile must not cross the ring's end

    def emit(self) -> None:
        """Write k and v, and attend; sequence by sequence of the batch."""
        low, em = self.low, self.low.em
        self.q, self.k, self.v = (low.act(self.call.inputs[n]) for n in ("q", "k", "v"))
        self.y = low.new(self.call.outputs[0], self.heads * self.dv, self.q.rows)
        cells = self.kv_heads * self.q_block * self.group
        self.k_tile = em.sram("k_tile", self.tile * self.keys.row_bytes)
        self.v_tile = em.sram("v_tile", self.tile * self.values.row_bytes)
        self.scores = em.sram("scores", cells * self.tile * 4)
        acc = em.sram("acc", cells * self.dv * 4)
        self.acc = dense(acc, DType.F32, self.kv_heads, self.q_block, self.group, self.dv)
        self.stats = {
            n: dense(em.sram(n, cells * 4), DType.F32, self.kv_heads, self.q_block, self.group)
            for n in ("row_max", "new_max", "factor", "row_sum", "tile_sum")
        }
        if not self.decode or low.variant.batch == 1:
            with em.scope():
                self._sequence(None)
        else:
            # an idle sequence has no query that would write its row
            em.fill((low.variant.batch, self.y.width), self.y.view, 0.0)
            with em.loop(low.variant.batch) as b:
                self._sequence(b)

    def _sequence(self, b: Reg | None) -> None:
        low, em = self.low, self.low.em
        seq: Dim = 0 if b is None else b
        first, slot = low.position(seq), em.csr("kv_slot", seq)
        if self.decode:
            cur = em.csr("cur_seq_len", seq)
            row = em.alu(Alu.MOD, first, self.keys.rows) if self.keys.ring else first
            for act, state in ((self.k, self.keys), (self.v, self.values)):
                em.store(
                    state.view(slot, row),
                    act.view if b is None else act.view.at(0, (b, act.row_bytes)),
                    (cur, act.width),
                )
            self._block(b, slot, first, cur, None)
            return
        rows = self.q.rows.count
        count = rows if isinstance(rows, Reg) else em.const(rows)
        if not self.keys.ring:
            for act, state in ((self.k, self.keys), (self.v, self.values)):
                em.store(state.view(slot, first), act.view, (count, act.width))
        with em.loop(em.alu(Alu.CDIV, count, self.q_block)) as qb:
            q0 = em.alu(Alu.MUL, qb, self.q_block)
            n = em.alu(Alu.MIN, em.alu(Alu.SUB, count, q0), self.q_block)
            self._block(None, slot, first, n, q0)
        if self.keys.ring:
            self._write_ring(slot, first, count)

    def _write_ring(self, slot: Reg, first: Reg, count: Reg) -> None:
        """The block's last rows, as many as the ring holds, in two runs: up to the ring's end, and from its start."""
        em, size = self.low.em, self.keys.rows
        keep = em.alu(Alu.MIN, count, size)
        skip = em.alu(Alu.SUB, count, keep)
        start = em.alu(Alu.MOD, em.alu(Alu.ADD, first, skip), size)
        until = em.alu(Alu.MIN, keep, em.alu(Alu.SUB, em.const(size), start))
        rest = em.alu(Alu.SUB, keep, until)
        for act, state in ((self.k, self.keys), (self.v, self.values)):
            rows = act.view.at(0, (skip, act.row_bytes))
            em.store(state.view(slot, start), rows, (until, act.width))
            em.store(state.view(slot), rows.at(0, (until, act.row_bytes)), (rest, act.width))

    def _block(self, b: Reg | None, slot: Reg, first: Reg, n: Dim, q0: Reg | None) -> None:
        """`n` queries, the first of them `q0` rows into the block at position `first`, against every key they see."""
        em = self.low.em
        g, q, y = self.group, self.q, self.y
        at = [r for r in (b, q0) if r is not None]
        qv = q.view.at(0, *[(r, q.row_bytes) for r in at]).stepped(g * self.dk * 2, q.row_bytes, self.dk * 2, 2)
        rows: tuple[Dim, ...] = (self.kv_heads, n, g)
        em.fill(rows, self.stats["row_max"], MASKED)
        em.fill(rows, self.stats["row_sum"], 0.0)
        em.fill((*rows, self.dv), self.acc, 0.0)
        here = first if q0 is None else em.alu(Alu.ADD, first, q0)
        own = self.keys.ring and not self.decode
        stored = first if own else em.alu(Alu.ADD, here, n)
        for t0, keys in self._tiles(here, stored):
            row = em.alu(Alu.MOD, t0, self.keys.rows) if self.keys.ring else t0
            k = View(self.k_tile, DType.BF16, (self.keys.row_bytes, 2))
            v = View(self.v_tile, DType.BF16, (self.values.row_bytes, 2))
            em.load(k, self.keys.view(slot, row), (keys, self.k.width))
            em.load(v, self.values.view(slot, row), (keys, self.v.width))
            self._tile(rows, qv, k, v, em.alu(Alu.SUB, here, t0), keys)
        if own:
            if q0 is None:
                raise InternalError(f"{self.call.name}: a block of queries without a place among its own keys")
            for t0, keys in self._tiles(q0, em.alu(Alu.ADD, q0, n)):
                k, v = (a.view.at(0, (t0, a.row_bytes)) for a in (self.k, self.v))
                self._tile(rows, qv, k, v, em.alu(Alu.SUB, q0, t0), keys)
        out = y.view.at(0, *[(r, y.row_bytes) for r in at]).stepped(g * self.dv * 2, y.row_bytes, self.dv * 2, 2)
        sums = self.stats["row_sum"]
        em.vmap(Fn.DIV, (*rows, self.dv), out, self.acc, sums.stepped(*sums.steps, 0))

    def _tiles(self, query: Reg, end: Reg) -> Iterator[tuple[Reg, Reg]]:
        """A loop over tiles of keys up to `end`, from the oldest that the first query sees: (start, keys in the tile).

        Query and keys are counted from one origin: position 0, or the block's first row. Tiles start at multiples of
        their size, so that none crosses the end of a ring.
        """
        em = self.low.em
        tiles, start = em.alu(Alu.CDIV, end, self.tile), None
        if self.window:
            oldest = em.alu(Alu.MAX, em.alu(Alu.SUB, query, self.window - 1), 0)
            start = em.alu(Alu.DIV, oldest, self.tile)
            tiles = em.alu(Alu.SUB, tiles, start)
        with em.loop(tiles) as t:
            index = t if start is None else em.alu(Alu.ADD, t, start)
            t0 = em.alu(Alu.MUL, index, self.tile)
            yield t0, em.alu(Alu.MIN, em.alu(Alu.SUB, end, t0), self.tile)

    def _tile(self, rows: tuple[Dim, ...], qv: View, k: View, v: View, ahead: Reg, keys: Reg) -> None:
        """One tile of keys and values (steps: row, element); the first query is `ahead` of the tile's first key."""
        em, call, st, acc = self.low.em, self.call, self.stats, self.acc
        s = dense(self.scores, DType.F32, self.kv_heads, self.q_block, self.group, self.tile)
        dims = (rows[0], rows[1], rows[2], keys, self.dk)
        em.gemm(dims, s, qv, k.stepped(self.dk * 2, k.steps[0], 2), alpha=call.attrs.scale)
        cap = call.attrs.softcap
        cells = (*rows, keys)
        if cap:
            em.vmap(Fn.AFFINE, cells, s, s, f=(1.0 / cap, 0.0))
            em.vmap(Fn.TANH, cells, s, s)
            em.vmap(Fn.AFFINE, cells, s, s, f=(cap, 0.0))
        if not self.decode or self.window:
            # key j of the tile is seen by query i when 0 <= ahead + i - j < window. One decode query without a window
            # sees every key that is loaded.
            em.op(
                Op.VBAND, Engine.VEC, cells, imm=(1, ahead.index, self.window or NO_WINDOW), fimm=(MASKED,), dst=s, a=s
            )
        em.vreduce(Red.MAX, cells, st["new_max"], s)
        em.vmap(Fn.MAX, rows, st["new_max"], st["new_max"], st["row_max"])
        em.vmap(Fn.EXPSUB, rows, st["factor"], st["row_max"], st["new_max"])
        wide = st["new_max"]
        em.vmap(Fn.EXPSUB, cells, s, s, wide.stepped(*wide.steps, 0))
        em.vreduce(Red.SUM, cells, st["tile_sum"], s)
        em.vmap(Fn.MADD, rows, st["row_sum"], st["row_sum"], st["factor"], st["tile_sum"])
        em.vmap(Fn.COPY, rows, st["row_max"], st["new_max"])
        f = st["factor"]
        em.vmap(Fn.MUL, (*rows, self.dv), acc, acc, f.stepped(*f.steps, 0))
        out = (rows[0], rows[1], rows[2], self.dv, keys)
        em.gemm(out, acc, s, v.stepped(self.dv * 2, 2, v.steps[0]), alpha=1.0, acc=True)
