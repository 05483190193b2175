"""A value's rows leave for another chip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from calc.core.isa import Engine, Op
from calc.kernels.base import Attr, Call, Example, Kernel, Numerics, Work

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering


class Send(Kernel):
    """``message = x``, on its way to chip `peer`; x [B, S, H] or [B, H].

    Attributes of a call: peer, partial (1: x is FP32).
    """

    name = "Send"

    def formals(self, attrs: Mapping[str, Attr]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("x",), ("message",)

    def weights(self, attrs: Mapping[str, Attr]) -> tuple[str, ...]:
        return ()

    def body(self, attrs: Mapping[str, Attr], numerics: Numerics) -> str:
        return "message = Identity(x)"

    def work(self, call: Call, rows: int, context: int) -> Work:
        return Work(0, 0)

    def lower(self, low: Lowering, call: Call) -> None:
        x = low.act(call.inputs["x"])
        low.em.op(Op.SEND, Engine.LINK, (x.rows.count, x.width), imm=(call.int("peer"),), a=x.view)

    def examples(self) -> tuple[Example, ...]:
        return (Example({"peer": 1, "partial": 0}, {"x": (1, 5, 48)}),)
