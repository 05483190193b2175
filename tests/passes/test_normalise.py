"""Weights behind casts, offsets, concatenations, reshapes and slices: the same numbers, or left alone."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from calc.core.tensors import ArrayTensor, StackTensor
from calc.passes.base import Graph
from calc.passes.normalise import Normalise
from tests.passes.graphs import graph, ops

CONSTANTS = "one = Constant<value_float = 1.0>()\n"


def folded(inputs: str, body: str) -> tuple[Graph, np.ndarray]:
    """After the pass the only node left reads the folded weight: that weight's values."""
    g = graph(f"float[1] x, {inputs}", "y", f"{body}\ny = com.acme.Use(x, r)")
    assert Normalise().run(g) >= 1
    assert ops(g) == ["Use"]
    name = g.model.graph.node(0).inputs[1].name
    assert g.model.graph.initializers[name].const_value is None
    return g, np.asarray(g.weights[name].read(), np.float64)


def untouched(inputs: str, body: str) -> None:
    g = graph(f"float[1] x, {inputs}", "y", f"{body}\ny = com.acme.Use(x, r)")
    before = ops(g)
    assert Normalise().run(g) == 0
    assert ops(g) == before


def weights(inputs: str, *names: str) -> list[np.ndarray]:
    g = graph(inputs, "y", f"y = com.acme.Use({', '.join(names)})")
    return [np.asarray(g.weights[n].read(), np.float64) for n in names]


def test_cast_to_float() -> None:
    g = graph("float[1] x, bfloat16[3,4] w", "y", "r = Cast<to = 1>(w)\ny = com.acme.Use(x, r)")
    stored = g.weights["w"].read().astype(ml_dtypes.bfloat16)
    g.weights["w"] = ArrayTensor(stored, ("w",))
    assert Normalise().run(g) == 1
    assert ops(g) == ["Use"]
    assert np.array_equal(g.weights["w"].read(), stored)


@pytest.mark.parametrize("to", [10, 16, 7, 11])
def test_casts_that_change_values_stay(to: int) -> None:
    untouched("float[3,4] w", f"r = Cast<to = {to}>(w)")


def test_offset_on_either_side() -> None:
    (w,) = weights("float[4] w", "w")
    for body in ("r = Add(w, one)", "r = Add(one, w)"):
        _, got = folded("float[4] w", CONSTANTS + body)
        np.testing.assert_allclose(got, w + 1, rtol=1e-6)
    untouched("float[4,4] w", CONSTANTS + "r = Add(w, one)")
    untouched("float[4] w, float[4] b", "r = Add(w, b)")


def test_experts_joined_and_stacked() -> None:
    inputs = "float[3,5] w1, float[3,5] w2"
    parts = weights(inputs, "w1", "w2")
    body = "s = Constant<value_ints = [2, 3, 5]>()\nc = Concat<axis = 0>(w1, w2)\nr = Reshape(c, s)"
    g, got = folded(inputs, body)
    assert np.array_equal(got, np.stack(parts))
    (ref,) = [r for r in g.weights.values() if isinstance(r, StackTensor)]
    assert ref.sources == ("w1", "w2")


@pytest.mark.parametrize(
    ("inputs", "shape"),
    [
        ("float[3,4] w1, float[3,4] w2", [2, 4, 3]),
        ("float[2,4] w1, float[4,4] w2", [2, 3, 4]),
        ("float[3,4] w1, float[3,4] w2", [6, 2, 2]),
        ("float[6,2] w1, float[6,2] w2", [2, 12]),
        ("float[4] w1, float[4] w2", [2, 4]),
    ],
)
def test_joined_and_reshaped_otherwise(inputs: str, shape: list[int]) -> None:
    """As many parts as the first axis, yet not one part for each element of it."""
    body = f"s = Constant<value_ints = {shape}>()\nc = Concat<axis = 0>(w1, w2)\nr = Reshape(c, s)"
    _, got = folded(inputs, body)
    assert np.array_equal(got, np.concatenate(weights(inputs, "w1", "w2")).reshape(shape))


def test_joined_along_another_axis_stays() -> None:
    untouched("float[3,4] w1, float[3,4] w2", "r = Concat<axis = 1>(w1, w2)")
    untouched("float[3,4] w1, float[3,4] a", "r = Concat<axis = 0>(w1, a)")


@pytest.mark.parametrize("start", [0, 2, -4, -100])
@pytest.mark.parametrize("stop", [1, 4, 6, 100, -1, 2**62])
@pytest.mark.parametrize("axis", [1, -2])
def test_slices_of_experts(start: int, stop: int, axis: int) -> None:
    (w,) = weights("float[2,6,3] w", "w")
    body = (
        f"a = Constant<value_ints = [{start}]>()\nb = Constant<value_ints = [{stop}]>()\n"
        f"c = Constant<value_ints = [{axis}]>()\nr = Slice(w, a, b, c)"
    )
    want = w[:, start:stop]
    if want.size:
        _, got = folded("float[2,6,3] w", body)
        assert np.array_equal(got, want)
    else:
        untouched("float[2,6,3] w", body)


@pytest.mark.parametrize(
    ("inputs", "bounds"),
    [
        ("float[2,6,3] w", ("0", "4", "1", "2")),
        ("float[2,6,3] w", ("5", "0", "1", "-1")),
        ("float[2,6,3] w", ("0", "2", "2", "1")),
        ("float[2,6,3] w", ("0, 0", "1, 4", "0, 1", "1, 1")),
        ("float[6,3] w", ("0", "4", "1", "1")),
    ],
)
def test_slices_that_stay(inputs: str, bounds: tuple[str, ...]) -> None:
    lines = [f"b{i} = Constant<value_ints = [{b}]>()" for i, b in enumerate(bounds)]
    untouched(inputs, "\n".join([*lines, "r = Slice(w, b0, b1, b2, b3)"]))


def test_ops_on_activations_stay() -> None:
    g = graph("float[3,4] x", "y", "r = Cast<to = 1>(x)\ny = Neg(r)")
    assert Normalise().run(g) == 0
    assert ops(g) == ["Cast", "Neg"]
