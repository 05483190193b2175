"""Initializers without data → lazy references to the checkpoint, in the checkpoint's dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from calc.core.errors import InternalError
from calc.core.tensors import FileTensor, TensorRef
from calc.frontend.cleanup import LAYER, SCOPE
from calc.frontend.functions import experts_function
from calc.frontend.mapping import Recipe
from calc.frontend.ops import MERGED_EXPERTS, OPSET

IR_DTYPES = {
    "f64": ir.DataType.DOUBLE,
    "f32": ir.DataType.FLOAT,
    "f16": ir.DataType.FLOAT16,
    "bf16": ir.DataType.BFLOAT16,
    "i64": ir.DataType.INT64,
    "i32": ir.DataType.INT32,
    "i16": ir.DataType.INT16,
    "i8": ir.DataType.INT8,
    "u8": ir.DataType.UINT8,
    "bool": ir.DataType.BOOL,
}
"""calc's dtype name → ONNX's, for dtypes a weight or a stored buffer may have."""


@dataclass
class Linker:
    """Gives the weights of one graph their references.

    Attributes:
        graph: the graph, changed in place.
        recipes: weight's name → how the checkpoint makes it.
        tensors: checkpoint name → reference.
        weights: initializer name → reference, filled here.
    """

    graph: ir.Graph
    recipes: Mapping[str, Recipe]
    tensors: Mapping[str, TensorRef]
    weights: dict[str, TensorRef] = field(default_factory=dict)

    def initializer(self, name: str, ref: TensorRef, value: ir.Value | None = None) -> ir.Value:
        """An initializer called `name` that refers to `ref`; `value` is reused if given."""
        dtype, shape = IR_DTYPES[ref.dtype], ir.Shape(ref.shape)
        if value is None:
            value = ir.Value(name=name)
            self.graph.initializers[name] = value
        value.shape = shape
        value.type = ir.TensorType(dtype)
        if isinstance(ref, FileTensor):
            value.const_value = ir.ExternalTensor(
                ref.path.name, ref.offset, ref.nbytes, dtype, shape=shape, name=name, base_dir=ref.path.parent
            )
        self.weights[name] = ref
        return value

    def plain(self, name: str) -> None:
        """Link a weight that the checkpoint holds as it is, with a Cast behind it unless it has the traced type."""
        value = self.graph.initializers[name]
        readers, traced = list(value.uses()), value.dtype
        ref = self.tensors[self.recipes[name].names[0]]
        self.initializer(name, ref, value)
        if value.dtype == traced or traced is None or not readers:
            return
        first = readers[0][0]
        if len(readers) > 1:
            first = next(node for node in self.graph if any(v is value for v in node.inputs))
        cast = self._node("Cast", [value], ref.shape, first, {"to": int(traced)}, name=f"{name}/Cast")
        for node, index in readers:
            node.replace_input_with(index, cast)

    def experts(self, node: ir.Node) -> str:
        """Replace the traced experts node by `calc::Experts` over per-expert initializers.

        Returns:
            The activation's name.
        """
        hidden, ids, weights, gate_up, down = node.inputs
        if gate_up is None or down is None:
            raise InternalError(f"{node.name}: traced experts without weights")
        gates = self._projections(gate_up, 2, node)
        downs = self._projections(down, 1, node)
        activation = node.attributes["activation"].as_string()
        new = ir.node(
            "Experts",
            [hidden, ids, weights, *gates, *downs],
            attributes={"activation": activation},
            domain="calc",
            version=1,
            name=node.name.removesuffix(MERGED_EXPERTS) + "Experts" if node.name else None,
            metadata_props=dict(node.metadata_props),
        )
        old, out = node.outputs[0], new.outputs[0]
        out.shape, out.type, out.name = old.shape, old.type, new.name
        self.graph.insert_before(node, new)
        old.replace_all_uses_with(out)
        self.graph.remove(node, safe=True)
        return activation

    def _projections(self, merged: ir.Value, count: int, before: ir.Node) -> list[ir.Value]:
        """The `count` 3-D float32 weights that make up a traced experts parameter."""
        name = merged.name or ""
        if name not in self.recipes:
            raise InternalError(f"the experts' weight {name!r} is no parameter of the model")
        recipe = self.recipes[name]
        if not recipe.merged:
            return self._slices(name, merged, count, before)
        if len(recipe.parts) != count:
            raise InternalError(f"{name}: {len(recipe.parts)} projections, expected {count}")
        if name in self.graph.initializers:
            self.graph.initializers.pop(name)
        result = []
        for part, label in zip(recipe.parts, ("gate", "up") if count == 2 else ("down",), strict=True):
            refs = [self.tensors[n] for n in part]
            known = [self.initializer(n, r) for n, r in zip(part, refs, strict=True)]
            rows, columns = refs[0].shape
            stem = f"{name}/{label}"
            joined = self._node(
                "Concat", known, (rows * len(part), columns), before, {"axis": 0}, name=f"{stem}/Concat"
            )
            shape = (len(part), rows, columns)
            sizes = self._constant(f"{stem}/shape", shape)
            stacked = self._node("Reshape", [joined, sizes], shape, before, {"allowzero": 1}, name=f"{stem}/Reshape")
            result.append(self._float(stacked, shape, before, f"{stem}/Cast"))
        return result

    def _slices(self, name: str, merged: ir.Value, count: int, before: ir.Node) -> list[ir.Value]:
        """Projections of a checkpoint that holds them merged, cut out along axis 1."""
        ref = self.tensors[self.recipes[name].names[0]]
        value = self.initializer(name, ref, merged)
        if count == 1:
            return [self._float(value, ref.shape, before, f"{name}/Cast")]
        experts, both, columns = ref.shape
        width = both // count
        result = []
        for i, label in enumerate(("gate", "up")):
            stem = f"{name}/{label}"
            bounds = {"starts": (i * width,), "ends": ((i + 1) * width,), "axes": (1,)}
            inputs = [value, *(self._constant(f"{stem}/{key}", data) for key, data in bounds.items())]
            cut = self._node("Slice", inputs, (experts, width, columns), before, {}, name=f"{stem}/Slice")
            result.append(self._float(cut, (experts, width, columns), before, f"{stem}/Cast"))
        return result

    def _float(self, value: ir.Value, shape: tuple[int, ...], before: ir.Node, name: str) -> ir.Value:
        if value.dtype == ir.DataType.FLOAT:
            return value
        return self._node("Cast", [value], shape, before, {"to": int(ir.DataType.FLOAT)}, name=name)

    def _node(
        self,
        op_type: str,
        inputs: list[ir.Value],
        shape: tuple[int, ...],
        before: ir.Node,
        attributes: dict[str, int],
        *,
        name: str,
    ) -> ir.Value:
        """A new node in front of `before`, of the same module; its output."""
        props = {key: before.metadata_props[key] for key in (SCOPE, LAYER) if key in before.metadata_props}
        node = ir.node(op_type, inputs, attributes=attributes, version=OPSET, name=name, metadata_props=props)
        out = node.outputs[0]
        out.name = name
        out.shape = ir.Shape(shape)
        out.type = ir.TensorType(ir.DataType(attributes["to"])) if op_type == "Cast" else inputs[0].type
        self.graph.insert_before(before, node)
        return out

    def _constant(self, name: str, data: tuple[int, ...]) -> ir.Value:
        tensor = ir.tensor(np.array(data, np.int64), name=name)
        value = ir.Value(name=name, const_value=tensor)
        value.shape = ir.Shape((len(data),))
        value.type = ir.TensorType(ir.DataType.INT64)
        self.graph.initializers[name] = value
        return value


def link(model: ir.Model, recipes: Mapping[str, Recipe], tensors: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
    """Link every weight of a tidy graph to the checkpoint.

    Args:
        model: changed in place.
        recipes: weight's name → how the checkpoint makes it.
        tensors: checkpoint name → reference.

    Returns:
        Initializer name → reference.
    """
    linker = Linker(model.graph, recipes, tensors)
    activations = {linker.experts(node) for node in list(model.graph) if node.op_type == MERGED_EXPERTS}
    for name in [n for n in model.graph.initializers if n in recipes and n not in linker.weights]:
        linker.plain(name)
    if len(activations) > 1:
        raise InternalError(f"experts of one model with several activations: {sorted(activations)}")
    for activation in activations:
        function = experts_function(activation)
        model.functions[function.identifier()] = function
        model.graph.opset_imports["calc"] = 1
    return linker.weights
