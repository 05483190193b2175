"""``Gather(table, input_ids)`` and the scale after it become ``calc.Embed``."""

from __future__ import annotations

import onnx_ir as ir

from calc.kernels.embed import EmbedAttrs
from calc.passes.base import Graph, Rule, attr, calc_node, dims, insert, replace_value, scalar, sole_user


class FuseEmbed(Rule):
    """The token embedding."""

    name = "fuse-embed"
    anchor = ("", "Gather")

    def rewrite(self, g: Graph, node: ir.Node) -> str | None:
        table, ids = node.inputs
        if table is None or g.weight(table) is None:
            return "not a lookup of input_ids in the rows of a weight"
        if ids is None or ids.name != "input_ids" or attr(node, "axis", 0) != 0:
            return "not a lookup of input_ids in the rows of a weight"
        out, last, scale = node.outputs[0], node, 1.0
        user = sole_user(out)
        if user is not None and user.op_type == "Mul" and not user.domain:
            factor = scalar(user.inputs[1] if user.inputs[0] is out else user.inputs[0])
            if factor is not None:
                out, last, scale = user.outputs[0], user, factor
        new = calc_node("Embed", [ids, table], EmbedAttrs(scale), [dims(out)], node, "model.embed_tokens/Embed")
        insert(last, new)
        replace_value(g, out, new.outputs[0])
        return None
