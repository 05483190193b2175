"""Flash attention over KV tiles with the KV write fused in. GQA heads are never expanded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calc.core.isa import Alu, DType, Engine, Fn, Op, Red
from calc.core.numerics import MASKED
from calc.kernels.base import Attr, Call, Constraint, Example, Kernel, Numerics, Work, softcap_positive, store
from calc.kernels.program import Dim, Reg, View, dense

if TYPE_CHECKING:
    from calc.kernels.lowering import KvBuffers, Lowering

NO_WINDOW = 2**31 - 1


def heads_divide(call: Call) -> str | None:
    """Query heads are a multiple of KV heads."""
    h, kv = call.int("heads"), call.int("kv_heads")
    return None if h % kv == 0 else f"{h} query heads over {kv} KV heads"


class Attention(Kernel):
    """Writes k and v into the cache at ``past``, then ``y = softmax(scale * q k^T, causal, window) v``.

    q [B, S, heads * Dk], k [B, S, kv_heads * Dk], v [B, S, kv_heads * Dv], past_k [B, kv_heads, C, Dk],
    past_v [B, kv_heads, C, Dv], past int64 [B]; y [B, S, heads * Dv], kv_k and kv_v the updated caches.

    Scores, probabilities and the running sums stay in FP32 (the matrix engine takes the FP32 probabilities); y is
    rounded once. Online softmax after Milakov and Gimelshein 2018 (arXiv 1805.02867).
    Attributes of a call: heads, kv_heads, head_dim, value_dim, scale, softcap (0 for none), window (0 for none).
    """

    name = "Attention"
    constraints: tuple[Constraint, ...] = (heads_divide, softcap_positive)

    def formals(self, attrs: Mapping[str, Attr]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("q", "k", "v", "past_k", "past_v", "past"), ("y", "kv_k", "kv_v")

    def weights(self, attrs: Mapping[str, Attr]) -> tuple[str, ...]:
        return ()

    def body(self, attrs: Mapping[str, Attr], numerics: Numerics) -> str:
        lines = []
        for x, heads, dim in (
            ("q", attrs["heads"], attrs["head_dim"]),
            ("k", attrs["kv_heads"], attrs["head_dim"]),
            ("v", attrs["kv_heads"], attrs["value_dim"]),
        ):
            lines += [
                f"{x}_split = Constant<value_ints: ints = [0, 0, {heads}, {dim}]>()",
                f"{x}_heads = Reshape({x}, {x}_split)",
                f"{x}_t = Transpose<perm: ints = [0, 2, 1, 3]>({x}_heads)",
            ]
        window = int(attrs["window"])  # type: ignore[arg-type]
        left = f", left_window_size: int = {window - 1}" if window else ""
        lines += [
            "kv_k = TensorScatter<axis: int = 2>(past_k, k_t, past)",
            "kv_v = TensorScatter<axis: int = 2>(past_v, v_t, past)",
            "shape = Shape(q)",
            "one = Constant<value_int: int = 1>()",
            "seq = Gather<axis: int = 0>(shape, one)",
            "valid = Add(past, seq)",
            f"a = Attention<is_causal: int = 1, scale: float = {float(attrs['scale'])!r}, "  # type: ignore[arg-type]
            f"softcap: float = {float(attrs['softcap'])!r}{left}>(q_t, kv_k, kv_v, , , , valid)",  # type: ignore[arg-type]
            "a_t = Transpose<perm: ints = [0, 2, 1, 3]>(a)",
            "a_join = Constant<value_ints: ints = [0, 0, -1]>()",
            "a_flat = Reshape(a_t, a_join)",
            store("a_flat", "y", numerics),
        ]
        return "\n".join(lines)

    def work(self, call: Call, rows: int, context: int) -> Work:
        per_key = call.int("heads") * (call.int("head_dim") + call.int("value_dim"))
        return Work(rows * context * per_key, rows * context * call.int("heads") * 4)

    def lower(self, low: Lowering, call: Call) -> None:
        _Flash(low, call).emit()

    def examples(self) -> tuple[Example, ...]:
        base: dict[str, Attr] = {
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 16,
            "value_dim": 16,
            "scale": 0.25,
            "softcap": 0.0,
            "window": 0,
        }
        cache = {"past_k": (1, 2, 96, 16), "past_v": (1, 2, 96, 16), "past": (1,)}
        prefill = {"q": (1, 24, 64), "k": (1, 24, 32), "v": (1, 24, 32), **cache}
        decode = {"q": (1, 1, 64), "k": (1, 1, 32), "v": (1, 1, 32), **cache}
        return (
            Example(base, prefill, {"past": [0]}),
            Example(base, prefill, {"past": [37]}),
            Example({**base, "softcap": 5.0}, prefill, {"past": [11]}),
            Example({**base, "window": 9}, prefill, {"past": [30]}),
            Example(base, decode, {"past": [50]}),
            Example({**base, "window": 8}, decode, {"past": [50]}),
        )


@dataclass
class _Flash:
    """One attention call while it is being written. Scores are [kv head, query, group, key]."""

    low: Lowering
    call: Call

    def __post_init__(self) -> None:
        c = self.call
        self.heads, self.kv_heads = c.int("heads"), c.int("kv_heads")
        self.group = self.heads // self.kv_heads
        self.dk, self.dv = c.int("head_dim"), c.int("value_dim")
        self.window = c.int("window")
        self.seq = self.low.variant.seq
        per_key = self.heads * 4
        budget = self.low.choices.score_bytes
        self.q_block = min(self.seq, max(1, budget // (per_key * min(128, self.low.choices.kv_tile))))
        rows = self.low.kv[self._layer].rows
        self.tile = max(16, min(self.low.choices.kv_tile, budget // (per_key * self.q_block), rows) // 16 * 16)

    @property
    def _layer(self) -> int:
        assert self.call.layer is not None
        return self.call.layer

    def emit(self) -> None:
        """Write k and v, then attend; sequence by sequence of the batch."""
        low, em = self.low, self.low.em
        self.y = low.new(self.call.outputs[0], self.heads * self.dv)
        cells = self.kv_heads * self.q_block * self.group
        self.k_tile = em.sram("k_tile", self.tile * self.kv_heads * self.dk * 2)
        self.v_tile = em.sram("v_tile", self.tile * self.kv_heads * self.dv * 2)
        self.scores = em.sram("scores", cells * self.tile * 4)
        self.acc = em.sram("acc", cells * self.dv * 4)
        self.stats = {n: em.sram(n, cells * 4) for n in ("row_max", "new_max", "factor", "row_sum", "tile_sum")}
        if low.variant.batch == 1:
            with em.scope():
                self._sequence(None)
        else:
            # an idle sequence has no query that would write its row
            em.fill((low.variant.batch, self.y.width), self.y.view, 0.0)
            with em.loop(low.variant.batch) as b:
                self._sequence(b)

    def _sequence(self, b: Reg | None) -> None:
        low, em, kv = self.low, self.low.em, self.low.kv[self._layer]
        seq: Dim = 0 if b is None else b
        past, cur, slot = (em.csr(n, seq) for n in ("past_kv_cur_seq_len", "cur_seq_len", "kv_slot"))
        for which, formal, dim in (("key", "k", self.dk), ("value", "v", self.dv)):
            src = low.act(self.call.inputs[formal])
            rows = src.view if b is None else src.view.at(0, (b, self.seq * src.row_bytes))
            em.store(kv.view(which, slot, (past,)), rows, (cur, self.kv_heads * dim))
        if self.seq == 1:
            self._block(kv, b, slot, past, cur, None)
            return
        blocks = em.alu(Alu.CDIV, cur, self.q_block)
        with em.loop(blocks) as qb:
            q0 = em.alu(Alu.MUL, qb, self.q_block)
            n = em.alu(Alu.MIN, em.alu(Alu.SUB, cur, q0), self.q_block)
            first = em.alu(Alu.ADD, past, q0)
            self._block(kv, b, slot, first, n, q0)

    def _block(self, kv: KvBuffers, b: Reg | None, slot: Reg, first: Reg, n: Dim, q0: Reg | None) -> None:
        """Queries at positions ``first .. first + n - 1`` against every key they may see."""
        em, low = self.low.em, self.low
        g, hk = self.group, self.kv_heads
        q = low.act(self.call.inputs["q"])
        terms = [(r, step * q.row_bytes) for r, step in ((b, self.seq), (q0, 1)) if r is not None]
        qv = q.view.at(0, *terms).stepped(g * self.dk * 2, q.row_bytes, self.dk * 2, 2)
        rows: tuple[Dim, ...] = (hk, n, g)
        st = {k: dense(v, DType.F32, hk, self.q_block, g) for k, v in self.stats.items()}
        acc = dense(self.acc, DType.F32, hk, self.q_block, g, self.dv)
        em.fill(rows, st["row_max"], MASKED)
        em.fill(rows, st["row_sum"], 0.0)
        em.fill((*rows, self.dv), acc, 0.0)
        total = em.alu(Alu.ADD, first, n)
        start = None
        tiles = em.alu(Alu.CDIV, total, self.tile)
        if self.window:
            oldest = em.alu(Alu.MAX, em.alu(Alu.SUB, first, self.window - 1), 0)
            start = em.alu(Alu.DIV, oldest, self.tile)
            tiles = em.alu(Alu.SUB, tiles, start)
        with em.loop(tiles) as t:
            index = t if start is None else em.alu(Alu.ADD, t, start)
            t0 = em.alu(Alu.MUL, index, self.tile)
            keys = em.alu(Alu.MIN, em.alu(Alu.SUB, total, t0), self.tile)
            self._tile(kv, slot, rows, qv, acc, st, (first, t0, keys))
        size = 2
        y = self.y.view.at(0, *[(r, s * self.y.row_bytes) for r, s in ((b, self.seq), (q0, 1)) if r is not None])
        out = y.stepped(g * self.dv * size, self.y.row_bytes, self.dv * size, size)
        sums = st["row_sum"]
        em.vmap(Fn.DIV, (*rows, self.dv), out, acc, sums.stepped(*sums.steps, 0))

    def _tile(
        self,
        kv: KvBuffers,
        slot: Reg,
        rows: tuple[Dim, ...],
        qv: View,
        acc: View,
        st: dict[str, View],
        where: tuple[Reg, Reg, Reg],
    ) -> None:
        em, hk, call = self.low.em, self.kv_heads, self.call
        first, t0, keys = where
        krow, vrow = hk * self.dk * 2, hk * self.dv * 2
        kt, vt = View(self.k_tile, DType.BF16, (krow, 2)), View(self.v_tile, DType.BF16, (vrow, 2))
        em.load(kt, kv.view("key", slot, (t0,)), (keys, hk * self.dk))
        em.load(vt, kv.view("value", slot, (t0,)), (keys, hk * self.dv))
        s = dense(self.scores, DType.F32, hk, self.q_block, self.group, self.tile)
        dims = (rows[0], rows[1], rows[2], keys, self.dk)
        em.gemm(dims, s, qv, kt.stepped(self.dk * 2, krow, 2), alpha=call.float("scale"))
        cap = call.float("softcap")
        cells = (*rows, keys)
        if cap:
            em.vmap(Fn.AFFINE, cells, s, s, f=(1.0 / cap, 0.0))
            em.vmap(Fn.TANH, cells, s, s)
            em.vmap(Fn.AFFINE, cells, s, s, f=(cap, 0.0))
        if self.seq > 1 or self.window:
            # the key at index j is position t0 + j, the query at index i position first + i: seen when 0 <= first + i
            # - t0 - j < window. One decode query without a window sees every key that is loaded.
            ahead = em.alu(Alu.SUB, first, t0)
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
        em.gemm(
            (rows[0], rows[1], rows[2], self.dv, keys), acc, s, vt.stepped(self.dv * 2, 2, vrow), alpha=1.0, acc=True
        )
