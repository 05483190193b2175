"""``Add(residual, y)`` goes into the Linear, Moe or RmsNorm that makes y."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from calc.kernels.base import DOMAIN
from calc.kernels.linear import LinearAttrs
from calc.kernels.moe import MoeAttrs
from calc.kernels.rms_norm import RmsNormAttrs
from calc.passes.base import Graph, Rule, attrs_of, calc_node, dims, insert, made_by, replace_value

_KINDS: dict[str, type[LinearAttrs | MoeAttrs | RmsNormAttrs]] = {
    "Linear": LinearAttrs,
    "Moe": MoeAttrs,
    "RmsNorm": RmsNormAttrs,
}
"""The ops that add a residual, with their attributes."""


class FuseResidual(Rule):
    """A residual connection after a projection, the experts, or a post-norm."""

    name = "fuse-residual"
    anchor = ("", "Add")

    def rewrite(self, g: Graph, node: ir.Node) -> str | None:
        for y, residual in (node.inputs, reversed(node.inputs)):
            old = made_by(y, *_KINDS, domain=DOMAIN)
            if old is None or y is None or residual is None or y.is_graph_output() or len(y.consumers()) != 1:
                continue
            attrs = attrs_of(old, _KINDS[old.op_type])
            if attrs.add or (isinstance(attrs, LinearAttrs) and attrs.n != 1) or dims(residual) != dims(y):
                continue
            ins = [v for v in old.inputs if v is not None]
            new = calc_node(old.op_type, [*ins, residual], replace(attrs, add=True), [dims(y)], old, old.name or "?")
            insert(node, new)
            replace_value(g, node.outputs[0], new.outputs[0])
            return None
        return "no operand is the sole output of a projection, experts or a norm"
