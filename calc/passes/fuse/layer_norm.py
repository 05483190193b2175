"""A layer norm becomes ``calc.LayerNorm``."""

from __future__ import annotations

import onnx_ir as ir

from calc.kernels.layer_norm import LayerNormAttrs
from calc.passes.base import Graph, Rule, attr, calc_node, dims, insert, is_row_norm, replace_value


class FuseLayerNorm(Rule):
    """A layer norm over the model's rows, with a bias or without."""

    name = "fuse-layer-norm"
    anchor = ("", "LayerNormalization")

    def rewrite(self, g: Graph, node: ir.Node) -> str | None:
        x, gamma, *rest = node.inputs
        out = node.outputs[0]
        if x is None or gamma is None or not is_row_norm(g, node) or len(dims(out)) not in (2, 3):
            return "not a norm of the model's rows with a weight for scale"
        beta = rest[0] if rest else None
        if beta is not None and (g.weight(beta) is None or dims(beta) != dims(gamma)):
            return "its bias is no weight with one value per column"
        if any(o.uses() for o in node.outputs[1:]):
            return "its mean or deviation is used"
        attrs = LayerNormAttrs(bias=beta is not None, eps=attr(node, "epsilon", 1e-5))
        name = f"{node.metadata_props.get('calc.scope', node.name)}/LayerNorm"
        inputs = [x, gamma, *([] if beta is None else [beta])]
        new = calc_node("LayerNorm", inputs, attrs, [dims(out)], node, name)
        insert(node, new)
        replace_value(g, out, new.outputs[0])
        return None
