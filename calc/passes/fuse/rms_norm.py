"""A norm that no projection took in becomes ``calc.RmsNorm``."""

from __future__ import annotations

import onnx_ir as ir

from calc.kernels.rms_norm import RmsNormAttrs
from calc.passes.base import Graph, Rule, attr, calc_node, dims, insert, is_row_norm, replace_value


class FuseRmsNorm(Rule):
    """A stand-alone RMS norm over the model's rows."""

    name = "fuse-rms-norm"
    anchor = ("", "RMSNormalization")

    def rewrite(self, g: Graph, node: ir.Node) -> str | None:
        x, gamma = node.inputs
        if x is None or gamma is None or not is_row_norm(g, node) or len(dims(node.outputs[0])) not in (2, 3):
            return "not a norm of the model's rows with a weight for scale"
        eps = attr(node, "epsilon", 1e-5)
        name = f"{node.metadata_props.get('calc.scope', node.name)}/RmsNorm"
        new = calc_node("RmsNorm", [x, gamma], RmsNormAttrs(add=False, eps=eps), [dims(node.outputs[0])], node, name)
        insert(node, new)
        replace_value(g, node.outputs[0], new.outputs[0])
        return None
