"""Gated linear unit: SwiGLU and GeGLU with the norm before them fused in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from calc.core.isa import Fn
from calc.kernels.base import (
    Attr,
    Call,
    Example,
    Kernel,
    Numerics,
    Work,
    activation,
    matmul,
    rms_norm,
    store,
    weight_formals,
)
from calc.kernels.lowering import ACTIVATIONS, Rows

if TYPE_CHECKING:
    from calc.kernels.emit import Dim, Packed, Reg, View
    from calc.kernels.lowering import Lowering


class Glu(Kernel):
    """``h = act(norm(x) @ gate.T) * (norm(x) @ up.T)``; x [B, S, K], gate and up [I, K], h [B, S, I].

    Gate and up stay in FP32 accumulators; h is rounded once. Attributes of a call: norm, act, eps.
    """

    name = "Glu"

    def formals(self, attrs: Mapping[str, Attr]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        ins = ["x", *(["gamma"] if attrs["norm"] else [])]
        return (*ins, *weight_formals(self.schemes(attrs))), ("h",)

    def weights(self, attrs: Mapping[str, Attr]) -> tuple[str, ...]:
        return ("gate", "up")

    def body(self, attrs: Mapping[str, Attr], numerics: Numerics) -> str:
        lines, src = [], "x"
        if attrs["norm"]:
            lines += [rms_norm("x", "gamma", float(attrs["eps"]), "xn"), store("xn", "xr", numerics)]  # type: ignore[arg-type]
            src = "xr"
        schemes = self.schemes(attrs)
        lines += [
            matmul(src, "gate", "g", schemes["gate"]),
            matmul(src, "up", "u", schemes["up"]),
            activation(str(attrs["act"]), "g", "ga"),
            "gu = Mul(ga, u)",
            store("gu", "h", numerics),
        ]
        return "\n".join(lines)

    def work(self, call: Call, rows: int, context: int) -> Work:
        n, k = call.shape("gate")
        return Work(2 * rows * n * k, rows * (2 * n + 2 * k))

    def lower(self, low: Lowering, call: Call) -> None:
        x = low.act(call.inputs["x"])
        src = x.view
        if call.attrs["norm"]:
            normed = low.new(f"{call.name}.normed", x.width)
            low.rms_norm(src, low.rows, x.width, low.plain(call, "gamma"), call.float("eps"), normed.view)
            src = normed.view
        gate, up = low.packed(call, "gate"), low.packed(call, "up")
        h = low.new(call.outputs[0], gate.layout.rows)
        emit_glu(low, gate, up, src, low.rows, h.view, call.str("act"), low.max_rows)

    def examples(self) -> tuple[Example, ...]:
        return (
            Example({"norm": 0, "act": "silu", "eps": 0.0}, {"x": (1, 5, 32), "gate": (48, 32), "up": (48, 32)}),
            Example(
                {"norm": 1, "act": "gelu_tanh", "eps": 1e-5},
                {"x": (1, 16, 128), "gamma": (128,), "gate": (341, 128), "up": (341, 128)},
            ),
        )


def emit_glu(  # noqa: PLR0913 - the operands of two GEMMs
    low: Lowering,
    gate: Packed,
    up: Packed,
    x: View,
    rows: Dim,
    h: View,
    act: str,
    max_rows: int,
    expert: Reg | None = None,
) -> None:
    """Gate and up tile by tile into FP32 scratch, then ``h[:, tile] = act(gate) * up``.

    Gate and up have one layout, so their tiles cover the same columns; the pair of GEMMs of a tile shares its loop.
    """
    em = low.em
    lay = gate.layout
    tile_rows = min(lay.tile_rows, lay.rows)
    g = low.scratch("gate", tile_rows, rows=max_rows)
    u = low.scratch("up", tile_rows, rows=max_rows)
    operand = Rows(low, x, rows, lay.cols, max_rows)
    for ref in low.linear(gate, operand, g.view, expert=expert, staged=True):
        a, scale = operand.under(up.scheme)
        em.packed_tile(up, rows, a, u.view, ref, scale, expert)
        em.vmap(ACTIVATIONS[act], (rows, ref.rows), g.view, g.view)
        off, terms = ref.columns(2)
        em.vmap(Fn.MUL, (rows, ref.rows), h.at(off, *terms), g.view, u.view)
