"""Attributes of kernels: a typed value, read from a node and written to one, of a made-up kernel too."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import pytest

from calc.core.errors import ModelError
from calc.core.isa import Fn
from calc.kernels import registry
from calc.kernels.base import Attrs, AttrsError, Example, Kernel, Work, attr_values, parse_attrs, store
from calc.kernels.linear import LinearAttrs
from calc.passes.base import attr, attrs_of, calc_node, schemes_of
from calc.passes.calls import make_call
from tests.kernels.harness import Bench, draw, run_ort


@dataclass(frozen=True)
class ScaleAttrs(Attrs):
    """A field of each type, two with a default."""

    factor: float
    label: str
    times: int = 1
    negate: bool = False


class Scale(Kernel[ScaleAttrs]):
    """``y = [-] x * factor ^ times``: a kernel that only this file knows."""

    name = "Scale"
    attributes = ScaleAttrs

    def formals(self, attrs):
        return ("x",), ("y",)

    def weights(self, attrs):
        return ()

    def total(self, attrs):
        return float(np.float32(attrs.factor) ** attrs.times) * (-1 if attrs.negate else 1)

    def body(self, attrs, schemes, numerics):
        factor = f"f = Constant<value_float: float = {self.total(attrs)!r}>()"
        return "\n".join((factor, "s = Mul(x, f)", store("s", "y", numerics)))

    def work(self, call, rows, context):
        return Work(0, rows * call.shape("x")[-1])

    def lower(self, low, call):
        x = low.act(call.inputs["x"])
        y = low.new(call.outputs[0], x.width, x.rows)
        low.em.vmap(Fn.AFFINE, (x.rows.count, x.width), y.view, x.view, f=(self.total(call.attrs), 0.0))

    def examples(self):
        return (
            Example(ScaleAttrs(0.5, "half"), {"x": (1, 5, 48)}),
            Example(ScaleAttrs(3.0, "odd", times=2, negate=True), {"x": (1, 7, 33)}),
        )


@pytest.fixture
def scale(monkeypatch):
    kernel = Scale()
    monkeypatch.setitem(registry(), "Scale", kernel)
    return kernel


def node_of(attrs, shape=(1, 5, 48)):
    x = ir.Value(name="x", shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
    source = ir.Node("", "Mul", [x, x], num_outputs=1, name="source", metadata_props={"calc.layer": "3"})
    return calc_node("Scale", [x], attrs, [shape], source, "scaled")


@pytest.mark.parametrize("index", [0, 1])
def test_a_made_up_kernel_runs_as_its_body_says(scale, index):
    ex = scale.examples()[index]
    values = draw(scale, ex)
    want = run_ort(scale, ex.attrs, "npu", values)["y"]
    np.testing.assert_array_equal(Bench(scale, ex.attrs, values, ()).run("strict")["y"], want[0])


def test_a_node_gives_back_the_value_it_was_made_from(scale):
    for ex in scale.examples():
        call = make_call(node_of(ex.attrs, ex.shapes["x"]), scale)
        assert (call.attrs, call.layer, call.inputs) == (ex.attrs, 3, {"x": "x"})
    assert list(node_of(ScaleAttrs(0.5, "half")).attributes) == ["factor", "label"]
    full = node_of(ScaleAttrs(0.5, "half", 2, True)).attributes
    assert {k: a.value for k, a in full.items()} == {"factor": 0.5, "label": "half", "times": 2, "negate": 1}


@pytest.mark.parametrize("name", registry())
def test_every_kernel_reads_what_it_wrote(name):
    kernel = registry()[name]
    assert kernel.attributes.__dataclass_params__.frozen
    for ex in kernel.examples():
        assert type(ex.attrs) is kernel.attributes
        assert parse_attrs(kernel.attributes, attr_values(ex.attrs)) == ex.attrs


def test_an_example_with_an_attribute_that_its_kernel_does_not_know():
    with pytest.raises(TypeError, match="eps"):
        Example(LinearAttrs(1, bias=False, add=False, eps=1e-5), {})


GOOD = {"factor": 0.5, "label": "half"}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, ["the attribute factor is missing", "the attribute label is missing"]),
        ({**GOOD, "eps": 1.0, "norm": 0}, ["it has no attribute eps", "it has no attribute norm"]),
        ({"factor": "half", "label": 2}, ["factor has another type", "label has another type"]),
        ({**GOOD, "times": 1.0}, ["times has another type"]),
        ({**GOOD, "times": "1"}, ["times has another type"]),
        ({**GOOD, "negate": 2}, ["negate has another type"]),
        ({**GOOD, "negate": 1.0}, ["negate has another type"]),
        ({"label": "x", "negate": "yes", "eps": 0}, ["no attribute eps", "factor is missing", "negate has another"]),
    ],
)
def test_every_faulty_attribute_is_named(scale, values, says):
    with pytest.raises(AttrsError) as e:
        parse_attrs(ScaleAttrs, values)
    assert len(e.value.faults) == len(says)
    assert all(s in f.what for s, f in zip(says, e.value.faults, strict=True))
    node = node_of(ScaleAttrs(0.5, "half"))
    node.attributes.clear()
    for k, v in values.items():
        node.attributes.add(
            ir.AttrInt64(k, v)
            if isinstance(v, int)
            else ir.AttrString(k, v)
            if isinstance(v, str)
            else ir.AttrFloat32(k, v)
        )
    with pytest.raises(ModelError) as e:
        make_call(node, scale)
    assert set(e.value.codes) == {"ONNX_CALC_NODE"}
    assert [p.what for p in e.value.problems] == [f.what for f in _faults(values)]
    assert all(p.where == "Scale scaled" and p.expected for p in e.value.problems)


def _faults(values):
    with pytest.raises(AttrsError) as e:
        parse_attrs(ScaleAttrs, values)
    return e.value.faults


def test_a_whole_number_is_a_float_too():
    found = parse_attrs(ScaleAttrs, {"factor": 2, "label": "two"})
    assert found == ScaleAttrs(2.0, "two") and isinstance(found.factor, float)


def test_schemes_are_no_attribute_of_the_kernel(scale):
    node = node_of(ScaleAttrs(0.5, "half"))
    assert schemes_of(node) is None
    node.attributes.add(ir.AttrStrings("schemes", ["bf16"]))
    assert attrs_of(node, ScaleAttrs) == ScaleAttrs(0.5, "half")
    assert schemes_of(node) == ("bf16",)
    node.attributes.add(ir.AttrString("schemes", "w8a8"))
    assert schemes_of(node) == ("w8a8",)


def test_an_attribute_of_a_standard_op_of_another_type():
    node = ir.Node("", "Softmax", [], [ir.AttrString("axis", "last")], num_outputs=1, name="odd")
    assert attr(node, "other", 1.5) == 1.5
    with pytest.raises(ModelError, match="axis has another type") as e:
        attr(node, "axis", -1)
    assert e.value.codes == ("ONNX_ATTRIBUTE",)
