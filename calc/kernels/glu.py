"""Gated linear unit: SwiGLU and GeGLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calc.core.isa import Fn
from calc.core.schemes import Scheme
from calc.kernels.base import (
    Attrs,
    Call,
    Example,
    Kernel,
    Numerics,
    Work,
    activation,
    activation_known,
    matmul,
    store,
)
from calc.kernels.lowering import ACTIVATIONS, MatrixRows

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering, Rows
    from calc.kernels.program import Packed, Reg, View


@dataclass(frozen=True)
class GluAttrs(Attrs):
    """Attributes of `Glu`.

    Attributes:
        act: an activation of the vector engine.
    """

    act: str


class Glu(Kernel[GluAttrs]):
    """``h = act(x @ gate.T) * (x @ up.T)``; x [B, S, K], gate and up [I, K], h [B, S, I].

    Gate and up stay in FP32 accumulators; h is rounded once.
    """

    name = "Glu"
    attributes = GluAttrs
    constraints = (activation_known,)

    def formals(self, attrs: GluAttrs) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("x", *self.weights(attrs)), ("h",)

    def weights(self, attrs: GluAttrs) -> tuple[str, ...]:
        return ("gate", "up")

    def body(self, attrs: GluAttrs, schemes: Mapping[str, Scheme], numerics: Numerics) -> str:
        lines = [
            matmul("x", "gate", "g", schemes["gate"]),
            matmul("x", "up", "u", schemes["up"]),
            activation(attrs.act, "g", "ga"),
            "gu = Mul(ga, u)",
            store("gu", "h", numerics),
        ]
        return "\n".join(lines)

    def work(self, call: Call[GluAttrs], rows: int, context: int) -> Work:
        n, k = call.shape("gate")
        return Work(2 * rows * n * k, rows * 2 * n)

    def lower(self, low: Lowering, call: Call[GluAttrs]) -> None:
        x = low.act(call.inputs["x"])
        gate, up = low.packed(call, "gate"), low.packed(call, "up")
        h = low.new(call.outputs[0], gate.layout.rows, x.rows)
        emit_glu(low, gate, up, x.view, x.rows, h.view, call.attrs.act)

    def examples(self) -> tuple[Example[GluAttrs], ...]:
        return (
            Example(GluAttrs("silu"), {"x": (1, 5, 32), "gate": (48, 32), "up": (48, 32)}),
            Example(GluAttrs("gelu_tanh"), {"x": (1, 16, 128), "gate": (341, 128), "up": (341, 128)}),
        )


def emit_glu(
    low: Lowering,
    gate: Packed,
    up: Packed,
    x: View,
    rows: Rows,
    h: View,
    act: str,
    expert: Reg | None = None,
) -> None:
    """Gate and up tile by tile into FP32 scratch, then ``h[:, tile] = act(gate) * up``.

    Gate and up have one layout, so their tiles cover the same columns; the pair of GEMMs of a tile shares its loop.
    """
    em = low.em
    lay = gate.layout
    tile_rows = min(lay.tile_rows, lay.rows)
    g = low.scratch("gate", tile_rows, rows=rows)
    u = low.scratch("up", tile_rows, rows=rows)
    operand = MatrixRows(low, x, rows, lay.cols)
    for ref in low.linear(gate, operand, g.view, expert=expert, staged=True):
        a, scale = operand.under(up.scheme)
        em.packed_tile(up, rows.count, a, u.view, ref, scale, expert)
        em.vmap(ACTIVATIONS[act], (rows.count, ref.rows), g.view, g.view)
        off, terms = ref.columns(2)
        em.vmap(Fn.MUL, (rows.count, ref.rows), h.at(off, *terms), g.view, u.view)
