"""The sum of two activations: a residual connection wherever it stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from calc.core.isa import Fn
from calc.core.schemes import Scheme
from calc.kernels.base import Attrs, Call, Example, Kernel, Numerics, Work, store

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering


class Add(Kernel):
    """``y = a + b``; a, b and y [B, S, H] or [B, H]. The sum is FP32, rounded once."""

    name = "Add"
    attributes = Attrs

    def formals(self, attrs: Attrs) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("a", "b"), ("y",)

    def weights(self, attrs: Attrs) -> tuple[str, ...]:
        return ()

    def body(self, attrs: Attrs, schemes: Mapping[str, Scheme], numerics: Numerics) -> str:
        return "\n".join(("s = Add(a, b)", store("s", "y", numerics)))

    def work(self, call: Call, rows: int, context: int) -> Work:
        return Work(0, rows * call.shape("a")[-1])

    def lower(self, low: Lowering, call: Call) -> None:
        a, b = low.act(call.inputs["a"]), low.act(call.inputs["b"])
        y = low.new(call.outputs[0], a.width, a.rows)
        low.em.vmap(Fn.ADD, (a.rows.count, a.width), y.view, a.view, b.view)

    def examples(self) -> tuple[Example, ...]:
        return (
            Example(Attrs(), {"a": (1, 5, 48), "b": (1, 5, 48)}),
            Example(Attrs(), {"a": (1, 341), "b": (1, 341)}),
        )
