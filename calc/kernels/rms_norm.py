"""RMS norm, with the residual after it fused in (Gemma's post-norms)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calc.core.schemes import Scheme
from calc.kernels.base import Attrs, Call, Example, Kernel, Numerics, Work, rms_norm, store

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering


@dataclass(frozen=True)
class RmsNormAttrs(Attrs):
    """Attributes of `RmsNorm`.

    Attributes:
        add: whether there is a residual.
        eps: added to the mean square.
    """

    add: bool
    eps: float


class RmsNorm(Kernel[RmsNormAttrs]):
    """``y = [residual +] x * rsqrt(mean(x^2) + eps) * gamma``; x, residual and y [B, S, H] or [B, H], gamma [H]."""

    name = "RmsNorm"
    attributes = RmsNormAttrs

    def formals(self, attrs: RmsNormAttrs) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("x", "gamma", "residual") if attrs.add else ("x", "gamma"), ("y",)

    def weights(self, attrs: RmsNormAttrs) -> tuple[str, ...]:
        return ()

    def vectors(self, attrs: RmsNormAttrs) -> tuple[str, ...]:
        return ("gamma",)

    def body(self, attrs: RmsNormAttrs, schemes: Mapping[str, Scheme], numerics: Numerics) -> str:
        lines = [rms_norm("x", "gamma", attrs.eps, "xn")]
        src = "xn"
        if attrs.add:
            lines.append("xa = Add(xn, residual)")
            src = "xa"
        return "\n".join((*lines, store(src, "y", numerics)))

    def work(self, call: Call[RmsNormAttrs], rows: int, context: int) -> Work:
        width = call.shape("x")[-1]
        return Work(0, rows * width * 2)

    def lower(self, low: Lowering, call: Call[RmsNormAttrs]) -> None:
        x = low.act(call.inputs["x"])
        y = low.new(call.outputs[0], x.width, x.rows)
        residual = low.act(call.inputs["residual"]).view if call.attrs.add else None
        low.rms_norm(x, low.plain(call, "gamma"), call.attrs.eps, y.view, residual)

    def examples(self) -> tuple[Example[RmsNormAttrs], ...]:
        return (
            Example(RmsNormAttrs(add=False, eps=1e-6), {"x": (1, 5, 48), "gamma": (48,)}),
            Example(RmsNormAttrs(add=False, eps=1e-6), {"x": (1, 48), "gamma": (48,)}),
            Example(RmsNormAttrs(add=True, eps=1e-5), {"x": (1, 9, 341), "gamma": (341,), "residual": (1, 9, 341)}),
        )
