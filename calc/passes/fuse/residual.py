"""``Add(residual, y)`` goes into the Linear, Moe or RmsNorm that makes y."""

from __future__ import annotations

import onnx_ir as ir

from calc.kernels.base import DOMAIN
from calc.passes.base import Graph, Rule, attr, calc_node, dims, insert, made_by, plain_attrs, replace_value


class FuseResidual(Rule):
    """A residual connection after a projection, the experts, or a post-norm."""

    name = "fuse-residual"
    anchor = ("", "Add")

    def rewrite(self, g: Graph, node: ir.Node) -> str | None:
        for y, residual in (node.inputs, reversed(node.inputs)):
            old = made_by(y, "Linear", "Moe", "RmsNorm", domain=DOMAIN)
            if old is None or y is None or residual is None or y.is_graph_output() or len(y.consumers()) != 1:
                continue
            if attr(old, "add", 0) or (old.op_type == "Linear" and attr(old, "n", 1) != 1) or dims(residual) != dims(y):
                continue
            ins = [v for v in old.inputs if v is not None]
            new = calc_node(
                old.op_type, [*ins, residual], {**plain_attrs(old), "add": 1}, [dims(y)], old, old.name or "?"
            )
            insert(node, new)
            replace_value(g, node.outputs[0], new.outputs[0])
            return None
        return "no operand is the sole output of a projection, experts or a norm"
