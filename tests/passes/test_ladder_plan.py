"""Golden plans and the arithmetic of the gates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calc.core.errors import InternalError, VerificationError
from calc.core.metrics import max_abs, rel_rms
from calc.core.variant import Variant
from calc.passes.execute import Replayed
from calc.passes.ladder import DECODE_STEPS, Ladder, golden_plan


@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.integers(1, 400))
def test_golden_plan(buckets: list[int], capacity: int) -> None:
    buckets = [b for b in buckets if b <= capacity] or [capacity]
    tokens = list(range(1000, 1000 + max(buckets) + DECODE_STEPS + 1))
    if capacity <= DECODE_STEPS:
        with pytest.raises(VerificationError) as caught:
            golden_plan(tokens, buckets, capacity)
        assert caught.value.codes == ("GOLDEN_TOO_SHORT",)
        return
    plan = golden_plan(tokens, buckets, capacity)
    assert 1 <= plan.prompt <= min(buckets)
    assert plan.prompt + DECODE_STEPS <= len(plan.tokens) <= capacity
    assert plan.tokens == tuple(tokens[: len(plan.tokens)])
    assert list(plan.rows) == sorted(set(plan.rows))
    assert plan.rows[0] >= 0
    assert plan.rows[-1] < len(plan.tokens)
    assert set(plan.replay_rows) <= set(plan.rows)
    for b in buckets:
        assert {n - 1 for n in (b - 1, b, b + 1) if 1 <= n <= capacity} <= set(plan.rows)
    prefill, decode = Variant("prefill", 1, max(buckets)), Variant("decode", 1, 1)
    calls = plan.calls(prefill, decode)
    assert [(c.graph, c.cur, c.past) for c in calls] == [
        (prefill.name, plan.prompt, 0),
        *((decode.name, 1, plan.prompt + i) for i in range(DECODE_STEPS)),
    ]
    seen = [int(t) for c in calls for t in c.ids[0, : c.cur]]
    assert seen == list(plan.tokens[: plan.prompt + DECODE_STEPS])
    assert calls[0].ids.shape == (1, max(buckets))
    assert not calls[0].ids[0, plan.prompt :].any()
    steps = range(DECODE_STEPS)
    alone = [(c.graph, c.cur, c.past) for c in plan.calls(prefill, None)]
    assert alone == [(prefill.name, plan.prompt, 0), *((prefill.name, 1, plan.prompt + i) for i in steps)]
    stepwise = [(c.graph, c.cur, c.past) for c in plan.calls(None, decode)]
    assert stepwise == [(decode.name, 1, t) for t in range(plan.prompt + DECODE_STEPS)]
    with pytest.raises(InternalError, match="through no graph"):
        plan.calls(None, None)


def run(value: float, last: float | None = None) -> Replayed:
    arrays = [np.full((2, 3), value, np.float32) for _ in range(5)]
    if last is not None:
        arrays[4][1, 2] = last
    return Replayed(arrays[0], arrays[1:3], arrays[3:])


@pytest.mark.parametrize("name", ["exported", "bf16"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e9])
def test_one_wrong_value_in_the_last_array_is_seen(name: str, wrong: float) -> None:
    ladder = Ladder()
    ladder.start("hf", run(1.0))
    with pytest.raises(VerificationError) as caught, np.errstate(invalid="ignore"):
        ladder.climb(name, "hf", run(1.0, wrong))
    (problem,) = caught.value.problems
    assert problem.code == f"LADDER_{name.upper()}"
    assert problem.what.startswith("KV differ")


@pytest.mark.parametrize("name", ["exported", "bf16"])
def test_a_reference_that_is_not_finite_passes_nothing(name: str) -> None:
    for wrong in (np.nan, np.inf):
        ladder = Ladder()
        ladder.start("hf", run(1.0, wrong))
        with pytest.raises(VerificationError), np.errstate(invalid="ignore"):
            ladder.climb(name, "hf", run(1.0, wrong))
        with pytest.raises(VerificationError), np.errstate(invalid="ignore"):
            ladder.climb(name, "hf", run(1.0))


def test_distances() -> None:
    a, b = np.zeros((2, 2), np.float32), np.array([[3, 0], [0, 4]], np.float32)
    assert max_abs([a], [b]) == 4
    assert max_abs([a, np.zeros((0, 3), np.float32)], [a, np.zeros((0, 3), np.float32)]) == 0
    assert rel_rms([a], [b]) == 1
    assert rel_rms([b], [a]) == 5
    assert np.isnan(max_abs([a, b * np.nan], [a, a]))
    assert np.isnan(max_abs([b * np.nan, a], [a, a]))
