"""An exported program → ONNX, by torch's exporter, sparing what would change nothing.

torch decomposes every program and reads its library of translations anew for every graph: half of an export. The
library is read once per process here, and a program that has nothing to decompose is translated as it is.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import onnx_ir as ir
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import TensorArgument
from torch.fx import Node
from torch.onnx._internal.exporter import _core, _fx_passes
from torch.onnx._internal.exporter._registration import ONNXRegistry

from calc.frontend import ops

_aten = torch.ops.aten
_ASSERTIONS = frozenset({_aten._assert_tensor_metadata.default, _aten._assert_scalar.default})
"""Nodes that the exporter drops."""

_KEPT = frozenset({_aten.linear.default, _aten.contiguous.default, _aten.softmax.int, _aten.reshape.default})
"""Composites whose translation gives what that of their parts gives, once `simplify` and the clean-up have run."""


@functools.cache
def registry() -> ONNXRegistry:
    """Every translation that torch knows for this opset, and those of the seams' operators."""
    known = ONNXRegistry.from_torchlib(opset_version=ops.OPSET)
    for target, function in ops.translations().items():
        known.register_op(target, function)
    return known


_PURE = {_aten.div_.Tensor: _aten.div.Tensor}
"""What writes into its first input, and what computes the same without."""


def to_decompose(program: ExportedProgram) -> str | None:
    """The first reason to decompose a program; None where that would give the same program again.

    Decomposing rewrites composites and operators without a translation, makes what writes into its inputs functional,
    and flattens control flow. A straight line of pure operators, each with a translation, has none of these.
    """
    signature = program.graph_signature
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        return "a buffer or an input is written"
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    targets = {node.target: None for node in calls if not (_is_idle_cast(program, node) or _is_private_write(node))}
    return next((reason for target in targets if (reason := _reason(target)) is not None), None)


def _reason(target: object) -> str | None:
    """Why a node that calls `target` must be decomposed, None if it need not be."""
    if target is operator.getitem or target in _ASSERTIONS or target in _KEPT:
        return None
    if not isinstance(target, torch._ops.OpOverload):
        return f"{target} is no plain operator"
    if target._schema.is_mutable:
        return f"{target} writes into its input"
    if not registry().is_registered(target):
        return f"{target} has no translation"
    if _is_composite(target):
        return f"{target} is a composite"
    return None


def _is_idle_cast(program: ExportedProgram, node: Node) -> bool:
    """A cast to the type a value has; not where the result is an output, which is known by its node's name."""
    if node.target is not _aten.to.dtype or len(node.args) != 2 or node.kwargs:
        return False
    source, dtype = node.args
    outputs = {spec.arg.name for spec in program.graph_signature.output_specs if isinstance(spec.arg, TensorArgument)}
    return isinstance(source, Node) and source.meta["val"].dtype == dtype and node.name not in outputs


def _is_private_write(node: Node) -> bool:
    """A write that only its own result shows: into a value that shares no memory and that nobody reads afterwards."""
    if node.target not in _PURE:
        return False
    source, other = node.args
    if not isinstance(source, Node) or not isinstance(other, Node):
        return False
    if source.meta["val"].dtype != other.meta["val"].dtype or not _is_fresh(source):
        return False
    return all(user is node or (user < node and _is_fresh(user)) for user in source.users)


def _is_fresh(node: Node) -> bool:
    """Whether a node's result has memory of its own."""
    if node.target is operator.getitem:
        (node, *_) = node.all_input_nodes
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or _is_composite(target):
        return False
    return not any(value.alias_info for value in target._schema.returns)


def _is_composite(target: torch._ops.OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")


def simplify(program: ExportedProgram) -> None:
    """Do, in place, what decomposing does to the composites that nearly every model has: one node for one node.

    Before::  reshape(x, shape); to(x, its own dtype); div_(x, y) into an x that nobody else sees
    After::   view(x, shape); x; div(x, y)

    The result is for translation alone: in torch, a view asks for strides that a reshape does without.
    """
    graph = program.graph
    for node in list(graph.nodes):
        if node.target is _aten.reshape.default:
            node.target = _aten.view.default
        elif _is_private_write(node):
            node.target = _PURE[node.target]
        elif _is_idle_cast(program, node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _same(exported_program: ExportedProgram, registry: ONNXRegistry) -> ExportedProgram:
    return exported_program


@contextmanager
def _as_it_is() -> Iterator[None]:
    """Inside, torch's exporter decomposes nothing."""
    real = _fx_passes.decompose_with_registry
    _fx_passes.decompose_with_registry = _same
    try:
        yield
    finally:
        _fx_passes.decompose_with_registry = real


def translate(program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> ir.Model:
    """The ONNX graph of a program, weights without data.

    Args:
        program: with static shapes; it may be changed.
        inputs: names for the graph's inputs, in order.
        outputs: names for its outputs, in order.

    Raises:
        torch.onnx.OnnxExporterError: an operator has no translation.
    """
    if to_decompose(program) is not None:
        return _export(program, inputs, outputs)
    simplify(program)
    with _as_it_is():
        return _export(program, inputs, outputs)


def _export(program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> ir.Model:
    return _core.export(
        program,
        registry=registry(),
        input_names=inputs,
        output_names=outputs,
        opset_version=ops.OPSET,
        optimize=False,
        verbose=False,
    ).model
