"""The timing table: TTFT and TPOT over prompt and output lengths, on the artefact's target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from calc.calbin.reader import Calbin
from calc.core.spec import Frozen
from calc.sim.runtime import Device
from calc.sim.timing import Counters


class BenchRow(Frozen):
    """One case: a prompt, then `output` decode steps of `batch` sequences. Seconds and bytes are the target's.

    An artefact without decode has a row per prompt, with `output` and all of decode's numbers 0.
    """

    prompt: int
    output: int
    batch: int
    chunks: int
    ttft: float
    tpot: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    prefill_macs: int
    prefill_dram_bytes: int
    decode_macs: int
    decode_dram_bytes: int
    prefill_bound: str
    decode_bound: str


class BenchReport(Frozen):
    """All cases. Prompts that do not fit the capacity are in `skipped`."""

    model: str
    target: str
    quant: str
    rows: tuple[BenchRow, ...]
    skipped: tuple[str, ...]


def bench(
    calbin: Calbin, prompts: Sequence[int] = (1, 16, 128, 512, 2048), outputs: Sequence[int] = (32, 128)
) -> BenchReport:
    """Time every prompt and output length, for each decode batch. No data is computed.

    Args:
        calbin: the open artefact.
        prompts: prompt lengths in tokens.
        outputs: output lengths in tokens.
    """
    device = Device(calbin)
    target, capacity = device.target, calbin.manifest.states.capacity
    hz, call = target.rates.clock.value, target.costs.call.value
    rows, skipped = [], []
    for n in prompts:
        if n > capacity:
            skipped.append(f"prompt {n} > capacity {capacity}")
            continue
        steps = device.plan_prefill([0] * n, 0, 0)
        costs = [device.time(s.submodel, [len(t) for t in s.tokens], s.past) for s in steps]
        ttft = sum(c.cycles + call for c in costs) / hz
        prefill = _prefill(n, len(steps), costs, ttft)
        if not device.decode_batches:
            rows.append(BenchRow.model_validate({**prefill, **NO_DECODE}))
        for out in outputs if device.decode_batches else ():
            if n + out > capacity:
                skipped.append(f"prompt {n} + output {out} > capacity {capacity}")
                continue
            for sub in device.decode_batches:
                # cost is affine in the past but for tile borders: the middle of the output stands for its mean
                c = device.time(sub.name, [1] * sub.batch, [n + out // 2] * sub.batch)
                rows.append(BenchRow.model_validate({**prefill, **_decode(out, sub.batch, c, (c.cycles + call) / hz)}))
    return BenchReport(
        model=calbin.manifest.model.name,
        target=target.name,
        quant=calbin.manifest.provenance.options.get("quant", ""),
        rows=tuple(rows),
        skipped=tuple(skipped),
    )


NO_DECODE: dict[str, object] = {
    "output": 0,
    "batch": 1,
    "tpot": 0.0,
    "decode_tokens_per_second": 0.0,
    "decode_macs": 0,
    "decode_dram_bytes": 0,
    "decode_bound": "",
}
"""Decode's part of a row where there is no decode."""


def _prefill(n: int, chunks: int, costs: Sequence[Counters], ttft: float) -> dict[str, object]:
    """The prompt's part of a row."""
    return {
        "prompt": n,
        "chunks": chunks,
        "ttft": ttft,
        "prefill_tokens_per_second": n / ttft,
        "prefill_macs": sum(c.macs for c in costs),
        "prefill_dram_bytes": sum(c.dram_bytes for c in costs),
        "prefill_bound": _bound(costs),
    }


def _decode(output: int, batch: int, c: Counters, tpot: float) -> dict[str, object]:
    """Decode's part of a row."""
    return {
        "output": output,
        "batch": batch,
        "tpot": tpot,
        "decode_tokens_per_second": batch / tpot,
        "decode_macs": c.macs,
        "decode_dram_bytes": c.dram_bytes,
        "decode_bound": c.bound,
    }


def _bound(costs: Sequence[Counters]) -> str:
    """The busiest resource over all calls."""
    busy: Counter[str] = Counter()
    for c in costs:
        busy.update(c.busy)
    return busy.most_common(1)[0][0]
