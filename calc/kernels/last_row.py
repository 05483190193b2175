"""The last valid row of each sequence: what the head looks at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from calc.core.isa import Alu, Fn
from calc.core.schemes import Scheme
from calc.kernels.base import Attrs, Call, Example, Kernel, Numerics, Work

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering


class LastRow(Kernel):
    """``y[b] = x[b, cur[b] - 1]``; x [B, S, H], cur int64 [B], y [B, H]. No rounding: rows are copied.

    Where the rows of x were spilled to DRAM, only the one that is wanted comes back.
    """

    name = "LastRow"
    attributes = Attrs
    by_row = ("x",)

    def formals(self, attrs: Attrs) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("x", "cur"), ("y",)

    def weights(self, attrs: Attrs) -> tuple[str, ...]:
        return ()

    def body(self, attrs: Attrs, schemes: Mapping[str, Scheme], numerics: Numerics) -> str:
        return "\n".join(
            (
                "one = Constant<value_int: int = 1>()",
                "last0 = Sub(cur, one)",
                "zero = Constant<value_int: int = 0>()",
                "last = Max(last0, zero)",
                "ax = Constant<value_ints: ints = [1]>()",
                "last_col = Unsqueeze(last, ax)",
                "y = GatherND<batch_dims: int = 1>(x, last_col)",
            )
        )

    def work(self, call: Call, rows: int, context: int) -> Work:
        return Work(0, call.shape("cur")[0] * call.shape("x")[-1])

    def lower(self, low: Lowering, call: Call) -> None:
        em, source, out = low.em, call.inputs["x"], call.outputs[0]
        if low.variant.seq == 1:
            low.acts[out] = low.act(source)
            return
        x = low.acts.get(source) or low.spilled[source]
        y = low.new(out, x.width, low.sequences, x.dtype)
        last = em.alu(Alu.SUB, em.csr("cur_seq_len"), 1)
        row = x.view.at(0, (last, x.row_bytes))
        if source in low.acts:
            em.vmap(Fn.COPY, (1, x.width), y.view, row)
        else:
            em.load(y.view, row, (1, x.width))

    def examples(self) -> tuple[Example, ...]:
        return (
            Example(Attrs(), {"x": (1, 8, 48), "cur": (1,)}, {"cur": [6]}),
            Example(Attrs(), {"x": (1, 1, 64), "cur": (1,)}, {"cur": [1]}),
        )
