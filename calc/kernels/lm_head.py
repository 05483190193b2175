"""Last-row choice, final norm and lm_head in one: logits of each sequence's last valid token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from calc.core.isa import Alu, DType, Fn
from calc.kernels.base import (
    Attr,
    Call,
    Constraint,
    Example,
    Kernel,
    Numerics,
    Work,
    matmul,
    rms_norm,
    softcap_positive,
    store,
    weight_formals,
)
from calc.kernels.emit import View
from calc.kernels.lowering import Rows

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering


class LmHead(Kernel):
    """``logits[b] = cap(norm(x[b, cur[b] - 1]) @ w.T)``; x [B, S, H], cur int64 [B], w [V, H], logits f32 [B, V].

    Only the chosen rows are normed and multiplied. Logits leave in FP32, straight from the accumulators.
    ``cap(z) = softcap * tanh(z / softcap)``. Attributes of a call: norm, eps, softcap (0 for none).
    """

    name = "LmHead"
    constraints: tuple[Constraint, ...] = (softcap_positive,)

    def formals(self, attrs: Mapping[str, Attr]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        ins = ["x", "cur", *(["gamma"] if attrs["norm"] else [])]
        return (*ins, *weight_formals(self.schemes(attrs))), ("logits",)

    def weights(self, attrs: Mapping[str, Attr]) -> tuple[str, ...]:
        return ("w",)

    def body(self, attrs: Mapping[str, Attr], numerics: Numerics) -> str:
        lines = [
            "one = Constant<value_int: int = 1>()",
            "last0 = Sub(cur, one)",
            "zero = Constant<value_int: int = 0>()",
            "last = Max(last0, zero)",
            "ax = Constant<value_ints: ints = [1]>()",
            "last_col = Unsqueeze(last, ax)",
            "row = GatherND<batch_dims: int = 1>(x, last_col)",
        ]
        src = "row"
        if attrs["norm"]:
            lines += [rms_norm("row", "gamma", float(attrs["eps"]), "rn"), store("rn", "rr", numerics)]  # type: ignore[arg-type]
            src = "rr"
        cap = float(attrs["softcap"])  # type: ignore[arg-type]
        lines.append(matmul(src, "w", "z" if cap else "logits", self.schemes(attrs)["w"]))
        if cap:
            lines += [
                f"cap = Constant<value_float: float = {cap!r}>()",
                "z1 = Div(z, cap)",
                "z2 = Tanh(z1)",
                "logits = Mul(z2, cap)",
            ]
        return "\n".join(lines)

    def work(self, call: Call, rows: int, context: int) -> Work:
        v, k = call.shape("w")
        batch = call.shape("cur")[0]
        return Work(batch * v * k, batch * 2 * k)

    def lower(self, low: Lowering, call: Call) -> None:
        em, w = low.em, low.packed(call, "w")
        x = low.act(call.inputs["x"])
        batch = low.variant.batch
        src = x.view
        if low.variant.seq > 1:
            cur = em.csr("cur_seq_len", 0)
            last = em.alu(Alu.SUB, cur, 1)
            src = src.at(0, (last, x.row_bytes))
        if call.attrs["norm"]:
            normed = low.scratch("normed", x.width, DType.BF16, batch)
            low.rms_norm(src, batch, x.width, low.plain(call, "gamma"), call.float("eps"), normed.view)
            src = normed.view
        vocab = w.layout.rows
        stage = low.scratch("logits", min(w.layout.tile_rows, vocab), DType.F32, batch)
        out = View(low.io["logits"], DType.F32, (4 * vocab, 4))
        cap = call.float("softcap")
        for ref in low.linear(w, Rows(low, src, batch, x.width, batch), stage.view, staged=True):
            if cap:
                dims = (batch, ref.rows)
                em.vmap(Fn.AFFINE, dims, stage.view, stage.view, f=(1.0 / cap, 0.0))
                em.vmap(Fn.TANH, dims, stage.view, stage.view)
                em.vmap(Fn.AFFINE, dims, stage.view, stage.view, f=(cap, 0.0))
            off, terms = ref.columns(4)
            em.store(out.at(off, *terms), stage.view, (batch, ref.rows))

    def examples(self) -> tuple[Example, ...]:
        return (
            Example(
                {"norm": 1, "eps": 1e-5, "softcap": 0.0},
                {"x": (1, 8, 48), "cur": (1,), "gamma": (48,), "w": (70, 48)},
                {"cur": [6]},
            ),
            Example(
                {"norm": 1, "eps": 1e-6, "softcap": 3.0},
                {"x": (1, 1, 64), "cur": (1,), "gamma": (64,), "w": (33, 64)},
                {"cur": [1]},
            ),
        )
