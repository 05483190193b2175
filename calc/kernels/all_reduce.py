"""The sum of the chips' partial results, on every chip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calc.core.errors import InternalError
from calc.core.isa import DType, Engine, Fn, Op
from calc.core.schemes import Scheme
from calc.kernels.base import Attrs, Call, Example, Kernel, Numerics, Work, store

if TYPE_CHECKING:
    from calc.kernels.lowering import Act, Lowering


@dataclass(frozen=True)
class AllReduceAttrs(Attrs):
    """Attributes of `AllReduce`.

    Attributes:
        chips: how many have a partial sum.
        own: the number of the chip that runs the call.
        add: whether there is a residual.
    """

    chips: int
    own: int
    add: bool


class AllReduce(Kernel[AllReduceAttrs]):
    """``y = [residual +] p0 + p1 + ...``; p_i FP32 [B, S, H] of chip i, residual and y [B, S, H] or all [B, H].

    A chip sends its own partial sum to the others and adds all of them in the order of the chips, so that every chip
    has the same bits. The sum is FP32, rounded once.
    """

    name = "AllReduce"
    attributes = AllReduceAttrs
    crosses = True

    def formals(self, attrs: AllReduceAttrs) -> tuple[tuple[str, ...], tuple[str, ...]]:
        ins = tuple(f"p{i}" for i in range(attrs.chips))
        return (*ins, *(("residual",) if attrs.add else ())), ("y",)

    def weights(self, attrs: AllReduceAttrs) -> tuple[str, ...]:
        return ()

    def body(self, attrs: AllReduceAttrs, schemes: Mapping[str, Scheme], numerics: Numerics) -> str:
        ins, _ = self.formals(attrs)
        lines, total = [], ins[0]
        for i, x in enumerate(ins[1:], start=1):
            lines.append(f"s{i} = Add({total}, {x})")
            total = f"s{i}"
        return "\n".join((*lines, store(total, "y", numerics)))

    def work(self, call: Call[AllReduceAttrs], rows: int, context: int) -> Work:
        return Work(0, rows * call.shape("p0")[-1] * call.attrs.chips)

    def lower(self, low: Lowering, call: Call[AllReduceAttrs]) -> None:
        em, own = low.em, call.attrs.own
        mine = low.act(call.inputs[f"p{own}"])
        dims = (mine.rows.count, mine.width)
        others = [i for i in range(call.attrs.chips) if i != own]
        for peer in others:
            em.op(Op.SEND, Engine.LINK, dims, imm=(peer,), a=mine.view)
        parts: dict[int, Act] = {own: mine}
        for peer in others:
            parts[peer] = low.scratch(f"p{peer}", mine.width, DType.F32, mine.rows)
            em.op(Op.RECV, Engine.LINK, dims, imm=(peer,), dst=parts[peer].view)
        terms = [parts[i].view for i in sorted(parts)]
        if call.attrs.add:
            terms.append(low.act(call.inputs["residual"]).view)
        if len(terms) < 2:
            raise InternalError(f"{call.name}: a reduction over one chip")
        y = low.new(call.outputs[0], mine.width, mine.rows)
        total = low.scratch("sum", mine.width, DType.F32, mine.rows).view
        for i, term in enumerate(terms[1:], start=2):
            em.vmap(Fn.ADD, dims, y.view if i == len(terms) else total, terms[0] if i == 2 else total, term)

    def examples(self) -> tuple[Example[AllReduceAttrs], ...]:
        return (
            Example(AllReduceAttrs(2, own=0, add=False), {"p0": (1, 5, 48), "p1": (1, 5, 48)}),
            Example(
                AllReduceAttrs(3, own=1, add=True),
                {"p0": (1, 5, 48), "p1": (1, 5, 48), "p2": (1, 5, 48), "residual": (1, 5, 48)},
            ),
        )
