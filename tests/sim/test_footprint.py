"""What strict mode takes an access to touch, against a list of its bytes."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from calc.sim.strict import GRANULE, Cells, _select, footprint

STEPS = st.one_of(st.integers(-70, 70), st.sampled_from([0, 2, 4, 16, 32, 64, 80, 128, -16, -64]))
SIZE = 1 << 13
BASE = SIZE // 2


@given(
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(1, 4), STEPS), max_size=4),
    st.sampled_from([1, 2, 4]),
)
@example(0, [(2, 32), (4, 4)], 4)  # the gap is one whole granule
@example(0, [(2, 31), (4, 4)], 4)
def test_bytes_and_granules_are_those_of_the_elements(shift: int, dims: list[tuple[int, int]], itemsize: int) -> None:
    shape, steps = tuple(n for n, _ in dims), tuple(s for _, s in dims)
    base = BASE + shift
    starts = [base + sum(i * s for i, s in zip(at, steps, strict=True)) for at in itertools.product(*map(range, shape))]
    want = {b + i for b in starts for i in range(itemsize)}
    touched = footprint(base % GRANULE, shape, steps, itemsize)
    origin = base // GRANULE
    marks = np.zeros(SIZE, np.bool_)
    _select(marks, touched.marks, origin * GRANULE)[...] = True
    assert set(np.flatnonzero(marks)) == want
    cells = Cells(touched, origin)
    account = np.zeros((3, SIZE // GRANULE), np.int32)
    cells.note(account[1], np.int32(7))
    assert set(np.flatnonzero(account[1])) == {b // GRANULE for b in want}
    assert not account[0].any() and not account[2].any()
    numbered = np.tile(np.arange(SIZE // GRANULE, dtype=np.int32), (3, 1))
    seen = cells.of(numbered)
    assert seen.ndim == 1 + cells.dims
    flat = seen[2].reshape(-1)
    assert [cells.number(i) for i in range(flat.size)] == flat.tolist()
    assert set(flat.tolist()) == {b // GRANULE for b in want}
