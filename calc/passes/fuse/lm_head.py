"""Last-row choice, final norm, lm_head and softcap become ``calc.LmHead``.

::

    x -> RMSNormalization -> GatherND(cur_seq_len - 1) -> Linear -> [Div, Tanh, Mul] -> logits
"""

from __future__ import annotations

import onnx_ir as ir

from calc.kernels.base import DOMAIN, Attr
from calc.passes.base import (
    Graph,
    Rule,
    attr,
    calc_node,
    dims,
    insert,
    is_row_norm,
    made_by,
    offset_from,
    replace_value,
    scalar,
    sole_user,
)


class FuseLmHead(Rule):
    """The graph's logits."""

    name = "fuse-lm-head"
    anchor = ("", "GatherND")

    def rewrite(self, g: Graph, node: ir.Node) -> str | None:
        cur = next((v for v in g.model.graph.inputs if v.name == "cur_seq_len"), None)
        row = None if cur is None else offset_from(node.inputs[1], cur)
        if cur is None or row is None or row.size != 1 or int(row.reshape(())) != -1:
            return "the rows are not chosen by cur_seq_len - 1"
        x, gamma, eps = node.inputs[0], None, 0.0
        norm = made_by(x, "RMSNormalization")
        if norm is not None and is_row_norm(g, norm):
            x, gamma, eps = norm.inputs[0], norm.inputs[1], float(attr(norm, "epsilon", 1e-5))  # type: ignore[arg-type]
        lin = sole_user(node.outputs[0])
        if lin is None or lin.domain != DOMAIN or lin.op_type != "Linear" or attr(lin, "bias", 0):
            return "the chosen rows do not go to a projection without bias"
        w, out = lin.inputs[1], lin.outputs[0]
        cap, last = 0.0, lin
        div = sole_user(out)
        if div is not None and div.op_type in ("Div", "Mul"):
            tanh = sole_user(div.outputs[0])
            mul = None if tanh is None or tanh.op_type != "Tanh" else sole_user(tanh.outputs[0])
            factor = None if mul is None else scalar(mul.inputs[1])
            if mul is None or mul.op_type != "Mul" or factor is None:
                return "the logits are scaled, but not by a softcap"
            first = scalar(div.inputs[1])
            if not first or abs((first if div.op_type == "Div" else 1 / first) - factor) > 1e-6 * factor:
                return "the softcap's two factors differ"
            cap, out, last = factor, mul.outputs[0], mul
        assert x is not None and w is not None
        attrs: dict[str, Attr] = {"norm": int(gamma is not None), "eps": eps, "softcap": cap}
        ins = [x, cur, *([gamma] if gamma is not None else []), w]
        new = calc_node("LmHead", ins, attrs, [dims(out)], lin, "lm_head/LmHead")
        insert(last, new)
        replace_value(g, out, new.outputs[0])
        return None
