"""KV write and attention become ``calc.Attention`` on token-major q, k and v."""

from __future__ import annotations

import onnx_ir as ir

from calc.core.roles import PAST
from calc.kernels.attention import AttentionAttrs
from calc.passes.base import (
    Graph,
    Rule,
    attr,
    calc_node,
    dims,
    insert,
    ints,
    made_by,
    offset_from,
    replace_value,
    sole_user,
)


class FuseAttentionKv(Rule):
    """``Attention(q, TensorScatter(past_k, k), TensorScatter(past_v, v))``, each split into heads, and their merge."""

    name = "fuse-attention-kv"
    anchor = ("", "Attention")

    def rewrite(self, g: Graph, node: ir.Node) -> str | None:
        if len(node.inputs) < 7 or any(v is not None for v in node.inputs[3:6]) or node.inputs[6] is None:
            return "attention with a mask or past inputs of its own"
        if attr(node, "is_causal", 0) != 1:
            return "attention is not causal"
        writes = [made_by(v, "TensorScatter") for v in node.inputs[1:3]]
        if any(w is None or attr(w, "mode", "linear") != "linear" or attr(w, "axis", -2) != 2 for w in writes):
            return "keys and values do not come from linear KV writes on axis 2"
        wk, wv = (w for w in writes if w is not None)
        heads_of_q = node.inputs[0]
        q, k, v = (_token_major(x) for x in (heads_of_q, wk.inputs[1], wv.inputs[1]))
        if heads_of_q is None or q is None or k is None or v is None:
            return "q, k or v are not split into heads by Reshape and Transpose"
        flat = _merge(node)
        if flat is None:
            return "the heads are not merged by Transpose and Reshape"
        past_k, past_v, past = wk.inputs[0], wv.inputs[0], wk.inputs[2]
        if past_k is None or past_v is None or past is None or wv.inputs[2] is not past or past.name != PAST:
            return "keys and values are not written at past_kv_cur_seq_len"
        _, heads, seq, head_dim = dims(heads_of_q)
        valid = offset_from(node.inputs[6], past)
        if valid is None or valid.size != 1 or int(valid.reshape(())) != seq:
            return "the valid keys are not past_kv_cur_seq_len and the call's own"
        left = attr(node, "left_window_size", -1)
        attrs = AttentionAttrs(
            heads=heads,
            kv_heads=dims(past_k)[1],
            head_dim=head_dim,
            value_dim=dims(past_v)[3],
            scale=attr(node, "scale", float(head_dim**-0.5)),
            softcap=attr(node, "softcap", 0.0),
            window=left + 1 if left >= 0 else 0,
        )
        out = flat.outputs[0]
        name = f"{node.metadata_props.get('calc.scope', node.name)}/Attention"
        shapes = [dims(out), dims(past_k), dims(past_v)]
        new = calc_node("Attention", [q, k, v, past_k, past_v, past], attrs, shapes, node, name)
        insert(node, new)
        replace_value(g, out, new.outputs[0])
        replace_value(g, wk.outputs[0], new.outputs[1])
        replace_value(g, wv.outputs[0], new.outputs[2])
        return None


def _token_major(value: ir.Value | None) -> ir.Value | None:
    transpose = made_by(value, "Transpose")
    if transpose is None or ints(transpose, "perm") != (0, 2, 1, 3):
        return None
    reshape = made_by(transpose.inputs[0], "Reshape")
    return None if reshape is None else reshape.inputs[0]


def _merge(node: ir.Node) -> ir.Node | None:
    """The Reshape that ends the merge of an attention's heads."""
    merge = sole_user(node.outputs[0])
    if merge is None or merge.op_type != "Transpose" or ints(merge, "perm") != (0, 2, 1, 3):
        return None
    flat = sole_user(merge.outputs[0])
    return flat if flat is not None and flat.op_type == "Reshape" and len(dims(flat.outputs[0])) == 3 else None
