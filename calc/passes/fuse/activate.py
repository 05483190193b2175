"""An activation that no gated unit took in becomes ``calc.Activate``."""

from __future__ import annotations

import onnx_ir as ir

from calc.kernels.activate import ActivateAttrs
from calc.passes.base import Graph, Rule, attr, calc_node, dims, insert, made_by, other_input, replace_value, sole_user


class FuseActivate(Rule):
    """Silu, gelu, tanh and sigmoid of rows."""

    name = "fuse-activate"
    anchor = ("", "*")
    ops = frozenset({"Mul", "Gelu", "Swish", "Tanh", "Sigmoid"})

    def rewrite(self, g: Graph, node: ir.Node) -> str | None:
        out = node.outputs[0]
        found = activation_of(out)
        if found is None:
            return "not an activation of one value"
        act, x = found
        user = sole_user(out)
        if act == "sigmoid" and user is not None and activation_of(user.outputs[0]) not in (None, found):
            return "the inner part of a silu"
        if len(dims(out)) not in (2, 3) or dims(x) != dims(out):
            return "not over the rows of the model"
        name = f"{node.metadata_props.get('calc.scope', node.name)}/Activate"
        new = calc_node("Activate", [x], ActivateAttrs(act), [dims(out)], node, name)
        insert(node, new)
        replace_value(g, out, new.outputs[0])
        return None


def activation_of(value: ir.Value | None) -> tuple[str, ir.Value] | None:
    """(activation, its input) when the value is an activation of something."""
    node = made_by(value, "Mul", "Gelu", "Swish", "Tanh", "Sigmoid")
    if node is None:
        return None
    x = node.inputs[0]
    if node.op_type in ("Tanh", "Sigmoid") and x is not None:
        return node.op_type.lower(), x
    if node.op_type == "Gelu" and x is not None:
        return ("gelu_tanh" if attr(node, "approximate", "none") == "tanh" else "gelu"), x
    if node.op_type == "Swish" and x is not None:
        return ("silu", x) if attr(node, "alpha", 1.0) == 1.0 else None
    for v in node.inputs:
        sig = made_by(v, "Sigmoid")
        if sig is not None and v is not None and sig.inputs[0] is other_input(node, v):
            x = sig.inputs[0]
            return None if x is None else ("silu", x)
    return None
