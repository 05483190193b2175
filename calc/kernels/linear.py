"""Linear layers of one input, with the norm before and the bias and residual after them fused in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from calc.kernels.base import Attr, Call, Example, Kernel, Numerics, Work, matmul, rms_norm, store, weight_formals
from calc.kernels.lowering import Rows, drain

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering


class Linear(Kernel):
    """``y_i = [residual +] norm(x) @ w_i.T [+ b_i]`` for i in 0..n-1 (RMSNorm + QKV; output projection + residual).

    x [B, S, K], w_i [N_i, K], b_i [N_i], residual and y_i [B, S, N_i]. The normed rows are rounded to BF16 once and
    shared; bias and residual are added in FP32 before the only rounding of the output.

    Attributes of a call: n, norm, bias, add (0 or 1), eps.
    """

    name = "Linear"

    def formals(self, attrs: Mapping[str, Attr]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        n = int(attrs["n"])  # type: ignore[arg-type]
        ins = ["x", *(["gamma"] if attrs["norm"] else [])]
        ins += weight_formals(self.schemes(attrs))
        ins += [f"b{i}" for i in range(n)] if attrs["bias"] else []
        ins += ["residual"] if attrs["add"] else []
        return tuple(ins), tuple(f"y{i}" for i in range(n))

    def weights(self, attrs: Mapping[str, Attr]) -> tuple[str, ...]:
        return tuple(f"w{i}" for i in range(int(attrs["n"])))  # type: ignore[arg-type]

    def body(self, attrs: Mapping[str, Attr], numerics: Numerics) -> str:
        lines = []
        src = "x"
        if attrs["norm"]:
            lines += [rms_norm("x", "gamma", float(attrs["eps"]), "xn"), store("xn", "xr", numerics)]  # type: ignore[arg-type]
            src = "xr"
        for i, scheme in enumerate(self.schemes(attrs).values()):
            lines.append(matmul(src, f"w{i}", f"p{i}", scheme))
            out = f"p{i}"
            if attrs["bias"]:
                lines.append(f"pb{i} = Add({out}, b{i})")
                out = f"pb{i}"
            if attrs["add"]:
                lines.append(f"pa{i} = Add({out}, residual)")
                out = f"pa{i}"
            lines.append(store(out, f"y{i}", numerics))
        return "\n".join(lines)

    def work(self, call: Call, rows: int, context: int) -> Work:
        sizes = [call.shape(w) for w in self.weights(call.attrs)]
        params = sum(n * k for n, k in sizes)
        vec = rows * call.shape("x")[-1] * 2 if call.attrs["norm"] else 0
        return Work(rows * params, vec)

    def lower(self, low: Lowering, call: Call) -> None:
        x = low.act(call.inputs["x"])
        src = x.view
        if call.attrs["norm"]:
            normed = low.new(f"{call.name}.normed", x.width)
            low.rms_norm(src, low.rows, x.width, low.plain(call, "gamma"), call.float("eps"), normed.view)
            src = normed.view
        rows = Rows(low, src, low.rows, x.width)
        addend = low.act(call.inputs["residual"]).view if call.attrs["add"] else None
        for formal, out in zip(self.weights(call.attrs), call.outputs, strict=True):
            w = low.packed(call, formal)
            y = low.new(out, w.layout.rows)
            drain(low.linear(w, rows, y.view, addend=addend))

    def examples(self) -> tuple[Example, ...]:
        one = {"n": 1, "norm": 0, "bias": 0, "add": 0, "eps": 0.0}
        return (
            Example(one, {"x": (1, 5, 32), "w0": (48, 32)}),
            Example({**one, "add": 1}, {"x": (1, 16, 341), "w0": (128, 341), "residual": (1, 16, 128)}),
            Example(
                {"n": 3, "norm": 1, "bias": 1, "add": 0, "eps": 1e-6},
                {
                    "x": (1, 7, 96),
                    "gamma": (96,),
                    "w0": (96, 96),
                    "w1": (40, 96),
                    "w2": (40, 96),
                    "b0": (96,),
                    "b1": (40,),
                    "b2": (40,),
                },
            ),
        )
