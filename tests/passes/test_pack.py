"""Packed tiles against an independent decoder, and the arithmetic of their layout."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from calc.core.errors import InternalError
from calc.core.packing import TileLayout, pack_int4, unpack_int4
from calc.passes.pack import pack_plain, pack_rows, pack_tile
from calc.passes.quantize import schemes


@st.composite
def layouts(draw: st.DrawFn) -> TileLayout:
    fmt = draw(st.sampled_from(["bf16", "w8", "w4"]))
    group = draw(st.sampled_from([32, 64, 128])) if fmt == "w4" else 0
    rows, cols, tile = draw(st.integers(1, 40)), draw(st.integers(1, 200)), draw(st.integers(1, 48))
    return TileLayout(fmt, rows, cols, tile, group, draw(st.booleans()))


@st.composite
def weights(draw: st.DrawFn, lay: TileLayout) -> NDArray[np.float32]:
    """Values of many sizes, with whole rows and groups of zeros."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    w = rng.standard_normal((lay.rows, lay.cols)) * 10.0 ** rng.integers(-30, 30, (lay.rows, 1))
    w[rng.random(lay.rows) < 0.1] = 0
    w[:, rng.integers(lay.cols) :][rng.random(lay.rows) < 0.2] = 0
    return w.astype(np.float32)


def decode(lay: TileLayout, raw: bytes) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """Values [N, K] and bias [N]: plain Python over the bytes, from what docs/calbin.md says."""
    n, k = lay.rows, lay.cols
    padded = (k + 31) // 32 * 32
    values, bias = np.zeros((n, k)), np.zeros(n, np.float32)
    at = 0
    for first in range(0, n, lay.tile_rows):
        rows = min(lay.tile_rows, n - first)
        if lay.fmt == "bf16":
            codes = np.frombuffer(raw, "<u2", rows * padded, at).reshape(rows, padded)
            got = (codes.astype(np.uint32) << 16).view(np.float32)
            at += rows * padded * 2
            scale = np.ones((rows, 1))
        elif lay.fmt == "w8":
            got = np.frombuffer(raw, np.int8, rows * padded, at).reshape(rows, padded)
            at += rows * padded
            scale = np.frombuffer(raw, "<f4", rows, at).reshape(rows, 1)
            at += rows * 4
        else:
            packed = np.frombuffer(raw, np.uint8, rows * padded // 2, at).reshape(rows, padded // 2)
            nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, padded).astype(np.int64)
            got = np.where(nibbles > 7, nibbles - 16, nibbles)
            at += rows * padded // 2
            groups = (k + lay.group - 1) // lay.group
            scale = np.frombuffer(raw, "<u2", rows * groups, at).reshape(rows, groups).astype(np.uint32) << 16
            scale = np.repeat(scale.view(np.float32), lay.group, axis=1)[:, :k]
            at += rows * groups * 2
        assert not got[:, k:].any()
        assert (np.isfinite(scale) & (scale >= 2.0**-126)).all()
        values[first : first + rows] = got[:, :k].astype(np.float64) * scale
        at = (at + 63) // 64 * 64
        if lay.bias:
            bias[first : first + rows] = np.frombuffer(raw, "<f4", rows, at)
            at = (at + 4 * rows + 63) // 64 * 64
    assert at == len(raw) == lay.nbytes
    return values, bias


@given(st.data())
def test_packing_loses_no_more_than_its_format(data: st.DataObject) -> None:
    lay = data.draw(layouts())
    w = data.draw(weights(lay))
    bias = np.arange(lay.rows, dtype=np.float32) - 3.25 if lay.bias else None
    got, got_bias = decode(lay, pack_rows(lay, w, bias))
    assert bias is None or np.array_equal(got_bias, bias)
    size = {"bf16": lay.cols, "w8": lay.cols, "w4": lay.group}[lay.fmt]
    top = {"bf16": 128, "w8": 127, "w4": 7}[lay.fmt]
    for g in range(0, lay.cols, size):
        part, want = got[:, g : g + size], w[:, g : g + size].astype(np.float64)
        largest = np.abs(want).max(axis=1, keepdims=True)
        # half a step, and for w4 what rounding the scale to BF16 costs; below 2^-126 scales do not shrink further
        step = np.maximum(largest / top, 2.0**-126)
        bound = 0.5 * step * (1 + 2.0**-7) + (largest * 2.0**-8 if lay.fmt == "w4" else 0)
        if lay.fmt == "bf16":
            bound = np.abs(want) * 2.0**-8 + 2.0**-133
        assert (np.abs(part - want) <= bound).all()
        assert not part[(want == 0) & (largest == 0)].any()


@given(st.data())
def test_the_graph_computes_with_the_same_values(data: st.DataObject) -> None:
    """What ONNX Runtime is given for a weight is what the shard holds, bit for bit."""
    lay = data.draw(layouts())
    w = data.draw(weights(lay))
    name = {"bf16": "bf16", "w8": "w8a8", "w4": "w4a16"}[lay.fmt]
    values, scale = schemes()[name].ort_values(w, lay.group)
    given_to_ort = values.astype(np.float64) * (1 if scale is None else scale.astype(np.float64)[:, None])
    got, _ = decode(lay, pack_rows(lay, w, np.zeros(lay.rows, np.float32) if lay.bias else None))
    assert np.array_equal(given_to_ort, got)


@given(layouts())
def test_tile_layout(lay: TileLayout) -> None:
    at, rows = 0, 0
    for t in range(lay.tiles):
        assert lay.tile_offset(t) == at
        assert at % 64 == 0
        n = lay.rows_of(t)
        assert 1 <= n <= lay.tile_rows
        assert lay.scales_offset(n) >= n * lay.cols * {"bf16": 2, "w8": 1, "w4": 0.5}[lay.fmt]
        assert lay.bias_offset(n) >= lay.scales_offset(n) + lay.scales_bytes(n)
        assert lay.tile_bytes(n) - lay.bias_offset(n) == ((4 * n + 63) // 64 * 64 if lay.bias else 0)
        at, rows = at + lay.tile_bytes(n), rows + n
    assert (rows, at) == (lay.rows, lay.nbytes)
    assert lay.nbytes % 64 == 0


@given(st.integers(1, 8), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_int4_round_trip(n: int, half: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(-8, 8, (n, 2 * half)).astype(np.int8)
    packed = pack_int4(codes)
    assert packed.shape == (n, half)
    assert np.array_equal(unpack_int4(packed), codes)


def test_what_packing_refuses() -> None:
    with pytest.raises(InternalError, match="even number"):
        pack_int4(np.zeros((1, 3), np.int8))
    for code in (-9, 8):
        with pytest.raises(InternalError, match="outside"):
            pack_int4(np.full((1, 2), code, np.int8))
    assert pack_int4(np.zeros((0, 4), np.int8)).shape == (0, 2)
    with pytest.raises(InternalError, match="no packed tile format"):
        TileLayout("w2", 1, 1, 1)
    for dims in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(InternalError, match="below 1"):
            TileLayout("bf16", *dims)
    for fmt, group in (("w4", 0), ("w4", 48), ("w8", 32), ("bf16", 64)):
        with pytest.raises(InternalError, match="does not fit format"):
            TileLayout(fmt, 1, 1, 1, group)
    for bias in (True, False):
        lay = TileLayout("bf16", 2, 4, 2, bias=bias)
        with pytest.raises(InternalError, match="bias"):
            pack_tile(lay, np.zeros((2, 4), np.float32), None if bias else np.zeros(2, np.float32))


def test_plain_weights_are_little_endian_f32() -> None:
    values = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    assert np.array_equal(np.frombuffer(pack_plain(values.T), "<f4").reshape(3, 2), values.T.astype(np.float32))
