"""An RMS norm goes into the projections, the gated unit or the experts that read it; projections of one norm join.

::

    RMSNormalization -> Linear(q), Linear(k), Linear(v)     becomes   Linear(norm=1, n=3)
    RMSNormalization -> Glu                                 becomes   Glu(norm=1)
"""

from __future__ import annotations

import onnx_ir as ir

from calc.kernels.base import DOMAIN, Attr
from calc.passes.base import Graph, Rule, attr, calc_node, dims, insert, is_row_norm, replace_value


class FuseNormPrologue(Rule):
    """A norm whose only readers are one Glu, one Moe, or plain Linears."""

    name = "fuse-norm-prologue"
    anchor = ("", "RMSNormalization")

    def rewrite(self, g: Graph, node: ir.Node) -> str | None:
        x, gamma = node.inputs
        out = node.outputs[0]
        if not is_row_norm(g, node):
            return "the norm's scale is not a weight with one value per column"
        if len(dims(out)) != 3 or out.is_graph_output():
            return "the norm is not over the rows of the model"
        users = list(dict.fromkeys(out.consumers()))
        kinds = {(u.domain, u.op_type) for u in users}
        assert x is not None and gamma is not None
        eps = float(attr(node, "epsilon", 1e-5))  # type: ignore[arg-type]
        if len(users) == 1 and kinds <= {(DOMAIN, "Glu"), (DOMAIN, "Moe")}:
            old = users[0]
            attrs = {**plain_attrs(old), "norm": 1, "eps": eps}
            new = calc_node(old.op_type, [x, gamma, *_rest(old)], attrs, [dims(old.outputs[0])], old, old.name or "?")
            insert(old, new)
            replace_value(g, old.outputs[0], new.outputs[0])
            return None
        if kinds == {(DOMAIN, "Linear")} and len({attr(u, "bias", 0) for u in users}) == 1:
            return _join(g, node, users, x, gamma, eps)
        return f"read by {sorted(k[1] for k in kinds)}"


def plain_attrs(node: ir.Node) -> dict[str, Attr]:
    """A calc node's attributes as plain values."""
    return {k: attr(node, k, 0) for k in node.attributes}


def _rest(node: ir.Node) -> list[ir.Value]:
    return [v for v in node.inputs[1:] if v is not None]


def _join(g: Graph, norm: ir.Node, users: list[ir.Node], x: ir.Value, gamma: ir.Value, eps: float) -> str | None:
    order = {n: i for i, n in enumerate(g.model.graph)}
    users.sort(key=lambda u: order[u])
    bias = int(attr(users[0], "bias", 0))  # type: ignore[arg-type]
    weights = [u.inputs[1] for u in users]
    biases = [u.inputs[2] for u in users] if bias else []
    attrs: dict[str, Attr] = {"n": len(users), "norm": 1, "bias": bias, "add": 0, "eps": eps}
    ins = [v for v in (x, gamma, *weights, *biases) if v is not None]
    name = (
        (users[0].name or "?")
        if len(users) == 1
        else f"{norm.metadata_props.get('calc.scope', norm.name)}/Linear{len(users)}"
    )
    new = calc_node("Linear", ins, attrs, [dims(u.outputs[0]) for u in users], users[0], name)
    insert(users[0], new)
    for u, value in zip(users, new.outputs, strict=True):
        replace_value(g, u.outputs[0], value)
    return None
