"""The verification ladder: what each stage of the compiler did to the numbers.

::

    transformers fp32 -> exported graph (ORT) -> fused graph (ORT) -> bf16 -> quantized -> program (simulator)

Every rung but the last runs here, in ONNX Runtime on the golden tokens; the last is `calc verify`'s. A rung compares
with the one before it, so that the one that fails is the stage that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from calc.calbin.manifest import Rung
from calc.core.errors import InternalError, Problem, Problems, VerificationError
from calc.core.metrics import max_abs, rel_rms
from calc.core.schemes import Scheme, scheme
from calc.core.tensors import ColumnsTensor, FileTensor, RowsTensor, StackTensor, TensorRef
from calc.core.variant import Variant
from calc.passes.execute import ReplayCall, Replayed

F32 = NDArray[np.float32]
RungName = Literal["exported", "fused", "bf16", "quantized", "program"]

DECODE_STEPS = 16
"""Decode steps of a replay."""

FP32_GATE = 2e-4
"""Largest absolute difference between two FP32 evaluations, for values up to 42. For scale: transformers' eager against
its sdpa attention 5.5e-5, its fp32 against fp64 5.9e-5 on SmolLM2."""

FP32_SCALE = 42.0
"""Larger values scale the gate: FP32 rounding is relative."""

BF16_GATE = 3 * 2.0**-8
"""Relative RMS of the bf16 rung, times the root of the number of layers: independent roundings of 2^-8 add up like a
random walk. Measured over that root: 0.0033 on SmolLM2 (30 layers), 0.0015 on the tiny model (4), up to 0.0077 on
random weights (2)."""

STEP_SLACK = 1.01
"""Rounding to nearest is wrong by half a step at most; this much more is left to FP32."""

ORDER_FACTOR, ORDER_FLOOR = 2.0, 1e-3
"""Two executors of one numerics contract differ by the order of FP32 sums. Where that crosses a BF16 rounding boundary
the difference becomes one BF16 step (or one int8 step of an activation), and over many layers both runs end up as far
from each other as rounding the activations took each from FP32. So the program's gate is this factor times what the
bf16 rung measured on the same model, or the quantized rung (up to `INT8_NOISE`) where activations are int8; at least
the floor."""

INT8_NOISE = 0.35
"""What int8 activations may cost at most, relative RMS: w8a8's gate. A quantized rung that lost more lost it to its
weights, which are the same in both executors."""

WHY = {
    "bf16": "BF16 keeps 8 bits of every stored value",
    "quantized": "rounding to nearest at the schemes in use",
    "program": "same numerics, two executors: the order of FP32 sums differs, to the scale of BF16 rounding at most",
}


@dataclass(frozen=True)
class GoldenPlan:
    """Which tokens are replayed and which rows are kept.

    Attributes:
        tokens: the whole sequence.
        prompt: tokens of the prefill; the rest is decoded one by one.
        rows: positions whose logits transformers gives: the replay's, and the ends of prompts around every bucket.
    """

    tokens: tuple[int, ...]
    prompt: int
    rows: tuple[int, ...]

    def calls(self, prefill: Variant | None, decode: Variant | None) -> list[ReplayCall]:
        """The replay: one padded prefill, then `DECODE_STEPS` decodes.

        Without a decode the steps are prefills of one token; without a prefill the prompt is decoded token by token.
        """
        out: list[ReplayCall] = []
        if prefill is not None:
            out.append(self._call(prefill, 0, self.prompt))
        steps = decode or prefill
        if steps is None:
            raise InternalError("a replay through no graph")
        start = self.prompt if prefill is not None else 0
        return out + [self._call(steps, t, 1) for t in range(start, self.prompt + DECODE_STEPS)]

    def _call(self, v: Variant, past: int, count: int) -> ReplayCall:
        ids = np.zeros((1, v.seq), np.int64)
        ids[0, :count] = self.tokens[past : past + count]
        return ReplayCall(v.name, ids, count, past)

    @property
    def replay_rows(self) -> list[int]:
        """Positions whose logits the replay gives."""
        return list(range(self.prompt - 1, self.prompt + DECODE_STEPS))


def golden_plan(tokens: Sequence[int], buckets: Sequence[int], max_seq_len: int) -> GoldenPlan:
    """Choose prompt and rows.

    Args:
        tokens: at least as many tokens as will be used; surplus is cut.
        buckets: prefill buckets.
        max_seq_len: KV capacity.

    Raises:
        VerificationError: GOLDEN_TOO_SHORT when the capacity leaves no room for the replay.
    """
    smallest = min(buckets)
    prompt = min(max(1, smallest - 3), max_seq_len - DECODE_STEPS)
    if prompt < 1:
        raise VerificationError(
            Problem(
                "GOLDEN_TOO_SHORT",
                "max_seq_len",
                "leaves no room for a prompt and the golden decode steps",
                f">= {DECODE_STEPS + 1}",
                str(max_seq_len),
            )
        )
    ends = {n for s in buckets for n in (s - 1, s, s + 1) if 1 <= n <= max_seq_len}
    length = max(prompt + DECODE_STEPS, *ends) if ends else prompt + DECODE_STEPS
    used = tuple(int(t) for t in tokens[:length])
    ends = {n for n in ends if n <= len(used)}
    rows = sorted({*range(prompt - 1, prompt + DECODE_STEPS), *(n - 1 for n in ends)})
    return GoldenPlan(used, prompt, tuple(rows))


def _fp32_gate(want: Sequence[F32]) -> float:
    """Values that are not finite give no room: they fail whatever they are compared with."""
    largest = max(float(np.abs(a).max(initial=0.0, where=np.isfinite(a))) for a in want)
    return FP32_GATE * max(1.0, largest / FP32_SCALE)


@dataclass
class Ladder:
    """Climbs the rungs and keeps what each gave.

    Attributes:
        rungs: those climbed.
        schemes: those in use, once weights are quantized.
        results: what each rung gave.
    """

    rungs: list[Rung] = field(default_factory=list)
    schemes: frozenset[Scheme] = frozenset()
    results: dict[str, Replayed] = field(default_factory=dict)

    def start(self, name: str, result: Replayed) -> None:
        """The ground: transformers in fp32."""
        self.results[name] = result

    @staticmethod
    def fp32_gate(want: Replayed) -> float:
        """How far another FP32 evaluation may be away, for values as large as these."""
        return _fp32_gate([want.logits, *want.keys, *want.values])

    def climb(self, name: RungName, reference: str, result: Replayed) -> None:
        """Compare a stage's result with an earlier one.

        Raises:
            VerificationError: LADDER_<NAME> when it is beyond its gate.
        """
        want = self.results[reference]
        self.results[name] = result
        for old in list(self.results):
            if old not in ("hf", name):
                # only the ground's and the last rung's KV go into the artefact
                self.results[old] = replace(self.results[old], keys=[], values=[])
        kv, kv_want = [*result.keys, *result.values], [*want.keys, *want.values]
        if name in ("exported", "fused"):
            metric: Literal["max_abs", "rel_rms"] = "max_abs"
            logits, kvs = max_abs([result.logits], [want.logits]), max_abs(kv, kv_want)
            gates = _fp32_gate([want.logits]), _fp32_gate(kv_want)
            why = "two FP32 evaluations of one function differ by the order of their sums"
        else:
            metric = "rel_rms"
            logits, kvs = rel_rms([result.logits], [want.logits]), rel_rms(kv, kv_want)
            gate = BF16_GATE * len(want.keys) ** 0.5 if name == "bf16" else max(s.gate for s in self.schemes)
            gates, why = (gate, gate), WHY[name]
        rung = Rung(
            name=name,
            reference=reference,
            candidate=name,
            metric=metric,
            logits=logits,
            kv=kvs,
            gate_logits=gates[0],
            gate_kv=gates[1],
            why=why,
        )
        self.rungs.append(rung)
        check_rung(rung)

    def finish(self, reference: str) -> None:
        """Add the last rung, which `calc verify` climbs."""
        coarser = any(s.activations == "int8" for s in self.schemes)
        measured = next(r for r in self.rungs if r.name == (reference if coarser else "bf16"))
        noise = INT8_NOISE if coarser else float("inf")
        gate_logits, gate_kv = (
            max(ORDER_FLOOR, ORDER_FACTOR * min(x or 0.0, noise)) for x in (measured.logits, measured.kv)
        )
        why = WHY["program"]
        self.rungs.append(
            Rung(
                name="program",
                reference=reference,
                candidate="simulator",
                metric="rel_rms",
                logits=None,
                kv=None,
                gate_logits=gate_logits,
                gate_kv=gate_kv,
                why=why,
            )
        )


def check_steps(
    name: str, w: F32, values: NDArray[np.generic], scale: F32 | None, scheme: Scheme, problems: Problems
) -> None:
    """Every quantized value is within half a step of the weight it stands for: a closed form, whatever made it.

    A swapped scale, a wrong zero point or a wrong grouping breaks this.

    Args:
        name: the weight, for the report.
        w: [..., K] as in the checkpoint.
        values: codes, or dequantized values if there is no scale, of the same shape.
        scale: [...], or None.
        scheme: of the weight; its `bound` is the half step.
        problems: receives LADDER_QUANTIZED.
    """
    flat = w.reshape(-1, w.shape[-1])
    got = np.asarray(values, np.float32).reshape(flat.shape)
    if scale is not None:
        got = got * scale.reshape(-1, 1)
    bound = scheme.bound(flat)
    off = np.abs(got - flat) > bound * STEP_SLACK + np.finfo(np.float32).tiny
    if off.any():
        problems.add(
            "LADDER_QUANTIZED",
            name,
            f"{int(off.sum())} of {off.size} {scheme.name} values are more than half a step from the weight",
            expected=f"<= {float(bound.max()):.3g}",
            got=f"{float(np.abs(got - flat).max()):.3g}",
            hint="a scale is wrong or belongs to another channel",
        )


def check_rung(rung: Rung) -> None:
    """Refuse a rung beyond its gate, or one that is not a number.

    Raises:
        VerificationError: LADDER_<NAME>, one problem for logits and one for KV.
    """
    problems = []
    for what, value, gate in (("logits", rung.logits, rung.gate_logits), ("KV", rung.kv, rung.gate_kv)):
        if value is None or not value <= gate:
            problems.append(
                Problem(
                    f"LADDER_{rung.name.upper()}",
                    f"rung {rung.name}",
                    f"{what} differ from {rung.reference} beyond the gate ({rung.metric})",
                    f"<= {gate:.3g}",
                    f"{value}",
                    HINTS[rung.name],
                )
            )
    if problems:
        raise VerificationError(problems)


HINTS = {
    "exported": "the export is wrong: compare the graph with the model's code",
    "fused": "a fusion is wrong: compile with --check-passes to find the pass",
    "bf16": "BF16 loses too much here: look for values beyond its range or precision",
    "quantized": "the scheme loses too much, or a scale is wrong: try another scheme, or overrides in a recipe",
    "program": "the program is wrong: run `calc verify --strict`",
}


@dataclass(frozen=True)
class Weights:
    """What a graph's initializers hold, in FP32 or under the NPU's numerics."""

    refs: Mapping[str, TensorRef]
    schemes: Mapping[str, Scheme]
    problems: Problems = field(default_factory=Problems)

    def raw(self, name: str) -> NDArray[np.generic]:
        """As stored in the checkpoint."""
        return self.refs[name].read()

    def fp32(self, name: str) -> NDArray[np.generic]:
        """In FP32."""
        return self._values(name, None)[0]

    def bf16(self, name: str) -> NDArray[np.generic]:
        """Matrices rounded to BF16, in FP32; everything else in FP32."""
        return self._values(name, scheme("bf16") if name in self.schemes else None)[0]

    def quantized(self, name: str) -> NDArray[np.generic]:
        """Under each weight's scheme; ``<name>/scale`` gives the scales of its rows.

        Every value is compared with the checkpoint's as it is read: `problems` receives LADDER_QUANTIZED for each
        weight that is not its checkpoint rounded to nearest.

        Raises:
            InternalError: its scheme has no scales per row.
        """
        base = name.removesuffix("/scale")
        values, scale = self._values(base, self.schemes.get(base), check=base == name)
        if base == name:
            return values
        if scale is None:
            raise InternalError(f"{name}: the scheme of {base} has no scale per row")
        return scale

    def _values(
        self, name: str, chosen: Scheme | None, *, check: bool = False
    ) -> tuple[NDArray[np.generic], F32 | None]:
        """A block of rows at a time: rounding needs several times the memory of what it rounds."""
        ref = self.refs[name]
        out: NDArray[np.generic] | None = None
        scales: list[F32] = []
        found = len(self.problems.items)
        for rows in _blocks(ref):
            w: F32 = (ref.read() if rows is None else ref.rows(*rows)).astype(np.float32)
            values: NDArray[np.generic] = w
            scale: F32 | None = None
            if chosen is not None:
                values, scale = chosen.ort_values(w.reshape(-1, w.shape[-1]))
            if check and chosen is not None and chosen.name != "bf16" and len(self.problems.items) == found:
                check_steps(name, w, values, scale, chosen, self.problems)
            if scale is not None:
                scales.append(scale.reshape(w.shape[:-1]))
            if rows is None:
                out = values.reshape(w.shape)
                break
            out = np.empty(ref.shape, values.dtype) if out is None else out
            out[slice(*rows)] = values.reshape(w.shape)
        if out is None:
            raise InternalError(f"{name}: a weight without rows")
        return out, np.concatenate(scales) if scales else None


_BLOCK = 1 << 22
"""Elements of a large weight that are read at a time."""


def _blocks(ref: TensorRef) -> Iterator[tuple[int, int] | None]:
    """Ranges of rows; None is all at once, for what is small or would be read whole for each range."""
    size = int(np.prod(ref.shape, dtype=np.int64))
    if size <= _BLOCK or not isinstance(ref, FileTensor | StackTensor | RowsTensor | ColumnsTensor):
        yield None
        return
    step = max(1, _BLOCK // (size // ref.shape[0]))
    for start in range(0, ref.shape[0], step):
        yield start, min(start + step, ref.shape[0])
