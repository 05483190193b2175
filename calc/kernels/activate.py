"""An activation on its own: the middle of an FFN without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calc.core.schemes import Scheme
from calc.kernels.base import Attrs, Call, Example, Kernel, Numerics, Work, activation, activation_known, store
from calc.kernels.lowering import ACTIVATIONS

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering


@dataclass(frozen=True)
class ActivateAttrs(Attrs):
    """Attributes of `Activate`.

    Attributes:
        act: an activation of the vector engine.
    """

    act: str


class Activate(Kernel[ActivateAttrs]):
    """``y = act(x)``; x and y [B, S, H] or [B, H]. FP32, rounded once."""

    name = "Activate"
    attributes = ActivateAttrs
    constraints = (activation_known,)

    def formals(self, attrs: ActivateAttrs) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("x",), ("y",)

    def weights(self, attrs: ActivateAttrs) -> tuple[str, ...]:
        return ()

    def body(self, attrs: ActivateAttrs, schemes: Mapping[str, Scheme], numerics: Numerics) -> str:
        return "\n".join((activation(attrs.act, "x", "a"), store("a", "y", numerics)))

    def work(self, call: Call[ActivateAttrs], rows: int, context: int) -> Work:
        return Work(0, rows * call.shape("x")[-1])

    def lower(self, low: Lowering, call: Call[ActivateAttrs]) -> None:
        x = low.act(call.inputs["x"])
        y = low.new(call.outputs[0], x.width, x.rows)
        low.em.vmap(ACTIVATIONS[call.attrs.act], (x.rows.count, x.width), y.view, x.view)

    def examples(self) -> tuple[Example[ActivateAttrs], ...]:
        return tuple(Example(ActivateAttrs(act), {"x": (1, 5, 48)}) for act in sorted(ACTIVATIONS))
