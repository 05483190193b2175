"""Ring states through the simulator: several times around, in chunks, in batches, with windows of every kind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import transformers

from calc.frontend.reference import reference
from calc.sim.runtime import Device
from tests.field.field_models import (
    BF16_GATE,
    against_transformers,
    compile_model,
    kv,
    open_device,
    rel_rms,
    save,
    t0,
    tokens,
)

CAPACITY = 128


def compiled(path: Path, window: int, **options: object) -> Path:
    """A model whose layers all slide, compiled beside itself."""
    model = save(transformers.MistralConfig(**t0(sliding_window=window)), path / "m")
    compile_model(model, model.with_suffix(".calbin"), **{"prefill": (8, 32), "max_seq_len": CAPACITY, **options})
    return model


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A window of 8 in rings of 16 rows, batches of 1 and 3."""
    return compiled(tmp_path_factory.mktemp("eight"), 8, batch=(1, 3))


def device_of(model: Path) -> Device:
    return open_device(model.with_suffix(".calbin"), "strict")


def ring_rows(device: Device) -> set[int]:
    states = device.manifest.states.states
    assert {s.growth for s in states} == {"ring"}
    return {s.rows for s in states}


@pytest.mark.parametrize("prompt", [16, 17, 31, 32, 33, 100])
def test_a_prompt_several_times_around(eight: Path, prompt: int) -> None:
    """Rings of 16 rows, prompts of up to six times that, in buckets of 32, then decode over the ring's end."""
    device = device_of(eight)
    assert ring_rows(device) == {16}
    assert max(against_transformers(eight, device, tokens(prompt + 18), prompt)) <= BF16_GATE


@pytest.mark.parametrize("chunks", [(5, 3, 9, 30, 1, 2), (1,) * 20, (32, 32, 32), (7, 8, 9, 16, 17)])
def test_chunks_of_every_length(eight: Path, chunks: tuple[int, ...]) -> None:
    """After each chunk the logits are those of the whole prompt, wherever the ring's end falls in it."""
    device, n = device_of(eight), sum(chunks)
    sequence = tokens(n)
    ends = np.cumsum(chunks)
    want = reference(eight, sequence, [int(e) - 1 for e in ends])
    past = 0
    for length, row in zip(chunks, want.logits, strict=True):
        got = device.prefill(sequence[past : past + length], past=past)
        past += length
        assert rel_rms([got], [row]) <= BF16_GATE
    state = [x for pair in zip(want.keys, want.values, strict=True) for x in pair]
    held = kv(device, n)
    assert {len(h) for h in held} == {min(n, 8)}
    assert rel_rms(held, [w[-len(h) :] for h, w in zip(held, state, strict=True)]) <= BF16_GATE


def test_a_batch_whose_slots_are_at_different_places(eight: Path) -> None:
    """One slot has just begun, one stands at its ring's end, one is three times around; twenty steps together."""
    device, pasts = device_of(eight), [1, 15, 50]
    sequences = [tokens(n + 20, seed=i) for i, n in enumerate(pasts)]
    for slot, n in enumerate(pasts):
        device.prefill(sequences[slot][:n], slot=slot)
    wants = [reference(eight, s, list(range(n, n + 20))) for s, n in zip(sequences, pasts, strict=True)]
    for step in range(20):
        at = [n + step for n in pasts]
        got = device.decode([s[a] for s, a in zip(sequences, at, strict=True)], at, [0, 1, 2])
        for slot in range(3):
            assert rel_rms([got[slot]], [wants[slot].logits[step]]) <= BF16_GATE, (step, slot)
    for slot, n in enumerate(pasts):
        state = [x for pair in zip(wants[slot].keys, wants[slot].values, strict=True) for x in pair]
        held = kv(device, n + 20, slot=slot)
        assert rel_rms(held, [w[-len(h) :] for h, w in zip(held, state, strict=True)]) <= BF16_GATE


def test_a_slot_is_used_again(eight: Path) -> None:
    """A new sequence in a ring that an old one has filled sees nothing of it."""
    device = device_of(eight)
    device.prefill(tokens(100, seed=1))
    assert max(against_transformers(eight, device, tokens(12), 6)) <= BF16_GATE


def test_an_idle_slot_keeps_its_ring(eight: Path) -> None:
    """Two of three sequences of a batch decode; the third's rows stay."""
    device = device_of(eight)
    for slot in range(3):
        device.prefill(tokens(30, seed=slot), slot=slot)
    before = kv(device, 30, slot=2)
    device.decode([5, 6], [30, 30], [0, 1])
    for a, b in zip(before, kv(device, 30, slot=2), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("window", "rows"),
    [
        (1, {16}),
        (16, {16}),
        (17, {32}),
        (127, {128}),
        *(pytest.param(w, r, marks=pytest.mark.sweep) for w, r in ((2, {16}), (15, {16}), (33, {48}))),
        *(pytest.param(w, {128}, marks=pytest.mark.sweep) for w in (128, 500)),
    ],
)
def test_windows_of_every_kind(tmp_path: Path, window: int, rows: set[int]) -> None:
    """One key, a full ring, one row more, and windows as long as the capacity and longer, which are no ring."""
    model = compiled(tmp_path, window)
    device = device_of(model)
    assert {s.rows for s in device.manifest.states.states} == rows
    assert max(against_transformers(model, device, tokens(70), 60)) <= BF16_GATE


def test_rings_need_less_memory(tmp_path: Path) -> None:
    """DRAM of the states does not grow with the context."""
    model = save(transformers.MistralConfig(**t0(sliding_window=8)), tmp_path / "m")
    sizes = [compile_model(model, tmp_path / "a.calbin", max_seq_len=n).kv_bytes for n in (32, 64, 128)]
    assert len(set(sizes)) == 1
    full = save(transformers.LlamaConfig(**t0()), tmp_path / "f")
    assert compile_model(full, tmp_path / "b.calbin", max_seq_len=128).kv_bytes[0] == 8 * sizes[0][0]


def test_verify_looks_across_the_rings_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill that leaves out what lies behind the ring's end, as a fault of the compiler would: verify sees it."""
    import calc
    from calc.kernels.emit import Emitter

    model = save(transformers.MistralConfig(**t0(sliding_window=8)), tmp_path / "m")
    options = calc.CompileOptions(prefill=(8, 32), max_seq_len=64)
    calc.compile(model, tmp_path / "sound.calbin", options)
    report = calc.verify(tmp_path / "sound.calbin")
    assert [c for c in report.checks if not c.ok] == []
    assert "chunks of 11 and 22 equal whole prefill: KV" in {c.name for c in report.checks}
    store = Emitter.store

    def forgetful(self, dst, src, dims):
        # the second run starts at row 0: its address has no term but the slot's
        if "kv." in dst.buf.name and len(dst.terms) == 1:
            return
        store(self, dst, src, dims)

    monkeypatch.setattr(Emitter, "store", forgetful)
    calc.compile(model, tmp_path / "faulty.calbin", options)
    failed = {c.name for c in calc.verify(tmp_path / "faulty.calbin").checks if not c.ok}
    assert "chunks of 11 and 22 equal whole prefill: KV" in failed
