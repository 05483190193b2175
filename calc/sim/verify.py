"""Verify: does the artefact compute what the model computes? Needs nothing but the calbin.

The last rung of the ladder runs here: the program on the simulator against the same numerics in ONNX Runtime (stored
golden vectors), and against transformers in fp32. The rungs before it are checked again from the stored vectors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from calc.calbin.manifest import Golden, Rung
from calc.calbin.reader import Calbin
from calc.core.errors import Problem, VerificationError
from calc.core.metrics import kl_top1, rel_rms
from calc.core.options import Progress, no_progress
from calc.core.roles import WHICH, kv_name
from calc.core.spec import Frozen
from calc.sim.machine import Mode
from calc.sim.runtime import Device

F32 = NDArray[np.float32]


FIRST_LAYER_GATE = 2.0**-8
"""Relative RMS of the first layer's KV between two executors: single roundings that fell the other way, before layers
amplify them. Tight on every model, however deep."""


ROW_FACTOR = 2.0
"""A single row's logits may be this much further away than the replay's 17 rows together: rows with small logits are
relatively noisier."""


class Check(Frozen):
    """One check: what was compared, how far apart, and what is allowed. `kl` is in nats, `top1` a fraction."""

    name: str
    ok: bool
    metric: str
    value: float
    gate: float
    detail: str = ""
    seconds: float = Field(default=0.0)


class VerifyReport(Frozen):
    """The verdict."""

    calbin: str
    model: str
    mode: str
    ok: bool
    checks: tuple[Check, ...]


@dataclass
class _Run:
    """Results of one replay: logits [steps, V], KV per layer."""

    logits: F32
    keys: list[F32]
    values: list[F32]

    @property
    def kv(self) -> list[F32]:
        """Keys and values of all layers."""
        return [*self.keys, *self.values]


def verify(calbin: Calbin, *, strict: bool = False, progress: Progress = no_progress) -> VerifyReport:
    """Run every check.

    Args:
        calbin: the open artefact.
        strict: run the simulator in strict mode, and compare it with fast mode bit for bit.
        progress: told each check's name.

    Raises:
        VerificationError: GOLDEN_MISSING when the artefact has no golden vectors.
        FormatError: a section's digest is wrong.
    """
    golden = calbin.manifest.golden
    if golden is None:
        raise VerificationError(
            Problem(
                "GOLDEN_MISSING",
                str(calbin.path),
                "the artefact has no golden vectors",
                hint="compile with the model's weights and the [hf] extra installed",
            )
        )
    mode: Mode = "strict" if strict else "fast"
    checks: list[Check] = []
    todo = list(_checks(calbin, golden, mode))
    for i, (name, run) in enumerate(todo):
        progress(name, i, len(todo))
        start = time.perf_counter()
        for c in run():
            checks.append(c.model_copy(update={"seconds": time.perf_counter() - start}))
            start = time.perf_counter()
    progress("done", len(todo), len(todo))
    return VerifyReport(
        calbin=str(calbin.path),
        model=calbin.manifest.model.name,
        mode=mode,
        ok=all(c.ok for c in checks),
        checks=tuple(checks),
    )


def _checks(calbin: Calbin, golden: Golden, mode: Mode) -> Iterator[tuple[str, Callable[[], Iterator[Check]]]]:
    state: dict[str, _Run] = {}
    yield "digests", lambda: _digests(calbin)
    yield "stored rungs", lambda: _stored(calbin, golden)
    yield "program", lambda: _program(calbin, golden, mode, state)
    yield "buckets", lambda: _buckets(calbin, golden, mode)
    yield "prefill row", lambda: _prefill_row(calbin, golden, mode)
    yield "chunked", lambda: _chunked(calbin, golden, mode)
    yield "batch", lambda: _batch(calbin, golden, mode)
    if mode == "strict":
        yield "strict equals fast", lambda: _strict_equals_fast(calbin, golden, state)


def _check(name: str, metric: str, value: float, gate: float, detail: str = "") -> Check:
    return Check(name=name, ok=bool(value <= gate), metric=metric, value=float(value), gate=float(gate), detail=detail)


def _digests(calbin: Calbin) -> Iterator[Check]:
    calbin.verify_digests()
    yield _check("digests", "damaged sections", 0, 0, f"{len(calbin.manifest.sections)} sections")


def _stored(calbin: Calbin, golden: Golden) -> Iterator[Check]:
    """The rungs before the program, again from the stored logits; KV as measured at compile time."""
    for rung in golden.rungs:
        if rung.name == "program":
            continue
        got, want = _logits(calbin, golden, rung.candidate), _logits(calbin, golden, rung.reference)
        value = float(np.abs(got - want).max()) if rung.metric == "max_abs" else rel_rms([got], [want])
        kl, top1 = kl_top1(got, want)
        yield _check(
            f"rung {rung.name}: logits", rung.metric, value, rung.gate_logits, f"KL {kl:.2e}, same top token {top1:.1%}"
        )
        yield _check(
            f"rung {rung.name}: KV",
            rung.metric,
            rung.kv if rung.kv is not None else float("inf"),
            rung.gate_kv,
            "as measured at compile time",
        )


def _logits(calbin: Calbin, golden: Golden, name: str) -> F32:
    """Stored logits of the replay's rows."""
    data = np.asarray(calbin.array(f"{name}/logits"), np.float32)
    if name != "hf":
        return data
    rows = range(golden.prompt - 1, _end(golden))
    return data[[golden.logits_rows.index(r) for r in rows]]


def _end(golden: Golden) -> int:
    """Tokens of the replay: prompt and decode steps."""
    return golden.prompt + golden.steps


def _program_rung(golden: Golden) -> Rung:
    return next(r for r in golden.rungs if r.name == "program")


def _replay(device: Device, golden: Golden, slot: int = 0) -> _Run:
    tokens, prompt = golden.tokens, golden.prompt
    logits = [device.prefill(tokens[:prompt], slot=slot)]
    logits += [device.advance(tokens[t], t, slot) for t in range(prompt, _end(golden))]
    kv = [device.kv(i, slot, _end(golden)) for i in golden.kv_layers]
    return _Run(np.stack(logits), [k for k, _ in kv], [v for _, v in kv])


def _stored_kv(calbin: Calbin, golden: Golden, name: str) -> list[F32]:
    """Stored keys, then values, of every layer: as many rows as the state keeps."""
    end = _end(golden)
    kept = {s.name: min(end, s.window or end) for s in calbin.manifest.states.states}
    return [
        np.asarray(calbin.array(f"{name}/{which}.{i}")[:end], np.float32)[end - kept[kv_name(i, which)] :]
        for which in WHICH
        for i in golden.kv_layers
    ]


def _program(calbin: Calbin, golden: Golden, mode: Mode, state: dict[str, _Run]) -> Iterator[Check]:
    """Prefill, then 16 decode steps, against ONNX Runtime with the same numerics and against transformers."""
    rung = _program_rung(golden)
    run = _replay(Device(calbin, mode), golden)
    state["replay"] = run
    want = _logits(calbin, golden, rung.reference)
    kl, top1 = kl_top1(run.logits, want)
    yield _check(
        "rung program: logits",
        rung.metric,
        rel_rms([run.logits], [want]),
        rung.gate_logits,
        f"KL {kl:.2e}, same top token {top1:.1%}",
    )
    yield _check(
        "rung program: KV",
        rung.metric,
        rel_rms(run.kv, _stored_kv(calbin, golden, rung.reference)),
        rung.gate_kv,
        f"{len(run.kv)} tensors",
    )
    shallow, stored = [run.keys[0], run.values[0]], _stored_kv(calbin, golden, rung.reference)
    want_shallow = [stored[0], stored[len(golden.kv_layers)]]
    yield _check("rung program: KV of the first layer", "rel_rms", rel_rms(shallow, want_shallow), FIRST_LAYER_GATE)
    hf = _logits(calbin, golden, "hf")
    kl, top1 = kl_top1(run.logits, hf)
    total = sum(r.gate_logits for r in golden.rungs if r.metric == "rel_rms")
    total_kv = sum(r.gate_kv for r in golden.rungs if r.metric == "rel_rms")
    yield _check(
        "program against transformers fp32: logits",
        "rel_rms",
        rel_rms([run.logits], [hf]),
        total,
        f"KL {kl:.2e}, same top token {top1:.1%}",
    )
    yield _check(
        "program against transformers fp32: KV", "rel_rms", rel_rms(run.kv, _stored_kv(calbin, golden, "hf")), total_kv
    )


def _buckets(calbin: Calbin, golden: Golden, mode: Mode) -> Iterator[Check]:
    """Prompts one short of a bucket, that fill it, and one over.

    Against the last rung's logits where the replay has that row; else, in bf16, against transformers. In larger
    buckets also against the same prompt in chunks of the smallest one, another path through the same artefact.
    """
    rung = _program_rung(golden)
    stored, first_row = _logits(calbin, golden, rung.reference), golden.prompt - 1
    hf = np.asarray(calbin.array("hf/logits"), np.float32)
    total = sum(r.gate_logits for r in golden.rungs if r.metric == "rel_rms")
    device = Device(calbin, mode)
    if not device.prefill_buckets:
        return
    smallest = device.prefill_buckets[0].seq
    for sub in device.prefill_buckets:
        for n in (sub.seq - 1, sub.seq, sub.seq + 1):
            if not 1 <= n <= min(len(golden.tokens), calbin.manifest.states.capacity):
                continue
            got = device.prefill(golden.tokens[:n])
            if 0 <= n - 1 - first_row < len(stored):
                value = rel_rms([got], [stored[n - 1 - first_row]])
                yield _check(f"prompt of {n} (bucket {sub.seq})", "rel_rms", value, ROW_FACTOR * rung.gate_logits)
            elif n - 1 in golden.logits_rows and rung.reference == "bf16":
                value = rel_rms([got], [hf[golden.logits_rows.index(n - 1)]])
                yield _check(
                    f"prompt of {n} (bucket {sub.seq})",
                    "rel_rms",
                    value,
                    ROW_FACTOR * total,
                    "against transformers fp32",
                )
            if sub.seq > smallest:
                chunked = device.prefill(golden.tokens[:n], bucket=smallest)
                value = rel_rms([got], [chunked])
                name = f"prompt of {n}: bucket {sub.seq} equals chunks of {smallest}"
                yield _check(name, "rel_rms", value, ROW_FACTOR * rung.gate_logits)


def _prefill_row(calbin: Calbin, golden: Golden, mode: Mode) -> Iterator[Check]:
    """The decode step at position t equals the prefill of t + 1 tokens; only where both roles are there."""
    device = Device(calbin, mode)
    if not (device.decode_batches and device.prefill_buckets):
        return  # an artefact of one role has one path
    t = golden.prompt
    device.prefill(golden.tokens[:t])
    stepped = device.decode([golden.tokens[t]], [t], [0])[0]
    other = Device(calbin, mode)
    whole = other.prefill(golden.tokens[: t + 1])
    yield _check(
        "decode at t equals prefill row t",
        "rel_rms",
        rel_rms([stepped], [whole]),
        ROW_FACTOR * _program_rung(golden).gate_logits,
    )


def _chunked(calbin: Calbin, golden: Golden, mode: Mode) -> Iterator[Check]:
    """A prompt given in two calls equals the prompt given in one: logits and KV.

    Where states are rings, also all golden tokens, cut unevenly: the second call's rows lie across a ring's end.
    """
    rung = _program_rung(golden)
    cuts = {golden.prompt: (golden.prompt // 2, "chunked equals whole prefill")}
    if any(s.growth == "ring" for s in calbin.manifest.states.states):
        n = min(len(golden.tokens), calbin.manifest.states.capacity)
        cuts[n] = (n // 3, f"chunks of {n // 3} and {n - n // 3} equal whole prefill")
    for n, (cut, name) in cuts.items():
        whole, parts = Device(calbin, mode), Device(calbin, mode)
        if cut < 1 or not whole.prefill_buckets:
            continue
        a = whole.prefill(golden.tokens[:n])
        parts.prefill(golden.tokens[:cut])
        b = parts.prefill(golden.tokens[cut:n], past=cut)
        kv_a, kv_b = ([x for i in golden.kv_layers for x in device.kv(i, 0, n)] for device in (whole, parts))
        yield _check(f"{name}: logits", "rel_rms", rel_rms([b], [a]), ROW_FACTOR * rung.gate_logits)
        yield _check(f"{name}: KV", "rel_rms", rel_rms(kv_b, kv_a), rung.gate_kv)


def _batch(calbin: Calbin, golden: Golden, mode: Mode) -> Iterator[Check]:
    """Several sequences at once equal each one alone, slot by slot."""
    batches = [s.batch for s in calbin.manifest.submodels if s.role == "decode" and s.batch > 1]
    for batch in batches:
        # as unlike as the replay's tokens allow, also where its prompt is one token long
        longest = max(golden.prompt, min(batch, golden.steps))
        lengths = [max(1, longest - i) for i in range(batch)]
        alone, want = Device(calbin, mode), []
        together = Device(calbin, mode)
        for slot, n in enumerate(lengths):
            alone.prefill(golden.tokens[:n], slot=0)
            want.append(alone.decode([golden.tokens[n]], [n], [0])[0])
            together.prefill(golden.tokens[:n], slot=slot)
        got = together.decode([golden.tokens[n] for n in lengths], lengths, range(batch))
        worst = max(rel_rms([g], [w]) for g, w in zip(got, want, strict=True))
        yield _check(
            f"batch {batch} equals batch 1, slot by slot",
            "rel_rms",
            worst,
            ROW_FACTOR * _program_rung(golden).gate_logits,
            f"prompts of {lengths}",
        )


def _strict_equals_fast(calbin: Calbin, golden: Golden, state: dict[str, _Run]) -> Iterator[Check]:
    fast, strict = _replay(Device(calbin, "fast"), golden), state["replay"]
    same = np.array_equal(fast.logits, strict.logits) and all(
        np.array_equal(a, b) for a, b in zip(fast.kv, strict.kv, strict=True)
    )
    yield _check("strict equals fast, bit for bit", "differs", 0.0 if same else 1.0, 0.0)
