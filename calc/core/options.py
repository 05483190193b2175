"""What a user may ask of a compile, and what comes back."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import Field

from calc.core.spec import Frozen

Progress = Callable[[str, int, int], None]
"""Told (stage, steps done, steps in all); a total of 0 means unknown."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Report nothing."""


class CompileOptions(Frozen):
    """Options of a compile.

    Attributes:
        target: a bundled target's name or the path of a TOML file.
        quant: a scheme's name (`calc.core.schemes`) or the path of a recipe.
        prefill: sequence buckets. Longer prompts run in chunks. None at all makes a decode-only artefact.
        batch: decode batches; batch 1 is compiled beside them. None at all makes a prefill-only artefact.
        max_seq_len: tokens a KV slot holds; None takes the model's context, at most 4096.
        jobs: worker threads that read and pack weights. The result does not depend on it.
        golden: make golden vectors (needs torch and transformers).
        split: how the model is split over the target's chips; None takes the target's way.
        check_passes: run the graph in ONNX Runtime after every pass; None does so for models under 50 M parameters.
    """

    target: str = "calculet-1chip"
    quant: str = "bf16"
    prefill: tuple[int, ...] = (128,)
    batch: tuple[int, ...] = (1,)
    max_seq_len: int | None = Field(default=None, gt=0)
    jobs: int = Field(default=1, gt=0, le=256)
    golden: bool = True
    check_passes: bool | None = None
    split: str | None = None


class RowBlock(Frozen):
    """A way to work through a bucket's rows in blocks that SRAM has room for.

    Attributes:
        kind: where the graph is cut into regions that share a loop over blocks: whole (nowhere), narrow (where one
            value is handed on), calls (everywhere).
        rows: rows of a block, for each size in use.
        weight_reads: how often the weights of the region with the smallest block are read.
        weight_bytes: weights that a full bucket reads.
        spill_bytes: activations that it writes to DRAM and reads back.
        cycles: bytes and MACs at the target's rates, overlapping: what candidates are compared by.
        seconds: the same on the target's clock.
    """

    kind: str
    rows: tuple[int, ...]
    weight_reads: int
    weight_bytes: int
    spill_bytes: int
    cycles: int
    seconds: float


class VariantReport(Frozen):
    """One sub-model: size of its programs and its cost at a full bucket on the target's clock."""

    name: str
    role: str
    batch: int
    seq: int
    past: int
    instructions: int
    sram_peak: tuple[int, ...]
    macs: int
    vector_ops: int
    dram_bytes: int
    link_bytes: int
    cycles: int
    seconds: float
    tokens_per_second: float
    bound: str
    row_blocks: tuple[RowBlock, ...] = ()


class RungReport(Frozen):
    """One comparison of the verification ladder. None where it has not been measured."""

    name: str
    reference: str
    metric: str
    logits: float | None
    kv: float | None
    gate_logits: float
    gate_kv: float
    ok: bool


class CompileReport(Frozen):
    """What a compile made, or would make (``--dry-run``). Sizes are bytes."""

    model: str
    family: str
    parameters: int
    target: str
    chips: int
    quant: str
    max_seq_len: int
    slots: int
    layers_per_chip: tuple[int, ...]
    shard_bytes: tuple[int, ...]
    kv_bytes: tuple[int, ...]
    dram_bytes: tuple[int, ...]
    dram_capacity: int
    sram_capacity: int
    variants: tuple[VariantReport, ...]
    rungs: tuple[RungReport, ...]
    path: str | None
    nbytes: int
