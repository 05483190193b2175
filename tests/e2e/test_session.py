"""Sampling: parameters are checked, draws are seeded and stay inside the nucleus."""

from __future__ import annotations

import numpy as np
import pytest

import calc
from calc.api.session import _chooser
from calc.core.errors import RuntimeFault, UsageError
from calc.sim.runtime import Device


def test_bad_parameters_are_named_together(tiny_calbin):
    with calc.open(tiny_calbin) as c, pytest.raises(UsageError) as e:
        bad = calc.Sampling(temperature=float("nan"), top_k=-1, top_p=0.0, seed=-1)
        calc.Session(c).generate("Alice", sampling=bad)
    assert [p.where for p in e.value.problems] == ["temperature", "top_k", "top_p", "seed"]
    assert set(e.value.codes) == {"SAMPLING_RANGE"}


def test_a_tiny_temperature_is_greedy():
    logits = np.array([1.0, 3.0, 2.0], np.float32)
    assert _chooser(calc.Sampling(temperature=1e-308))(logits) == 1


def test_an_array_of_ids_is_a_prompt(tiny_calbin):
    with calc.open(tiny_calbin) as c:
        session = calc.Session(c)
        assert session.generate(np.array([5, 6, 7]), max_new_tokens=2).prompt_tokens == 3


def test_templates_may_break_and_ask_for_the_date(tiny_calbin):
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
        "{{ eos_token }}{{ strftime_now('%Y')|length }}"
    )
    with calc.open(tiny_calbin) as c:
        session = calc.Session(c)
        tokenizer = session.spec.tokenizer.model_copy(update={"chat_template": template})
        session.spec = session.spec.model_copy(update={"tokenizer": tokenizer})
        text = session._render([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    assert text == "a<eos>4"


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda d: d.plan_prefill([1, 2], 0, 0, bucket=7), "NO_SUCH_SUBMODEL"),
        (lambda d: d.decode([1], [0, 1], [0]), "BATCH_UNEVEN"),
        (lambda d: d.kv(0, 99, 1), "KV_RANGE"),
        (lambda d: d.kv(0, 0, 10**9), "KV_RANGE"),
    ],
)
def test_requests_that_name_nothing(tiny_calbin, call, code):
    with calc.open(tiny_calbin) as c, pytest.raises(RuntimeFault) as e:
        call(Device(c))
    assert e.value.code == code


def test_the_same_seed_gives_the_same_text(tiny_calbin):
    with calc.open(tiny_calbin) as c:
        session = calc.Session(c)
        texts = [
            session.generate("Alice", max_new_tokens=8, sampling=calc.Sampling(1.0, seed=s)).tokens for s in (3, 3, 4)
        ]
    assert texts[0] == texts[1] != texts[2]


def test_draws_follow_the_distribution_inside_top_k_and_top_p():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    draw = _chooser(calc.Sampling(1.0, top_k=3, top_p=0.7, seed=0))
    counts = np.bincount([draw(logits) for _ in range(4000)], minlength=4)
    # the nucleus of 0.7 within the first three (0.526, 0.316, 0.158) is the first two
    assert counts[2] == counts[3] == 0
    np.testing.assert_allclose(counts[:2] / 4000, [0.625, 0.375], atol=0.03)
