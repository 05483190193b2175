"""A value's rows arrive from another chip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from calc.core.isa import DType, Engine, Op
from calc.kernels.base import Attr, Call, Example, Kernel, Numerics, Work

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering


class Recv(Kernel):
    """``x = message``, sent by chip `peer`; x [B, S, H] or [B, H].

    Attributes of a call: peer, partial (1: x is FP32).
    """

    name = "Recv"
    crosses = True
    by_row = ("message",)

    def formals(self, attrs: Mapping[str, Attr]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("message",), ("x",)

    def weights(self, attrs: Mapping[str, Attr]) -> tuple[str, ...]:
        return ()

    def body(self, attrs: Mapping[str, Attr], numerics: Numerics) -> str:
        return "x = Identity(message)"

    def work(self, call: Call, rows: int, context: int) -> Work:
        return Work(0, 0)

    def lower(self, low: Lowering, call: Call) -> None:
        shape = call.shape("message")
        rows = low.sequences if len(shape) == 2 else low.tokens
        x = low.new(call.outputs[0], shape[-1], rows, DType.F32 if call.int("partial") else DType.BF16)
        low.em.op(Op.RECV, Engine.LINK, (rows.count, x.width), imm=(call.int("peer"),), dst=x.view)

    def examples(self) -> tuple[Example, ...]:
        return (Example({"peer": 1, "partial": 0}, {"message": (1, 5, 48)}),)
