"""Execute: a graph in ONNX Runtime, a layer at a time.

The graph is cut where decoder layers begin. A segment's weights are read, once for all graphs of the replay, its
sessions run for every call, and all are dropped before the next segment's weights are read; so memory is bounded by the
largest segment, never by the model. That is possible because the tokens of a replay are known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as rt
from numpy.typing import NDArray

from calc.core.errors import InternalError
from calc.core.heap import trim
from calc.core.roles import CURRENT, IDS, LOGITS, PAST, is_kv, is_state, is_state_input, kv_name, layer_of, state_of
from calc.core.tensors import ArrayTensor
from calc.passes.base import Graph, dims

Array = NDArray[np.generic]
Provider = Callable[[Graph, str, bool], Array]
"""A weight's data by graph and initializer name; True asks for it in FP32, which the stored type fits into."""

INLINE_LIMIT = 1 << 20
"""Weights up to this many bytes travel inside a segment's model, where ONNX Runtime folds what is computed on them.
Larger ones are inputs of its session: an initializer would be copied, transposed and packed before the first call."""

_FITS_FP32 = frozenset({"f32", "bf16", "f16"})


@dataclass(frozen=True)
class Segment:
    """A run of nodes: what it reads from outside, the weights it needs, what it gives."""

    nodes: tuple[ir.Node, ...]
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]


def segments(g: Graph) -> list[Segment]:
    """Cut a graph at layer borders: before the layers, each layer, after them.

    Nodes that compute on weights alone (casts, transposes) go with whoever uses them, twice if need be: what crosses a
    border is kept for every call of a replay, so it must be activations, never a weight.
    """
    graph = g.model.graph
    place = _places(g)
    weights_only = _weights_only(graph)
    moving = [(n, place[id(n)]) for n in graph if id(n) not in weights_only]
    out = []
    for at in sorted({a for _, a in moving}):
        wanted = {id(n) for n, a in moving if a == at}
        for n in reversed(list(graph)):
            if id(n) in weights_only and any(id(c) in wanted for v in n.outputs for c in v.consumers()):
                wanted.add(id(n))
        out.append(_segment(g, tuple(n for n in graph if id(n) in wanted), weights_only))
    return out


def _places(g: Graph) -> dict[int, int]:
    """The segment of each node: 0, then one per layer, then one more for modules behind the layers."""
    graph = g.model.graph
    last = max((int(n.metadata_props["calc.layer"]) for n in graph if "calc.layer" in n.metadata_props), default=-1)
    index: dict[int, int] = {}
    for node in graph:
        producers = [p for v in node.inputs if v is not None and (p := v.producer()) is not None]
        before = max((index[id(p)] for p in producers), default=0)
        text = node.metadata_props.get("calc.layer")
        at = int(text) + 1 if text is not None else before
        if text is None and at == last + 1 and node.metadata_props.get("calc.scope"):
            at = last + 2  # final norm, lm_head
        index[id(node)] = max(at, before)
    return index


def _weights_only(graph: ir.Graph) -> set[int]:
    """Nodes that no graph input reaches."""
    out: set[int] = set()
    for node in graph:
        values = [v for v in node.inputs if v is not None]
        if all(v.name in graph.initializers or ((p := v.producer()) is not None and id(p) in out) for v in values):
            out.add(id(node))
    return out


def _segment(g: Graph, nodes: tuple[ir.Node, ...], weights_only: set[int]) -> Segment:
    graph = g.model.graph
    made = {v.name for n in nodes for v in n.outputs}
    inputs: dict[str, None] = {}
    weights: dict[str, None] = {}
    for v in (v for n in nodes for v in n.inputs):
        if v is not None and v.name is not None and v.name not in made:
            (weights if v.name in graph.initializers else inputs)[v.name] = None
    inside = {id(n) for n in nodes}
    graph_outputs = {v.name for v in graph.outputs}
    outputs = [
        v.name
        for n in nodes
        if id(n) not in weights_only
        for v in n.outputs
        if v.name is not None and (v.name in graph_outputs or any(id(c) not in inside for c in v.consumers()))
    ]
    return Segment(nodes, tuple(inputs), tuple(weights), tuple(outputs))


@dataclass
class Held:
    """The large weights of one segment, read once for all graphs that read the same tensor."""

    provider: Provider
    values: dict[tuple[str, bool], rt.OrtValue] = field(default_factory=dict)

    def get(self, g: Graph, name: str, floats: bool) -> rt.OrtValue:
        """A weight's value. Tables that a graph holds itself are as long as its own buffers, so nobody shares them."""
        if isinstance(g.weights[name], ArrayTensor):
            return _ort_value(self.provider(g, name, floats))
        key = (name, floats)
        if key not in self.values:
            self.values[key] = _ort_value(self.provider(g, name, floats))
        return self.values[key]


@dataclass(frozen=True)
class Session:
    """A segment in ONNX Runtime, and the weights among its inputs."""

    runtime: rt.InferenceSession
    outputs: tuple[str, ...]
    weights: Mapping[str, rt.OrtValue]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The segment's outputs by name."""
        given = {name: _ort_value(data) for name, data in feeds.items()}
        results = self.runtime.run_with_ort_values(list(self.outputs), {**given, **self.weights})
        return {name: value.numpy() for name, value in zip(self.outputs, results, strict=True)}


def session(g: Graph, seg: Segment, held: Held, *, packed: bool = False) -> Session:
    """A session for one segment, with its weights.

    What computes on weights alone runs once, here, and its results are inputs like the weights; but for a
    transposition whose result is multiplied by, which ONNX Runtime does within the product.

    Args:
        g: the graph.
        seg: a part of it.
        held: gives the weights.
        packed: make all weights initializers: slow to open and twice the memory, for a session that runs often.
    """
    inputs = {name: _tensor_type(g, name) for name in seg.inputs}
    if packed:
        weights = {n: held.get(g, n, False) for n in seg.weights if n in g.weights}
        return Session(_runtime(g, seg.nodes, inputs, seg.outputs, weights, arena=True), seg.outputs, {})
    casts, once, rest = _by_time(g, seg)
    values = {_only(n.outputs): held.get(g, _only(n.inputs), True) for n in casts}
    values |= {n: held.get(g, n, False) for n in _reads((*once, *rest)) if n in g.weights}
    read = _reads(rest)
    fixed = {n: v for n, v in values.items() if n in read and _is_fixed(v)}
    if once:
        made = {o.name for n in once for o in n.outputs}
        wanted = [n for n in read if n in made]
        first = {n: values[n] for n in _reads(once) if n in values}
        runtime = _runtime(g, once, {n: _of(v) for n, v in first.items()}, wanted, {})
        values |= dict(zip(wanted, runtime.run_with_ort_values(wanted, first), strict=True))
    fed = {n: values[n] for n in read if n in values and n not in fixed}
    inputs |= {n: _of(v) for n, v in fed.items()}
    return Session(_runtime(g, rest, inputs, seg.outputs, fixed), seg.outputs, fed)


def _by_time(g: Graph, seg: Segment) -> tuple[list[ir.Node], list[ir.Node], list[ir.Node]]:
    """A segment's nodes: casts of weights to FP32, what else runs once on weights alone, and what runs at each call."""
    weights_only = _weights_only(g.model.graph)
    casts, once, rest = [], [], []
    for n in seg.nodes:
        if id(n) not in weights_only:
            rest.append(n)
        elif _is_cast_of_weight(g, n):
            casts.append(n)
        elif n.op_type == "Transpose" and not any(id(c) in weights_only for c in n.outputs[0].consumers()):
            rest.append(n)
        else:
            once.append(n)
    return casts, once, rest


def _is_cast_of_weight(g: Graph, n: ir.Node) -> bool:
    source = n.inputs[0] if n.op_type == "Cast" and not n.domain else None
    ref = None if source is None else g.weights.get(source.name or "")
    return ref is not None and ref.dtype in _FITS_FP32 and n.attributes["to"].as_int() == ir.DataType.FLOAT


def _reads(nodes: Sequence[ir.Node]) -> dict[str, None]:
    """Names of what nodes read, in order."""
    return {v.name: None for n in nodes for v in n.inputs if v is not None and v.name is not None}


def _only(values: Sequence[ir.Value | None]) -> str:
    """The name of the only value."""
    (value,) = values
    if value is None or value.name is None:
        raise InternalError("a cast without a named input and output")
    return value.name


def _is_fixed(value: rt.OrtValue) -> bool:
    """Small ones, and codes of int8 weights: a product of integers takes no operand transposed."""
    size = int(np.prod(value.shape())) * (1 if value.element_type() == onnx.TensorProto.INT8 else 4)
    return size <= INLINE_LIMIT or value.element_type() == onnx.TensorProto.INT8


TensorType = tuple[int, list[int] | None]
"""Element type and shape."""


def _of(value: rt.OrtValue) -> TensorType:
    return value.element_type(), list(value.shape())


def _tensor_type(g: Graph, name: str) -> TensorType:
    graph = g.model.graph
    values = (v for v in (*graph.inputs, *(o for n in graph for o in n.outputs)) if v.name == name)
    value = next(values)
    return (value.dtype or ir.DataType.FLOAT).value, None if value.shape is None else list(value.shape.numpy())


def _runtime(
    g: Graph,
    nodes: Sequence[ir.Node],
    inputs: Mapping[str, TensorType],
    outputs: Sequence[str],
    weights: Mapping[str, rt.OrtValue],
    *,
    arena: bool = False,
) -> rt.InferenceSession:
    """A session over nodes; `weights` and constants are its initializers.

    `arena` keeps the largest call's memory until the session is gone, and spares asking for it at every call.
    """
    proto = onnx.ModelProto()
    proto.ir_version = 10
    for domain, version in sorted(g.model.opset_imports.items()):
        proto.opset_import.append(onnx.helper.make_opsetid(domain, version))
    used = {n.op_identifier() for n in nodes}
    proto.functions.extend(ir.serde.serialize_function(f) for k, f in sorted(g.model.functions.items()) if k in used)
    proto.graph.name = "segment"
    proto.graph.node.extend(ir.serde.serialize_node(n) for n in nodes)
    proto.graph.input.extend(onnx.helper.make_tensor_value_info(n, *t) for n, t in inputs.items())
    proto.graph.output.extend(onnx.helper.make_tensor_value_info(n, *_tensor_type(g, n)) for n in outputs)
    options = rt.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = arena
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    constants = g.model.graph.initializers
    for name in _reads(nodes):
        value = constants.get(name)
        if value is not None and value.const_value is not None and name not in inputs and name not in weights:
            data = np.ascontiguousarray(value.const_value.numpy())
            proto.graph.initializer.append(onnx.numpy_helper.from_array(data, name))
    for name, held in weights.items():
        t = onnx.TensorProto(
            name=name, data_type=held.element_type(), dims=held.shape(), data_location=onnx.TensorProto.EXTERNAL
        )
        t.external_data.add(key="location", value="weights")
        proto.graph.initializer.append(t)
    if weights:
        options.add_external_initializers(list(weights), list(weights.values()))
    return rt.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _ort_value(data: Array) -> rt.OrtValue:
    """A value of ONNX Runtime's own over the same memory, also of types numpy has no name for."""
    data = np.ascontiguousarray(data)
    elem = onnx.helper.np_dtype_to_tensor_dtype(data.dtype)
    if elem == onnx.TensorProto.BFLOAT16:
        return rt.OrtValue.ortvalue_from_numpy_with_onnx_type(data.view(np.uint16), elem)
    return rt.OrtValue.ortvalue_from_numpy(data)


@dataclass(frozen=True)
class ReplayCall:
    """One call of a replay: which graph, the tokens [B, S] padded to the bucket, valid tokens and past."""

    graph: str
    ids: NDArray[np.int64]
    cur: int
    past: int


@dataclass
class Replayed:
    """What a replay gave: logits [calls, V] of each call's last row, and KV per layer [T, heads, dim]."""

    logits: NDArray[np.float32]
    keys: list[NDArray[np.float32]]
    values: list[NDArray[np.float32]]


def replay(
    graphs: Mapping[str, Graph],
    provider: Provider,
    plan: Sequence[ReplayCall],
    progress: Callable[[str], None] | None = None,
) -> Replayed:
    """Run calls (batch 1) through a prefill and a decode graph, layer by layer.

    Args:
        graphs: graphs by name; all cut into the same number of segments.
        provider: a weight's data by graph and initializer name.
        plan: the calls in order.
        progress: told the name of each segment.
    """
    cuts = {name: segments(g) for name, g in graphs.items() if any(c.graph == name for c in plan)}
    count = {len(c) for c in cuts.values()}
    if len(count) != 1:
        raise InternalError(f"the graphs are cut into {sorted(count)} segments, not into as many each")
    live: list[dict[str, Array]] = [
        {
            IDS: c.ids,
            CURRENT: np.array([c.cur], np.int64),
            PAST: np.array([c.past], np.int64),
        }
        for c in plan
    ]
    keep: dict[str, Array] = {}
    states = {v.name for name in cuts for v in graphs[name].model.graph.outputs if is_state(v.name)}
    total = plan[-1].past + plan[-1].cur
    for at in range(count.pop()):
        if progress is not None:
            progress(f"segment {at}")
        cache: dict[str, Array] = {}
        later = {name: {v for s in cut[at + 1 :] for v in s.inputs} for name, cut in cuts.items()}
        held = Held(provider)
        open_now: tuple[str, Session] | None = None
        for i, call in enumerate(plan):
            seg = cuts[call.graph][at]
            if open_now is None or open_now[0] != call.graph:
                open_now = None  # one session at a time
                open_now = (call.graph, session(graphs[call.graph], seg, held))
            feeds = {n: _feed(graphs[call.graph], n, live[i], cache) for n in seg.inputs}
            for name, data in open_now[1].run(feeds).items():
                if name in states:
                    cache[name] = data
                else:
                    live[i][name] = data
            live[i] = {n: v for n, v in live[i].items() if n in later[call.graph] or n == LOGITS}
        for name, data in cache.items():
            if is_kv(name):  # what else a model keeps has no rows of tokens to compare
                keep[name] = data[0, :, :total].transpose(1, 0, 2).copy()
        del held, open_now, cache
        trim()
    layers = sorted({layer_of(name) for name in keep})
    return Replayed(
        np.concatenate([np.asarray(v[LOGITS], np.float32) for v in live]),
        [np.asarray(keep[kv_name(i, "key")], np.float32) for i in layers],
        [np.asarray(keep[kv_name(i, "value")], np.float32) for i in layers],
    )


def _feed(g: Graph, name: str, live: Mapping[str, Array], cache: Mapping[str, Array]) -> Array:
    if not is_state_input(name):
        return live[name]
    value = next(v for v in g.model.graph.inputs if v.name == name)
    shape = dims(value)
    held = cache.get(state_of(name))
    if held is not None and held.shape == shape:
        return held
    out = np.zeros(shape, np.float32)
    if held is not None and len(shape) == 4:
        # another variant's buffer of rows has another length
        n = min(shape[2], held.shape[2])
        out[:, :, :n] = held[:, :, :n]
    return out
