"""Every kernel's program against its ONNX body in ONNX Runtime, over the registry."""

from __future__ import annotations

import numpy as np
import pytest

from calc.kernels import registry
from calc.kernels.base import Example
from tests.kernels.harness import Bench, draw, quantize, run_ort, run_sim


def schemes_for(kernel, attrs, scheme):
    return tuple("bf16" if n in ("router", "table") else scheme for n in kernel.weights(attrs))


ALONE = {n: k for n, k in registry().items() if n != "Send" and not k.crosses}
"""Kernels that run on one chip; the others are tested together in test_transfers.py."""

CASES = [
    (name, i, scheme)
    for name, k in ALONE.items()
    for i, ex in enumerate(k.examples())
    for scheme in ("bf16", "w8a8", "w4a16")
    if scheme == "bf16" or scheme in schemes_for(k, ex.attrs, scheme)
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


@pytest.mark.parametrize(("name", "index", "scheme"), CASES)
def test_program_equals_body(name, index, scheme):
    kernel = registry()[name]
    ex = kernel.examples()[index]
    schemes = schemes_for(kernel, ex.attrs, scheme)
    attrs = {**ex.attrs, "schemes": schemes} if schemes else dict(ex.attrs)
    values = draw(kernel, ex)
    ort_values, _ = quantize(kernel, ex, values, schemes, 32)
    want = run_ort(kernel, attrs, "npu", ort_values)
    bench = Bench(kernel, ex, attrs, values, schemes, 32)
    fast, strict = bench.run("fast"), bench.run("strict")
    assert fast
    for out, got in fast.items():
        np.testing.assert_array_equal(got, strict[out], err_msg=f"{out}: fast and strict differ")
        assert_close(out, got, expected(out, got, want[out], bench.past, bench.cur))


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
    schemes = schemes_for(kernel, ex.attrs, "bf16")
    values = draw(kernel, ex)
    whole = Bench(kernel, ex, dict(ex.attrs), values, schemes, 32).run("fast")
    parts = Bench(kernel, ex, dict(ex.attrs), values, schemes, 32, block=block).run("strict")
    assert set(parts) == set(whole)
    for out, got in parts.items():
        assert_close(out, got, whole[out])


RINGS = [i for i, ex in enumerate(registry()["Attention"].examples()) if ex.attrs["window"]]


@pytest.mark.parametrize("block", [None, 3, 16])
@pytest.mark.parametrize("index", RINGS)
@pytest.mark.parametrize("past", [0, 5, 15, 16, 17, 40, 70])
def test_a_ring_of_the_window_equals_all_keys(index, past, block):
    """Whatever the past, the ring's end and the block: the same output, and the window's last keys in the ring."""
    kernel = registry()["Attention"]
    ex = kernel.examples()[index]
    values = {**draw(kernel, ex), "past": np.array([past], np.int64)}
    want = run_ort(kernel, dict(ex.attrs), "npu", values)
    bench = Bench(kernel, ex, dict(ex.attrs), values, (), 32, block=block, ring=True)
    assert all(s.ring and s.rows < 96 for s in bench.memory.states.values())
    for out, got in bench.run("strict").items():
        assert_close(out, got, expected(out, got, want[out], bench.past, bench.cur))


def test_keys_and_values_of_different_widths():
    """value_dim beside head_dim: each state has its own row."""
    kernel = registry()["Attention"]
    attrs = {"heads": 4, "kv_heads": 2, "head_dim": 16, "value_dim": 24, "scale": 0.25, "softcap": 0.0, "window": 0}
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
        call = {**attrs, "window": window}
        values = draw(kernel, ex)
        want = run_ort(kernel, call, "npu", values)
        bench = Bench(kernel, ex, call, values, (), 32, ring=bool(window))
        for out, got in bench.run("strict").items():
            assert_close(out, got, expected(out, got, want[out], bench.past, bench.cur))


def test_router_under_int8():
    """A recipe may name the router; its logits then come from int8 codes in both executors."""
    kernel = registry()["Moe"]
    ex = kernel.examples()[0]
    attrs = {**ex.attrs, "schemes": ("w8a8",) * 4}
    values = draw(kernel, ex)
    ort_values, _ = quantize(kernel, ex, values, ("w8a8",) * 4, 32)
    want = run_ort(kernel, attrs, "npu", ort_values)["y"]
    got = run_sim(kernel, ex, attrs, values, ("w8a8",) * 4, 32, "strict")
    np.testing.assert_allclose(got["y"], want.reshape(-1, want.shape[-1]), rtol=2**-7, atol=1e-5)
