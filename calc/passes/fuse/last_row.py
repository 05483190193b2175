"""The choice of each sequence's last valid row becomes ``calc.LastRow``, ahead of the norm.

::

    x -> RMSNormalization -> GatherND(cur_seq_len - 1)     becomes   x -> LastRow -> RMSNormalization

and so with LayerNormalization. A norm works row by row, so it may as well see the chosen rows only.
"""

from __future__ import annotations

import onnx_ir as ir

from calc.kernels.base import Attrs
from calc.passes.base import (
    Graph,
    Rule,
    attributes,
    calc_node,
    dims,
    insert,
    is_row_norm,
    made_by,
    offset_from,
    replace_value,
    sole_user,
)


class FuseLastRow(Rule):
    """Rows picked by ``cur_seq_len - 1``."""

    name = "fuse-last-row"
    anchor = ("", "GatherND")

    def rewrite(self, g: Graph, node: ir.Node) -> str | None:
        cur = next((v for v in g.model.graph.inputs if v.name == "cur_seq_len"), None)
        row = None if cur is None else offset_from(node.inputs[1], cur)
        if cur is None or row is None or row.size != 1 or int(row.reshape(())) != -1:
            return "the rows are not chosen by cur_seq_len - 1"
        x, out = node.inputs[0], node.outputs[0]
        if x is None or len(dims(x)) != 3 or len(dims(out)) != 2:
            return "not one row of each sequence"
        norm = made_by(x, "RMSNormalization", "LayerNormalization")
        hoisted = norm is not None and is_row_norm(g, norm) and sole_user(x) is node
        source = norm.inputs[0] if hoisted and norm is not None else x
        if source is None:
            return "the norm has no input"
        new = calc_node("LastRow", [source, cur], Attrs(), [dims(out)], node, "model/LastRow")
        insert(node, new)
        last = new.outputs[0]
        if hoisted and norm is not None:
            again = ir.Node(
                "",
                norm.op_type,
                [last, *norm.inputs[1:]],
                [a for a in norm.attributes.values() if a.name != "axis"] + attributes({"axis": -1}),
                num_outputs=1,
                name=norm.name,
                metadata_props=dict(norm.metadata_props),
            )
            value = again.outputs[0]
            value.name, value.shape, value.dtype = f"{out.name}/normed", ir.Shape(dims(out)), ir.DataType.FLOAT
            insert(node, again)
            last = value
        replace_value(g, out, last)
        return None
