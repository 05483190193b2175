"""What a graph pass is, and how graphs are read: small helpers over `onnx_ir`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from calc.core.errors import InternalError, ModelError, Problem
from calc.core.schemes import Scheme
from calc.core.tensors import TensorRef
from calc.kernels.base import DOMAIN, SCHEMES, A, Attr, Attrs, AttrsError, attr_values, parse_attrs


@dataclass(frozen=True)
class StatePart:
    """A chip's part of a state: `heads` heads from `first` on, of `total`."""

    state: str
    first: int
    heads: int
    total: int


@dataclass
class Graph:
    """A graph on its way through the passes.

    Attributes:
        model: the ONNX graph; weights are initializers without data.
        weights: initializer name to lazy reference.
        parts: for a value that is a chip's part of a state, which part.
        schemes: weight name to quantization scheme, once it has been chosen.
    """

    model: ir.Model
    weights: dict[str, TensorRef]
    parts: dict[str, StatePart] = field(default_factory=dict)
    schemes: dict[str, Scheme] = field(default_factory=dict)

    def weight(self, value: ir.Value | None) -> TensorRef | None:
        """The reference behind a value, if it is a weight."""
        return None if value is None or value.name is None else self.weights.get(value.name)


class UnknownShapeError(InternalError):
    """A value has no static shape. The exporter gives every value one; a graph made by other means may not."""


@dataclass(frozen=True)
class Refusal:
    """Why a place in the graph did not fuse: data, not a log line."""

    node: str
    rule: str
    reason: str


class Pass(ABC):
    """One transformation of a graph. `run` returns the number of places it changed."""

    name: str

    @abstractmethod
    def run(self, g: Graph) -> int:
        """Transform the graph in place."""


class Watcher:
    """Told about every pass over a graph; the ladder is one. This one does nothing."""

    def before_passes(self, g: Graph) -> None:
        """The exported graph, before any pass."""

    def after_pass(self, g: Graph, name: str) -> None:
        """The graph after a pass that changed it."""


class Rule(Pass):
    """A fusion: finds anchors of one op type, in graph order, and rewrites those whose surroundings match."""

    anchor: tuple[str, str]
    ops: frozenset[str] = frozenset()
    """The anchor's op types where there are several (`anchor` then has ``*``)."""

    def __init__(self) -> None:
        self.refusals: list[Refusal] = []

    @abstractmethod
    def rewrite(self, g: Graph, node: ir.Node) -> str | None:
        """Rewrite at an anchor; returns why not, or None when it was done."""

    def is_anchor(self, node: ir.Node) -> bool:
        """Whether the rule looks at a node."""
        domain, op = self.anchor
        return node.domain == domain and (node.op_type == op or node.op_type in self.ops)

    def run(self, g: Graph) -> int:
        """Rewrite at every anchor that matches; the others' reasons go to `refusals`."""
        done = 0
        for node in list(g.model.graph):
            if node.graph is None or not self.is_anchor(node):
                continue
            try:
                reason = self.rewrite(g, node)
            except UnknownShapeError as e:
                reason = str(e)
            if reason is None:
                done += 1
            else:
                self.refusals.append(Refusal(node.name or "?", self.name, reason))
        sweep(g)
        return done


# -- reading ----------------------------------------------------------------------------------------------------------


Scalar = TypeVar("Scalar", int, float, str)


def attr(node: ir.Node, name: str, default: Scalar) -> Scalar:
    """An attribute's value, of the type of its default.

    Raises:
        ModelError: ONNX_ATTRIBUTE for a value of another type, which no valid node has.
    """
    a = node.attributes.get(name)
    if a is None:
        return default
    kind = type(default)
    if not isinstance(a.value, kind):
        raise ModelError(
            Problem(
                "ONNX_ATTRIBUTE",
                f"{node.op_type} {node.name or '?'}",
                f"the attribute {name} has another type than the operator says",
                kind.__name__,
                repr(a.value),
                "check the file with onnx.checker",
            )
        )
    return a.value


def attrs_of(node: ir.Node, kind: type[A]) -> A:
    """A calc node's attributes as its kernel's value.

    Raises:
        ModelError: ONNX_CALC_NODE for each attribute (of a node made elsewhere) that its kernel does not know, misses,
            or has with another type.
    """
    values: dict[str, Attr] = {}
    for name, a in node.attributes.items():
        if name != SCHEMES:
            values[name] = a.value if isinstance(a.value, int | float | str) else (str(a.value),)
    try:
        return parse_attrs(kind, values)
    except AttrsError as e:
        raise ModelError([not_a_call(node, f.what, f.expected, f.got) for f in e.faults]) from e


def schemes_of(node: ir.Node) -> tuple[str, ...] | None:
    """The names of a calc node's schemes; None where none have been bound."""
    a = node.attributes.get(SCHEMES)
    if a is None:
        return None
    return tuple(map(str, a.value)) if isinstance(a.value, list | tuple) else (str(a.value),)


def not_a_call(node: ir.Node, what: str, expected: str, got: str = "") -> Problem:
    """A calc node (of a graph made elsewhere) that is not a call of its kernel."""
    where = f"{node.op_type} {node.name or '?'}"
    return Problem("ONNX_CALC_NODE", where, what, expected, got, "docs/ops.md lists each op's inputs and attributes")


def ints(node: ir.Node, name: str) -> tuple[int, ...]:
    """An integer list attribute."""
    a = node.attributes.get(name)
    return tuple(int(v) for v in a.value) if a is not None else ()


def constant(value: ir.Value | None) -> np.ndarray | None:
    """The data of a small constant, None for anything else."""
    if value is None or value.const_value is None or value.const_value.size > 1 << 16:
        return None
    return np.asarray(value.const_value.numpy())


def scalar(value: ir.Value | None) -> float | None:
    """The data of a one-element constant."""
    data = constant(value)
    return float(data.reshape(())) if data is not None and data.size == 1 else None


def dims(value: ir.Value) -> tuple[int, ...]:
    """Static dimensions.

    Raises:
        UnknownShapeError: an unknown or symbolic dimension (variants are static).
    """
    if value.shape is None or any(not isinstance(d, int) for d in value.shape):
        raise UnknownShapeError(f"value {value.name} has no static shape: {value.shape}")
    return tuple(int(d) for d in value.shape)  # type: ignore[arg-type]


def made_by(value: ir.Value | None, *ops: str, domain: str = "") -> ir.Node | None:
    """The producer, if it is one of these ops."""
    node = None if value is None else value.producer()
    return node if node is not None and node.domain == domain and node.op_type in ops else None


def offset_from(value: ir.Value | None, source: ir.Value) -> np.ndarray | None:
    """What index arithmetic adds to `source` on the way to a value; None if the value is computed in another way."""
    total = np.zeros((), np.int64)
    while value is not source:
        node = made_by(value, "Add", "Sub", "Unsqueeze", "Squeeze", "Reshape", "Cast", "Identity", "Max", "Clip")
        if node is None:
            return None
        value, other = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
        if node.op_type in ("Add", "Sub"):
            added = constant(other)
            if added is None and node.op_type == "Add":
                added, value = constant(value), other
            if added is None:
                return None
            total = total + (added if node.op_type == "Add" else -added)
        elif node.op_type in ("Max", "Clip") and scalar(other) != 0:
            return None
    return np.asarray(total)


def is_last_axis(node: ir.Node, rank: int) -> bool:
    """Whether a node with an axis attribute works along the last of `rank` axes."""
    a = node.attributes.get("axis")
    return a is None or int(a.value) in (-1, rank - 1)


def is_row_norm(g: Graph, node: ir.Node) -> bool:
    """Whether an RMS or layer norm is over the last axis with a checkpoint's weight, one value per column."""
    gamma, shape = node.inputs[1], dims(node.outputs[0])
    return (
        gamma is not None
        and g.weight(gamma) is not None
        and dims(gamma) == shape[-1:]
        and is_last_axis(node, len(shape))
    )


def sole_user(value: ir.Value) -> ir.Node | None:
    """The only consumer of a value that is no graph output."""
    users = value.consumers()
    return users[0] if len(users) == 1 and not value.is_graph_output() else None


def other_input(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """The other input of a binary node."""
    a, b = node.inputs
    return b if a is value else a


# -- writing ----------------------------------------------------------------------------------------------------------


def attributes(attrs: Mapping[str, int | float | str]) -> list[ir.Attr]:
    """ONNX attributes from plain values."""
    out: list[ir.Attr] = []
    for k, v in attrs.items():
        if isinstance(v, str):
            out.append(ir.AttrString(k, v))
        elif isinstance(v, float):
            out.append(ir.AttrFloat32(k, v))
        else:
            out.append(ir.AttrInt64(k, v))
    return out


def calc_node(
    op: str,
    inputs: Sequence[ir.Value],
    attrs: Attrs,
    outputs: Sequence[tuple[int, ...]],
    source: ir.Node,
    name: str,
) -> ir.Node:
    """A node of domain ``calc`` with f32 outputs of the given dimensions; the module path comes from `source`."""
    keep = {k: v for k, v in source.metadata_props.items() if k.startswith("calc.")}
    given = attributes(attr_values(attrs))
    node = ir.Node(DOMAIN, op, list(inputs), given, num_outputs=len(outputs), name=name, metadata_props=keep)
    for i, (value, shape) in enumerate(zip(node.outputs, outputs, strict=True)):
        value.name = f"{name}/{i}"
        value.shape = ir.Shape(shape)
        value.dtype = ir.DataType.FLOAT
    return node


def replace_value(g: Graph, old: ir.Value, new: ir.Value) -> None:
    """Every use of `old` becomes a use of `new`; a graph output keeps its name."""
    outputs = g.model.graph.outputs
    for i, out in enumerate(list(outputs)):
        if out is old:
            name = old.name
            old.name = f"{name}/replaced"
            new.name = name
            outputs[i] = new
    ir.convenience.replace_all_uses_with(old, new)


def replace_input(node: ir.Node, index: int, value: ir.Value) -> None:
    """One input of a node becomes another value."""
    node.replace_input_with(index, value)


def insert(before: ir.Node, *nodes: ir.Node) -> None:
    """Put nodes in front of another one."""
    if before.graph is None:
        raise InternalError(f"{before.name} is in no graph, nothing can stand before it")
    before.graph.insert_before(before, nodes)


def sweep(g: Graph) -> None:
    """Remove nodes and initializers that nothing uses."""
    graph = g.model.graph
    for node in reversed(list(graph)):
        if all(not v.uses() and not v.is_graph_output() for v in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
            g.weights.pop(name, None)


def new_weight(g: Graph, name: str, ref: TensorRef) -> ir.Value:
    """An initializer, f32 and without data, for a lazy reference; one per name."""
    if name in g.model.graph.initializers:
        return g.model.graph.initializers[name]
    value = ir.Value(name=name, shape=ir.Shape(ref.shape), type=ir.TensorType(ir.DataType.FLOAT))
    g.weights[name] = ref
    g.model.graph.initializers[name] = value
    return value


Step = Callable[[Graph], int]
