"""Projections of one input become one ``calc.Linear`` with several outputs: q, k and v.

::

    x -> Linear(q), Linear(k), Linear(v)     becomes   x -> Linear(n=3)

They share the int8 codes of x, and the program's records for its rows.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from calc.kernels.base import DOMAIN
from calc.kernels.linear import LinearAttrs
from calc.passes.base import Graph, Rule, attrs_of, calc_node, dims, insert, replace_value


class JoinLinears(Rule):
    """Plain projections of one input, the first of them in graph order is the anchor."""

    name = "join-linears"
    anchor = (DOMAIN, "Linear")

    def rewrite(self, g: Graph, node: ir.Node) -> str | None:
        x = node.inputs[0]
        attrs = attrs_of(node, LinearAttrs)
        if x is None or not _is_plain(attrs):
            return "it has several outputs or a residual already"
        linears = [u for u in dict.fromkeys(x.consumers()) if self.is_anchor(u) and u.inputs[0] is x]
        users = [u for u in linears if _is_plain(a := attrs_of(u, LinearAttrs)) and a.bias == attrs.bias]
        if len(users) < 2:
            return "no other projection of its input is like it"
        order = {n: i for i, n in enumerate(g.model.graph)}
        users.sort(key=lambda u: order[u])
        weights = [u.inputs[1] for u in users]
        biases = [u.inputs[2] for u in users] if attrs.bias else []
        ins = [v for v in (x, *weights, *biases) if v is not None]
        name = f"{(users[0].name or '?').removesuffix('/Linear')}/Linear{len(users)}"
        shapes = [dims(u.outputs[0]) for u in users]
        new = calc_node("Linear", ins, replace(attrs, n=len(users)), shapes, users[0], name)
        insert(users[0], new)
        for u, value in zip(users, new.outputs, strict=True):
            replace_value(g, u.outputs[0], value)
            g.model.graph.remove(u, safe=True)
        return None


def _is_plain(attrs: LinearAttrs) -> bool:
    return attrs.n == 1 and not attrs.add
