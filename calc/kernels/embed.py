"""Token embedding: rows of the table by token id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from calc.core.isa import DType, Engine, Fn, Op
from calc.core.roles import IDS
from calc.kernels.base import Attr, Call, Example, Kernel, Numerics, Work, store
from calc.kernels.program import View, dense

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering


class Embed(Kernel):
    """``y[b, s, :] = scale * table[ids[b, s], :]``, ids int64 [B, S], table [V, H], y [B, S, H]."""

    name = "Embed"
    loads = IDS
    gathers = ("table",)

    def formals(self, attrs: Mapping[str, Attr]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("ids", "table"), ("y",)

    def weights(self, attrs: Mapping[str, Attr]) -> tuple[str, ...]:
        return ("table",)

    def body(self, attrs: Mapping[str, Attr], numerics: Numerics) -> str:
        return "\n".join(
            (
                "rows = Gather<axis: int = 0>(table, ids)",
                f"factor = Constant<value_float: float = {float(attrs['scale'])!r}>()",  # type: ignore[arg-type]
                "scaled = Mul(rows, factor)",
                store("scaled", "y", numerics),
            )
        )

    def work(self, call: Call, rows: int, context: int) -> Work:
        width = call.shape("table")[1]
        return Work(0, rows * width)

    def lower(self, low: Lowering, call: Call) -> None:
        em, w = low.em, low.packed(call, "table")
        y = low.new(call.outputs[0], w.layout.cols)
        rows = y.rows
        ids = dense(em.sram("ids", 4 * rows.limit), DType.I32, rows.limit)
        source = low.memory.io[IDS]
        em.load(ids, low.from_first(dense(source, DType.I32, source.nbytes // 4), 4), (rows.count,))
        table = View(em.weights, DType.BF16, (w.layout.code_row_bytes, 2), w.offset)
        em.op(Op.LOADG, Engine.ADMA, (rows.count, y.width), imm=(w.layout.rows,), dst=y.view, a=table, b=ids)
        if call.float("scale") != 1.0:
            em.vmap(Fn.AFFINE, (rows.count, y.width), y.view, y.view, f=(call.float("scale"), 0.0))

    def examples(self) -> tuple[Example, ...]:
        return (
            Example({"scale": 1.0}, {"ids": (1, 5), "table": (64, 48)}),
            Example({"scale": 5.656854249492381}, {"ids": (1, 16), "table": (33, 341)}),
        )
