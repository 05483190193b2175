"""Execute: a graph in ONNX Runtime, a layer at a time.

The graph is cut where decoder layers begin. A segment's weights are read, its session runs for every call of the
replay, and is dropped before the next segment's weights are read; so memory is bounded by the largest segment, never
by the model. That is possible because the tokens of a replay are known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as rt
from numpy.typing import NDArray

from calc.core.roles import CURRENT, IDS, LOGITS, PAST, is_state, is_state_input, kv_name, state_of
from calc.passes.base import Graph

Array = NDArray[np.generic]
Provider = Callable[[Graph, str], Array]

INLINE_LIMIT = 1 << 20
"""Weights up to this many bytes travel inside a segment's model; larger ones are handed over as arrays, which spares
the copies that serialising them would make."""


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


def session(g: Graph, seg: Segment, provider: Provider) -> rt.InferenceSession:
    """A session for one segment, its weights inside."""
    graph = g.model.graph
    values: dict[str, ir.Value] = {}
    for n in graph:
        for v in n.outputs:
            values[v.name or ""] = v
    for v in graph.inputs:
        values[v.name or ""] = v
    proto = onnx.ModelProto()
    proto.ir_version = 10
    for domain, version in sorted(g.model.opset_imports.items()):
        proto.opset_import.append(onnx.helper.make_opsetid(domain, version))
    used = {n.op_identifier() for n in seg.nodes}
    proto.functions.extend(ir.serde.serialize_function(f) for k, f in sorted(g.model.functions.items()) if k in used)
    proto.graph.name = "segment"
    proto.graph.node.extend(ir.serde.serialize_node(n) for n in seg.nodes)
    for names, target in ((seg.inputs, proto.graph.input), (seg.outputs, proto.graph.output)):
        for name in names:
            v = values[name]
            elem = (v.dtype or ir.DataType.FLOAT).value
            target.append(
                onnx.helper.make_tensor_value_info(name, elem, None if v.shape is None else list(v.shape.numpy()))
            )
    options = rt.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    small = {n: graph.initializers[n] for n in seg.weights if n not in g.weights}
    for name, value in small.items():
        assert value.const_value is not None
        proto.graph.initializer.append(
            onnx.numpy_helper.from_array(np.ascontiguousarray(value.const_value.numpy()), name)
        )
    handed: list[str] = []
    held: list[rt.OrtValue] = []
    for name in (n for n in seg.weights if n in g.weights):
        data = np.ascontiguousarray(provider(g, name))
        if data.nbytes <= INLINE_LIMIT:
            proto.graph.initializer.append(onnx.numpy_helper.from_array(data, name))
            continue
        elem = onnx.helper.np_dtype_to_tensor_dtype(data.dtype)
        t = onnx.TensorProto(name=name, data_type=elem, dims=data.shape, data_location=onnx.TensorProto.EXTERNAL)
        t.external_data.add(key="location", value="weights")
        proto.graph.initializer.append(t)
        handed.append(name)
        held.append(_ort_value(data, elem))
    if handed:
        options.add_external_initializers(handed, held)
    return rt.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _ort_value(data: Array, elem: int) -> rt.OrtValue:
    """A value of ONNX Runtime's own, also of types numpy has no name for."""
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
    assert len(count) == 1, count
    live: list[dict[str, Array]] = [
        {
            IDS: c.ids,
            CURRENT: np.array([c.cur], np.int64),
            PAST: np.array([c.past], np.int64),
        }
        for c in plan
    ]
    keep: dict[str, dict[str, Array]] = {}
    total = plan[-1].past + plan[-1].cur
    for at in range(count.pop()):
        if progress is not None:
            progress(f"segment {at}")
        cache: dict[str, Array] = {}
        later = {name: {v for s in cut[at + 1 :] for v in s.inputs} for name, cut in cuts.items()}
        sessions: dict[str, rt.InferenceSession] = {}
        for i, call in enumerate(plan):
            seg = cuts[call.graph][at]
            if call.graph not in sessions:
                sessions.clear()
                sessions[call.graph] = session(graphs[call.graph], seg, provider)
            feeds = {n: _feed(graphs[call.graph], n, live[i], cache) for n in seg.inputs}
            results = dict(zip(seg.outputs, sessions[call.graph].run(list(seg.outputs), feeds), strict=True))
            for name, data in results.items():
                if is_state(name):
                    cache[name] = data
                else:
                    live[i][name] = data
            live[i] = {n: v for n, v in live[i].items() if n in later[call.graph] or n == LOGITS}
        for name, data in cache.items():
            keep.setdefault(name, {})["data"] = data[0, :, :total].transpose(1, 0, 2).copy()
    layers = len(keep) // 2
    return Replayed(
        np.concatenate([np.asarray(v[LOGITS], np.float32) for v in live]),
        [np.asarray(keep[kv_name(i, "key")]["data"], np.float32) for i in range(layers)],
        [np.asarray(keep[kv_name(i, "value")]["data"], np.float32) for i in range(layers)],
    )


def _feed(g: Graph, name: str, live: Mapping[str, Array], cache: Mapping[str, Array]) -> Array:
    if not is_state_input(name):
        return live[name]
    value = next(v for v in g.model.graph.inputs if v.name == name)
    assert value.shape is not None
    shape = tuple(int(d) for d in value.shape)  # type: ignore[arg-type]
    out = np.zeros(shape, np.float32)
    held = cache.get(state_of(name))
    if held is not None:
        n = min(shape[2], held.shape[2])
        out[:, :, :n] = held[:, :, :n]
    return out
