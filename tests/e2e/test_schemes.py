"""Schemes on real weights: compiled, verified strictly, and one that no file of the package has."""

from __future__ import annotations

import numpy as np
import pytest

import calc
from calc.calbin.manifest import Rung
from calc.calbin.reader import open_calbin
from calc.core.errors import FormatError, InternalError
from calc.core.isa import DType, Flag, Op, Tile
from calc.core.schemes import schemes
from calc.core.target import load_target
from calc.core.tensors import ArrayTensor
from calc.passes.ladder import INT8_NOISE, Ladder, Weights
from calc.sim.machine import csr_file, time_programs
from tests.conftest import GLASS
from tests.kernels.test_kernels import W8A16

OPTIONS = calc.CompileOptions(prefill=(16,), max_seq_len=96, check_passes=False)


def rung(path, name):
    return next(r for r in open_calbin(path).manifest.golden.rungs if r.name == name)


@pytest.mark.parametrize(
    ("quant", "fmt", "tile", "rows", "loss"),
    [("w4a8", "w4", Tile.W4, DType.I8, (0.04, 0.09)), ("w4z", "w4z", Tile.W4Z, DType.BF16, (0.03, 0.07))],
)
def test_four_bit_schemes(tmp_path, quant, fmt, tile, rows, loss):
    out = tmp_path / "x.calbin"
    report = calc.compile(GLASS, out, OPTIONS.model_copy(update={"quant": quant}))
    assert report.quant == f"bf16+{quant}"
    verdict = calc.verify(out, strict=True)
    assert verdict.ok, [c for c in verdict.checks if not c.ok]
    program = next(c for c in verdict.checks if c.name == "rung program: logits")
    assert program.value < 1e-4
    assert loss[0] < rung(out, "quantized").logits < loss[1]
    with calc.open(out) as calbin:
        m = calbin.manifest
        chosen = {q.weight: (q.scheme, q.group) for q in m.quantization}
        assert set(chosen.values()) == {("bf16", 0), (quant, 64)}
        packed = {w.name: (w.format, w.group) for w in m.weights if w.format != "f32"}
        assert {packed[n] for n, s in chosen.items() if s[0] == quant} == {(fmt, 64)}
        for sub in m.submodels:
            records = calbin.program(sub.name, 0)
            gemms = records[(records["op"] == Op.GEMM) & (records["flags"] & Flag.PACKED != 0)]
            assert {(int(t), int(d)) for t, d in zip(gemms["tile"], gemms["a"]["dtype"], strict=True)} == {
                (tile, rows),
                (Tile.BF16, DType.BF16),
            }


def test_the_clock_goes_by_the_rows(tmp_path):
    """The bytes and products of w4a8 are those of w4a16; the matrix engine takes half the time for the products."""
    target, counters = load_target("calculet-1chip"), {}
    for quant in ("w4a16", "w4a8"):
        out = tmp_path / f"{quant}.calbin"
        calc.compile(GLASS, out, OPTIONS.model_copy(update={"prefill": (64,), "golden": False, "quant": quant}))
        with calc.open(out) as calbin:
            csr = csr_file({"past_kv_cur_seq_len": [0], "cur_seq_len": [64], "kv_slot": [0]})
            counters[quant] = time_programs(target, {0: calbin.program("prefill_b1_s64", 0)}, csr)
    narrow, wide = counters["w4a8"], counters["w4a16"]
    assert (narrow.dram_bytes, narrow.macs) == (wide.dram_bytes, wide.macs)
    assert narrow.vector_ops > wide.vector_ops
    assert narrow.busy["mat"] < 0.8 * wide.busy["mat"]


def test_a_scheme_that_only_this_test_knows(tmp_path, monkeypatch):
    """From the option to the strict simulator; and a reader without it refuses the file by name."""
    out = tmp_path / "x.calbin"
    with monkeypatch.context() as m:
        m.setitem(schemes(), "w8a16", W8A16)
        calc.compile(GLASS, out, OPTIONS.model_copy(update={"quant": "w8a16"}))
        assert calc.verify(out, strict=True).ok
        assert rung(out, "quantized").logits < 0.02
    with pytest.raises(FormatError) as e:
        calc.verify(out)
    assert e.value.code == "CALBIN_ENUM"
    assert e.value.problems[0].got == "w8a16"


def test_the_programs_gate_does_not_grow_with_what_weights_lose():
    """With int8 activations the quantized rung sets it, up to what activations may cost."""

    def gate(loss, *in_use):
        ladder = Ladder(schemes=frozenset(schemes()[n](g) for n, g in in_use))
        for name, value in (("bf16", 0.01), ("quantized", loss)):
            ladder.rungs.append(
                Rung(
                    name=name,
                    reference="x",
                    candidate=name,
                    metric="rel_rms",
                    logits=value,
                    kv=value,
                    gate_logits=1,
                    gate_kv=1,
                    why="",
                )
            )
        ladder.finish("quantized")
        return ladder.rungs[-1].gate_logits

    assert gate(0.8, ("w4a8", 64)) == 2 * INT8_NOISE
    assert gate(0.1, ("w4a8", 64)) == 0.2
    assert gate(0.8, ("w4a16", 64), ("w4z", 64)) == 0.02


def test_scales_of_a_weight_without_them():
    w = ArrayTensor(np.ones((2, 32), np.float32))
    weights = Weights({"w": w}, {"w": schemes()["w4z"](32)})
    assert np.allclose(weights.quantized("w"), 1, rtol=2**-8)
    with pytest.raises(InternalError, match="no scale per row"):
        weights.quantized("w/scale")
