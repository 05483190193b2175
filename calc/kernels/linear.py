"""Linear layers of one input, with the bias and the residual after them fused in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from calc.core.isa import DType
from calc.core.schemes import Scheme
from calc.kernels.base import Attrs, Call, Example, Kernel, Numerics, Work, matmul, store
from calc.kernels.lowering import MatrixRows, drain

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering


@dataclass(frozen=True)
class LinearAttrs(Attrs):
    """Attributes of `Linear`.

    Attributes:
        n: how many matrices.
        bias: whether each has one.
        add: whether there is a residual.
        partial: whether y is a chip's share of a sum, which stays FP32.
    """

    n: int
    bias: bool
    add: bool
    partial: bool = False


class Linear(Kernel[LinearAttrs]):
    """``y_i = [residual +] x @ w_i.T [+ b_i]`` for i in 0..n-1 (QKV; output projection + residual).

    x [B, S, K], w_i [N_i, K], b_i [N_i], residual and y_i [B, S, N_i]. Dynamic int8 codes of x are made once and
    shared; bias and residual are added in FP32 before the only rounding of the output.
    """

    name = "Linear"
    attributes = LinearAttrs

    def formals(self, attrs: LinearAttrs) -> tuple[tuple[str, ...], tuple[str, ...]]:
        n = attrs.n
        ins = ["x"]
        ins += self.weights(attrs)
        ins += [f"b{i}" for i in range(n)] if attrs.bias else []
        ins += ["residual"] if attrs.add else []
        return tuple(ins), tuple(f"y{i}" for i in range(n))

    def weights(self, attrs: LinearAttrs) -> tuple[str, ...]:
        return tuple(f"w{i}" for i in range(attrs.n))

    def body(self, attrs: LinearAttrs, schemes: Mapping[str, Scheme], numerics: Numerics) -> str:
        lines = []
        for i, scheme in enumerate(schemes.values()):
            lines.append(matmul("x", f"w{i}", f"p{i}", scheme))
            out = f"p{i}"
            if attrs.bias:
                lines.append(f"pb{i} = Add({out}, b{i})")
                out = f"pb{i}"
            if attrs.add:
                lines.append(f"pa{i} = Add({out}, residual)")
                out = f"pa{i}"
            lines.append(store(out, f"y{i}", "fp32" if attrs.partial else numerics))
        return "\n".join(lines)

    def work(self, call: Call[LinearAttrs], rows: int, context: int) -> Work:
        sizes = [call.shape(w) for w in self.weights(call.attrs)]
        return Work(rows * sum(n * k for n, k in sizes), 0)

    def lower(self, low: Lowering, call: Call[LinearAttrs]) -> None:
        x = low.act(call.inputs["x"])
        rows = MatrixRows(low, x.view, x.rows, x.width)
        addend = low.act(call.inputs["residual"]).view if call.attrs.add else None
        for formal, out in zip(self.weights(call.attrs), call.outputs, strict=True):
            w = low.packed(call, formal)
            y = low.new(out, w.layout.rows, x.rows, DType.F32 if call.attrs.partial else DType.BF16)
            drain(low.linear(w, rows, y.view, addend=addend))

    def examples(self) -> tuple[Example[LinearAttrs], ...]:
        one = LinearAttrs(1, bias=False, add=False)
        return (
            Example(one, {"x": (1, 5, 32), "w0": (48, 32)}),
            Example(replace(one, add=True), {"x": (1, 16, 341), "w0": (128, 341), "residual": (1, 16, 128)}),
            Example(
                LinearAttrs(3, bias=True, add=False),
                {
                    "x": (1, 7, 96),
                    "w0": (96, 96),
                    "w1": (40, 96),
                    "w2": (40, 96),
                    "b0": (96,),
                    "b1": (40,),
                    "b2": (40,),
                },
            ),
        )
