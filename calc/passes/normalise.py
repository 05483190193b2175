"""Normalise: weights become plain f32 initializers behind lazy references.

::

    W (bf16) -> Cast -> ...                          W -> ...
    w -> Add(1) -> RMSNormalization                  w.plus -> RMSNormalization
    w0, w1, .. -> Concat -> Reshape -> Cast -> ..    layer.experts.gate -> ...
"""

from __future__ import annotations

import onnx_ir as ir

from calc.core.errors import InternalError
from calc.core.tensors import (
    ConcatTensor,
    OffsetTensor,
    ReshapeTensor,
    RowsTensor,
    SelectTensor,
    StackTensor,
    TensorRef,
)
from calc.passes.base import Graph, Pass, attr, constant, dims, new_weight, replace_value, scalar, sweep


class Normalise(Pass):
    """Folds casts, offsets, concatenations, slices and reshapes of weights into their references; no byte is read."""

    name = "normalise"

    def run(self, g: Graph) -> int:
        done = 0
        for node in list(g.model.graph):
            ref = _fold(g, node)
            if ref is None:
                continue
            out = node.outputs[0]
            base = node.inputs[0]
            name = base.name if node.op_type == "Cast" and base is not None else out.name
            if name is None:
                raise InternalError(f"{node.op_type} {node.name}: what it makes of a weight has no name")
            if node.op_type == "Cast" and base is not None:
                base.dtype = ir.DataType.FLOAT
                base.const_value = None
                replace_value(g, out, base)
            else:
                replace_value(g, out, new_weight(g, name, ref))
            done += 1
        sweep(g)
        for name, value in g.model.graph.initializers.items():
            if name in g.weights:
                value.const_value = None
                value.dtype = ir.DataType.FLOAT
        return done


def _fold(g: Graph, node: ir.Node) -> TensorRef | None:  # noqa: PLR0911 - one return per kind of node
    """The reference that a node's output amounts to, if its data input is a weight."""
    if node.domain or not node.inputs:
        return None
    refs = [g.weight(v) for v in node.inputs]
    first = refs[0]
    if node.op_type == "Concat" and all(r is not None for r in refs):
        return ConcatTensor(tuple(r for r in refs if r is not None)) if attr(node, "axis", 0) == 0 else None
    if node.op_type == "Add":
        for ref, other in ((refs[0], node.inputs[1]), (refs[1], node.inputs[0])):
            value = scalar(other)
            if ref is not None and value is not None and len(ref.shape) == 1:
                return OffsetTensor(ref, value)
        return None
    if first is None:
        return None
    match node.op_type:
        case "Cast":
            return first if attr(node, "to", 0) == ir.DataType.FLOAT else None
        case "Reshape":
            return _reshape(first, dims(node.outputs[0]))
        case "Slice":
            return _slice(first, node)
    return None


def _reshape(ref: TensorRef, shape: tuple[int, ...]) -> TensorRef:
    if isinstance(ref, ConcatTensor) and shape[0] == len(ref.parts) and all(p.shape == shape[1:] for p in ref.parts):
        # experts, joined one below the other, become a stack: expert e stays its own tensor
        return StackTensor(ref.parts)
    return ReshapeTensor(ref, shape)


def _slice(ref: TensorRef, node: ir.Node) -> TensorRef | None:
    if len(ref.shape) != 3 or len(node.inputs) < 4:
        return None
    start, stop, axes, *steps = (constant(v) for v in node.inputs[1:])
    if start is None or stop is None or axes is None or axes.tolist() not in ([1], [-2]):
        return None
    if any(s is None or s.tolist() != [1] for s in steps):
        return None
    a, b, _ = slice(int(start[0]), int(stop[0])).indices(ref.shape[1])
    if a >= b:
        return None
    return StackTensor(tuple(RowsTensor(SelectTensor(ref, e), a, b) for e in range(ref.shape[0])))
