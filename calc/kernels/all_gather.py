"""The chips' columns side by side, on every chip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calc.core.isa import ITEMSIZE, Engine, Fn, Op
from calc.core.schemes import Scheme
from calc.kernels.base import Attrs, Call, Example, Kernel, Numerics, Work

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering


@dataclass(frozen=True)
class AllGatherAttrs(Attrs):
    """Attributes of `AllGather`.

    Attributes:
        chips: how many have columns.
        own: the number of the chip that runs the call.
    """

    chips: int
    own: int


class AllGather(Kernel[AllGatherAttrs]):
    """``y = concat(p0, p1, ...)`` along the columns; p_i [B, S, H_i] of chip i, y [B, S, sum H_i]. No rounding."""

    name = "AllGather"
    attributes = AllGatherAttrs
    crosses = True

    def formals(self, attrs: AllGatherAttrs) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return tuple(f"p{i}" for i in range(attrs.chips)), ("y",)

    def weights(self, attrs: AllGatherAttrs) -> tuple[str, ...]:
        return ()

    def body(self, attrs: AllGatherAttrs, schemes: Mapping[str, Scheme], numerics: Numerics) -> str:
        return f"y = Concat<axis: int = -1>({', '.join(self.formals(attrs)[0])})"

    def work(self, call: Call[AllGatherAttrs], rows: int, context: int) -> Work:
        return Work(0, rows * call.shape(f"p{call.attrs.own}")[-1])

    def lower(self, low: Lowering, call: Call[AllGatherAttrs]) -> None:
        em, own = low.em, call.attrs.own
        mine = low.act(call.inputs[f"p{own}"])
        widths = [call.shape(f"p{i}")[-1] for i in range(call.attrs.chips)]
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

    def examples(self) -> tuple[Example[AllGatherAttrs], ...]:
        return (
            Example(AllGatherAttrs(2, own=0), {"p0": (1, 5, 48), "p1": (1, 5, 32)}),
            Example(AllGatherAttrs(3, own=2), {"p0": (1, 5, 16), "p1": (1, 5, 16), "p2": (1, 5, 24)}),
        )
