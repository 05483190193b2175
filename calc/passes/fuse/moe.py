"""Router and experts become ``calc.Moe``.

::

    x -> Reshape -> Linear(router) -> Softmax -> TopK -> [ReduceSum, Div] -> Experts -> Reshape
"""

from __future__ import annotations

import onnx_ir as ir

from calc.kernels.base import DOMAIN
from calc.kernels.linear import LinearAttrs
from calc.kernels.moe import MoeAttrs
from calc.passes.base import (
    Graph,
    Rule,
    attr,
    attrs_of,
    calc_node,
    constant,
    dims,
    insert,
    is_last_axis,
    made_by,
    replace_value,
    sole_user,
)


class FuseMoe(Rule):
    """Softmax router with top-k, optional normalisation, and the experts."""

    name = "fuse-moe"
    anchor = (DOMAIN, "Experts")

    def rewrite(self, g: Graph, node: ir.Node) -> str | None:
        x2d, ids, weights, gate, up, down = node.inputs
        reshape = made_by(x2d, "Reshape")
        if reshape is None or reshape.inputs[0] is None:
            return "the experts' input is not a reshape of the layer's rows"
        x = reshape.inputs[0]
        norm_topk, top = False, made_by(weights, "TopK")
        div = made_by(weights, "Div")
        if div is not None:
            total = made_by(div.inputs[1], "ReduceSum")
            top = made_by(div.inputs[0], "TopK")
            if top is None or total is None or total.inputs[0] is not top.outputs[0] or not _over_columns(total):
                return "the routing weights are not normalised by their sum"
            norm_topk = True
        if top is None or ids is not top.outputs[1]:
            return "the expert ids do not come from the same TopK as the weights"
        softmax = made_by(top.inputs[0], "Softmax")
        if softmax is None or not (is_last_axis(softmax, 2) and is_last_axis(top, 2)) or attr(top, "largest", 1) != 1:
            return "the router is not softmax then top-k"
        router = made_by(softmax.inputs[0], "Linear", domain=DOMAIN)
        if router is None or router.inputs[0] is not x2d or attrs_of(router, LinearAttrs).bias:
            return "the router's logits are not a projection of the experts' input"
        w = router.inputs[1]
        experts = [v for v in (gate, up, down) if v is not None and g.weight(v) is not None]
        if w is None or len(experts) != 3:
            return "the experts' weights are not weights of the checkpoint"
        back = sole_user(node.outputs[0])
        if back is None or back.op_type != "Reshape" or dims(back.outputs[0]) != dims(x):
            return "the experts' output is not reshaped back to the layer's rows"
        attrs = MoeAttrs(
            act=attr(node, "activation", "silu"),
            top_k=dims(top.outputs[0])[-1],
            norm_topk=norm_topk,
            add=False,
            hidden=dims(x)[-1],
        )
        name = f"{node.metadata_props.get('calc.scope', node.name)}/Moe"
        new = calc_node("Moe", [x, w, *experts], attrs, [dims(x)], node, name)
        insert(node, new)
        replace_value(g, back.outputs[0], new.outputs[0])
        return None


def _over_columns(reduce: ir.Node) -> bool:
    """Whether a ReduceSum sums the columns of rows and keeps the axis."""
    axes = constant(reduce.inputs[1]) if len(reduce.inputs) > 1 else None
    return axes is not None and axes.ravel().tolist() in ([-1], [1]) and attr(reduce, "keepdims", 1) == 1
