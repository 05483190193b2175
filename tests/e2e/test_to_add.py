"""What it takes to add to calc, tried: things that only this test knows, from the graph to the simulator."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

import calc
from calc.calbin.reader import open_calbin
from calc.core.isa import DType, Fn
from calc.core.state import StateSpec
from calc.kernels import registry
from calc.kernels.base import Attrs, Kernel, Work
from calc.kernels.lowering import Rows
from calc.passes.partition import strategies
from calc.passes.partition.layers import transfers
from calc.sim.runtime import Device
from tests.conftest import GLASS
from tests.e2e.models import ROOT

OPTIONS = {"prefill": (16,), "max_seq_len": 64}


def handmade():
    where = importlib.util.spec_from_file_location("from_onnx", ROOT / "examples" / "from_onnx.py")
    module = importlib.util.module_from_spec(where)
    where.loader.exec_module(module)
    return module


# -- a partition strategy ---------------------------------------------------------------------------------------------


def alternate(g, board):
    """Every other layer on every other chip; what has no layer on the first."""
    for node in g.model.graph:
        layer = int(node.metadata_props.get("calc.layer", "0"))
        node.metadata_props["calc.chip"] = str(layer % board.chips)
    transfers(g)


def test_a_partition_strategy(tmp_path, monkeypatch):
    monkeypatch.setitem(strategies(), "alternate", SimpleNamespace(NAME="alternate", partition=alternate))
    out = tmp_path / "x.calbin"
    options = calc.CompileOptions(target="calculet-2chip", split="alternate", **OPTIONS)
    calc.compile(GLASS, out, options)
    report = calc.verify(out, strict=True)
    assert report.ok, [c for c in report.checks if not c.ok]
    with open_calbin(out) as c:
        assert [p.layers for p in c.manifest.submodels[0].chip_map] == [(0, 2), (1, 3)]
        one = tmp_path / "one.calbin"
        calc.compile(GLASS, one, calc.CompileOptions(golden=False, **OPTIONS))
        with open_calbin(one) as single:
            tokens = [5, 9, 17, 300, 21]
            np.testing.assert_array_equal(Device(c).prefill(tokens), Device(single).prefill(tokens))


# -- a state of a fixed size, and the op that keeps it ----------------------------------------------------------------

KEEP = 0.5


class Leak(Kernel):
    """``y_t = x_t + s_t``, ``s_(t+1) = y_t / 2``: an exponential mean that is kept between calls."""

    name = "Leak"
    attributes = Attrs

    def formals(self, attrs):
        return ("x", "past"), ("y", "s")

    def weights(self, attrs):
        return ()

    def states(self, call):
        width = call.shape("x")[-1]
        spec = StateSpec(name="leak.0", layer=0, heads=1, dim=width, dtype="f32", growth="fixed")
        return {"past": spec}

    def body(self, attrs, schemes, numerics):
        # of a call with one token; the test has the recurrence of longer ones in closed form
        return "y = Add(x, past)\nhalf = Constant<value_float: float = 0.5>()\ns = Mul(y, half)"

    def work(self, call, rows, context):
        return Work(0, rows * call.shape("x")[-1])

    def lower(self, low, call):
        em, x, state = low.em, low.act(call.inputs["x"]), low.state(call, "past")
        y = low.new(call.outputs[0], x.width, x.rows)
        kept = low.scratch("kept", x.width, DType.F32, Rows(1, 1)).view
        dims = (1, x.width)
        with em.loop(low.variant.batch) as b:
            slot, count = em.csr("kv_slot", b), em.csr("cur_seq_len", b) if low.variant.seq == 1 else x.rows.count
            em.load(kept, state.view(slot), dims)
            with em.loop(count) as t:
                row = b if low.variant.seq == 1 else t
                out = y.view.at(0, (row, y.row_bytes))
                em.vmap(Fn.ADD, dims, out, x.view.at(0, (row, x.row_bytes)), kept)
                em.vmap(Fn.AFFINE, dims, kept, out, f=(KEEP, 0.0))
            em.store(state.view(slot), kept, dims)

    def examples(self):
        return ()


def leaky(module, weights, batch, seq):
    vocab, hidden = module.VOCAB, module.HIDDEN
    text = f"""<ir_version: 10, opset_import: ["" : 25, "calc" : 1]>
    leaky (int64[{batch},{seq}] input_ids, int64[{batch}] past_kv_cur_seq_len, int64[{batch}] cur_seq_len,
           float[{batch},1,{hidden}] "past_leak.0")
        => (float[{batch},{vocab}] logits, float[{batch},1,{hidden}] "leak.0")
           <float[{batch},{seq},{hidden}] y> {{
    one = Constant<value_ints=[1]>()
    x = Gather<axis=0>(embed, input_ids)
    y, "leak.0" = calc.Leak(x, "past_leak.0")
    last = Sub(cur_seq_len, one) at = Unsqueeze(last, one) row = GatherND<batch_dims=1>(y, at)
    hw = Transpose<perm=[1,0]>(head) logits = MatMul(row, hw) }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(weights[k], k) for k in ("embed", "head"))
    model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    known = {v.name for v in (*model.graph.value_info, *model.graph.output)}
    missing = {"row": (batch, hidden), "at": (batch, 1)}
    for name in set(missing) - known:
        elem = onnx.TensorProto.INT64 if name == "at" else onnx.TensorProto.FLOAT
        model.graph.value_info.append(onnx.helper.make_tensor_value_info(name, elem, missing[name]))
    return model


@pytest.fixture
def leaky_calbin(tmp_path, monkeypatch):
    monkeypatch.setitem(registry(), "Leak", Leak())
    module = handmade()
    weights = module.weights()
    shapes = {"prefill": (1, 8), "decode1": (1, 1), "decode2": (2, 1)}
    for name, (batch, seq) in shapes.items():
        onnx.save(leaky(module, weights, batch, seq), tmp_path / f"{name}.onnx")
    spec = module.spec().model_copy(update={"layers": module.spec().layers[:1]})
    (tmp_path / "model_spec.json").write_text(spec.model_dump_json())
    paths = [tmp_path / f"{n}.onnx" for n in shapes]
    out = tmp_path / "leaky.calbin"
    calc.compile_graphs(paths[:1], paths[1:], tmp_path / "model_spec.json", out, calc.CompileOptions(max_seq_len=32))
    return out, weights


def recurrence(weights, tokens):
    """Logits after every token, in FP64."""
    state, out = np.zeros(weights["embed"].shape[1]), []
    for t in tokens:
        y = weights["embed"][t].astype(np.float64) + state
        state = KEEP * y
        out.append(weights["head"].astype(np.float64) @ y)
    return np.array(out)


def close(got, want):
    return np.sqrt(np.square(got - want).sum() / np.square(want).sum()) < 0.01  # a lost state is wrong by 0.5


@pytest.mark.parametrize("mode", ["fast", "strict"])
def test_a_state_of_a_fixed_size(leaky_calbin, mode):
    """One row per slot, kept over prefill, decode and a batch; a new sequence starts from zero."""
    path, weights = leaky_calbin
    with open_calbin(path) as c:
        (state,) = c.manifest.states.states
        assert (state.name, state.growth, state.rows, state.dtype, state.layer) == ("leak.0", "fixed", 1, "f32", 0)
        device = Device(c, mode)
        tokens = [3, 7, 50, 11, 60, 2]
        want = recurrence(weights, tokens)
        assert close(device.prefill(tokens[:4]), want[3])
        assert close(device.decode(tokens[4:5], [4], [0])[0], want[4])
        other = [9, 1, 8]
        device.prefill(other[:2], slot=1)
        both = device.decode([tokens[5], other[2]], [5, 2], [0, 1])
        assert close(both[0], want[5])
        assert close(both[1], recurrence(weights, other)[2])
        kept = device.state("leak.0", 1, 3)
        y = weights["embed"][8] + KEEP * (weights["embed"][1] + KEEP * weights["embed"][9])
        assert kept.shape == (1, 1, y.size)
        assert close(kept.ravel(), KEEP * y)
        assert close(device.prefill(other, slot=0), recurrence(weights, other)[2])
