"""Every kernel's program against its ONNX body in ONNX Runtime, over the registry."""

from __future__ import annotations

import numpy as np
import pytest

from calc.kernels import registry
from tests.kernels.harness import draw, quantize, run_ort, run_sim


def schemes_for(kernel, attrs, scheme):
    return tuple("bf16" if n in ("router", "table") else scheme for n in kernel.weights(attrs))


CASES = [
    (name, i, scheme)
    for name, k in registry().items()
    for i, ex in enumerate(k.examples())
    for scheme in ("bf16", "w8a8", "w4a16")
    if scheme == "bf16" or scheme in schemes_for(k, ex.attrs, scheme)
]


@pytest.mark.parametrize(("name", "index", "scheme"), CASES)
def test_program_equals_body(name, index, scheme):
    kernel = registry()[name]
    ex = kernel.examples()[index]
    schemes = schemes_for(kernel, ex.attrs, scheme)
    attrs = {**ex.attrs, "schemes": schemes} if schemes else dict(ex.attrs)
    values = draw(kernel, ex)
    ort_values, _ = quantize(kernel, ex, values, schemes, 32)
    want = run_ort(kernel, attrs, "npu", ort_values)
    fast, cur, past = run_sim(kernel, ex, attrs, values, schemes, 32, "fast")
    strict, _, _ = run_sim(kernel, ex, attrs, values, schemes, 32, "strict")
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


def test_router_under_int8():
    """A recipe may name the router; its logits then come from int8 codes in both executors."""
    kernel = registry()["Moe"]
    ex = kernel.examples()[0]
    attrs = {**ex.attrs, "schemes": ("w8a8",) * 4}
    values = draw(kernel, ex)
    ort_values, _ = quantize(kernel, ex, values, ("w8a8",) * 4, 32)
    want = run_ort(kernel, attrs, "npu", ort_values)["y"]
    got, _, _ = run_sim(kernel, ex, attrs, values, ("w8a8",) * 4, 32, "strict")
    np.testing.assert_allclose(got["y"], want, rtol=2**-7, atol=1e-5)
