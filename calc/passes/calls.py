"""Calls: the fused graph as a list of kernel calls, with ONNX functions bound to its nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from calc.core.errors import ModelError, Problems, UnsupportedError
from calc.core.schemes import Scheme, UnknownSchemeError
from calc.core.tensors import ShapeOnlyTensor
from calc.kernels import registry
from calc.kernels.base import DOMAIN, SCHEMES, A, Call, Kernel, Numerics
from calc.kernels.functions import OPSET, function_proto
from calc.passes.base import Graph, Refusal, UnknownShapeError, attrs_of, dims, new_weight, not_a_call, schemes_of

STRUCTURE = "calc.structure"
"""Metadata of a node that only says how a chip's part of a state or an output belongs to the whole: no chip runs it."""


def calls(g: Graph, refusals: Iterable[Refusal] = ()) -> list[Call]:
    """Every node as a kernel call, in topological order.

    Args:
        g: the fused graph.
        refusals: why the fusions did not take nodes in, for the errors.

    Raises:
        UnsupportedError: OP_UNSUPPORTED for each node that no kernel computes, with the module it comes from, and
            OP_CONSTRAINT for each constraint a call breaks.
    """
    out: list[Call] = []
    problems = Problems()
    kernels = registry()
    reasons: dict[str, list[str]] = {}
    for r in refusals:
        reasons.setdefault(r.node, []).append(f"{r.rule}: {r.reason}")
    for node in g.model.graph:
        if STRUCTURE in node.metadata_props:
            continue
        where = node.metadata_props.get("calc.scope", node.name or "?")
        kernel = kernels.get(node.op_type) if node.domain == DOMAIN else None
        if kernel is None:
            problems.add(
                "OP_UNSUPPORTED",
                where,
                "; ".join(
                    [
                        f"no NPU kernel computes {node.domain + '.' if node.domain else ''}{node.op_type} here",
                        *reasons.get(node.name or "?", []),
                    ]
                ),
                got=", ".join(f"{v.name} {v.shape}" for v in node.inputs if v is not None),
                hint="`calc inventory` lists every op with its class and why it did not fuse",
            )
            continue
        try:
            call = make_call(node, kernel)
        except UnknownShapeError as e:
            problems.add("OP_UNSUPPORTED", where, f"{node.op_type} cannot run on the NPU", got=str(e))
            continue
        for reason in kernel.refusals(call):
            problems.add("OP_CONSTRAINT", where, f"{node.op_type} cannot run on the NPU", got=reason)
        out.append(call)
    problems.raise_if_any(UnsupportedError)
    return out


def make_call(node: ir.Node, kernel: Kernel[A]) -> Call[A]:
    """One node as a call.

    Raises:
        ModelError: ONNX_CALC_NODE for a node (of a graph made elsewhere) that is not a call of its kernel.
    """
    attrs = attrs_of(node, kernel.attributes)
    values = [v for v in node.inputs if v is not None]
    try:
        schemes = kernel.schemes(attrs, schemes_of(node))
    except UnknownSchemeError as e:
        raise ModelError(not_a_call(node, str(e), expected="schemes of docs/quantization.md")) from e
    formals, outs = kernel.inputs(attrs, schemes), kernel.formals(attrs)[1]
    if (len(formals), len(outs)) != (len(values), len(node.outputs)):
        raise ModelError(
            not_a_call(
                node,
                "its inputs or outputs do not fit its attributes",
                expected=f"({', '.join(formals)}) -> ({', '.join(outs)})",
                got=f"{len(values)} inputs, {len(node.outputs)} outputs",
            )
        )
    inputs = {f: v.name or "?" for f, v in zip(formals, values, strict=True)}
    shapes = {v.name or "?": dims(v) for v in (*values, *node.outputs)}
    layer = node.metadata_props.get("calc.layer")
    return Call(
        node.op_type,
        node.name or "?",
        attrs,
        inputs,
        tuple(v.name or "?" for v in node.outputs),
        shapes,
        None if layer is None else int(layer),
        int(node.metadata_props.get("calc.chip", "0")),
        schemes,
    )


def bind_functions(g: Graph, numerics: Numerics) -> None:
    """Give every calc node the function overload for its attributes, so that the graph runs in ONNX Runtime."""
    kernels = registry()
    model = g.model
    for key in [k for k in model.functions if k[0] == DOMAIN and k[1] in kernels]:
        del model.functions[key]
    for node in model.graph:
        kernel = kernels.get(node.op_type) if node.domain == DOMAIN else None
        if kernel is None:
            continue
        attrs, bound = attrs_of(node, kernel.attributes), schemes_of(node)
        node.overload = kernel.overload(attrs, bound, numerics)
        key = (DOMAIN, node.op_type, node.overload)
        if key not in model.functions:
            proto = function_proto(kernel, attrs, bound, numerics)
            proto.attribute.extend(sorted(node.attributes))
            model.functions[key] = ir.serde.deserialize_function(proto)
    model.opset_imports[DOMAIN] = 1
    model.opset_imports[""] = max(model.opset_imports.get("", OPSET), OPSET)


def bind_schemes(g: Graph, schemes: Mapping[str, Scheme]) -> None:
    """Write each weight's scheme into its nodes; where rows have scales, they become a further input.

    Args:
        g: the fused graph.
        schemes: by weight name.
    """
    kernels = registry()
    for node in list(g.model.graph):
        kernel = kernels.get(node.op_type) if node.domain == DOMAIN else None
        if kernel is None:
            continue
        attrs = attrs_of(node, kernel.attributes)
        names = kernel.weights(attrs)
        if not names or SCHEMES in node.attributes:
            continue
        formals, _ = kernel.formals(attrs)
        values = dict(zip(formals, [v for v in node.inputs if v is not None], strict=True))
        chosen = {n: schemes[values[n].name or "?"] for n in names}
        for n, s in chosen.items():
            if s.row_scaled:
                w = values[n]
                shape = dims(w)
                values[f"{n}_scale"] = new_weight(
                    g, f"{w.name}/scale", ShapeOnlyTensor(shape[:-1], "f32", (w.name or "?",))
                )
        new_formals = kernel.inputs(attrs, chosen)
        for i in range(len(node.inputs), len(new_formals)):
            node.resize_inputs(i + 1)
        for i, f in enumerate(new_formals):
            node.replace_input_with(i, values[f])
        node.attributes.add(ir.AttrStrings(SCHEMES, list(map(str, chosen.values()))))
