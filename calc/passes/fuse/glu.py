"""``Mul(act(Linear(x, gate)), Linear(x, up))`` becomes ``calc.Glu``: SwiGLU and GeGLU."""

from __future__ import annotations

import onnx_ir as ir

from calc.kernels.base import DOMAIN
from calc.kernels.glu import GluAttrs
from calc.kernels.linear import LinearAttrs
from calc.passes.base import Graph, Rule, attrs_of, calc_node, dims, insert, made_by, replace_value
from calc.passes.fuse.activate import activation_of


class FuseGlu(Rule):
    """The gated product of two projections of one input."""

    name = "fuse-glu"
    anchor = ("", "Mul")

    def rewrite(self, g: Graph, node: ir.Node) -> str | None:
        for gated, up in (node.inputs, reversed(node.inputs)):
            found = activation_of(gated)
            lin_up = _plain_linear(up)
            if found is None or lin_up is None:
                continue
            act, pre = found
            lin_gate = _plain_linear(pre)
            if lin_gate is None or lin_gate is lin_up or lin_gate.inputs[0] is not lin_up.inputs[0]:
                continue
            x, wg, wu = lin_gate.inputs[0], lin_gate.inputs[1], lin_up.inputs[1]
            if x is None or wg is None or wu is None:
                continue
            name = f"{node.metadata_props.get('calc.scope', node.name)}/Glu"
            new = calc_node("Glu", [x, wg, wu], GluAttrs(act), [dims(node.outputs[0])], node, name)
            insert(node, new)
            replace_value(g, node.outputs[0], new.outputs[0])
            return None
        return "not an activation of one projection times another projection of the same input"


def _plain_linear(value: ir.Value | None) -> ir.Node | None:
    node = made_by(value, "Linear", domain=DOMAIN)
    if node is None:
        return None
    attrs = attrs_of(node, LinearAttrs)
    return None if attrs.bias or attrs.add else node
