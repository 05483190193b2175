"""Every kernel's program against its ONNX body in ONNX Runtime, over the registries of kernels and schemes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from calc.core.isa import DType, Op
from calc.core.numerics import quant_rows_int8
from calc.core.packing import W8, Codes
from calc.core.schemes import Scheme, scheme, schemes
from calc.kernels import registry
from calc.sim import engines
from tests.kernels.harness import draw, quantize, run_ort, run_sim

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


EXAMPLES = [(name, i) for name, k in registry().items() for i in range(len(k.examples()))]
CASES = [
    (name, i, s)
    for name, i in EXAMPLES
    for s in schemes()
    if s == "bf16" or {"table"} < {"table", *registry()[name].weights(registry()[name].examples()[i].attrs)}
]


def check(kernel, ex, chosen):
    attrs = {**ex.attrs, "schemes": tuple(map(str, chosen))} if chosen else dict(ex.attrs)
    values = draw(kernel, ex)
    want = run_ort(kernel, attrs, "npu", quantize(kernel, ex, values, chosen))
    fast, cur, past = run_sim(kernel, ex, attrs, values, chosen, "fast")
    strict, _, _ = run_sim(kernel, ex, attrs, values, chosen, "strict")
    for out, got in fast.items():
        if out.startswith("kv_"):
            a, b, s = got[:, :, : past + cur], want[out][:, :, : past + cur], strict[out][:, :, : past + cur]
        else:
            a, b, s = got, want[out], strict[out]
        assert np.isfinite(a).all(), out
        np.testing.assert_array_equal(a, s, err_msg=f"{out}: fast and strict differ")
        scale = np.abs(b).max()
        # one BF16 ulp where the order of accumulation crosses a rounding boundary; FP32 order elsewhere
        exact = np.isclose(a, b, rtol=2**-7, atol=2e-6 * scale)
        assert exact.all(), (out, np.abs(a - b).max(), scale)
        assert (a == b).mean() > 0.97 or out == "logits", (out, (a == b).mean())
        if out == "logits":
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6 * scale)


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
