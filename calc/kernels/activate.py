"""An activation on its own: the middle of an FFN without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from calc.kernels.base import Attr, Call, Example, Kernel, Numerics, Work, activation, activation_known, store
from calc.kernels.lowering import ACTIVATIONS

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering


class Activate(Kernel):
    """``y = act(x)``; x and y [B, S, H] or [B, H]. FP32, rounded once. Attributes of a call: act."""

    name = "Activate"
    constraints = (activation_known,)

    def formals(self, attrs: Mapping[str, Attr]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("x",), ("y",)

    def weights(self, attrs: Mapping[str, Attr]) -> tuple[str, ...]:
        return ()

    def body(self, attrs: Mapping[str, Attr], numerics: Numerics) -> str:
        return "\n".join((activation(str(attrs["act"]), "x", "a"), store("a", "y", numerics)))

    def work(self, call: Call, rows: int, context: int) -> Work:
        return Work(0, rows * call.shape("x")[-1])

    def lower(self, low: Lowering, call: Call) -> None:
        x = low.act(call.inputs["x"])
        y = low.new(call.outputs[0], x.width, x.rows)
        low.em.vmap(ACTIVATIONS[call.str("act")], (x.rows.count, x.width), y.view, x.view)

    def examples(self) -> tuple[Example, ...]:
        return tuple(Example({"act": act}, {"x": (1, 5, 48)}) for act in sorted(ACTIVATIONS))
