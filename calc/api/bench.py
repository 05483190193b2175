"""The timing table: TTFT and TPOT over prompt and output lengths, on the artefact's target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from calc.calbin.reader import Calbin
from calc.core.spec import Frozen
from calc.sim.runtime import Device
from calc.sim.timing import Counters


class BenchRow(Frozen):
    """One case: a prompt, then `output` decode steps of `batch` sequences. Seconds and bytes are the target's."""

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
        for out in outputs:
            if n + out > capacity:
                skipped.append(f"prompt {n} + output {out} > capacity {capacity}")
                continue
            for sub in device.decode_batches or device.prefill_buckets[:1]:
                # a prefill-only artefact takes one more token through its smallest bucket
                # cost is affine in the past but for tile borders: the middle of the output stands for its mean
                c = device.time(sub.name, [1] * sub.batch, [n + out // 2] * sub.batch)
                tpot = (c.cycles + call) / hz
                rows.append(
                    BenchRow(
                        prompt=n,
                        output=out,
                        batch=sub.batch,
                        chunks=len(steps),
                        ttft=ttft,
                        tpot=tpot,
                        prefill_tokens_per_second=n / ttft,
                        decode_tokens_per_second=sub.batch / tpot,
                        prefill_macs=sum(c.macs for c in costs),
                        prefill_dram_bytes=sum(c.dram_bytes for c in costs),
                        decode_macs=c.macs,
                        decode_dram_bytes=c.dram_bytes,
                        prefill_bound=_bound(costs),
                        decode_bound=c.bound,
                    )
                )
    return BenchReport(
        model=calbin.manifest.model.name,
        target=target.name,
        quant=calbin.manifest.provenance.options.get("quant", ""),
        rows=tuple(rows),
        skipped=tuple(skipped),
    )


def _bound(costs: Sequence[Counters]) -> str:
    """The busiest resource over all calls."""
    busy: Counter[str] = Counter()
    for c in costs:
        busy.update(c.busy)
    return busy.most_common(1)[0][0]
