"""``MatMul(x, Transpose(W)) [+ b]`` becomes ``calc.Linear``."""

from __future__ import annotations

import onnx_ir as ir

from calc.kernels.linear import LinearAttrs
from calc.passes.base import Graph, Rule, calc_node, dims, insert, ints, made_by, other_input, replace_value, sole_user


class FuseLinear(Rule):
    """A matrix product with a weight, and the bias after it."""

    name = "fuse-linear"
    anchor = ("", "MatMul")

    def rewrite(self, g: Graph, node: ir.Node) -> str | None:
        x, wt = node.inputs
        transpose = made_by(wt, "Transpose")
        w = None if transpose is None else transpose.inputs[0]
        if transpose is None or ints(transpose, "perm") != (1, 0) or x is None or w is None or g.weight(w) is None:
            return "the second operand is not a transposed 2-D weight"
        out, last, bias = node.outputs[0], node, None
        user = sole_user(out)
        if user is not None and user.op_type == "Add" and not user.domain:
            b = other_input(user, out)
            if b is not None and g.weight(b) is not None and dims(b) == dims(out)[-1:]:
                out, last, bias = user.outputs[0], user, b
        attrs = LinearAttrs(1, bias=bias is not None, add=False)
        ins = [x, w, *([bias] if bias is not None else [])]
        new = calc_node(
            "Linear", ins, attrs, [dims(out)], node, f"{node.metadata_props.get('calc.scope', node.name)}/Linear"
        )
        insert(last, new)
        replace_value(g, out, new.outputs[0])
        return None
