"""The chips' columns side by side, on every chip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from calc.core.isa import ITEMSIZE, Engine, Fn, Op
from calc.kernels.base import Attr, Call, Example, Kernel, Numerics, Work

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering


class AllGather(Kernel):
    """``y = concat(p0, p1, ...)`` along the columns; p_i [B, S, H_i] of chip i, y [B, S, sum H_i]. No rounding.

    Attributes of a call: chips, own (the chip's number).
    """

    name = "AllGather"
    crosses = True

    def formals(self, attrs: Mapping[str, Attr]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return tuple(f"p{i}" for i in range(int(attrs["chips"]))), ("y",)  # type: ignore[arg-type]

    def weights(self, attrs: Mapping[str, Attr]) -> tuple[str, ...]:
        return ()

    def body(self, attrs: Mapping[str, Attr], numerics: Numerics) -> str:
        return f"y = Concat<axis: int = -1>({', '.join(self.formals(attrs)[0])})"

    def work(self, call: Call, rows: int, context: int) -> Work:
        return Work(0, rows * call.shape(f"p{call.int('own')}")[-1])

    def lower(self, low: Lowering, call: Call) -> None:
        em, own = low.em, call.int("own")
        mine = low.act(call.inputs[f"p{own}"])
        widths = [call.shape(f"p{i}")[-1] for i in range(call.int("chips"))]
        y = low.new(call.outputs[0], sum(widths), mine.rows, mine.dtype)
        rows, size = mine.rows.count, ITEMSIZE[mine.dtype]
        for peer in range(len(widths)):
            if peer != own:
                em.op(Op.SEND, Engine.LINK, (rows, mine.width), imm=(peer,), a=mine.view)
        at = 0
        for peer, width in enumerate(widths):
            columns = y.view.at(at * size)
            if peer == own:
                em.vmap(Fn.COPY, (rows, width), columns, mine.view)
            else:
                em.op(Op.RECV, Engine.LINK, (rows, width), imm=(peer,), dst=columns)
            at += width

    def examples(self) -> tuple[Example, ...]:
        return (
            Example({"chips": 2, "own": 0}, {"p0": (1, 5, 48), "p1": (1, 5, 32)}),
            Example({"chips": 3, "own": 2}, {"p0": (1, 5, 16), "p1": (1, 5, 16), "p2": (1, 5, 24)}),
        )
