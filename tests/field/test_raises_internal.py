"""Invariants of calc itself: what no input can break says so in a sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from calc.calbin.writer import SectionWriter
from calc.core.errors import InternalError
from calc.core.tensors import ArrayTensor
from calc.frontend.link import Linker
from calc.frontend.norms import weight_of
from calc.passes import execute
from calc.passes.base import Graph, insert
from calc.passes.execute import ReplayCall, replay
from calc.passes.normalise import Normalise
from calc.sim.runtime import Device
from tests.field.conftest import Compiled
from tests.field.field_models import compile_graphs, open_device


def value(name: str, *shape: int, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def graph(inputs: list[ir.Value], nodes: list[ir.Node]) -> ir.Graph:
    return ir.Graph(inputs, list(nodes[-1].outputs), nodes=nodes, opset_imports={"": 25}, name="g")


def test_a_weight_that_is_no_tensor() -> None:
    linear = nn.Linear(2, 3)
    assert weight_of(linear, "weight") is linear.weight
    assert isinstance(weight_of(linear, "bias"), torch.Tensor)
    with pytest.raises(InternalError, match="Sequential: gone is a NoneType"):
        weight_of(nn.Sequential(linear), "gone")
    with pytest.raises(InternalError, match="Sequential: 0 is a Linear"):
        weight_of(nn.Sequential(linear), "0")


def test_traced_experts_without_weights() -> None:
    x = value("x", 2, 2)
    bare = ir.Node("", "experts", [x, x, x, None, None], num_outputs=1, name="bare")
    with pytest.raises(InternalError, match="bare: traced experts without weights"):
        Linker(graph([x], [bare]), {}, {}).experts(bare)
    x, w = value("x", 2, 2), value("w", 2, 4, 2)
    strange = ir.Node("", "experts", [x, x, x, w, w], num_outputs=1, name="strange")
    with pytest.raises(InternalError, match="'w' is no parameter"):
        Linker(graph([x, w], [strange]), {}, {}).experts(strange)


def test_a_tensor_without_a_place_on_a_chip(compiled: Compiled) -> None:
    device = open_device(compiled())
    sub = device.calbin.manifest.submodels[0]
    logits = sub.outputs[0]
    away = logits.model_copy(update={"at": logits.at.model_copy(update={"chip": None})})
    with pytest.raises(InternalError, match=f"{logits.name} has no place on a chip"):
        Device._read(device, away)
    with pytest.raises(InternalError, match="has no place on a chip"):
        Device._write(device, away, np.zeros(1, np.float32))


def test_graphs_with_different_numbers_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "segments", lambda g: [None] * g)
    ids = np.zeros((1, 1), np.int64)
    plan = [ReplayCall("prefill", ids, cur=1, past=0), ReplayCall("decode", ids, cur=1, past=1)]
    with pytest.raises(InternalError, match=r"cut into \[2, 3\] segments"):
        replay({"prefill": 3, "decode": 2}, None, plan)


def test_a_node_that_stands_nowhere() -> None:
    x = value("x", 2)
    node, other = (ir.Node("", "Abs", [x], num_outputs=1, name=n) for n in ("alone", "other"))
    with pytest.raises(InternalError, match="alone is in no graph"):
        insert(node, other)


def test_a_folded_weight_without_a_name() -> None:
    w = value("w", 2, 2)
    node = ir.Node("", "Reshape", [w, value("s", 1)], num_outputs=1, name="shaped")
    node.inputs[1].const_value = ir.tensor(np.array([4], np.int64))
    node.outputs[0].shape, node.outputs[0].dtype = ir.Shape([4]), ir.DataType.FLOAT
    g = graph([], [node])
    g.initializers["w"] = w
    node.outputs[0].name = None
    with pytest.raises(InternalError, match="shaped: what it makes of a weight has no name"):
        Normalise().run(Graph(ir.Model(g, ir_version=10), {"w": ArrayTensor(np.zeros((2, 2), np.float32), ("w",))}))


def test_weights_that_are_not_where_they_were_placed(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = SectionWriter.align
    monkeypatch.setattr(SectionWriter, "align", lambda s, n: honest(s, n if n != 64 else 4096))
    with pytest.raises(InternalError, match=r"is placed at \d+, not at \d+"):
        compile_graphs(exported, tmp_path / "m.calbin")
    assert not (tmp_path / "m.calbin").exists()
