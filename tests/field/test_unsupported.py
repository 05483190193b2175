"""What the NPU cannot do is named all at once, each place with the constraint that failed."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import onnx.helper as oh
import pytest
import transformers

import calc
from calc.core.errors import UnsupportedError
from tests.field.field_models import compile_graphs, compile_model, save, t0

UNKNOWN = {0: "Sin", 1: "Softsign", 2: "Elu"}


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers; behind each down projection stands an op that no kernel computes."""
    home = tmp_path_factory.mktemp("strange")
    model = save(transformers.LlamaConfig(**t0(num_hidden_layers=3)), home / "m")
    out = home / "graphs"
    calc.export(model, out, calc.CompileOptions(prefill=(8,), max_seq_len=32))
    for path in out.glob("*.onnx"):
        proto = onnx.load(path, load_external_data=False)
        _insert(proto.graph)
        onnx.save(proto, path)
    return out


def _insert(graph: onnx.GraphProto) -> None:
    makers = {o: n for n in graph.node for o in n.output}
    nodes = []
    for node in graph.node:
        nodes.append(node)
        scope = next((p.value for p in node.metadata_props if p.key == "calc.scope"), "")
        layer = next((p.value for p in node.metadata_props if p.key == "calc.layer"), None)
        if node.op_type == "MatMul" and scope.endswith("down_proj") and layer is not None:
            inner = f"{node.output[0]}/plain"
            extra = oh.make_node(UNKNOWN[int(layer)], [inner], [node.output[0]], name=f"strange_{layer}")
            extra.metadata_props.extend(node.metadata_props)
            node.output[0] = inner
            nodes.append(extra)
    assert len(nodes) == len(graph.node) + 3
    assert makers
    del graph.node[:]
    graph.node.extend(nodes)


def test_field_61_all_unknown_ops_are_named(strange: Path, tmp_path: Path) -> None:
    for path in sorted(strange.glob("*.onnx")):
        report = calc.inventory(path)
        assert not report.ok
        (graph,) = report.graphs
        found = {e.op: e.findings for e in graph.ops if e.klass == "unsupported"}
        assert set(found) == set(UNKNOWN.values())  # the residual behind each is a sum of its own
        for layer, op in UNKNOWN.items():
            (finding,) = found[op]
            assert f"layers.{layer}." in finding.where
            assert f"no kernel for {op} with inputs" in finding.reason
    with pytest.raises(UnsupportedError) as caught:
        compile_graphs(strange, tmp_path / "m.calbin")
    assert caught.value.exit_code == 1
    assert set(caught.value.codes) == {"OP_UNSUPPORTED"}
    text = {p.what: p.where for p in caught.value.problems}
    for layer, op in UNKNOWN.items():
        (where,) = {w for what, w in text.items() if f" {op} here" in what}
        assert f"layers.{layer}." in where
    assert len(caught.value.problems) == 3
    assert not list(tmp_path.iterdir())


def test_unknown_ops_whose_shapes_nobody_knows(strange: Path, tmp_path: Path) -> None:
    """Ops of a domain without schemas: nothing behind the first has a shape."""
    out = Path(shutil.copytree(strange, tmp_path / "graphs"))
    for path in out.glob("*.onnx"):
        proto = onnx.load(path, load_external_data=False)
        del proto.graph.value_info[:]
        proto.opset_import.append(oh.make_opsetid("com.acme", 1))
        for node in proto.graph.node:
            if node.op_type in UNKNOWN.values():
                node.domain = "com.acme"
        onnx.save(proto, path)
        (graph,) = calc.inventory(path).graphs
        found = {e.op for e in graph.ops if e.klass == "unsupported"}
        assert found >= set(UNKNOWN.values())
    with pytest.raises(UnsupportedError) as caught:
        compile_graphs(out, tmp_path / "m.calbin")
    text = "\n".join(p.what for p in caught.value.problems)
    assert all(f"com.acme.{op} here" in text for op in UNKNOWN.values())


def test_graphs_without_shapes_are_completed(exported: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(exported, tmp_path / "graphs"))
    for path in out.glob("*.onnx"):
        proto = onnx.load(path, load_external_data=False)
        assert len(proto.graph.value_info) > 10
        del proto.graph.value_info[:]
        onnx.save(proto, path)
    compile_graphs(out, tmp_path / "m.calbin")
    compile_graphs(exported, tmp_path / "whole.calbin")
    sections = [
        {s.name: s.sha256 for s in calc.open(tmp_path / name).manifest.sections if s.kind in ("program", "weights")}
        for name in ("m.calbin", "whole.calbin")
    ]
    assert sections[0] == sections[1]
    assert len(sections[0]) == 3


def test_field_35_a_shared_expert_is_refused_by_every_op(tmp_path: Path) -> None:
    config = transformers.Qwen2MoeConfig(
        **t0(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            head_dim=...,
        )
    )
    model = save(config, tmp_path / "m")
    with pytest.raises(UnsupportedError) as caught:
        compile_model(model, tmp_path / "m.calbin")
    found = {(p.where.split(".")[2], p.what.split(" here")[0].split()[-1]) for p in caught.value.problems}
    assert found >= {(layer, op) for layer in "01" for op in ("Mul", "calc.Experts")}
    (why,) = {p.what.split("; ")[1] for p in caught.value.problems if "calc.Experts" in p.what}
    assert why == "fuse-moe: the experts' output is not reshaped back to the layer's rows"
    assert not (tmp_path / "m.calbin").exists()
