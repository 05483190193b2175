"""Token embedding: rows of the table by token id."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calc.core.isa import DType, Engine, Fn, Op
from calc.core.roles import IDS
from calc.core.schemes import Scheme
from calc.kernels.base import Attrs, Call, Example, Kernel, Numerics, Work, store
from calc.kernels.program import View, dense

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering


@dataclass(frozen=True)
class EmbedAttrs(Attrs):
    """Attributes of `Embed`.

    Attributes:
        scale: factor of the table's rows.
    """

    scale: float


class Embed(Kernel[EmbedAttrs]):
    """``y[b, s, :] = scale * table[ids[b, s], :]``, ids int64 [B, S], table [V, H], y [B, S, H]."""

    name = "Embed"
    attributes = EmbedAttrs
    loads = IDS
    gathers = ("table",)

    def formals(self, attrs: EmbedAttrs) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("ids", "table"), ("y",)

    def weights(self, attrs: EmbedAttrs) -> tuple[str, ...]:
        return ("table",)

    def body(self, attrs: EmbedAttrs, schemes: Mapping[str, Scheme], numerics: Numerics) -> str:
        return "\n".join(
            (
                "rows = Gather<axis: int = 0>(table, ids)",
                f"factor = Constant<value_float: float = {attrs.scale!r}>()",
                "scaled = Mul(rows, factor)",
                store("scaled", "y", numerics),
            )
        )

    def work(self, call: Call[EmbedAttrs], rows: int, context: int) -> Work:
        width = call.shape("table")[1]
        return Work(0, rows * width)

    def lower(self, low: Lowering, call: Call[EmbedAttrs]) -> None:
        em, w = low.em, low.packed(call, "table")
        y = low.new(call.outputs[0], w.layout.cols)
        rows = y.rows
        ids = dense(em.sram("ids", 4 * rows.limit), DType.I32, rows.limit)
        source = low.memory.io[IDS]
        em.load(ids, low.from_first(dense(source, DType.I32, source.nbytes // 4), 4), (rows.count,))
        table = View(em.weights, DType.BF16, (w.layout.code_row_bytes, 2), w.offset)
        em.op(Op.LOADG, Engine.ADMA, (rows.count, y.width), imm=(w.layout.rows,), dst=y.view, a=table, b=ids)
        if call.attrs.scale != 1.0:
            em.vmap(Fn.AFFINE, (rows.count, y.width), y.view, y.view, f=(call.attrs.scale, 0.0))

    def examples(self) -> tuple[Example[EmbedAttrs], ...]:
        return (
            Example(EmbedAttrs(1.0), {"ids": (1, 5), "table": (64, 48)}),
            Example(EmbedAttrs(5.656854249492381), {"ids": (1, 16), "table": (33, 341)}),
        )
