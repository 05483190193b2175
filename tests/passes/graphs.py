"""Small graphs from ONNX text: weights are inputs whose names start with ``w``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from calc.core.tensors import ArrayTensor
from calc.passes.base import Graph, Rule, sweep

OPSETS = 'opset_import: ["" : 25, "calc" : 1, "com.acme" : 1]'


Shapes = Mapping[str, tuple[int, ...]]


def graph(inputs: str, outputs: str, body: str, *, shapes: Shapes | None = None, seed: int = 0) -> Graph:
    """``graph("float[1,4,8] x, float[8,8] w", "y", "y = MatMul(x, w)")``; nodes are named n0, n1, … in order.

    `shapes` are those of values that ONNX cannot infer: outputs of calc nodes.
    """
    model = onnx.parser.parse_model(f"<ir_version: 10, {OPSETS}>\ng ({inputs}) => ({outputs}) {{\n{body}\n}}")
    for i, node in enumerate(model.graph.node):
        node.name = f"n{i}"
        if node.domain == "calc":
            for name in set(node.output) & set(shapes or {}):
                info = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (shapes or {})[name])
                for known in (v for v in model.graph.output if v.name == name):
                    known.CopyFrom(info)
                model.graph.value_info.append(info)
    model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    rng = np.random.default_rng(seed)
    weights: dict[str, ArrayTensor] = {}
    for value in [v for v in model.graph.input if v.name.startswith("w")]:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        weights[value.name] = ArrayTensor(rng.standard_normal(shape).astype(np.float32), (value.name,))
        model.graph.initializer.append(onnx.numpy_helper.from_array(weights[value.name].array, value.name))
        model.graph.input.remove(value)
    loaded = ir.from_proto(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(loaded)
    for name in weights:
        loaded.graph.initializers[name].const_value = None
    return Graph(loaded, dict(weights))


def ops(g: Graph) -> list[str]:
    """Op types, in order."""
    return [n.op_type for n in g.model.graph]


def refusal(rule: Rule, g: Graph) -> str:
    """Run a rule that must refuse all of its anchors, and change nothing; the last one's reason."""
    sweep(g)
    before = ops(g)
    assert rule.run(g) == 0
    assert ops(g) == before
    assert {r.rule for r in rule.refusals} == {rule.name}
    return rule.refusals[-1].reason
