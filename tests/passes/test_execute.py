"""Graphs cut at layer borders: every node once, every value where it is needed, the same numbers as in one piece."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calc.core.errors import InternalError
from calc.core.tensors import RowsTensor
from calc.passes import execute
from calc.passes.base import Graph, sweep
from calc.passes.execute import Held, ReplayCall, Segment, replay, segments, session
from tests.passes.graphs import graph


@st.composite
def layered(draw: st.DrawFn) -> Graph:
    """A random graph: nodes in layers, before and after them, with casts of weights that several layers share."""
    layers = draw(st.integers(1, 4))
    lines, marks, alive = [], [], ["x"]
    for i in range(draw(st.integers(0, 3))):
        lines.append(f"t{i} = Transpose<perm = [1, 0]>(w{i})")
        marks.append(None)
    shared = [f"t{i}" for i in range(len(lines))]
    for layer in [-1, *range(layers), layers]:
        for _ in range(draw(st.integers(1, 3))):
            a = draw(st.sampled_from(alive))
            b = draw(st.sampled_from([*alive, *shared]))
            name = f"v{len(lines)}"
            lines.append(f"{name} = MatMul({a}, {b})" if b in shared else f"{name} = Add({a}, {b})")
            marks.append(layer)
            alive.append(name)
    inputs = ", ".join(["float[4,4] x", *(f"float[4,4] w{i}" for i in range(len(shared)))])
    outputs = sorted({alive[-1], *draw(st.sets(st.sampled_from(alive[1:]), max_size=2))})
    g = graph(inputs, ", ".join(outputs), "\n".join(lines))
    for node, mark in zip(g.model.graph, marks, strict=True):
        if mark is not None and 0 <= mark < layers:
            node.metadata_props["calc.layer"] = str(mark)
        elif mark is not None and mark >= layers:
            node.metadata_props["calc.scope"] = "behind"
    sweep(g)
    return g


def held(g: Graph, name: str, floats: bool = False) -> np.ndarray:
    """A permutation with signs: products keep whole numbers, and a sum of those is exact in whatever order."""
    draw = np.random.default_rng(list(name.encode()))
    signs = draw.choice(np.array([-1, 1], np.float32), 4)
    return np.eye(4, dtype=np.float32)[draw.permutation(4)] * signs


def is_of_weights(node: ir.Node) -> bool:
    return node.op_type == "Transpose"


@given(layered())
def test_every_node_is_in_one_segment(g: Graph) -> None:
    cuts = segments(g)
    inside = [n for s in cuts for n in s.nodes if not is_of_weights(n)]
    used = [n for n in g.model.graph if not is_of_weights(n)]
    assert sorted(map(id, inside)) == sorted(map(id, used))
    made = {"x"}
    for s in cuts:
        assert set(s.inputs) <= made
        assert set(s.weights) <= set(g.weights)
        layers = {n.metadata_props.get("calc.layer") for n in s.nodes if "calc.layer" in n.metadata_props}
        assert len(layers) <= 1
        made |= set(s.outputs)
    assert {v.name for v in g.model.graph.outputs} <= made


def piecewise(g: Graph, cuts: Sequence[Segment], x: np.ndarray) -> dict[str, np.ndarray]:
    live = {"x": x}
    for s in cuts:
        live.update(session(g, s, Held(held)).run({n: live[n] for n in s.inputs}))
    return live


@given(layered())
def test_the_pieces_compute_what_the_whole_computes(g: Graph) -> None:
    x = np.random.default_rng(0).integers(-7, 8, (4, 4)).astype(np.float32)  # doubled by at most 18 additions
    outputs = tuple(v.name for v in g.model.graph.outputs)
    used = {v.name for n in g.model.graph for v in n.inputs}
    whole = Segment(tuple(g.model.graph), ("x",), tuple(n for n in g.weights if n in used), outputs)
    got = piecewise(g, segments(g), x)
    for packed in (False, True):
        for name, value in session(g, whole, Held(held), packed=packed).run({"x": x}).items():
            np.testing.assert_array_equal(got[name], value)


STEP = """
e = Gather<axis = 0>(w_table, input_ids)
ax = Constant<value_ints = [1]>()
k = Unsqueeze(e, ax)
%kv.0.key = TensorScatter<axis = 2>(%past_kv.0.key, k, past_kv_cur_seq_len)
%kv.0.value = TensorScatter<axis = 2>(%past_kv.0.value, k, past_kv_cur_seq_len)
hd = Constant<value_ints = [2]>()
h = ReduceSum<keepdims = 0>(%kv.0.key, hd)
dd = ReduceSum<keepdims = 0>(h, ax)
logits = MatMul(dd, w_head)
"""


def cached(seq: int, room: int) -> Graph:
    """One layer that sums its whole cache: what is left over in a row shows."""
    body = STEP.replace("%", "")
    for name in ("past_kv.0.key", "past_kv.0.value", "kv.0.key", "kv.0.value"):
        body = body.replace(name, name.replace(".", "_"))
    cache = ", ".join(f"float[1,1,{room},4] past_kv_0_{n}" for n in ("key", "value"))
    g = graph(
        f"int64[1,{seq}] input_ids, int64[1] past_kv_cur_seq_len, {cache}, float[9,4] w_table, float[4,5] w_head",
        "logits, kv_0_key, kv_0_value",
        body,
    )
    for value in [*g.model.graph.inputs, *(v for n in g.model.graph for v in n.outputs)]:
        if "kv_0" in (value.name or ""):
            value.name = value.name.replace("_0_", ".0.")
    return g


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_a_replay_keeps_its_cache_between_calls_and_buckets(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of different length, weights inline and handed over: the state is the same."""
    monkeypatch.setattr(execute, "INLINE_LIMIT", limit)
    graphs = {"p": cached(3, 11), "d": cached(1, 9)}
    ids = [np.array([[4, 7, 0]]), np.array([[2]]), np.array([[8]])]
    plan = [ReplayCall("p", ids[0], 2, 0), ReplayCall("d", ids[1], 1, 2), ReplayCall("d", ids[2], 1, 3)]

    def stored(g: Graph, name: str, floats: bool = False) -> np.ndarray:
        return np.asarray(graphs["p"].weights[name].read(), np.float32)

    got = replay(graphs, stored, plan)
    table, head = stored(graphs["p"], "w_table"), stored(graphs["p"], "w_head")
    assert np.array_equal(got.keys[0][:, 0], table[[4, 7, 2, 8]])
    assert np.array_equal(got.values[0][:, 0], table[[4, 7, 2, 8]])
    # the padded third token of the prefill is in the cache until the first decode overwrites it
    seen = [[4, 7, 0], [4, 7, 2], [4, 7, 2, 8]]
    want = np.stack([table[rows].sum(axis=0) @ head for rows in seen])
    np.testing.assert_allclose(got.logits, want, rtol=1e-5)


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_what_is_computed_on_weights_alone_runs_once(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An offset is added when the session opens; a transposition before a product is left to the product."""
    monkeypatch.setattr(execute, "INLINE_LIMIT", limit)
    body = "s = Add(w0, w1)\nt = Transpose<perm = [1, 0]>(s)\ny = MatMul(x, t)"
    g = graph("float[4,4] x, float[4,4] w0, float[4,4] w1", "y", body)
    (seg,) = segments(g)
    made = session(g, seg, Held(held))
    assert {i.name for i in made.runtime.get_inputs()} == {"x", "s"}
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    assert np.array_equal(made.run({"x": x})["y"], x @ (held(g, "w0") + held(g, "w1")).T)


def test_a_weight_is_read_once_for_both_graphs() -> None:
    """Tables that a graph holds in memory are its own: they are asked for in each."""
    read: list[str] = []

    def counted(g: Graph, name: str, floats: bool) -> np.ndarray:
        read.append(name)
        return held(g, name)

    g = graph("float[4,4] x, float[4,4] w0", "y", "y = MatMul(x, w0)")
    values = Held(counted)
    g.weights["w1"] = RowsTensor(g.weights["w0"], 0, 4)
    for name in ("w0", "w0", "w1", "w1"):
        values.get(g, name, floats=False)
    assert read == ["w0", "w0", "w1"]


def test_a_cast_without_names_is_our_bug() -> None:
    with pytest.raises(InternalError, match="named"):
        execute._only([None])
