"""A value's rows leave for another chip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calc.core.isa import Engine, Op
from calc.core.schemes import Scheme
from calc.kernels.base import Attrs, Call, Example, Kernel, Numerics, Work

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering


@dataclass(frozen=True)
class SendAttrs(Attrs):
    """Attributes of `Send`.

    Attributes:
        peer: the chip that receives.
        partial: whether x is FP32.
    """

    peer: int
    partial: bool


class Send(Kernel[SendAttrs]):
    """``message = x``, on its way to chip `peer`; x [B, S, H] or [B, H]."""

    name = "Send"
    attributes = SendAttrs

    def formals(self, attrs: SendAttrs) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("x",), ("message",)

    def weights(self, attrs: SendAttrs) -> tuple[str, ...]:
        return ()

    def body(self, attrs: SendAttrs, schemes: Mapping[str, Scheme], numerics: Numerics) -> str:
        return "message = Identity(x)"

    def work(self, call: Call[SendAttrs], rows: int, context: int) -> Work:
        return Work(0, 0)

    def lower(self, low: Lowering, call: Call[SendAttrs]) -> None:
        x = low.act(call.inputs["x"])
        low.em.op(Op.SEND, Engine.LINK, (x.rows.count, x.width), imm=(call.attrs.peer,), a=x.view)

    def examples(self) -> tuple[Example[SendAttrs], ...]:
        return (Example(SendAttrs(1, partial=False), {"x": (1, 5, 48)}),)
