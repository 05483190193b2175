"""A sum of two activations that no projection took in becomes ``calc.Add``."""

from __future__ import annotations

import onnx_ir as ir

from calc.kernels.base import Attrs
from calc.passes.base import Graph, Rule, calc_node, dims, insert, replace_value


class FuseAdd(Rule):
    """``a + b``, row by row."""

    name = "fuse-add"
    anchor = ("", "Add")

    def rewrite(self, g: Graph, node: ir.Node) -> str | None:
        a, b = node.inputs
        out = node.outputs[0]
        if a is None or b is None or any(v.is_initializer() or v.is_graph_input() for v in (a, b)):
            return "not a sum of two activations"
        if dims(a) != dims(b) or len(dims(out)) not in (2, 3) or out.dtype != ir.DataType.FLOAT:
            return "the operands are not rows of one shape"
        name = f"{node.metadata_props.get('calc.scope', node.name)}/Add"
        new = calc_node("Add", [a, b], Attrs(), [dims(out)], node, name)
        insert(node, new)
        replace_value(g, out, new.outputs[0])
        return None
