"""A vector of the checkpoint added to every row becomes ``calc.Bias``, where no projection took it in."""

from __future__ import annotations

import onnx_ir as ir

from calc.kernels.base import Attrs
from calc.passes.base import Graph, Rule, calc_node, dims, insert, replace_value


class FuseBias(Rule):
    """``x + b``, b one value per column."""

    name = "fuse-bias"
    anchor = ("", "Add")

    def rewrite(self, g: Graph, node: ir.Node) -> str | None:
        out = node.outputs[0]
        for x, b in (node.inputs, reversed(node.inputs)):
            if x is None or b is None or g.weight(b) is None or g.weight(x) is not None:
                continue
            if dims(b) != dims(out)[-1:] or dims(x) != dims(out) or len(dims(out)) not in (2, 3):
                continue
            name = f"{node.metadata_props.get('calc.scope', node.name)}/Bias"
            new = calc_node("Bias", [x, b], Attrs(), [dims(out)], node, name)
            insert(node, new)
            replace_value(g, out, new.outputs[0])
            return None
        return "no operand is a weight with one value per column"
