"""Layer norm, with a bias or without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calc.core.isa import DType, Fn, Red
from calc.core.schemes import Scheme
from calc.kernels.base import Attrs, Call, Example, Kernel, Numerics, Work, store
from calc.kernels.program import View

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering


@dataclass(frozen=True)
class LayerNormAttrs(Attrs):
    """Attributes of `LayerNorm`.

    Attributes:
        bias: whether there is a beta.
        eps: added to the variance.
    """

    bias: bool
    eps: float


class LayerNorm(Kernel[LayerNormAttrs]):
    """``y = (x - mean(x)) * rsqrt(var(x) + eps) * gamma [+ beta]``; x and y [B, S, H] or [B, H], gamma and beta [H].

    The variance is the mean square of what the mean was taken from. All of it is FP32, rounded once.
    """

    name = "LayerNorm"
    attributes = LayerNormAttrs

    def formals(self, attrs: LayerNormAttrs) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("x", *self.vectors(attrs)), ("y",)

    def weights(self, attrs: LayerNormAttrs) -> tuple[str, ...]:
        return ()

    def vectors(self, attrs: LayerNormAttrs) -> tuple[str, ...]:
        return ("gamma", "beta") if attrs.bias else ("gamma",)

    def body(self, attrs: LayerNormAttrs, schemes: Mapping[str, Scheme], numerics: Numerics) -> str:
        vectors = ", ".join(self.vectors(attrs))
        norm = f"LayerNormalization<axis: int = -1, epsilon: float = {attrs.eps!r}, stash_type: int = 1>"
        return "\n".join((f"n = {norm}(x, {vectors})", store("n", "y", numerics)))

    def work(self, call: Call[LayerNormAttrs], rows: int, context: int) -> Work:
        width = call.shape("x")[-1]
        return Work(0, rows * width * (4 + call.attrs.bias))

    def lower(self, low: Lowering, call: Call[LayerNormAttrs]) -> None:
        em, x, attrs = low.em, low.act(call.inputs["x"]), call.attrs
        y = low.new(call.outputs[0], x.width, x.rows)
        cells = (x.rows.count, x.width)

        mean = View(em.sram("minus_mean", 4 * x.rows.limit), DType.F32, (4,))
        em.vreduce(Red.SUM, cells, mean, x.view)
        em.vmap(Fn.AFFINE, cells[:1], mean, mean, f=(-1.0 / x.width, 0.0))
        centred = low.scratch("centred", x.width, rows=x.rows)
        em.vmap(Fn.ADD, cells, centred.view, x.view, View(mean.buf, DType.F32, (4, 0)))

        scale = View(low.row_scale(centred.view, (x.rows,), x.width, attrs.eps), DType.F32, (4, 0))
        gamma = View(em.constant(low.plain(call, "gamma"), "gamma"), DType.F32, (0, 4))
        scaled = centred.view if attrs.bias else y.view
        em.vmap(Fn.MUL3, cells, scaled, centred.view, scale, gamma)
        if attrs.bias:
            beta = View(em.constant(low.plain(call, "beta"), "beta"), DType.F32, (0, 4))
            em.vmap(Fn.ADD, cells, y.view, scaled, beta)

    def examples(self) -> tuple[Example[LayerNormAttrs], ...]:
        return (
            Example(LayerNormAttrs(bias=True, eps=1e-5), {"x": (1, 5, 48), "gamma": (48,), "beta": (48,)}),
            Example(LayerNormAttrs(bias=True, eps=1e-6), {"x": (1, 341), "gamma": (341,), "beta": (341,)}),
            Example(LayerNormAttrs(bias=False, eps=1e-5), {"x": (1, 9, 341), "gamma": (341,)}),
        )
