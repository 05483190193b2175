"""Errors of the library that no other test of a stage enters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

import calc
from calc.calbin.reader import open_calbin
from calc.core.errors import CalcError, DiskError, InternalError, ModelError, RuntimeFault, VerificationError
from calc.core.tensors import FileTensor, RowsTensor, ShapeOnlyTensor
from calc.kernels import registry
from calc.kernels.functions import function_proto
from calc.kernels.rms_norm import RmsNormAttrs
from calc.passes.base import Graph, Rule
from calc.passes.fuse.linear import FuseLinear
from calc.passes.onnx_files import write_files
from tests.field.conftest import Compiled
from tests.field.field_models import compile_graphs, compile_model


def test_an_error_has_a_problem() -> None:
    with pytest.raises(InternalError):
        CalcError([])


def test_tensors_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="shape alone"):
        ShapeOnlyTensor((2, 3), "f32", ("w",)).read()
    path = tmp_path / "w"
    np.arange(6, dtype=np.float32).tofile(path)
    whole = FileTensor(path, 0, (2, 3), "f32", ("w",))
    assert whole.read().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert FileTensor(path, 8, (), "f32", ("s",)).read().tolist() == 2
    with pytest.raises(InternalError, match="scalar"):
        RowsTensor(FileTensor(path, 8, (), "f32", ("s",)), 0, 1).base.__class__.__mro__[1].read(
            FileTensor(path, 8, (), "f32", ("s",))
        )
    for ref in (
        FileTensor(path, 4, (2, 3), "f32", ("w",)),
        FileTensor(path, 24, (), "f32", ("w",)),
        FileTensor(tmp_path / "gone", 0, (2, 3), "f32", ("w",)),
    ):
        with pytest.raises(ModelError) as caught:
            ref.read()
        assert caught.value.codes == ("MODEL_UNREADABLE",)
        assert "w" in caught.value.problems[0].where


def test_a_body_that_is_no_onnx_is_our_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = registry()["RmsNorm"]
    monkeypatch.setattr(kernel, "body", lambda attrs, schemes, numerics: "y = = x")
    with pytest.raises(InternalError, match="kernel RmsNorm"):
        function_proto(kernel, RmsNormAttrs(add=False, eps=1e-6), None, "fp32")


def test_a_pass_that_changes_the_result_is_named(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fusion that swaps q and k; without the check the ladder's next rung finds it, and does not know which pass."""
    run = Rule.run

    def broken(self: Rule, g: Graph) -> int:
        done = run(self, g)
        if isinstance(self, FuseLinear):
            linears = [n for n in g.model.graph if n.op_type == "Linear" and "q_proj" in n.name]
            for n in linears:
                other = next(m for m in g.model.graph if m.name == n.name.replace("q_proj", "o_proj"))
                n.replace_input_with(1, other.inputs[1])
        return done

    monkeypatch.setattr(Rule, "run", broken)
    with pytest.raises(VerificationError) as caught:
        compile_model(llama, tmp_path / "m.calbin", golden=True)
    assert caught.value.codes == ("PASS_CHANGED_RESULT",)
    assert caught.value.problems[0].where == "pass fuse-linear on prefill_b1_s8"
    with pytest.raises(VerificationError) as caught:
        compile_model(llama, tmp_path / "m.calbin", golden=True, check_passes=False)
    assert set(caught.value.codes) == {"LADDER_FUSED"}
    assert not (tmp_path / "m.calbin").exists()


def test_graphs_without_a_cache(exported: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(exported, tmp_path / "graphs"))
    for path in out.glob("*.onnx"):
        proto = onnx.load(path, load_external_data=False)
        (kv,) = [v for v in proto.graph.input if v.name == "past_kv.0.key"]
        kv.type.tensor_type.shape.dim[2].dim_param = "capacity"
        onnx.save(proto, path)
    with pytest.raises(ModelError) as caught:
        compile_graphs(out, tmp_path / "m.calbin")
    assert set(caught.value.codes) == {"ONNX_INPUTS"}


def test_graphs_with_symbolic_tokens(exported: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(exported, tmp_path / "graphs"))
    for path in out.glob("*.onnx"):
        proto = onnx.load(path, load_external_data=False)
        (ids,) = [v for v in proto.graph.input if v.name == "input_ids"]
        ids.type.tensor_type.shape.dim[1].dim_param = "S"
        onnx.save(proto, path)
    with pytest.raises(ModelError) as caught:
        compile_graphs(out, tmp_path / "m.calbin")
    assert caught.value.codes == ("ONNX_INPUTS", "ONNX_INPUTS")


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError) as caught:
        write_files(tmp_path / "file", {"a": b""})
    assert caught.value.codes == ("DISK_WRITE",)


def session(path: Path, **changes: object) -> calc.Session:
    calbin = open_calbin(path)
    model = calbin.manifest.model
    tokenizer = model.tokenizer.model_copy(update=changes)
    calbin.manifest = calbin.manifest.model_copy(update={"model": model.model_copy(update={"tokenizer": tokenizer})})
    return calc.Session(calbin)


def test_prompts_that_cannot_be_rendered(compiled: Compiled) -> None:
    path = compiled()
    hello = [{"role": "user", "content": "w5"}]

    def code(s: calc.Session, prompt: object) -> str:
        with pytest.raises(RuntimeFault) as caught:
            s.generate(prompt)
        assert caught.value.exit_code == 3
        return caught.value.code

    assert code(session(path, kind="none"), "w5") == "NO_TOKENIZER"
    assert code(session(path), hello) == "NO_CHAT_TEMPLATE"
    for template in (
        "{{ raise_exception('no system prompts') }}",
        "{% if %}",
        "{{ messages.missing.field }}",
        "{{ 1 / 0 }}",
        "{{ messages | sum }}",
        "{{ messages[0].content.__class__.__mro__ }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ 'x' * 3 + 4 }}",
        "{{ messages[0]['content']['x'] | tojson }}",
    ):
        assert code(session(path, chat_template=template), hello) == "CHAT_TEMPLATE", template
    asked = session(path, chat_template="{{ messages[0].content }}")
    assert asked.prompt_ids(hello) == asked.prompt_ids("w5") == [5]
    assert code(asked, []) == "PROMPT_EMPTY"
    assert code(asked, "") == "PROMPT_EMPTY"
    assert code(session(path, chat_template="{# nothing #}"), hello) == "PROMPT_EMPTY"


def test_reports_are_plain_data(compiled: Compiled) -> None:
    with pytest.raises(RuntimeFault) as caught:
        session(compiled(), kind="none").generate("w5")
    (problem,) = caught.value.problems
    data = json.loads(json.dumps(problem.as_dict()))
    assert data["code"] == "NO_TOKENIZER"
    assert str(problem).startswith("[NO_TOKENIZER] ")
