"""The ladder is proven: a fault planted at each stage makes that stage's rung fail, and the error names it."""

from __future__ import annotations

import numpy as np
import pytest

import calc
from calc.core.errors import VerificationError
from calc.core.isa import Alu
from calc.core.packing import Codes, pack_codes
from calc.core.roles import is_state
from calc.core.schemes import schemes
from calc.kernels import moe as moe_kernel
from calc.kernels.emit import Emitter
from calc.passes import ladder as ladder_module
from calc.passes.fuse import glu as glu_pass
from tests.conftest import GLASS, shared

OPTIONS = calc.CompileOptions(prefill=(16,), max_seq_len=48, check_passes=False)


def options(**changes: object) -> calc.CompileOptions:
    return OPTIONS.model_copy(update=changes)


def refused(out, opts=OPTIONS) -> VerificationError:
    with pytest.raises(VerificationError) as e:
        calc.compile(GLASS, out, opts)
    assert not out.exists()
    assert not list(out.parent.glob("*.partial"))
    return e.value


def failed_checks(path) -> list[str]:
    report = calc.verify(path)
    return [c.name for c in report.checks if not c.ok]


def test_a_wrong_export(tmp_path, monkeypatch):
    """Attention's scale is off by 2 %."""
    from calc.stages import source as pipeline

    graph = pipeline._graph

    def wrong(exported, v):
        g = graph(exported, v)
        import onnx_ir as ir

        for node in g.model.graph:
            if node.op_type == "Attention":
                node.attributes.add(ir.AttrFloat32("scale", node.attributes["scale"].value * 1.02))
        return g

    monkeypatch.setattr(pipeline, "_graph", wrong)
    assert refused(tmp_path / "x.calbin").code == "LADDER_EXPORTED"


def wrong_activation(value):
    found = glu_pass_activation(value)
    return None if found is None else ("gelu", found[1])


glu_pass_activation = glu_pass.activation_of


def test_a_wrong_fusion(tmp_path, monkeypatch):
    """SwiGLU becomes GeGLU."""
    monkeypatch.setattr(glu_pass, "activation_of", wrong_activation)
    assert refused(tmp_path / "x.calbin").code == "LADDER_FUSED"


def test_a_wrong_fusion_is_pinned_to_its_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(glu_pass, "activation_of", wrong_activation)
    error = refused(tmp_path / "x.calbin", options(check_passes=True))
    assert error.code == "PASS_CHANGED_RESULT"
    assert "fuse-glu" in error.problems[0].where


def test_a_wrong_rounding(tmp_path, monkeypatch):
    """BF16 with three bits less."""

    def coarse(self, w):
        raw = w.astype(np.float32).view(np.uint32) & np.uint32(0xFFF80000)
        return raw.view(np.float32), None

    monkeypatch.setattr(schemes()["bf16"], "ort_values", coarse)
    assert refused(tmp_path / "x.calbin").code == "LADDER_BF16"


def swapped(codes):
    """Each output channel has its neighbour's scale, or scales."""
    return Codes(codes.values, np.roll(codes.scales, 1, axis=0), codes.zeros)


def wrong_zeros(codes):
    """Each group's zero point is one too low, or too high where it was 0."""
    return Codes(codes.values, codes.scales, np.where(codes.zeros == 0, 1, codes.zeros - 1).astype(np.uint8))


FAULTS = [(name, swapped) for name, cls in schemes().items() if cls.format.scale] + [
    (name, wrong_zeros) for name, cls in schemes().items() if cls.format.zero_point
]


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_a_wrong_step(tmp_path, monkeypatch, name, fault):
    """The closed form of half a step finds it in every scheme, though nothing of the model is run for it."""
    honest = schemes()[name].quantize
    monkeypatch.setattr(schemes()[name], "quantize", lambda self, w: fault(honest(self, w)))
    error = refused(tmp_path / "x.calbin", options(quant=name))
    assert error.code == "LADDER_QUANTIZED"
    assert "more than half a step" in error.problems[0].what


def test_a_wrong_kv_offset(tmp_path, monkeypatch):
    """Keys and values are written one token late."""
    store, seen = Emitter.store, []

    def late(self, dst, src, dims):
        if is_state(dst.buf.name):
            seen.append(dst.buf.name)
            dst = dst.at(dst.steps[0])
        store(self, dst, src, dims)

    monkeypatch.setattr(Emitter, "store", late)
    out = tmp_path / "x.calbin"
    calc.compile(GLASS, out, options(max_seq_len=48))
    assert "kv.0.key" in seen
    assert "rung program: KV" in failed_checks(out)


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_a_wrong_step_in_the_shard(tmp_path, monkeypatch, name, fault):
    """The graph's values are right, the packed tile's are not."""
    monkeypatch.setattr(
        schemes()[name], "pack", lambda self, lay, w, bias: pack_codes(lay, fault(self.quantize(w)), bias)
    )
    out = tmp_path / "x.calbin"
    calc.compile(GLASS, out, options(quant=name))
    assert {"rung program: logits", "rung program: KV"} <= set(failed_checks(out))


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory):
    from tests.e2e.models import upcycled

    return shared(tmp_path_factory, "glass-moe", lambda path: upcycled(GLASS, path))


def test_a_wrong_expert(tmp_path, monkeypatch, moe_model):
    """Decode takes the expert after the one the router chose."""
    lower = moe_kernel._by_pair

    def next_expert(low, call, x, weights, ids, total):
        sload = Emitter.sload

        def shifted(self, a, assume):
            r = sload(self, a, assume)
            self.alu(Alu.ADD, r, 1, r)
            return self.alu(Alu.MOD, r, call.shape("gate")[0], r)

        with monkeypatch.context() as m:
            m.setattr(Emitter, "sload", shifted)
            lower(low, call, x, weights, ids, total)

    monkeypatch.setattr(moe_kernel, "_by_pair", next_expert)
    out = tmp_path / "x.calbin"
    calc.compile(moe_model, out, OPTIONS)
    assert "rung program: logits" in failed_checks(out)


def test_gates_refuse_what_is_not_a_number():
    from calc.calbin.manifest import Rung

    rung = Rung(
        name="bf16",
        reference="fused",
        candidate="bf16",
        metric="rel_rms",
        logits=float("nan"),
        kv=0.0,
        gate_logits=1.0,
        gate_kv=1.0,
        why="",
    )
    with pytest.raises(VerificationError) as e:
        ladder_module.check_rung(rung)
    assert e.value.codes == ("LADDER_BF16",)
