"""Linear layers of one input, with the bias and the residual after them fused in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from calc.core.isa import DType
from calc.kernels.base import Attr, Call, Example, Kernel, Numerics, Work, matmul, store, weight_formals
from calc.kernels.lowering import MatrixRows, drain

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering


class Linear(Kernel):
    """``y_i = [residual +] x @ w_i.T [+ b_i]`` for i in 0..n-1 (QKV; output projection + residual).

    x [B, S, K], w_i [N_i, K], b_i [N_i], residual and y_i [B, S, N_i]. Dynamic int8 codes of x are made once and
    shared; bias and residual are added in FP32 before the only rounding of the output.

    Attributes of a call: n, bias, add (0 or 1); partial (1: y is a chip's share of a sum and stays FP32).
    """

    name = "Linear"

    def formals(self, attrs: Mapping[str, Attr]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        n = int(attrs["n"])  # type: ignore[arg-type]
        ins = ["x"]
        ins += weight_formals(self.schemes(attrs))
        ins += [f"b{i}" for i in range(n)] if attrs["bias"] else []
        ins += ["residual"] if attrs["add"] else []
        return tuple(ins), tuple(f"y{i}" for i in range(n))

    def weights(self, attrs: Mapping[str, Attr]) -> tuple[str, ...]:
        return tuple(f"w{i}" for i in range(int(attrs["n"])))  # type: ignore[arg-type]

    def body(self, attrs: Mapping[str, Attr], numerics: Numerics) -> str:
        lines = []
        for i, scheme in enumerate(self.schemes(attrs).values()):
            lines.append(matmul("x", f"w{i}", f"p{i}", scheme))
            out = f"p{i}"
            if attrs["bias"]:
                lines.append(f"pb{i} = Add({out}, b{i})")
                out = f"pb{i}"
            if attrs["add"]:
                lines.append(f"pa{i} = Add({out}, residual)")
                out = f"pa{i}"
            lines.append(store(out, f"y{i}", "fp32" if attrs.get("partial") else numerics))
        return "\n".join(lines)

    def work(self, call: Call, rows: int, context: int) -> Work:
        sizes = [call.shape(w) for w in self.weights(call.attrs)]
        return Work(rows * sum(n * k for n, k in sizes), 0)

    def lower(self, low: Lowering, call: Call) -> None:
        x = low.act(call.inputs["x"])
        rows = MatrixRows(low, x.view, x.rows, x.width)
        addend = low.act(call.inputs["residual"]).view if call.attrs["add"] else None
        for formal, out in zip(self.weights(call.attrs), call.outputs, strict=True):
            w = low.packed(call, formal)
            y = low.new(out, w.layout.rows, x.rows, DType.F32 if call.attrs.get("partial") else DType.BF16)
            drain(low.linear(w, rows, y.view, addend=addend))

    def examples(self) -> tuple[Example, ...]:
        one = {"n": 1, "bias": 0, "add": 0}
        return (
            Example(one, {"x": (1, 5, 32), "w0": (48, 32)}),
            Example({**one, "add": 1}, {"x": (1, 16, 341), "w0": (128, 341), "residual": (1, 16, 128)}),
            Example(
                {"n": 3, "bias": 1, "add": 0},
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
