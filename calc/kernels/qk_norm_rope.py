"""Rotary position embedding of queries and keys, with the per-head norms before it fused in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from calc.core.isa import ITEMSIZE, DType, Engine, Fn, Op
from calc.core.schemes import Scheme
from calc.kernels.base import Attrs, Call, Constraint, Example, Kernel, Numerics, Work, rms_norm, store
from calc.kernels.lowering import Rows
from calc.kernels.program import View, dense

if TYPE_CHECKING:
    from calc.kernels.lowering import Act, Lowering


def rotary_width(call: Call[QkNormRopeAttrs]) -> str | None:
    """The rotated part of a head is even and no wider than the head."""
    r, d = 2 * call.shape("cos")[1], call.attrs.head_dim
    return None if r <= d else f"rotates {r} of {d} elements"


@dataclass(frozen=True)
class QkNormRopeAttrs(Attrs):
    """Attributes of `QkNormRope`.

    Attributes:
        heads: query heads.
        kv_heads: key heads.
        head_dim: elements of a head.
        norm: whether heads are normed.
        eps: added to the mean square of a norm.
        interleaved: whether a pair is two neighbours.
        rotary_dim: elements of a head that are rotated.
    """

    heads: int
    kv_heads: int
    head_dim: int
    norm: bool
    eps: float
    interleaved: bool
    rotary_dim: int


class QkNormRope(Kernel[QkNormRopeAttrs]):
    """``q' = rope(norm(q))``, ``k' = rope(norm(k))`` head by head, at positions ``past .. past + S - 1``.

    q [B, S, heads * D], k [B, S, kv_heads * D], gammas [D], cos and sin tables f32 [C, R/2], past int64 [B].
    Pairs are (i, i + R/2), or neighbours when interleaved; elements past R pass unrotated. FP32 from the norm to the
    rotation, rounded once at the store.
    """

    name = "QkNormRope"
    attributes = QkNormRopeAttrs
    constraints: tuple[Constraint[QkNormRopeAttrs], ...] = (rotary_width,)

    def formals(self, attrs: QkNormRopeAttrs) -> tuple[tuple[str, ...], tuple[str, ...]]:
        norms = ("q_gamma", "k_gamma") if attrs.norm else ()
        return ("q", "k", *norms, "cos", "sin", "past"), ("qr", "kr")

    def weights(self, attrs: QkNormRopeAttrs) -> tuple[str, ...]:
        return ()

    def vectors(self, attrs: QkNormRopeAttrs) -> tuple[str, ...]:
        return (*(("q_gamma", "k_gamma") if attrs.norm else ()), "cos", "sin")

    def body(self, attrs: QkNormRopeAttrs, schemes: Mapping[str, Scheme], numerics: Numerics) -> str:
        d = attrs.head_dim
        lines = [
            "past_col_ax = Constant<value_ints: ints = [1]>()",
            "past_col = Unsqueeze(past, past_col_ax)",
            "shape = Shape(q)",
            "one = Constant<value_int: int = 1>()",
            "zero = Constant<value_int: int = 0>()",
            "seq = Gather<axis: int = 0>(shape, one)",
            "steps = Range(zero, seq, one)",
            "positions = Add(past_col, steps)",
        ]
        for x, heads in (("q", attrs.heads), ("k", attrs.kv_heads)):
            lines += [
                f"{x}_split = Constant<value_ints: ints = [0, 0, {heads}, {d}]>()",
                f"{x}_heads = Reshape({x}, {x}_split)",
            ]
            src = f"{x}_heads"
            if attrs.norm:
                lines.append(rms_norm(src, f"{x}_gamma", attrs.eps, f"{x}_normed"))
                src = f"{x}_normed"
            rotary = attrs.rotary_dim
            lines += [
                f"{x}_t = Transpose<perm: ints = [0, 2, 1, 3]>({src})",
                f"{x}_rot = RotaryEmbedding<interleaved: int = {attrs.interleaved:d}, rotary_embedding_dim: int = "
                f"{0 if rotary == d else rotary}>({x}_t, cos, sin, positions)",
                f"{x}_back = Transpose<perm: ints = [0, 2, 1, 3]>({x}_rot)",
                f"{x}_join = Constant<value_ints: ints = [0, 0, -1]>()",
                f"{x}_flat = Reshape({x}_back, {x}_join)",
                store(f"{x}_flat", f"{x}r", numerics),
            ]
        return "\n".join(lines)

    def work(self, call: Call[QkNormRopeAttrs], rows: int, context: int) -> Work:
        width = call.shape("q")[-1] + call.shape("k")[-1]
        return Work(0, rows * width * (3 if call.attrs.norm else 1))

    def lower(self, low: Lowering, call: Call[QkNormRopeAttrs]) -> None:
        cos, sin = low.rope_table(call, "cos"), low.rope_table(call, "sin")
        for i, (x, heads) in enumerate((("q", call.attrs.heads), ("k", call.attrs.kv_heads))):
            src = low.act(call.inputs[x])
            dst = low.new(call.outputs[i], src.width, src.rows)
            _rotate(low, call, src, dst, heads, (cos, sin), f"{x}_gamma" if call.attrs.norm else None)

    def examples(self) -> tuple[Example[QkNormRopeAttrs], ...]:
        base = QkNormRopeAttrs(4, 2, head_dim=16, norm=False, eps=0.0, interleaved=False, rotary_dim=16)
        shapes = {"q": (1, 7, 64), "k": (1, 7, 32), "cos": (40, 8), "sin": (40, 8), "past": (1,)}
        return (
            Example(base, shapes, {"past": [3]}),
            Example(
                replace(base, norm=True, eps=1e-6, interleaved=True),
                {**shapes, "q_gamma": (16,), "k_gamma": (16,)},
                {"past": [0]},
            ),
            Example(replace(base, rotary_dim=8), {**shapes, "cos": (40, 4), "sin": (40, 4)}, {"past": [20]}),
        )


def _rotate(
    low: Lowering,
    call: Call[QkNormRopeAttrs],
    src: Act,
    dst: Act,
    heads: int,
    tables: tuple[Act, Act],
    gamma: str | None,
) -> None:
    em, d, rotary = low.em, call.attrs.head_dim, call.attrs.rotary_dim
    x, rows = src.heads(d), src.rows.count
    if gamma is not None:
        scale = low.row_scale(x, (src.rows, Rows(heads, heads)), d, call.attrs.eps)
        g = em.constant(low.plain(call, gamma), "gamma")
        normed = low.scratch("normed", src.width)
        wide = dense(scale, DType.F32, src.rows.limit, heads)
        em.vmap(
            Fn.MUL3,
            (rows, heads, d),
            normed.heads(d),
            x,
            wide.stepped(*wide.steps, 0),
            View(g, DType.F32, (0, 0, 4)),
        )
        x = normed.heads(d)
    y = dst.heads(d)
    size, out = ITEMSIZE[x.dtype], ITEMSIZE[y.dtype]
    half = rotary // 2
    pair, pair_out = (2, 1), (2, 1)
    if not call.attrs.interleaved:
        pair = pair_out = (1, half)
    cos, sin = tables
    em.op(
        Op.VCMUL,
        Engine.VEC,
        (rows, heads, half),
        imm=(pair[1] * size, pair_out[1] * out),
        dst=y.stepped(y.steps[0], y.steps[1], pair_out[0] * out),
        a=x.stepped(x.steps[0], x.steps[1], pair[0] * size),
        b=View(cos.buf, DType.F32, (cos.row_bytes, 0, 4)),
        d=View(sin.buf, DType.F32, (sin.row_bytes, 0, 4)),
    )
    if rotary < d:
        em.vmap(Fn.COPY, (rows, heads, d - rotary), y.at(rotary * out), x.at(rotary * size))
