"""Graphs and models that cannot be compiled as given."""

from __future__ import annotations

import importlib.util
import shutil

import numpy as np
import onnx
import pytest

import calc
from calc.core.errors import ModelError, UsageError
from calc.core.target import load_target, parse_target
from tests.conftest import GLASS
from tests.e2e.models import ROOT


@pytest.fixture
def hand_made(tmp_path):
    where = importlib.util.spec_from_file_location("from_onnx", ROOT / "examples" / "from_onnx.py")
    module = importlib.util.module_from_spec(where)
    where.loader.exec_module(module)
    weights = module.weights()
    for name, seq in (("prefill", 16), ("decode", 1)):
        onnx.save(module.graph(seq, weights), tmp_path / f"{name}.onnx")
    (tmp_path / "model_spec.json").write_text(module.spec().model_dump_json())
    return tmp_path


def compile_graphs(d):
    return calc.compile_graphs([d / "prefill.onnx"], [d / "decode.onnx"], d / "model_spec.json", d / "x.calbin")


def edited(path, edit):
    model = onnx.load(path)
    edit(model)
    onnx.save(model, path)


def test_one_name_for_two_weights(hand_made):
    def other(model):
        t = next(t for t in model.graph.initializer if t.name == "0.q")
        t.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(t) + np.float32(1), "0.q"))

    edited(hand_made / "decode.onnx", other)
    with pytest.raises(ModelError) as e:
        compile_graphs(hand_made)
    assert e.value.code == "ONNX_INPUTS"
    assert "0.q" in e.value.problems[0].where
    assert not (hand_made / "x.calbin").exists()


def test_graphs_with_different_weights(hand_made):
    def renamed(model):
        for t in model.graph.initializer:
            t.name = "other" if t.name == "0.q" else t.name
        for n in model.graph.node:
            n.input[:] = ["other" if i == "0.q" else i for i in n.input]

    edited(hand_made / "decode.onnx", renamed)
    with pytest.raises(ModelError) as e:
        compile_graphs(hand_made)
    assert "other" in e.value.problems[0].got


def test_a_config_without_weights_can_be_planned_only(tmp_path):
    shutil.copy(GLASS / "config.json", tmp_path)
    options = calc.CompileOptions(prefill=(16,), max_seq_len=64)
    assert calc.compile(tmp_path, None, options).shard_bytes[0] > 1_700_000
    with pytest.raises(UsageError) as e:
        calc.compile(tmp_path, tmp_path / "x.calbin", options)
    assert e.value.code == "USAGE_NO_WEIGHTS"


def test_an_alignment_the_compiler_does_not_keep():
    text = load_target("calculet-1chip").toml
    with pytest.raises(UsageError) as e:
        parse_target(text.replace("value = 64.0", "value = 4096.0", 1), "x")
    assert "alignment" in e.value.problems[0].where


@pytest.mark.parametrize(("schemes", "why"), [(["w2a2"], "no scheme 'w2a2'"), (["bf16"] * 2, "2 schemes for 1")])
def test_a_calc_node_with_schemes_that_do_not_exist(tmp_path, schemes, why):
    from onnx import TensorProto, helper

    attributes = {"n": 1, "bias": 0, "add": 0, "schemes": schemes}
    node = helper.make_node("Linear", ["x", "w"], ["y"], domain="calc", name="odd", **attributes)
    x, w, y = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s)
        for n, s in (("x", [1, 4, 8]), ("w", [8, 8]), ("y", [1, 4, 8]))
    )
    opsets = [helper.make_opsetid("", 25), helper.make_opsetid("calc", 1)]
    graph = helper.make_graph([node], "g", [x, w], [y])
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "g.onnx")
    with pytest.raises(ModelError) as e:
        calc.inventory(tmp_path / "g.onnx")
    assert e.value.code == "ONNX_CALC_NODE"
    assert why in e.value.problems[0].what


@pytest.mark.parametrize(
    ("attributes", "inputs", "faults"),
    [
        ({"add": 0, "eps": 1e-5}, 3, ["its inputs or outputs do not fit its attributes"]),
        ({"eps": 1e-5}, 2, ["the attribute add is missing"]),
        (
            {"eps": "small", "norm": 1, "bias": 0},
            2,
            [
                "it has no attribute bias",
                "it has no attribute norm",
                "the attribute add is missing",
                "the attribute eps has another type",
            ],
        ),
        ({"add": 2, "eps": 1.0}, 2, ["the attribute add has another type"]),
        ({"add": [0], "eps": 1.0}, 2, ["the attribute add has another type"]),
    ],
)
def test_a_calc_node_that_is_no_call_of_its_kernel(tmp_path, attributes, inputs, faults):
    from onnx import TensorProto, helper

    names = [f"x{i}" for i in range(inputs)]
    node = helper.make_node("RmsNorm", names, ["y"], domain="calc", name="odd", **attributes)
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 4, 8]) for n in (*names, "y")]
    graph = helper.make_graph([node], "g", values[:-1], values[-1:])
    opsets = [helper.make_opsetid("", 25), helper.make_opsetid("calc", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "g.onnx")
    with pytest.raises(ModelError) as e:
        calc.inventory(tmp_path / "g.onnx")
    assert set(e.value.codes) == {"ONNX_CALC_NODE"}
    assert sorted(p.what for p in e.value.problems) == faults
    assert all("odd" in p.where for p in e.value.problems)
