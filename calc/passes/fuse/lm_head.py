"""The lm_head and its softcap become ``calc.LmHead``.

::

    x [B, H] -> Linear -> [Div, Tanh, Mul] -> logits
"""

from __future__ import annotations

import onnx_ir as ir

from calc.kernels.base import DOMAIN
from calc.kernels.linear import LinearAttrs
from calc.kernels.lm_head import LmHeadAttrs
from calc.passes.base import (
    Graph,
    Rule,
    attrs_of,
    calc_node,
    dims,
    insert,
    replace_value,
    scalar,
    sole_user,
)


class FuseLmHead(Rule):
    """The graph's logits."""

    name = "fuse-lm-head"
    anchor = (DOMAIN, "Linear")

    def rewrite(self, g: Graph, lin: ir.Node) -> str | None:
        x = lin.inputs[0]
        if len(dims(lin.outputs[0])) != 2 or attrs_of(lin, LinearAttrs) != LinearAttrs(1, bias=False, add=False):
            return "not a plain projection of one row per sequence"
        w, out = lin.inputs[1], lin.outputs[0]
        cap, last = 0.0, lin
        div = sole_user(out)
        if out.is_graph_output():
            div = None
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
        if not out.is_graph_output():
            return "its output is not the graph's"
        if x is None or w is None:
            return "an operand is missing"
        new = calc_node("LmHead", [x, w], LmHeadAttrs(cap), [dims(out)], lin, "lm_head/LmHead")
        insert(last, new)
        replace_value(g, out, new.outputs[0])
        return None
