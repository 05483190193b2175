"""Every kernel's program against its ONNX body in ONNX Runtime, over the registries of kernels and schemes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from calc.core.isa import DType, Op
from calc.core.numerics import quant_rows_int8
from calc.core.packing import W8, Codes
from calc.core.schemes import Scheme, scheme, schemes
from calc.kernels import registry
from calc.kernels.attention import AttentionAttrs
from calc.kernels.base import Example
from calc.sim import engines
from tests.kernels.harness import Bench, draw, quantize, run_ort

GROUP = 32


@dataclass(frozen=True)
class W8A16(Scheme):
    """A scheme that no file has: int8 rows, BF16 activations. Nothing but this class is needed."""

    name = "w8a16"
    format = W8
    activations = "bf16"
    gate = 0.35
    why = "a test's"

    def quantize(self, w):
        return Codes(*quant_rows_int8(w))

    def bound(self, w):
        return np.abs(w).max(axis=1, keepdims=True) * np.float32(0.5 / 127)


def schemes_for(kernel, attrs, chosen):
    return tuple(scheme("bf16") if n in ("router", "table") else chosen for n in kernel.weights(attrs))


ALONE = {n: k for n, k in registry().items() if n != "Send" and not k.crosses}
"""Kernels that run on one chip; the others are tested together in test_transfers.py."""

EXAMPLES = [(name, i) for name, k in ALONE.items() for i in range(len(k.examples()))]
CASES = [
    (name, i, s)
    for name, i in EXAMPLES
    for s in schemes()
    if s == "bf16" or {"table"} < {"table", *registry()[name].weights(registry()[name].examples()[i].attrs)}
]


def assert_close(out, a, b):
    """One BF16 ulp where the order of accumulation crosses a rounding boundary; FP32 order elsewhere."""
    scale = np.abs(b).max()
    assert np.isfinite(a).all(), out
    exact = np.isclose(a, b, rtol=2**-7, atol=2e-6 * scale)
    assert exact.all(), (out, np.abs(a - b).max(), scale)
    assert (a == b).mean() > 0.97 or out == "logits", (out, (a == b).mean())
    if out == "logits":
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6 * scale)


def expected(out, got, want, past, cur):
    """What ONNX Runtime gives, in the form of what the program gives: valid rows, states as far as they are held."""
    if out.startswith("kv_"):
        return want[0, :, : past + cur][:, -got.shape[1] :]
    return want.reshape(-1, want.shape[-1])


def check(kernel, ex, chosen):
    values = draw(kernel, ex)
    want = run_ort(kernel, ex.attrs, "npu", quantize(kernel, ex, values, chosen), chosen)
    bench = Bench(kernel, ex.attrs, values, chosen)
    fast, strict = bench.run("fast"), bench.run("strict")
    assert fast
    for out, got in fast.items():
        np.testing.assert_array_equal(got, strict[out], err_msg=f"{out}: fast and strict differ")
        assert_close(out, got, expected(out, got, want[out], bench.past, bench.cur))


@pytest.mark.parametrize(("name", "index", "chosen"), CASES)
def test_program_equals_body(name, index, chosen):
    kernel = registry()[name]
    ex = kernel.examples()[index]
    check(kernel, ex, schemes_for(kernel, ex.attrs, scheme(chosen, GROUP)))


@pytest.mark.parametrize(("name", "index"), [c[:2] for c in CASES if c[2] == "w8a8"])
def test_a_scheme_that_only_this_test_knows(name, index, monkeypatch):
    monkeypatch.setitem(schemes(), "w8a16", W8A16)
    kernel = registry()[name]
    ex = kernel.examples()[index]
    check(kernel, ex, schemes_for(kernel, ex.attrs, scheme("w8a16")))


@pytest.mark.parametrize("chosen", schemes())
def test_router_under_a_scheme(chosen):
    """A recipe may name the router; its logits then come from the same codes in both executors."""
    kernel = registry()["Moe"]
    check(kernel, kernel.examples()[0], (scheme(chosen, GROUP),) * 4)


@pytest.mark.parametrize("chosen", schemes())
def test_what_is_multiplied_is_what_the_scheme_says(chosen, monkeypatch):
    """Int8 activations reach the matrix engine as int8 with a scale per row, whatever the weight's format is."""
    seen = []
    honest = engines.HANDLERS[Op.GEMM]
    monkeypatch.setitem(engines.HANDLERS, Op.GEMM, lambda ins, mem: (seen.append(ins), honest(ins, mem))[1])
    kernel, s = registry()["Linear"], scheme(chosen, GROUP)
    ex = kernel.examples()[0]
    check(kernel, ex, (s,))
    int8 = s.activations == "int8"
    assert {(i.tile, i.operands["a"].dtype, "e" in i.operands) for i in seen} == {
        (s.format.tile, DType.I8 if int8 else DType.BF16, int8)
    }


BLOCKED = [
    (name, i)
    for name, k in ALONE.items()
    for i, ex in enumerate(k.examples())
    if any(len(s) == 3 and s[1] > 5 for f, s in ex.shapes.items() if f in ("x", "a", "q")) and not k.by_row
]


@pytest.mark.parametrize("block", [3, 5])
@pytest.mark.parametrize(("name", "index"), BLOCKED)
def test_blocks_of_rows_equal_the_whole(name, index, block):
    """Row by row the same numbers: only the order of FP32 sums may differ, with the number of rows in a GEMM."""
    kernel = registry()[name]
    ex = kernel.examples()[index]
    schemes = schemes_for(kernel, ex.attrs, scheme("bf16"))
    values = draw(kernel, ex)
    whole = Bench(kernel, ex.attrs, values, schemes).run("fast")
    parts = Bench(kernel, ex.attrs, values, schemes, block=block).run("strict")
    assert set(parts) == set(whole)
    for out, got in parts.items():
        assert_close(out, got, whole[out])


RINGS = [i for i, ex in enumerate(registry()["Attention"].examples()) if ex.attrs.window]


@pytest.mark.parametrize("block", [None, 3, 16])
@pytest.mark.parametrize("index", RINGS)
@pytest.mark.parametrize("past", [0, 5, 15, 16, 17, 40, 70])
def test_a_ring_of_the_window_equals_all_keys(index, past, block):
    """Whatever the past, the ring's end and the block: the same output, and the window's last keys in the ring."""
    kernel = registry()["Attention"]
    ex = kernel.examples()[index]
    values = {**draw(kernel, ex), "past": np.array([past], np.int64)}
    want = run_ort(kernel, ex.attrs, "npu", values)
    bench = Bench(kernel, ex.attrs, values, (), block=block, ring=True)
    assert all(s.ring and s.rows < 96 for s in bench.memory.states.values())
    for out, got in bench.run("strict").items():
        assert_close(out, got, expected(out, got, want[out], bench.past, bench.cur))


@pytest.mark.parametrize("ring_tile", [32, 512])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("index", RINGS)
def test_a_ring_holds_its_whole_window(index, window, ring_tile):
    """Windows around the row multiple: a ring one row short would lose the oldest key that is seen.

    Placed for longer tiles than the kernel can afford, a ring of 48 rows is no multiple of 32; no tile crosses its end.
    """
    kernel = registry()["Attention"]
    ex = kernel.examples()[index]
    attrs = replace(ex.attrs, window=window)
    for past in (window - 1, window, 47, 64):
        values = {**draw(kernel, ex), "past": np.array([past], np.int64)}
        want = run_ort(kernel, attrs, "npu", values)
        bench = Bench(kernel, attrs, values, (), ring=True, ring_tile=ring_tile)
        assert all(s.ring and window <= s.rows < 96 for s in bench.memory.states.values())
        for out, got in bench.run("strict").items():
            assert_close(out, got, expected(out, got, want[out], bench.past, bench.cur))


def test_keys_and_values_of_different_widths():
    """value_dim beside head_dim: each state has its own row."""
    kernel = registry()["Attention"]
    attrs = AttentionAttrs(4, 2, head_dim=16, value_dim=24, scale=0.25, softcap=0.0, window=0)
    shapes = {
        "q": (1, 7, 64),
        "k": (1, 7, 32),
        "v": (1, 7, 48),
        "past_k": (1, 2, 64, 16),
        "past_v": (1, 2, 64, 24),
        "past": (1,),
    }
    ex = Example(attrs, shapes, {"past": [37]})
    for window in (0, 9):
        call = replace(attrs, window=window)
        values = draw(kernel, ex)
        want = run_ort(kernel, call, "npu", values)
        bench = Bench(kernel, call, values, (), ring=bool(window))
        for out, got in bench.run("strict").items():
            assert_close(out, got, expected(out, got, want[out], bench.past, bench.cur))
