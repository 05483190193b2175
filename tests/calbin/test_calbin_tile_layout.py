"""Tile arithmetic: what one side writes at these offsets, the other reads."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calc.core.errors import InternalError
from calc.core.packing import FORMATS, GROUPS, TileLayout, pack_int4, pack_uint4, unpack_int4

LAYOUTS = st.builds(
    lambda fmt, rows, cols, tile_rows, group, bias: TileLayout(
        fmt, rows, cols, tile_rows, group if FORMATS[fmt].per == "group" else 0, bias
    ),
    st.sampled_from(list(FORMATS)),
    st.integers(1, 70),
    st.integers(1, 300),
    st.integers(1, 80),
    st.sampled_from(GROUPS),
    st.booleans(),
)


@given(LAYOUTS)
def test_tiles_cover_the_weight_once(lay):
    assert sum(lay.rows_of(t) for t in range(lay.tiles)) == lay.rows
    assert all(1 <= lay.rows_of(t) <= lay.tile_rows for t in range(lay.tiles))
    ends = [lay.tile_offset(t) + lay.tile_bytes(lay.rows_of(t)) for t in range(lay.tiles)]
    starts = [lay.tile_offset(t) for t in range(lay.tiles)]
    assert all(e == s for e, s in zip(ends[:-1], starts[1:], strict=True))
    assert ends[-1] == lay.nbytes and lay.nbytes % 64 == 0 and lay.tile_stride % 64 == 0


@given(LAYOUTS)
def test_fields_of_a_tile_do_not_overlap(lay):
    for n in {lay.rows_of(0), lay.rows_of(lay.tiles - 1)}:
        assert lay.scales_offset(n) == n * lay.code_row_bytes
        assert lay.scales_offset(n) + lay.scales_bytes(n) == lay.zeros_offset(n)
        assert lay.zeros_offset(n) + lay.zeros_bytes(n) <= lay.bias_offset(n) <= lay.tile_bytes(n)
        assert lay.zeros_bytes(n) == (n * ((lay.groups + 1) // 2) if lay.fmt == "w4z" else 0)
        assert lay.bias_offset(n) % 64 == 0
        assert lay.scales_offset(n) % 4 == 0 if lay.fmt == "w8" else lay.scales_offset(n) % 2 == 0
        assert lay.tile_bytes(n) - lay.bias_offset(n) >= 4 * n * lay.bias


@given(LAYOUTS, st.integers(0, 2**32 - 1))
def test_round_trip_through_bytes(lay, seed):
    rng = np.random.default_rng(seed)
    buf = np.zeros(lay.nbytes, dtype=np.uint8)
    codes = np.zeros((lay.rows, lay.cols_padded), dtype=np.float32)
    codes[:, : lay.cols] = rng.integers(0 if lay.fmt == "w4z" else -8, 8, (lay.rows, lay.cols))
    scales = rng.uniform(0.5, 1, (lay.rows, lay.groups)).astype({"w8": np.float32}.get(lay.fmt, ml_dtypes.bfloat16))
    bias = rng.normal(size=lay.rows).astype(np.float32)
    for t in range(lay.tiles):
        n, at, first = lay.rows_of(t), lay.tile_offset(t), t * lay.tile_rows
        rows = codes[first : first + n]
        data = {
            "bf16": lambda r: r.astype(ml_dtypes.bfloat16),
            "w8": lambda r: r.astype(np.int8),
            "w4": lambda r: pack_int4(r.astype(np.int8)),
            "w4z": lambda r: pack_uint4(r.astype(np.uint8)),
        }[lay.fmt](rows)
        parts = [(0, data), (lay.scales_offset(n), scales[first : first + n])]
        if lay.bias:
            parts.append((lay.bias_offset(n), bias[first : first + n]))
        for offset, values in parts:
            raw = np.frombuffer(values.tobytes(), dtype=np.uint8)
            assert not buf[at + offset : at + offset + raw.size].any()
            buf[at + offset : at + offset + raw.size] = raw
    for t in range(lay.tiles):
        n, at, first = lay.rows_of(t), lay.tile_offset(t), t * lay.tile_rows
        grid = buf[at : at + n * lay.code_row_bytes].reshape(n, lay.code_row_bytes)
        read = {
            "bf16": lambda g: g.view(ml_dtypes.bfloat16),
            "w8": lambda g: g.view(np.int8),
            "w4": unpack_int4,
            "w4z": unpack_int4,
        }[lay.fmt](grid)
        assert np.array_equal(read.astype(np.float32), codes[first : first + n])
        start = at + lay.scales_offset(n)
        assert buf[start : start + lay.scales_bytes(n)].tobytes() == scales[first : first + n].tobytes()
        if lay.bias:
            start = at + lay.bias_offset(n)
            assert buf[start : start + 4 * n].tobytes() == bias[first : first + n].tobytes()


def test_int4_is_twos_complement_with_the_even_column_low():
    assert pack_int4(np.array([[1, -1, -8, 7]], dtype=np.int8)).tolist() == [[0xF1, 0x78]]
    every = np.arange(256, dtype=np.uint8).reshape(1, 256)
    assert np.array_equal(pack_int4(unpack_int4(every)), every)


@pytest.mark.parametrize("codes", [[[1, 2, 3]], [[8, 0]], [[0, -9]]])
def test_codes_that_are_no_int4(codes):
    with pytest.raises(InternalError):
        pack_int4(np.array(codes, dtype=np.int8))


@pytest.mark.parametrize(
    "fields",
    [
        ("w2", 1, 1, 1),
        ("bf16", 0, 1, 1),
        ("bf16", 1, 0, 1),
        ("bf16", 1, 1, 0),
        ("bf16", 1, 1, 1, 32),
        ("w8", 1, 1, 1, 1),
        ("w4", 1, 1, 1),
    ],
)
def test_layouts_that_do_not_exist(fields):
    with pytest.raises(InternalError):
        TileLayout(*fields)


def test_sizes_by_hand():
    w4 = TileLayout("w4", 40, 72, 16, group=32)
    assert (w4.cols_padded, w4.code_row_bytes, w4.groups, w4.tiles) == (96, 48, 3, 3)
    assert (w4.scales_offset(16), w4.scales_bytes(16), w4.bias_offset(16), w4.tile_stride) == (768, 96, 896, 896)
    assert w4.nbytes == 2 * 896 + 448
    w4z = TileLayout("w4z", 40, 72, 16, group=32)
    assert (w4z.zeros_offset(16), w4z.zeros_bytes(16), w4z.bias_offset(16), w4z.nbytes) == (864, 32, 896, 2 * 896 + 448)
    w8 = TileLayout("w8", 40, 48, 16, bias=True)
    assert (w8.cols_padded, w8.tile_stride, w8.tile_bytes(8), w8.nbytes) == (64, 1152, 640, 2 * 1152 + 640)
    assert TileLayout("bf16", 3, 33, 2).nbytes == 256 + 128
