"""Mixture of experts: router, top-k, the routed experts and the residual in one op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from calc.core.isa import Alu, DType, Engine, Fn, Op, Red
from calc.core.schemes import Scheme
from calc.kernels.base import (
    Attrs,
    Call,
    Constraint,
    Example,
    Kernel,
    Numerics,
    Work,
    activation,
    activation_known,
    int8_rows,
    matmul,
    store,
)
from calc.kernels.glu import emit_glu
from calc.kernels.lowering import Act, MatrixRows, Rows, drain
from calc.kernels.program import Reg, View, dense

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering


def top_k_fits(call: Call[MoeAttrs]) -> str | None:
    """1 <= top_k <= experts."""
    k, e = call.attrs.top_k, call.shape("gate")[0]
    return None if 1 <= k <= e else f"top_k {k} of {e} experts"


@dataclass(frozen=True)
class MoeAttrs(Attrs):
    """Attributes of `Moe`.

    Attributes:
        act: an activation of the vector engine.
        top_k: experts that a row goes to.
        norm_topk: whether their weights are divided by their sum.
        add: whether there is a residual.
        hidden: columns of x.
    """

    act: str
    top_k: int
    norm_topk: bool
    add: bool
    hidden: int


class Moe(Kernel[MoeAttrs]):
    """``y = [residual +] sum_j p_j * expert_j(x)`` over the top_k experts of the router's softmax.

    x, residual and y [B, S, H], router [E, H], gate and up [E, I, H], down [E, H, I]. The router's logits, softmax and
    weights are FP32; with norm_topk the chosen weights are divided by their sum. Each expert is a GLU whose hidden
    values are rounded to BF16 once; expert outputs are weighted and summed in FP32, and rounded once.

    Decode walks the (token, choice) pairs and loads the routed experts only: the program reads the expert's id from
    SRAM and addresses its tiles with it. Prefill sorts the pairs by expert and visits each expert that has any.
    """

    name = "Moe"
    attributes = MoeAttrs
    constraints: tuple[Constraint[MoeAttrs], ...] = (top_k_fits, activation_known)

    def formals(self, attrs: MoeAttrs) -> tuple[tuple[str, ...], tuple[str, ...]]:
        ins = ("x", *self.weights(attrs))
        return (*ins, *(("residual",) if attrs.add else ())), ("y",)

    def weights(self, attrs: MoeAttrs) -> tuple[str, ...]:
        return ("router", "gate", "up", "down")

    def body(self, attrs: MoeAttrs, schemes: Mapping[str, Scheme], numerics: Numerics) -> str:
        lines = [
            f"flat_shape = Constant<value_ints: ints = [-1, {attrs.hidden}]>()",
            "t = Reshape(x, flat_shape)",
            matmul("t", "router", "z", schemes["router"]),
            "p = Softmax<axis: int = -1>(z)",
            f"k = Constant<value_ints: ints = [{attrs.top_k}]>()",
            "top, ids = TopK<axis: int = -1>(p, k)",
            "last = Constant<value_ints: ints = [-1]>()",
            "total = ReduceSum<keepdims: int = 1>(top, last)",
            "w = Div(top, total)" if attrs.norm_topk else "w = Identity(top)",
            "p_zero = Sub(p, p)",
            "dense_w = ScatterElements<axis: int = 1>(p_zero, ids, w)",
            "dense_t = Transpose<perm: ints = [1, 0]>(dense_w)",
            "w_col = Unsqueeze(dense_t, last)",
            "lead = Constant<value_ints: ints = [0]>()",
            "tb = Unsqueeze(t, lead)",
            *_batched("tb", "gate", "g", schemes["gate"]),
            *_batched("tb", "up", "u", schemes["up"]),
            activation(attrs.act, "g", "ga"),
            "gu = Mul(ga, u)",
            store("gu", "h", numerics),
            *_batched("h", "down", "o", schemes["down"]),
            "ow = Mul(o, w_col)",
            "s = ReduceSum<keepdims: int = 0>(ow, lead)",
            "xs = Shape(x)",
            "back = Reshape(s, xs)",
            "sum = Add(back, residual)" if attrs.add else "sum = Identity(back)",
            store("sum", "y", numerics),
        ]
        return "\n".join(lines)

    def work(self, call: Call[MoeAttrs], rows: int, context: int) -> Work:
        e, i, h = call.shape("gate")
        k = call.attrs.top_k
        return Work(rows * (e * h + k * 3 * i * h), rows * (e + k * (2 * i + h)))

    def lower(self, low: Lowering, call: Call[MoeAttrs]) -> None:
        em = low.em
        x = low.act(call.inputs["x"])
        weights, ids = _route(low, call, x)
        dims = (x.rows.count, x.width)
        total = low.scratch("total", x.width, rows=x.rows)
        em.fill(dims, total.view, 0.0)
        if low.variant.seq == 1:
            _by_pair(low, call, x, weights, ids, total)
        else:
            _by_expert(low, call, x, weights, ids, total)
        y = low.new(call.outputs[0], x.width, x.rows)
        if call.attrs.add:
            em.vmap(Fn.ADD, dims, y.view, total.view, low.act(call.inputs["residual"]).view)
        else:
            em.vmap(Fn.COPY, dims, y.view, total.view)

    def examples(self) -> tuple[Example[MoeAttrs], ...]:
        base = MoeAttrs("silu", top_k=2, norm_topk=True, add=True, hidden=64)
        shapes = {"router": (4, 64), "gate": (4, 48, 64), "up": (4, 48, 64), "down": (4, 64, 48)}
        return (
            Example(base, {"x": (1, 9, 64), "residual": (1, 9, 64), **shapes}),
            Example(replace(base, norm_topk=False), {"x": (1, 1, 64), "residual": (1, 1, 64), **shapes}),
            Example(replace(base, top_k=1, norm_topk=False), {"x": (1, 33, 64), "residual": (1, 33, 64), **shapes}),
        )


def _batched(x: str, w: str, dst: str, scheme: Scheme) -> list[str]:
    """``dst[e] = x[e] @ w[e].T`` for all experts at once; see `matmul`."""
    lines = [f"{dst}_wt = Transpose<perm: ints = [0, 2, 1]>({w})"]
    scales = [
        f"{dst}_mid = Constant<value_ints: ints = [1]>()",
        f"{dst}_ws = Unsqueeze({w}_scale, {dst}_mid)",
    ]
    if scheme.activations == "bf16" and not scheme.row_scaled:
        return [*lines, f"{dst} = MatMul({x}, {dst}_wt)"]
    if scheme.activations == "bf16":
        wide = f"{dst}_wf = Cast<to: int = 1>({dst}_wt)"
        return [*lines, wide, f"{dst}_f = MatMul({x}, {dst}_wf)", *scales, f"{dst} = Mul({dst}_f, {dst}_ws)"]
    if not scheme.row_scaled:
        return [
            *int8_rows(x, dst),
            *lines,
            f"{dst}_f = MatMul({dst}_codes, {dst}_wt)",
            f"{dst} = Mul({dst}_f, {dst}_s)",
        ]
    return [
        *int8_rows(x, dst),
        f"{dst}_qd = Cast<to: int = 11>({dst}_codes)",
        *lines,
        f"{dst}_wd = Cast<to: int = 11>({dst}_wt)",
        f"{dst}_id = MatMul({dst}_qd, {dst}_wd)",
        f"{dst}_f = Cast<to: int = 1>({dst}_id)",
        f"{dst}_fa = Mul({dst}_f, {dst}_s)",
        *scales,
        f"{dst} = Mul({dst}_fa, {dst}_ws)",
    ]


def _route(low: Lowering, call: Call[MoeAttrs], x: Act) -> tuple[View, View]:
    """Router, softmax and top-k: (weights f32 [rows, k], ids i32 [rows, k]), dense."""
    em, w, k = low.em, low.packed(call, "router"), call.attrs.top_k
    experts = w.layout.rows
    count, limit = x.rows.count, x.rows.limit
    z = low.scratch("router", experts, rows=x.rows)
    drain(low.linear(w, MatrixRows(low, x.view, x.rows, x.width), z.view))
    stat = em.sram("router_stat", 4 * limit)
    sv = View(stat, DType.F32, (4,))
    dims, wide = (count, experts), sv.stepped(4, 0)
    em.vreduce(Red.MAX, dims, sv, z.view)
    em.vmap(Fn.EXPSUB, dims, z.view, z.view, wide)
    em.vreduce(Red.SUM, dims, sv, z.view)
    em.vmap(Fn.DIV, dims, z.view, z.view, wide)
    weights = dense(em.sram("top_weights", 4 * limit * k), DType.F32, limit, k)
    ids = dense(em.sram("top_ids", 4 * limit * k), DType.I32, limit, k)
    em.op(Op.VTOPK, Engine.VEC, dims, imm=(k,), dst=weights, a=z.view, d=ids)
    if call.attrs.norm_topk:
        em.vreduce(Red.SUM, (count, k), sv, weights)
        em.vmap(Fn.DIV, (count, k), weights, weights, wide)
    return weights, ids


def _expert(low: Lowering, call: Call[MoeAttrs], x: View, h: Act, out: Act, expert: Reg) -> None:
    """One expert's GLU and down projection: out f32 [rows, H]."""
    gate, up, down = (low.packed(call, n) for n in ("gate", "up", "down"))
    emit_glu(low, gate, up, x, h.rows, h.view, call.attrs.act, expert)
    drain(low.linear(down, MatrixRows(low, h.view, h.rows, h.width), out.view, expert=expert))


def _by_pair(low: Lowering, call: Call[MoeAttrs], x: Act, weights: View, ids: View, total: Act) -> None:
    """Decode: token by token, choice by choice."""
    em, k = low.em, call.attrs.top_k
    experts, inter, _ = call.shape("gate")
    one = Rows(1, 1)
    h = low.scratch("hidden", inter, DType.BF16, one)
    out = low.scratch("expert", x.width, DType.F32, one)
    with em.loop(x.rows.count) as token, em.loop(k) as j:
        expert = em.alu(Alu.MIN, em.sload(ids.stepped(4).at(0, (token, 4 * k), (j, 4)), (1, j, None, 1)), experts - 1)
        _expert(low, call, x.view.at(0, (token, x.row_bytes)), h, out, expert)
        acc = total.view.at(0, (token, total.row_bytes))
        weight = weights.at(0, (token, 4 * k), (j, 4)).stepped(0, 0)
        em.vmap(Fn.MADD, (1, x.width), acc, out.view, weight, acc)


def _by_expert(low: Lowering, call: Call[MoeAttrs], x: Act, weights: View, ids: View, total: Act) -> None:
    """Prefill: pairs sorted by expert, experts without any skipped."""
    em, k, width = low.em, call.attrs.top_k, x.width
    experts, inter, _ = call.shape("gate")
    n = x.rows.limit
    order = dense(em.sram("order", 4 * n * k), DType.I32, n * k)
    offsets = dense(em.sram("offsets", 4 * (experts + 1)), DType.I32, experts + 1)
    rows = x.rows.count if isinstance(x.rows.count, Reg) else em.const(x.rows.count)
    pairs = em.alu(Alu.MUL, rows, k)
    em.op(Op.VBUCKET, Engine.VEC, (pairs,), imm=(experts,), dst=order, a=ids.stepped(4), d=offsets)
    with em.loop(experts) as e:
        following = em.alu(Alu.ADD, e, 1)
        first = em.sload(offsets.at(0, (e, 4)), (k, e, rows, experts))
        end = em.sload(offsets.at(4, (e, 4)), (k, following, rows, experts))
        count = em.alu(Alu.SUB, end, first)
        mine = Rows(count, n)
        gathered = low.scratch("gathered", width, DType.BF16, mine)
        h = low.scratch("hidden", inter, DType.BF16, mine)
        out = low.scratch("expert", width, DType.F32, mine)
        with em.loop(em.alu(Alu.MIN, count, 1)):
            chosen = order.at(0, (first, 4))
            em.op(Op.VGATHER, Engine.VEC, (count, width), imm=(k, n), dst=gathered.view, a=x.view, b=chosen)
            _expert(low, call, gathered.view, h, out, e)
            em.op(
                Op.VSCATTER,
                Engine.VEC,
                (count, width),
                imm=(k, n),
                dst=total.view,
                a=out.view,
                b=chosen,
                d=weights.stepped(4),
            )
