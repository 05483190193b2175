"""Rotary embeddings of one attention's q and k, with the norms before them, become ``calc.QkNormRope``.

::

    q -> Reshape -> [RMSNorm] -> Transpose -> RotaryEmbedding -> Attention
    k -> Reshape -> [RMSNorm] -> Transpose -> RotaryEmbedding -> TensorScatter -> Attention

becomes ``q', k' = QkNormRope(q, k)`` in token-major layout, followed by the split into heads that Attention expects.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from calc.kernels.qk_norm_rope import QkNormRopeAttrs
from calc.passes.base import (
    Graph,
    Rule,
    attr,
    calc_node,
    dims,
    insert,
    ints,
    is_row_norm,
    made_by,
    offset_from,
    replace_value,
)


@dataclass(frozen=True)
class _Branch:
    rope: ir.Node
    x: ir.Value
    heads: int
    head_dim: int
    gamma: ir.Value | None
    eps: float
    cos: ir.Value
    sin: ir.Value
    positions: ir.Value | None


class FuseQkNormRope(Rule):
    """Both rotary embeddings of an attention, and the head norms before them."""

    name = "fuse-qk-norm-rope"
    anchor = ("", "Attention")

    def rewrite(self, g: Graph, node: ir.Node) -> str | None:
        scatter = made_by(node.inputs[1], "TensorScatter")
        if scatter is None:
            return "the keys do not come from a KV write"
        q, k = _branch(g, node.inputs[0]), _branch(g, scatter.inputs[1])
        if isinstance(q, str) or isinstance(k, str):
            return q if isinstance(q, str) else str(k)
        if (
            q.cos is not k.cos
            or q.sin is not k.sin
            or q.head_dim != k.head_dim
            or q.positions is not k.positions
            or attr(q.rope, "interleaved", 0) != attr(k.rope, "interleaved", 0)
            or (q.gamma is None, q.eps) != (k.gamma is None, k.eps)
        ):
            return "q and k are normed or rotated differently"
        past = scatter.inputs[2]
        steps = None if past is None or past.name != "past_kv_cur_seq_len" else offset_from(q.positions, past)
        if past is None or steps is None or not np.array_equal(steps.ravel(), np.arange(dims(q.x)[1])):
            return "the positions are not past_kv_cur_seq_len onwards"
        attrs = QkNormRopeAttrs(
            heads=q.heads,
            kv_heads=k.heads,
            head_dim=q.head_dim,
            norm=q.gamma is not None,
            eps=q.eps,
            interleaved=attr(q.rope, "interleaved", 0) == 1,
            rotary_dim=2 * dims(q.cos)[1],
        )
        gammas = [v for v in (q.gamma, k.gamma) if v is not None]
        name = f"{node.metadata_props.get('calc.scope', node.name)}/QkNormRope"
        new = calc_node(
            "QkNormRope", [q.x, k.x, *gammas, q.cos, q.sin, past], attrs, [dims(q.x), dims(k.x)], node, name
        )
        first = q.rope if _before(g, q.rope, k.rope) else k.rope
        last = k.rope if first is q.rope else q.rope
        insert(last, new)
        for i, b in enumerate((q, k)):
            _split_heads(g, b, new.outputs[i], last)
        return None


def _before(g: Graph, a: ir.Node, b: ir.Node) -> bool:
    for n in g.model.graph:
        if n is a:
            return True
        if n is b:
            return False
    return False


def _branch(g: Graph, value: ir.Value | None) -> _Branch | str:
    rope = made_by(value, "RotaryEmbedding")
    if rope is None:
        return "not rotated by RotaryEmbedding"
    # families norm the heads before or after they swap them with the sequence: the same rows either way
    gamma, eps, inner, swapped = None, 0.0, rope.inputs[0], False
    for _ in range(2):
        norm, transpose = made_by(inner, "RMSNormalization"), made_by(inner, "Transpose")
        if norm is not None and gamma is None:
            gamma, eps, inner = norm.inputs[1], attr(norm, "epsilon", 1e-5), norm.inputs[0]
            if not is_row_norm(g, norm):
                return "the head norm's scale is not a weight with one value per column"
        elif transpose is not None and ints(transpose, "perm") == (0, 2, 1, 3) and not swapped:
            inner, swapped = transpose.inputs[0], True
    if not swapped:
        return "heads are not split by Reshape and Transpose"
    reshape = made_by(inner, "Reshape")
    x = None if reshape is None else reshape.inputs[0]
    if reshape is None or x is None:
        return "heads are not split by Reshape and Transpose"
    shape = dims(reshape.outputs[0])
    if len(shape) != 4:
        return "the head split is not [batch, sequence, heads, head_dim]"
    tables = [made_by(v, "Gather") for v in rope.inputs[1:3]]
    found = [t.inputs[0] for t in tables if t is not None and g.weight(t.inputs[0]) is not None]
    if len(found) != 2 or found[0] is None or found[1] is None:
        return "cos and sin are not rows of a table"
    at = [t.inputs[1] for t in tables if t is not None]
    if at[0] is not at[1]:
        return "cos and sin are rows of different positions"
    return _Branch(rope, x, shape[2], shape[3], gamma, eps, found[0], found[1], at[0])


def _split_heads(g: Graph, b: _Branch, value: ir.Value, before: ir.Node) -> None:
    batch, seq, _ = dims(value)
    shape = (batch, seq, b.heads, b.head_dim)
    name = f"{value.name}/split"
    target = ir.Value(name=f"{name}/shape", shape=ir.Shape([4]), type=ir.TensorType(ir.DataType.INT64))
    target.const_value = ir.tensor(np.array(shape, np.int64), name=target.name)
    g.model.graph.initializers[target.name or name] = target
    reshape = ir.Node("", "Reshape", [value, target], num_outputs=1, name=f"{name}/Reshape")
    out = reshape.outputs[0]
    out.name, out.shape, out.dtype = f"{name}/heads", ir.Shape(shape), ir.DataType.FLOAT
    transpose = ir.Node(
        "", "Transpose", [out], [ir.AttrInt64s("perm", [0, 2, 1, 3])], num_outputs=1, name=f"{name}/Transpose"
    )
    t = transpose.outputs[0]
    t.name, t.shape, t.dtype = f"{name}/t", ir.Shape((batch, b.heads, seq, b.head_dim)), ir.DataType.FLOAT
    insert(before, reshape, transpose)
    replace_value(g, b.rope.outputs[0], t)
