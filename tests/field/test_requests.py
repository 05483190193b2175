"""Requests to a loaded artefact: lengths around every border, batches, ends, and what is refused before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import calc
from calc.calbin.reader import open_calbin
from calc.core.errors import CapacityError, RuntimeFault
from calc.sim.runtime import Device, Step
from tests.field.conftest import Compiled
from tests.field.field_models import (
    BF16_GATE,
    ORDER_GATE,
    against_transformers,
    kv,
    open_device,
    rel_rms,
    tokens,
    with_submodels,
)


def test_field_50_empty_prompts_leave_the_session_usable(compiled: Compiled) -> None:
    session = calc.Session(calc.open(compiled()))
    before = session.generate("w5 w9 w11", max_new_tokens=4)
    for prompt in ("", " ", [], ()):
        with pytest.raises(RuntimeFault) as caught:
            session.generate(prompt)
        assert (caught.value.code, caught.value.exit_code) == ("PROMPT_EMPTY", 3)
        assert session.generate("w5 w9 w11", max_new_tokens=4).tokens == before.tokens
    assert len(before.tokens) >= 1


@pytest.mark.parametrize("length", [9, 16, 17])
def test_field_51_chunks_equal_one_call(compiled: Compiled, length: int) -> None:
    path = compiled(prefill=(8, 24))
    sequence = tokens(length + 1)
    chunked = Device(with_submodels(path, lambda s: s.seq != 24))
    whole = open_device(path)
    plan = chunked.plan_prefill(sequence[:length], 0, 0)
    assert [len(s.tokens[0]) for s in plan] == [8] * (length // 8) + [length % 8] * (length % 8 > 0)
    assert len(whole.plan_prefill(sequence[:length], 0, 0)) == 1
    got, want = (d.prefill(sequence[:length]) for d in (chunked, whole))
    assert rel_rms([got], [want]) <= ORDER_GATE
    assert rel_rms(kv(chunked, length), kv(whole, length)) <= ORDER_GATE
    after = [d.decode([sequence[length]], [length], [0]) for d in (chunked, whole)]
    assert rel_rms([after[0]], [after[1]]) <= ORDER_GATE


@pytest.mark.parametrize("length", [1, 7, 8, 9, 30, 31])
def test_field_53_prompts_around_the_bucket(compiled: Compiled, llama: Path, length: int) -> None:
    device = open_device(compiled(), "strict")
    assert max(against_transformers(llama, device, tokens(length + 1), length)) <= BF16_GATE


def test_field_53_a_prompt_that_fills_the_cache(compiled: Compiled, llama: Path) -> None:
    device = open_device(compiled())
    assert max(against_transformers(llama, device, tokens(32), 32)) <= BF16_GATE
    with pytest.raises(CapacityError) as caught:
        device.decode([3], [32], [0])
    assert (caught.value.code, caught.value.exit_code) == ("CONTEXT_FULL", 6)


@pytest.mark.parametrize("prompt", [30, 31, 32])
def test_generation_fills_the_cache_to_the_last_row(compiled: Compiled, prompt: int) -> None:
    generation = ends(compiled(), ()).generate(tokens(prompt), max_new_tokens=9)
    assert (generation.finish, len(generation.tokens)) == ("capacity", 33 - prompt)


@pytest.mark.parametrize("most", [0, 1, 2])
def test_no_more_tokens_than_asked_for(compiled: Compiled, most: int) -> None:
    generation = ends(compiled(), ()).generate(tokens(5), max_new_tokens=most)
    assert (generation.finish, len(generation.tokens)) == ("length", most)


def test_field_55_more_sequences_than_compiled(compiled: Compiled) -> None:
    device = open_device(compiled())
    with pytest.raises(CapacityError) as caught:
        device.decode([4, 5], [0, 0], [0, 0])
    (problem,) = caught.value.problems
    assert (problem.code, problem.expected, problem.got) == ("BATCH_TOO_LARGE", "<= 1", "2")
    assert "--batch" in problem.hint


def test_field_56_a_decode_only_artefact_takes_the_prompt_stepwise(compiled: Compiled) -> None:
    """The compiler always makes a prefill sub-model, and the reader wants one; the device needs none."""
    sequence = tokens(6)
    stepwise = Device(with_submodels(compiled(), lambda s: s.role == "decode"), "strict")
    plan = stepwise.plan_prefill(sequence, 3, 0)
    assert [(s.tokens, s.past) for s in plan] == [(((t,),), (3 + i,)) for i, t in enumerate(sequence)]
    whole = open_device(compiled())
    assert rel_rms([stepwise.prefill(sequence)], [whole.prefill(sequence)]) <= ORDER_GATE
    assert rel_rms(kv(stepwise, 6), kv(whole, 6)) <= ORDER_GATE


def ends(path: Path, eos: Sequence[int]) -> calc.Session:
    """A session whose model ends at these tokens."""
    calbin = open_calbin(path)
    model = calbin.manifest.model
    changed = model.model_copy(update={"tokens": model.tokens.model_copy(update={"eos": tuple(eos)})})
    calbin.manifest = calbin.manifest.model_copy(update={"model": changed})
    return calc.Session(calbin)


def test_field_58_any_end_token_ends(compiled: Compiled) -> None:
    prompt = tokens(5)
    free = ends(compiled(), ()).generate(prompt, max_new_tokens=12).tokens
    distinct = list(dict.fromkeys(free))
    assert len(distinct) >= 2, "the model repeats one token: choose another seed"
    first, second = distinct[0], distinct[1]
    unused = next(t for t in range(64) if t not in free)
    for eos, at in (((first, unused), 0), ((unused, second), free.index(second)), ((second, first), 0)):
        generation = ends(compiled(), eos).generate(prompt, max_new_tokens=12)
        assert (generation.finish, generation.tokens) == ("eos", free[:at])


@pytest.mark.parametrize("quant", ["bf16", "w8a8"])
def test_field_60_idle_slots_disturb_nobody(compiled: Compiled, quant: str) -> None:
    """Three of four sequences: the fourth has no tokens, no past, and a slot that another one owns."""
    path = compiled(batch=(4,), quant=quant)
    lengths = [9, 1, 5]
    sequences = [tokens(n + 1, seed=n) for n in lengths]
    for mode in ("fast", "strict"):
        together, alone = open_device(path, mode), open_device(path)
        want = []
        for slot, (n, sequence) in enumerate(zip(lengths, sequences, strict=True)):
            together.prefill(sequence[:n], slot=slot)
            alone.prefill(sequence[:n])
            want.append(alone.decode([sequence[n]], [n], [0])[0])
        got = together.decode([s[-1] for s in sequences], lengths, [0, 1, 2])
        assert np.isfinite(got).all()
        assert rel_rms(list(got), want) <= ORDER_GATE
        assert all(np.isfinite(x).all() for slot, n in enumerate(lengths) for x in kv(together, n + 1, slot))
        whole = open_device(path)
        whole.prefill(sequences[0])
        assert rel_rms(kv(together, 10), kv(whole, 10)) <= ORDER_GATE


def test_field_62_an_overlong_prompt_runs_nothing(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    session = calc.Session(calc.open(compiled()))
    ran: list[Step] = []
    monkeypatch.setattr(Device, "run", lambda self, step: ran.append(step))
    monkeypatch.setattr(Device, "time", lambda self, *args: ran.append(args))
    for call in (
        lambda: session.generate(tokens(33)),
        lambda: session.device.prefill(tokens(33)),
        lambda: session.device.prefill(tokens(5), past=28),
    ):
        with pytest.raises(CapacityError) as caught:
            call()
        assert (caught.value.code, caught.value.exit_code) == ("PROMPT_TOO_LONG", 6)
    assert not ran


def test_requests_out_of_range_are_named_together(compiled: Compiled) -> None:
    device = open_device(compiled())
    with pytest.raises(RuntimeFault) as caught:
        device.prefill([3, 64, -1], slot=1)
    assert caught.value.codes == ("TOKEN_RANGE", "SLOT_RANGE")
    with pytest.raises(RuntimeFault) as caught:
        device.decode([64], [0], [0])
    assert caught.value.codes == ("TOKEN_RANGE",)
    with pytest.raises(RuntimeFault) as caught:
        device.prefill([3], past=-1)
    assert caught.value.codes == ("PAST_RANGE",)


def test_two_sequences_need_two_slots(compiled: Compiled) -> None:
    device = open_device(compiled(batch=(4,)))
    with pytest.raises(RuntimeFault) as caught:
        device.decode([3, 4], [0, 0], [1, 1])
    assert caught.value.codes == ("SLOT_TWICE",)
