"""Clean-up of the traced graph: constants folded, no-ops gone, names derived from the modules. Weights untouched."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.optimizer._constant_folding import FoldConstantsPass

SCOPE = "calc.scope"
LAYER = "calc.layer"
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)")
_FOLD_LIMIT = 1 << 18  # elements; above any index or shape constant, below any table


class RenamePass(ir.passes.InPlacePass):
    """Names by module path and operator, so that the same model always gives the same bytes."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rename every node and every value that is neither an input, an output nor a named weight."""
        graph = model.graph
        keep = {id(v) for v in (*graph.inputs, *graph.outputs)}
        seen: Counter[str] = Counter()
        for node in graph:
            base = f"{node.metadata_props.get(SCOPE, 'graph')}/{node.op_type}"
            node.name = f"{base}.{seen[base]}" if seen[base] else base
            seen[base] += 1
            for i, output in enumerate(node.outputs):
                if id(output) not in keep:
                    output.name = f"{node.name}#{i}" if i else node.name
        return ir.passes.PassResult(model, modified=True)


class ScopePass(ir.passes.InPlacePass):
    """The exporter's metadata (with paths of this machine) → `SCOPE` and `LAYER`."""

    def __init__(self, prefix: str) -> None:
        """`prefix`: the attribute of the traced module that holds the model, removed from the paths."""
        self.prefix = prefix

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace the metadata of every node and value."""
        for node in model.graph:
            scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
            node.metadata_props.clear()
            path = strip(scopes[-2], self.prefix) if len(scopes) > 1 else ""
            enclosing = strip(scopes[-3], self.prefix) if len(scopes) > 2 else ""
            if path:
                node.metadata_props[SCOPE] = path
            layer = _LAYER.search(path) or _LAYER.search(enclosing)
            if layer is not None:
                node.metadata_props[LAYER] = layer.group(1)
            for output in node.outputs:
                output.metadata_props.clear()
        for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
            value.metadata_props.clear()
        model.metadata_props.clear()
        model.graph.metadata_props.clear()
        return ir.passes.PassResult(model, modified=True)


def strip(path: str, prefix: str) -> str:
    """`path` without its first component if that is `prefix`."""
    return "" if path == prefix else path.removeprefix(prefix + ".")


class NoOpPass(ir.passes.InPlacePass):
    """Removes casts to the type a value has and reshapes to the shape a value has; joins reshapes in a row."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Bypass every no-op whose type and shape are known."""
        modified = False
        outputs = {id(v) for v in model.graph.outputs}
        for node in model.graph:
            if node.op_type not in ("Cast", "Reshape", "Identity") or node.domain or id(node.outputs[0]) in outputs:
                continue
            source, out = node.inputs[0], node.outputs[0]
            if source is None:
                continue
            producer = source.producer()
            inner = producer.inputs[0] if producer is not None and producer.op_type == "Reshape" else None
            if _is_plain_reshape(node) and inner is not None:
                node.replace_input_with(0, inner)
                source, modified = inner, True
            same_type = source.dtype is not None and source.dtype == out.dtype
            same_shape = source.shape is not None and source.shape == out.shape
            if node.op_type == "Identity" or (same_type and (node.op_type == "Cast" or same_shape)):
                out.replace_all_uses_with(source)
                modified = True
        return ir.passes.PassResult(model, modified=modified)


def _is_plain_reshape(node: ir.Node) -> bool:
    """A Reshape whose target does not refer to its input's dimensions (0 means 0, not "as in the input")."""
    literal = node.attributes.get("allowzero")
    return node.op_type == "Reshape" and literal is not None and literal.as_int() == 1


class ConstantsPass(ir.passes.InPlacePass):
    """Equal constants become one; they are called ``const.<n>`` in the order in which nodes read them."""

    def __init__(self, weights: Collection[str]) -> None:
        """`weights`: initializers that are no constants."""
        self.weights = weights

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Merge and rename."""
        graph = model.graph
        known: dict[tuple[object, ...], ir.Value] = {}
        for node in graph:
            for i, value in enumerate(node.inputs):
                if value is None or value.const_value is None or value.name in self.weights:
                    continue
                data = value.const_value
                key = (data.dtype, tuple(data.shape), data.tobytes())
                node.replace_input_with(i, known.setdefault(key, value))
        kept = [value for name, value in graph.initializers.items() if name in self.weights]
        graph.initializers.clear()
        for value in kept:
            graph.initializers.add(value)
        for i, value in enumerate(known.values()):
            value.name = f"const.{i}"
            graph.initializers.add(value)
        return ir.passes.PassResult(model, modified=True)


class TrimOutputsPass(ir.passes.InPlacePass):
    """Drops the optional outputs of `Attention` that nobody reads."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Shorten the nodes' outputs."""
        outputs = {id(v) for v in model.graph.outputs}
        modified = False
        for node in model.graph:
            if node.op_type != "Attention":
                continue
            count = len(node.outputs)
            while count > 1 and not node.outputs[count - 1].uses() and id(node.outputs[count - 1]) not in outputs:
                count -= 1
            if count != len(node.outputs):
                node.resize_outputs(count)
                modified = True
        return ir.passes.PassResult(model, modified=modified)


def cleanup(model: ir.Model, weights: Collection[str], prefix: str) -> None:
    """Tidy a traced graph in place.

    Before::  Constant, Concat, Reshape; Cast float → float; an exporter's names and metadata; 4 outputs of Attention
    After::   Reshape by ``const.<n>``; names by module path and operator; every value with its type and shape

    Args:
        model: as the exporter made it.
        weights: initializers that are weights: they keep their names and nothing that reads them is folded.
        prefix: as for `ScopePass`.
    """
    names = frozenset(weights)

    def should_fold(node: ir.Node) -> bool | None:
        return False if any(v is not None and v.name in names for v in node.inputs) else None

    for name in sorted(names & model.graph.initializers.keys()):
        value = model.graph.initializers[name]
        data = value.const_value
        if data is not None:
            value.shape, value.dtype = ir.Shape(data.shape.numpy()), data.dtype
        value.const_value = None
    ir.passes.Sequential(
        common.InlinePass(),
        TrimOutputsPass(),
        ScopePass(prefix),
        FoldConstantsPass(
            shape_inference=False,
            input_size_limit=_FOLD_LIMIT,
            output_size_limit=_FOLD_LIMIT,
            should_fold=should_fold,
        ),
        common.ShapeInferencePass(data_prop=False),
        NoOpPass(),
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        ConstantsPass(names),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        common.RemoveUnusedOpsetsPass(),
        RenamePass(),
    )(model)
