"""The lm_head: rows to logits in DRAM, with the softcap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calc.core.isa import DType, Fn
from calc.core.roles import LOGITS
from calc.core.schemes import Scheme
from calc.kernels.base import (
    Attrs,
    Call,
    Constraint,
    Example,
    Kernel,
    Numerics,
    Work,
    matmul,
    softcap_positive,
)
from calc.kernels.lowering import MatrixRows
from calc.kernels.program import View

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering


@dataclass(frozen=True)
class LmHeadAttrs(Attrs):
    """Attributes of `LmHead`.

    Attributes:
        softcap: what the logits stay below, 0 for none.
    """

    softcap: float


class LmHead(Kernel[LmHeadAttrs]):
    """``logits[b] = cap(x[b] @ w.T)``; x [B, H], one row per sequence, w [V, H], logits f32 [B, V].

    Logits leave in FP32, straight from the accumulators. ``cap(z) = softcap * tanh(z / softcap)``.
    """

    name = "LmHead"
    attributes = LmHeadAttrs
    stores = LOGITS
    constraints: tuple[Constraint[LmHeadAttrs], ...] = (softcap_positive,)

    def formals(self, attrs: LmHeadAttrs) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("x", "w"), ("logits",)

    def weights(self, attrs: LmHeadAttrs) -> tuple[str, ...]:
        return ("w",)

    def body(self, attrs: LmHeadAttrs, schemes: Mapping[str, Scheme], numerics: Numerics) -> str:
        cap = attrs.softcap
        lines = [matmul("x", "w", "z" if cap else "logits", schemes["w"])]
        if cap:
            lines += [
                f"cap = Constant<value_float: float = {cap!r}>()",
                "z1 = Div(z, cap)",
                "z2 = Tanh(z1)",
                "logits = Mul(z2, cap)",
            ]
        return "\n".join(lines)

    def work(self, call: Call[LmHeadAttrs], rows: int, context: int) -> Work:
        v, k = call.shape("w")
        return Work(call.shape("x")[0] * v * k, 0)

    def lower(self, low: Lowering, call: Call[LmHeadAttrs]) -> None:
        em, w = low.em, low.packed(call, "w")
        x = low.act(call.inputs["x"])
        vocab = w.layout.rows
        stage = low.scratch("logits", min(w.layout.tile_rows, vocab), DType.F32, x.rows)
        out = View(low.memory.io[LOGITS], DType.F32, (4 * vocab, 4))
        cap = call.attrs.softcap
        for ref in low.linear(w, MatrixRows(low, x.view, x.rows, x.width), stage.view, staged=True):
            dims = (x.rows.count, ref.rows)
            if cap:
                em.vmap(Fn.AFFINE, dims, stage.view, stage.view, f=(1.0 / cap, 0.0))
                em.vmap(Fn.TANH, dims, stage.view, stage.view)
                em.vmap(Fn.AFFINE, dims, stage.view, stage.view, f=(cap, 0.0))
            off, terms = ref.columns(4)
            em.store(out.at(off, *terms), stage.view, dims)

    def examples(self) -> tuple[Example[LmHeadAttrs], ...]:
        return (
            Example(LmHeadAttrs(0.0), {"x": (1, 48), "w": (70, 48)}),
            Example(LmHeadAttrs(3.0), {"x": (1, 64), "w": (33, 64)}),
        )
