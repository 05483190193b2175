"""SRAM allocation and the split of layers over chips, as properties."""

from __future__ import annotations

from itertools import combinations, combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calc.core.errors import CapacityError
from calc.core.isa import Space
from calc.kernels.program import Buffer
from calc.passes.allocate import allocate
from calc.passes.partition.layers import split_layers


@st.composite
def buffers(draw: st.DrawFn) -> list[Buffer]:
    out = []
    for i in range(draw(st.integers(1, 24))):
        first = draw(st.integers(0, 40))
        size = 64 * draw(st.integers(1, 50))
        b = Buffer(f"b{i}", Space.SRAM, size, manual=draw(st.integers(0, 9)) == 0)
        if draw(st.integers(0, 9)) or b.manual:
            b.first, b.last = first, first + draw(st.integers(0, 20))
        out.append(b)
    return out


def overlap(a: Buffer, b: Buffer) -> bool:
    return a.first <= b.last and b.first <= a.last


@given(buffers())
def test_live_buffers_never_share_bytes(given_buffers: list[Buffer]) -> None:
    live = [b for b in given_buffers if b.last >= 0 or b.manual]
    peak = allocate(given_buffers, 1 << 30, "here", "hint")
    assert all(b.base is not None and b.base % 64 == 0 for b in live)
    assert all(b.base is None for b in given_buffers if b not in live)
    for a, b in combinations(live, 2):
        if overlap(a, b):
            assert a.base + a.nbytes <= b.base or b.base + b.nbytes <= a.base, (a, b)
    assert peak == max((b.base + b.nbytes for b in live), default=0)
    end = max((b.last for b in given_buffers), default=0)
    for b in live:
        assert not b.manual or (b.first, b.last) == (0, end)
    at_once = max((sum(b.nbytes for b in live if b.first <= t <= b.last) for t in range(70)), default=0)
    assert peak >= at_once


@given(buffers())
def test_the_peak_is_within_capacity_or_refused(given_buffers: list[Buffer]) -> None:
    peak = allocate(given_buffers, 1 << 30, "here", "hint")
    assert allocate(given_buffers, peak, "here", "hint") == peak
    if peak:
        with pytest.raises(CapacityError) as caught:
            allocate(given_buffers, peak - 1, "chip 3", "less")
        (problem,) = caught.value.problems
        assert (problem.code, problem.where, problem.hint) == ("SRAM_TOO_SMALL", "chip 3", "less")
        assert "need 1 bytes more" in problem.what


def test_nothing_to_place() -> None:
    assert allocate([], 0, "here", "") == 0
    unused = Buffer("unused", Space.SRAM, 64)
    assert allocate([unused], 0, "here", "") == 0
    assert unused.base is None


def loads(size: list[int], chip_of: tuple[int, ...], chips: int) -> list[int]:
    head, *layers, tail = size
    out = [0] * chips
    out[0] += head
    out[-1] += tail
    for chip, s in zip(chip_of, layers, strict=True):
        out[chip] += s
    return out


@given(st.lists(st.integers(0, 60), min_size=2, max_size=9), st.integers(1, 5))
def test_layers_are_split_contiguously_and_as_evenly_as_can_be(size: list[int], chips: int) -> None:
    got = split_layers(size, chips)
    n = len(size) - 2
    assert len(got) == n
    assert list(got) == sorted(got)
    assert all(0 <= c < chips for c in got)
    every = combinations_with_replacement(range(chips), n)
    best = min(max(loads(size, option, chips)) for option in every)
    assert max(loads(size, got, chips)) == best
