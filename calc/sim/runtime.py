"""The device: a calbin loaded on the simulator, driven as a host runtime drives the board.

It chooses the sub-model by role, batch and bucket from the manifest, runs prompts longer than the largest bucket in
chunks, sets the CSRs, and checks capacity before anything runs. It needs nothing but the calbin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from calc.calbin.manifest import SubModel, TensorDesc
from calc.calbin.reader import Calbin
from calc.core.errors import CapacityError, InternalError, Problem, Problems, RuntimeFault
from calc.core.isa import DType
from calc.core.roles import CURRENT, IDS, LOGITS, PAST, SLOT, kv_name
from calc.core.target import Target, parse_target
from calc.sim.machine import LoadedProgram, Machine, Mode, TimedProgram, csr_file
from calc.sim.program import Program
from calc.sim.timing import Counters

DTYPES = {"f32": DType.F32, "bf16": DType.BF16, "i8": DType.I8, "i32": DType.I32, "u8": DType.U8}

TIMED_RECORDS = 1 << 16
"""Records whose clocks are kept, over all sub-models: about 90 MiB at most. The one in use is kept in any case."""


@dataclass(frozen=True)
class Step:
    """One call of a sub-model: tokens per sequence, valid tokens before it, and KV slots."""

    submodel: str
    tokens: tuple[tuple[int, ...], ...]
    past: tuple[int, ...]
    slots: tuple[int, ...]


class Device:
    """A loaded artefact.

    Args:
        calbin: the open artefact.
        mode: fast, or strict with every check on.
        cache_bytes: budget for decoded weight tiles in fast mode.
    """

    def __init__(self, calbin: Calbin, mode: Mode = "fast", cache_bytes: int = 4 << 30) -> None:
        m = calbin.manifest
        self.calbin = calbin
        self.manifest = m
        self.mode: Mode = mode
        shards = {s.chip: calbin.shard(s.chip) for s in m.shards}
        ends = {chip: max(r.offset + r.nbytes for r in m.dram if r.chip == chip) for chip in shards}
        dynamic = {chip: max(0, ends[chip] - len(shard)) for chip, shard in shards.items()}
        self.machine = Machine(m.target.sram_bytes, shards, dynamic, mode, cache_bytes)
        self._programs: dict[str, LoadedProgram] = {}
        self._timed: dict[str, TimedProgram] = {}
        self.target: Target = parse_target(m.target.toml, m.target.name)

    # -- choice ------------------------------------------------------------------------------------------------------

    @property
    def prefill_buckets(self) -> list[SubModel]:
        """Prefill sub-models by ascending bucket."""
        return sorted((s for s in self.manifest.submodels if s.role == "prefill"), key=lambda s: s.seq)

    @property
    def decode_batches(self) -> list[SubModel]:
        """Decode sub-models by ascending batch."""
        return sorted((s for s in self.manifest.submodels if s.role == "decode"), key=lambda s: s.batch)

    def plan_prefill(self, tokens: Sequence[int], past: int, slot: int, bucket: int | None = None) -> list[Step]:
        """Split a prompt over prefill buckets: the largest while it is filled, then the smallest that holds the rest.

        `bucket` restricts the choice to one.

        Raises:
            CapacityError: PROMPT_TOO_LONG when past and prompt exceed the KV capacity.
            RuntimeFault: PROMPT_EMPTY, TOKEN_RANGE, SLOT_RANGE, PAST_RANGE; NO_SUCH_SUBMODEL for a bucket that does not
                exist, or an artefact that can neither prefill nor decode.
        """
        self._check_prompt(tokens, past, slot)
        buckets = [s for s in self.prefill_buckets if bucket in (None, s.seq)]
        if bucket is not None and not buckets:
            known = ", ".join(str(s.seq) for s in self.prefill_buckets)
            raise RuntimeFault(Problem("NO_SUCH_SUBMODEL", f"bucket {bucket}", "no prefill of this bucket", known))
        if not buckets:
            # a decode-only artefact takes the prompt token by token
            one = self.step_submodel()
            return [Step(one.name, ((int(t),),), (past + i,), (slot,)) for i, t in enumerate(tokens)]
        steps, at = [], 0
        while at < len(tokens):
            rest = len(tokens) - at
            fits = [s for s in buckets if s.seq >= rest]
            sub = fits[0] if fits else buckets[-1]
            n = min(rest, sub.seq)
            steps.append(Step(sub.name, (tuple(int(t) for t in tokens[at : at + n]),), (past + at,), (slot,)))
            at += n
        return steps

    def step_submodel(self) -> SubModel:
        """The sub-model that takes one more token of one sequence: the smallest decode, or else prefill bucket.

        Raises:
            RuntimeFault: NO_SUCH_SUBMODEL for an artefact of neither role.
        """
        for found in (self.decode_batches, self.prefill_buckets):
            if found:
                return found[0]
        what = "the artefact is no language model"
        raise RuntimeFault(Problem("NO_SUCH_SUBMODEL", "decode", what, "a prefill or a decode sub-model"))

    def decode_submodel(self, sequences: int) -> SubModel:
        """The smallest decode batch that holds that many sequences.

        Raises:
            RuntimeFault: NO_SUCH_SUBMODEL when the artefact has no decode at all.
            CapacityError: BATCH_TOO_LARGE.
        """
        batches = self.decode_batches
        if not batches:
            roles = ", ".join(sorted({s.role for s in self.manifest.submodels}))
            hint = "compile with --batch 1, or score prompts only"
            raise RuntimeFault(
                Problem("NO_SUCH_SUBMODEL", "decode", "the artefact cannot decode", "a decode sub-model", roles, hint)
            )
        for sub in batches:
            if sub.batch >= sequences:
                return sub
        largest = batches[-1].batch
        raise CapacityError(
            Problem(
                "BATCH_TOO_LARGE",
                f"{sequences} sequences",
                "more sequences than the largest compiled batch",
                f"<= {largest}",
                str(sequences),
                "send them in turns, or compile with a larger --batch",
            )
        )

    def _check_prompt(self, tokens: Sequence[int], past: int, slot: int) -> None:
        problems = Problems()
        vocab, layout = self.manifest.model.vocab, self.manifest.states
        if not len(tokens):
            problems.add(
                "PROMPT_EMPTY", "prompt", "the prompt has no tokens", expected="at least one", hint="give some text"
            )
        bad = [int(t) for t in tokens if not 0 <= t < vocab]
        if bad:
            problems.add(
                "TOKEN_RANGE", "prompt", "token ids outside the vocabulary", expected=f"0..{vocab - 1}", got=bad[:8]
            )
        if not 0 <= slot < layout.slots:
            problems.add("SLOT_RANGE", "slot", "no such KV slot", expected=f"0..{layout.slots - 1}", got=slot)
        if past < 0:
            problems.add("PAST_RANGE", "past", "a negative number of tokens", expected=">= 0", got=past)
        problems.raise_if_any(RuntimeFault)
        if past + len(tokens) > layout.capacity:
            raise CapacityError(
                Problem(
                    "PROMPT_TOO_LONG",
                    "prompt",
                    "the prompt does not fit the KV cache",
                    f"at most {layout.capacity - past} tokens",
                    str(len(tokens)),
                    "shorten it, or compile with a larger --max-seq-len",
                )
            )

    # -- calls -------------------------------------------------------------------------------------------------------

    def run(self, step: Step) -> NDArray[np.float32]:
        """One call; logits f32 [batch, V] of each sequence's last valid token (rows of idle sequences are undefined).

        Raises:
            RuntimeFault: what the simulator finds.
        """
        sub = self._submodel(step.submodel)
        cur = [len(t) for t in step.tokens]
        ids = np.zeros((sub.batch, sub.seq), np.int32)
        for i, t in enumerate(step.tokens):
            ids[i, : len(t)] = t
        pad = sub.batch - len(cur)
        csr = csr_file({PAST: [*step.past, *[0] * pad], CURRENT: [*cur, *[0] * pad], SLOT: [*step.slots, *[0] * pad]})
        for desc in _named(sub.inputs, IDS):
            self._write(desc, ids)
        for past, slot in zip(step.past, step.slots, strict=True):
            if past == 0:
                self._clear(slot)
        with threadpool_limits(1):
            # one BLAS thread: the order of sums, and so every bit, is the same on every machine of a kind
            self._program(sub).run(csr)
        parts = sorted(_named(sub.outputs, LOGITS), key=lambda d: d.part.start if d.part else 0)
        return np.concatenate([self._read(d) for d in parts], axis=parts[0].part.axis if parts[0].part else -1)

    def _clear(self, slot: int) -> None:
        """A sequence starts: what does not grow with it starts from zero. Rows per token are written before use."""
        layout = self.manifest.states
        for state in layout.states:
            if state.growth == "fixed":
                for part in state.parts:
                    size = state.part_bytes(part, 1)
                    self.machine.memories[part.chip].host_write(part.offset + slot * size, np.zeros(size, np.uint8))

    def prefill(
        self, tokens: Sequence[int], *, past: int = 0, slot: int = 0, bucket: int | None = None
    ) -> NDArray[np.float32]:
        """Run a prompt, in chunks if need be; logits f32 [V] of its last token."""
        *before, last = self.plan_prefill(tokens, past, slot, bucket)
        for step in before:
            self.run(step)
        logits: NDArray[np.float32] = self.run(last)[0]
        return logits

    def decode(self, tokens: Sequence[int], past: Sequence[int], slots: Sequence[int]) -> NDArray[np.float32]:
        """One token for each sequence; logits f32 [len(tokens), V].

        Raises:
            CapacityError: BATCH_TOO_LARGE, CONTEXT_FULL.
            RuntimeFault: NO_SUCH_SUBMODEL, TOKEN_RANGE, SLOT_RANGE, PAST_RANGE, SLOT_TWICE, BATCH_UNEVEN.
        """
        if not len(tokens) == len(past) == len(slots):
            got = f"{len(tokens)} tokens, {len(past)} pasts, {len(slots)} slots"
            raise RuntimeFault(
                Problem("BATCH_UNEVEN", "decode", "each sequence has a token, a past and a slot", got=got)
            )
        sub = self.decode_submodel(len(tokens))
        capacity = self.manifest.states.capacity
        if full := [p for p in past if p >= capacity]:
            raise CapacityError(
                Problem(
                    "CONTEXT_FULL",
                    "KV cache",
                    "no room for another token",
                    f"at most {capacity} tokens",
                    f"{full[0]} before this one",
                    "compile with a larger --max-seq-len",
                )
            )
        for t, p, s in zip(tokens, past, slots, strict=True):
            self._check_prompt([t], p, s)
        if len(set(slots)) < len(slots):
            raise RuntimeFault(
                Problem("SLOT_TWICE", "slots", "two sequences share a KV slot", "one slot each", str(list(slots)))
            )
        out = self.run(Step(sub.name, tuple((int(t),) for t in tokens), tuple(past), tuple(slots)))
        return out[: len(tokens)]

    def advance(self, token: int, past: int, slot: int) -> NDArray[np.float32]:
        """One more token of one sequence, by decode or, in a prefill-only artefact, by the smallest bucket.

        Returns:
            logits f32 [V].

        Raises:
            CalcError: as `decode` and `prefill`.
        """
        if self.decode_batches:
            return np.asarray(self.decode([token], [past], [slot])[0])
        return self.prefill([token], past=past, slot=slot)

    def kv(self, layer: int, slot: int, count: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """A layer's keys and values after `count` tokens: f32 [rows, kv_heads, dim] each, the newest last.

        All of them, or of a ring the last `window` ones.

        Raises:
            RuntimeFault: KV_RANGE.
        """
        return self.state(kv_name(layer, "key"), slot, count), self.state(kv_name(layer, "value"), slot, count)

    def state(self, name: str, slot: int, count: int) -> NDArray[np.float32]:
        """What a slot holds of a state after `count` tokens: f32 [rows, heads, dim]; see `kv`.

        Raises:
            RuntimeFault: KV_RANGE.
        """
        layout = self.manifest.states
        found = next((s for s in layout.states if s.name == name), None)
        if found is None or not (0 <= slot < layout.slots and 0 <= count <= layout.capacity):
            limits = f"a state of the manifest, slot below {layout.slots}, count up to {layout.capacity}"
            raise RuntimeFault(Problem("KV_RANGE", "kv", "no such rows", limits, f"{name}, {slot}, {count}"))
        rows = {"token": count, "ring": min(count, found.window or 0), "fixed": 1}[found.growth]
        kept = np.arange(count - rows, count) % found.rows if found.growth != "fixed" else np.zeros(1, np.int64)
        out = np.zeros((rows, found.heads, found.dim), np.float32)
        for part in found.parts:
            mem = self.machine.memories[part.chip]
            at = part.offset + slot * (found.part_bytes(part, layout.slots) // layout.slots)
            held = mem.host_read(at, DTYPES[found.dtype], (found.rows, part.heads, found.dim)).astype(np.float32)
            out[:, part.first_head : part.first_head + part.heads] = held[kept]
        return out

    def time(self, submodel: str, cur: Sequence[int], past: Sequence[int]) -> Counters:
        """The cost of one call on the artefact's target, without data."""
        sub = self._submodel(submodel)
        pad = [0] * (sub.batch - len(cur))
        csr = csr_file({PAST: [*past, *pad], CURRENT: [*cur, *pad], SLOT: list(range(sub.batch))})
        return self._timed_program(sub).run(csr)

    def _submodel(self, name: str) -> SubModel:
        for sub in self.manifest.submodels:
            if sub.name == name:
                return sub
        raise RuntimeFault(Problem("NO_SUCH_SUBMODEL", name, "the artefact has no such sub-model", got=name))

    def _program(self, sub: SubModel) -> LoadedProgram:
        if sub.name not in self._programs:
            nodes = {p.chip: p.nodes for p in sub.chip_map}
            self._programs[sub.name] = self.machine.load(self._code(sub), nodes)
        return self._programs[sub.name]

    def _timed_program(self, sub: SubModel) -> TimedProgram:
        timed = self._timed.pop(sub.name, None) or TimedProgram(self.target, self._code(sub))
        self._timed[sub.name] = timed
        while sum(t.records for t in self._timed.values()) > TIMED_RECORDS and len(self._timed) > 1:
            del self._timed[next(iter(self._timed))]
        return timed

    def _code(self, sub: SubModel) -> dict[int, Program]:
        """Its programs, decoded if a mode has done so already."""
        known = self._programs.get(sub.name) or self._timed.get(sub.name)
        if known is not None:
            return dict(known.code)
        return {p.chip: self.calbin.program(sub.name, p.chip) for p in sub.chip_map}

    def _write(self, desc: TensorDesc, data: NDArray[np.generic]) -> None:
        chip, offset = _address(desc)
        self.machine.memories[chip].host_write(offset, data)

    def _read(self, desc: TensorDesc) -> NDArray[np.float32]:
        chip, offset = _address(desc)
        return self.machine.memories[chip].host_read(offset, DTYPES[desc.dtype], desc.shape).astype(np.float32)


def _address(desc: TensorDesc) -> tuple[int, int]:
    """Chip and DRAM address of a tensor that lies on a chip."""
    if desc.at.chip is None or desc.at.offset is None:
        raise InternalError(f"{desc.name} has no place on a chip: {desc.at}")
    return desc.at.chip, desc.at.offset


def _named(tensors: Sequence[TensorDesc], name: str) -> list[TensorDesc]:
    """A tensor by its semantic name, never by its place in a list: on every chip that has it, or a part of it."""
    found = [t for t in tensors if t.name == name]
    if not found:
        known = ", ".join(t.name for t in tensors)
        raise RuntimeFault(Problem("NO_SUCH_TENSOR", name, "the sub-model has no such tensor", known, name))
    return found
