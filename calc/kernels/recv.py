"""A value's rows arrive from another chip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calc.core.isa import DType, Engine, Op
from calc.core.schemes import Scheme
from calc.kernels.base import Attrs, Call, Example, Kernel, Numerics, Work

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering


@dataclass(frozen=True)
class RecvAttrs(Attrs):
    """Attributes of `Recv`.

    Attributes:
        peer: the chip that sends.
        partial: whether x is FP32.
    """

    peer: int
    partial: bool


class Recv(Kernel[RecvAttrs]):
    """``x = message``, sent by chip `peer`; x [B, S, H] or [B, H]."""

    name = "Recv"
    attributes = RecvAttrs
    crosses = True
    by_row = ("message",)

    def formals(self, attrs: RecvAttrs) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("message",), ("x",)

    def weights(self, attrs: RecvAttrs) -> tuple[str, ...]:
        return ()

    def body(self, attrs: RecvAttrs, schemes: Mapping[str, Scheme], numerics: Numerics) -> str:
        return "x = Identity(message)"

    def work(self, call: Call[RecvAttrs], rows: int, context: int) -> Work:
        return Work(0, 0)

    def lower(self, low: Lowering, call: Call[RecvAttrs]) -> None:
        shape = call.shape("message")
        rows = low.sequences if len(shape) == 2 else low.tokens
        x = low.new(call.outputs[0], shape[-1], rows, DType.F32 if call.attrs.partial else DType.BF16)
        low.em.op(Op.RECV, Engine.LINK, (rows.count, x.width), imm=(call.attrs.peer,), dst=x.view)

    def examples(self) -> tuple[Example[RecvAttrs], ...]:
        return (Example(RecvAttrs(1, partial=False), {"message": (1, 5, 48)}),)
