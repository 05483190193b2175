"""A vector added to every row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from calc.core.isa import DType, Fn
from calc.core.schemes import Scheme
from calc.kernels.base import Attrs, Call, Example, Kernel, Numerics, Work, store
from calc.kernels.program import View

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering


class Bias(Kernel):
    """``y = x + beta``; x and y [B, S, H] or [B, H], beta [H]. The sum is FP32, rounded once."""

    name = "Bias"
    attributes = Attrs

    def formals(self, attrs: Attrs) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("x", "beta"), ("y",)

    def weights(self, attrs: Attrs) -> tuple[str, ...]:
        return ()

    def vectors(self, attrs: Attrs) -> tuple[str, ...]:
        return ("beta",)

    def body(self, attrs: Attrs, schemes: Mapping[str, Scheme], numerics: Numerics) -> str:
        return "\n".join(("s = Add(x, beta)", store("s", "y", numerics)))

    def work(self, call: Call, rows: int, context: int) -> Work:
        return Work(0, rows * call.shape("x")[-1])

    def lower(self, low: Lowering, call: Call) -> None:
        x = low.act(call.inputs["x"])
        y = low.new(call.outputs[0], x.width, x.rows)
        beta = View(low.em.constant(low.plain(call, "beta"), "beta"), DType.F32, (0, 4))
        low.em.vmap(Fn.ADD, (x.rows.count, x.width), y.view, x.view, beta)

    def examples(self) -> tuple[Example, ...]:
        return (
            Example(Attrs(), {"x": (1, 5, 48), "beta": (48,)}),
            Example(Attrs(), {"x": (1, 341), "beta": (341,)}),
        )
