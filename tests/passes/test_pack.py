"""Packed tiles against an independent decoder, and the arithmetic of their layout."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from calc.core.errors import InternalError
from calc.core.isa import Tile
from calc.core.packing import Codes, TileLayout, pack_codes, pack_int4, pack_uint4, unpack_int4
from calc.core.schemes import Scheme, scheme, schemes
from calc.passes.pack import pack_plain, pack_rows
from calc.sim.memory import TileSpec, decode_tile


@st.composite
def values_of_schemes(draw: st.DrawFn) -> Scheme:
    return scheme(draw(st.sampled_from(list(schemes()))), draw(st.sampled_from([32, 64, 128])))


@st.composite
def layouts(draw: st.DrawFn, chosen: Scheme | None = None) -> TileLayout:
    s = draw(values_of_schemes()) if chosen is None else chosen
    rows, cols, tile = draw(st.integers(1, 40)), draw(st.integers(1, 200)), draw(st.integers(1, 48))
    return TileLayout(s.format.name, rows, cols, tile, s.group, draw(st.booleans()))


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
            got = np.where(nibbles > 7, nibbles - 16, nibbles) if lay.fmt == "w4" else nibbles
            at += rows * padded // 2
            groups = (k + lay.group - 1) // lay.group
            scale = np.frombuffer(raw, "<u2", rows * groups, at).reshape(rows, groups).astype(np.uint32) << 16
            scale = np.repeat(scale.view(np.float32), lay.group, axis=1)[:, :k]
            at += rows * groups * 2
        assert not got[:, k:].any()
        if lay.fmt == "w4z":
            width = (groups + 1) // 2
            packed = np.frombuffer(raw, np.uint8, rows * width, at).reshape(rows, width)
            zero = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, 2 * width).astype(np.int64)
            assert not zero[:, groups:].any()
            got = got[:, :k] - np.repeat(zero[:, :groups], lay.group, axis=1)[:, :k]
            at += rows * width
        assert (np.isfinite(scale) & (scale >= 2.0**-126)).all()
        values[first : first + rows] = got[:, :k].astype(np.float64) * scale
        at = (at + 63) // 64 * 64
        if lay.bias:
            bias[first : first + rows] = np.frombuffer(raw, "<f4", rows, at)
            at = (at + 4 * rows + 63) // 64 * 64
    assert at == len(raw) == lay.nbytes
    return values, bias


@given(st.data())
def test_packing_loses_no_more_than_half_a_step(data: st.DataObject) -> None:
    """What the bytes stand for is within the scheme's closed form of the weight."""
    s = data.draw(values_of_schemes())
    lay = data.draw(layouts(s))
    w = data.draw(weights(lay))
    bias = np.arange(lay.rows, dtype=np.float32) - 3.25 if lay.bias else None
    got, got_bias = decode(lay, pack_rows(s, lay, w, bias))
    assert bias is None or np.array_equal(got_bias, bias)
    want = w.astype(np.float64)
    # below 2^-126 scales do not shrink further
    assert (np.abs(got - want) <= s.bound(w).astype(np.float64) * (1 + 2.0**-7) + 2.0**-126).all()
    size = s.group or lay.cols
    for g in range(0, lay.cols, size):
        assert not got[:, g : g + size][~want[:, g : g + size].any(axis=1)].any()


@given(st.data())
def test_the_closed_form_is_tight(data: st.DataObject) -> None:
    """Some weight comes near half a step: the bound is no more than 1.3 times what can happen."""
    s = data.draw(values_of_schemes())
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    w = rng.standard_normal((8, 1024)).astype(np.float32)
    given, scale = s.ort_values(w)
    off = np.abs(given.astype(np.float64) * (1 if scale is None else scale[:, None].astype(np.float64)) - w)
    assert (off / np.maximum(s.bound(w), 1e-30)).max() > 1 / 1.3


@given(st.data())
def test_the_graph_computes_with_the_same_values(data: st.DataObject) -> None:
    """What ONNX Runtime is given for a weight is what the shard holds, bit for bit."""
    s = data.draw(values_of_schemes())
    lay = data.draw(layouts(s))
    w = data.draw(weights(lay))
    values, scale = s.ort_values(w)
    given_to_ort = values.astype(np.float64) * (1 if scale is None else scale.astype(np.float64)[:, None])
    got, _ = decode(lay, pack_rows(s, lay, w, np.zeros(lay.rows, np.float32) if lay.bias else None))
    assert np.array_equal(given_to_ort, got)


@given(st.data())
def test_the_simulator_decodes_what_is_packed(data: st.DataObject) -> None:
    """Random codes, all of them, through the packer and the simulator's own decoder."""
    lay = data.draw(layouts())
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    n, k, fmt = lay.rows_of(0), lay.cols, lay.format
    scales = None
    if fmt.scale is not None:
        shape = (n,) if fmt.per == "row" else (n, lay.groups)
        scales = rng.uniform(0.5, 2, shape).astype(np.float32 if fmt.scale == "f32" else ml_dtypes.bfloat16)
    zeros = rng.integers(0, 16, (n, lay.groups)).astype(np.uint8) if fmt.zero_point else None
    codes = {
        Tile.BF16: lambda: rng.standard_normal((n, k)).astype(ml_dtypes.bfloat16),
        Tile.W8: lambda: rng.integers(-127, 128, (n, k)).astype(np.int8),
        Tile.W4: lambda: rng.integers(-8, 8, (n, k)).astype(np.int8),
        Tile.W4Z: lambda: rng.integers(0, 16, (n, k)).astype(np.uint8),
    }[fmt.tile]()
    bias = rng.standard_normal(n).astype(np.float32) if lay.bias else None
    raw = np.frombuffer(pack_codes(lay, Codes(codes, scales, zeros), bias), np.uint8)
    assert len(raw) == lay.tile_bytes(n)
    spec = TileSpec(
        fmt.tile,
        n,
        k,
        lay.code_row_bytes,
        lay.scales_offset(n),
        lay.bias_offset(n),
        lay.bias,
        lay.group,
        len(raw),
    )
    tile = decode_tile(raw, spec)
    want = codes.astype(np.float32)
    if fmt.per == "group":
        wide = [np.repeat(x.astype(np.float32), lay.group, axis=1)[:, :k] for x in (scales, zeros) if x is not None]
        want = (want - (wide[1] if zeros is not None else 0)) * wide[0]
        assert tile.row_scale is None
    elif fmt.per == "row":
        assert np.array_equal(tile.row_scale, scales)
    assert np.array_equal(tile.values, want)
    assert (tile.bias is None) == (bias is None)
    assert bias is None or np.array_equal(tile.bias, bias)


@given(layouts())
def test_tile_layout(lay: TileLayout) -> None:
    at, rows = 0, 0
    for t in range(lay.tiles):
        assert lay.tile_offset(t) == at
        assert at % 64 == 0
        n = lay.rows_of(t)
        assert 1 <= n <= lay.tile_rows
        assert lay.scales_offset(n) >= n * lay.cols * lay.format.bits / 8
        assert lay.bias_offset(n) >= lay.zeros_offset(n) + lay.zeros_bytes(n)
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
        with pytest.raises(InternalError, match="outside -8"):
            pack_int4(np.full((1, 2), code, np.int8))
    with pytest.raises(InternalError, match=r"outside 0\.\.15"):
        pack_uint4(np.full((1, 2), 16, np.uint8))
    assert pack_int4(np.zeros((0, 4), np.int8)).shape == (0, 2)
    with pytest.raises(InternalError, match="no packed tile format"):
        TileLayout("w2", 1, 1, 1)
    for dims in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(InternalError, match="below 1"):
            TileLayout("bf16", *dims)
    for fmt, group in (("w4", 0), ("w4", 48), ("w8", 32), ("bf16", 64), ("w4z", 0)):
        with pytest.raises(InternalError, match="does not fit format"):
            TileLayout(fmt, 1, 1, 1, group)
    for bias in (True, False):
        lay = TileLayout("bf16", 2, 4, 2, bias=bias)
        with pytest.raises(InternalError, match="bias"):
            scheme("bf16").pack(lay, np.zeros((2, 4), np.float32), None if bias else np.zeros(2, np.float32))
    codes, scales = np.zeros((2, 4), np.int8), np.ones((2, 1), ml_dtypes.bfloat16)
    for wrong in (Codes(codes), Codes(codes, scales, np.zeros((2, 1), np.uint8))):
        with pytest.raises(InternalError, match="do not fit a packed tile's layout"):
            pack_codes(TileLayout("w4", 2, 4, 2, 32), wrong, None)


def test_plain_weights_are_little_endian_f32() -> None:
    values = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    assert np.array_equal(np.frombuffer(pack_plain(values.T), "<f4").reshape(3, 2), values.T.astype(np.float32))
