"""The calbin manifest: everything a host or a simulator must know, so that no reader has to guess (``docs/calbin.md``).

The models are frozen and refuse unknown fields. They are the single source of ``schemas/calbin-manifest.schema.json``.
Offsets and sizes are bytes. Names are semantic and unique; roles, layouts and tiles are explicit (R1-R6).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, WithJsonSchema

from calc.core.packing import FORMATS
from calc.core.roles import ModelType, RoleName
from calc.core.schemes import schemes
from calc.core.spec import Frozen, ModelSpec, one_of
from calc.core.state import ITEMSIZE, Growth, StateDType

Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, le=2**62)]
Positive = Annotated[int, Field(gt=0, le=2**62)]
Dims = Annotated[tuple[Count, ...], Field(max_length=8)]
DTypeName = Literal["f32", "bf16", "i8", "i32", "u8"]

WEIGHT_FORMATS = ("f32", *FORMATS)
SchemeName = Annotated[str, one_of(schemes), WithJsonSchema({"type": "string", "enum": list(schemes())})]
WeightFormat = Annotated[
    str, one_of(lambda: WEIGHT_FORMATS), WithJsonSchema({"type": "string", "enum": list(WEIGHT_FORMATS)})
]

SectionKind = Literal["program", "weights", "golden", "tokenizer", "graph"]


class Section(Frozen):
    """A contiguous range of the file, 4096-aligned. `chunks` are digests of each 64 MiB of it."""

    name: Name
    kind: SectionKind
    offset: Positive
    nbytes: Count
    sha256: Sha256
    chunks: tuple[Sha256, ...]


class ValidRange(Frozen):
    """Which CSR bounds an axis at run time: elements at or past the CSR's value are not valid."""

    axis: Count
    csr: Name


class Location(Frozen):
    """Where a tensor lives. `chip` and `offset` (into the chip's DRAM) are None for host tensors."""

    space: Literal["dram", "host"]
    chip: Count | None = None
    offset: Count | None = None
    nbytes: Positive


class TensorPart(Frozen):
    """Which part of a whole a tensor is: elements from `start` on along `axis`, of `size`."""

    axis: Count
    start: Count
    size: Positive


class TensorDesc(Frozen):
    """An input, output or state tensor of a sub-model.

    An input may lie on several chips: the host writes each. An output's parts lie side by side along one axis.

    Attributes:
        shape: logical dimensions; `padded_shape` is what memory holds; `tile` is the layout's tile per dimension.
        layout: ``row_major`` (last axis contiguous).
        valid: which CSRs bound which axes.
        at: where it lives; the host writes inputs and reads outputs there.
    """

    name: Name
    dtype: DTypeName
    shape: Dims
    layout: Literal["row_major"]
    tile: Dims
    padded_shape: Dims
    valid: tuple[ValidRange, ...] = ()
    part: TensorPart | None = None
    at: Location


class WeightDesc(Frozen):
    """A weight in a chip's shard.

    The formats of `calc.core.packing` are packed GEMM tiles (``docs/calbin.md``): `tile_rows` rows each, the last may
    be short. `f32` is a plain row-major array. `sources` are the checkpoint tensors it was made from.
    """

    name: Name
    chip: Count
    offset: Count
    nbytes: Positive
    format: WeightFormat
    shape: Dims
    padded_shape: Dims
    tile_rows: Count = 0
    group: Count = 0
    bias: bool = False
    experts: Count = 0
    sources: tuple[Name, ...]


class ShardDesc(Frozen):
    """One chip's weights: the section that holds them and where the runtime puts it in DRAM."""

    chip: Count
    section: Name
    dram_offset: Count
    nbytes: Count


class MemoryRegion(Frozen):
    """A named range of a chip's SRAM or DRAM. `first`..`last` are the program steps during which it is live."""

    name: Name
    space: Literal["sram", "dram"]
    chip: Count
    offset: Count
    nbytes: Positive
    first: Count = 0
    last: Count = 0


class Workload(Frozen):
    """What one call costs at a full bucket (`past` = 0 for prefill, capacity - 1 for decode). Never zero (R2)."""

    macs: Positive
    vector_ops: Positive
    dram_bytes: Positive
    host_bytes: Positive
    link_bytes: Count
    cycles: Positive


class ChipPart(Frozen):
    """What one chip does in a sub-model: its layers, program, source-node names and memory."""

    chip: Count
    layers: tuple[Count, ...]
    program: Name
    instructions: Positive
    nodes: tuple[str, ...]
    sram_peak: Positive
    regions: tuple[MemoryRegion, ...]


class SubModel(Frozen):
    """One compiled variant. The host chooses by `role`, `batch` and `seq`, never by `name` (R4)."""

    name: Name
    role: RoleName
    model_type: ModelType
    batch: Positive
    seq: Positive
    workload: Workload
    target_chips: Annotated[tuple[Count, ...], Field(min_length=1)]
    chip_map: Annotated[tuple[ChipPart, ...], Field(min_length=1)]
    inputs: tuple[TensorDesc, ...]
    outputs: tuple[TensorDesc, ...]


class StatePart(Frozen):
    """The heads of a state that one chip holds: `heads` of them from `first_head` on, at `offset` in its DRAM."""

    chip: Count
    offset: Count
    first_head: Count
    heads: Positive


class StateDesc(Frozen):
    """One state: what a slot keeps of a sequence between calls.

    A slot holds `rows` rows of ``heads * dim`` elements; slots lie one behind another in each part. How token t's row
    is found depends on `growth`: ``token`` at row t; ``ring`` at row ``t mod rows`` (the last `window` tokens count);
    ``fixed`` has one row for the whole sequence, which the host clears before a sequence's first call. `layer` is None
    for a state outside of the layers.
    """

    name: Name
    layer: Count | None
    dtype: StateDType
    heads: Positive
    dim: Positive
    growth: Growth
    window: Positive | None
    rows: Positive
    parts: Annotated[tuple[StatePart, ...], Field(min_length=1)]

    def part_bytes(self, part: StatePart, slots: int) -> int:
        """Bytes of a part, all slots."""
        return slots * self.rows * part.heads * self.dim * ITEMSIZE[self.dtype]


class StateLayout(Frozen):
    """All states, shared by every sub-model. `capacity` is in tokens per slot; growing rows are whole `tile` rows."""

    slots: Positive
    capacity: Positive
    tile: Positive
    states: tuple[StateDesc, ...]


class Csr(Frozen):
    """A control register array the host sets before a call; element b belongs to sequence b of the batch."""

    name: Name
    index: Count
    count: Positive


class QuantEntry(Frozen):
    """The scheme that was applied to one weight."""

    weight: Name
    scheme: SchemeName
    group: Count = 0
    flushed: Count = 0
    saturated: Count = 0


class Rung(Frozen):
    """One comparison of the verification ladder, as measured at compile time, and its gate.

    `candidate` is compared with `reference`; both name an entry of the golden section or an executor.
    """

    name: Literal["exported", "fused", "bf16", "quantized", "program"]
    reference: Name
    candidate: Name
    metric: Literal["max_abs", "rel_rms"]
    logits: float | None
    kv: float | None
    gate_logits: float
    gate_kv: float
    why: str


class Golden(Frozen):
    """Golden vectors: `tokens` were run whole through transformers in fp32.

    The replay is a prefill of `prompt` tokens and `steps` decode steps. `logits_rows` are the positions whose logits
    the reference has, the replay's among them; `arrays` of the manifest says where they are.
    """

    section: Name
    tokens: tuple[Count, ...]
    prompt: Positive
    steps: Positive
    logits_rows: tuple[Count, ...]
    kv_layers: tuple[Count, ...]
    rungs: tuple[Rung, ...]


class Array(Frozen):
    """An array inside the golden section: row-major, little endian."""

    name: Name
    dtype: Literal["f32", "bf16", "i32"]
    shape: Dims
    offset: Count
    nbytes: Count


class Provenance(Frozen):
    """Where the artefact comes from. Nothing here depends on time, path, locale or worker count."""

    source_sha256: str
    calc: str
    versions: dict[str, str]
    passes: tuple[str, ...]
    options: dict[str, str]


class Compatibility(Frozen):
    """Which versions fit together (R11)."""

    isa: Name
    isa_version: tuple[int, int]
    calbin: tuple[int, int]
    runtime_min: tuple[int, int]
    driver_min: tuple[int, int]


class TargetDesc(Frozen):
    """The machine the artefact was compiled for. Capacities are bytes per chip, not MiB (R9)."""

    name: Name
    chips: Positive
    sram_bytes: Positive
    dram_bytes: Positive
    digest: Sha256
    toml: str


class File(Frozen):
    """A file inside a section (tokenizer.json, a graph): a name and a range of the section."""

    name: Name
    section: Name
    offset: Count
    nbytes: Count


class Manifest(Frozen):
    """The whole manifest of calbin 1.0."""

    format: tuple[int, int]
    model: ModelSpec
    target: TargetDesc
    sections: tuple[Section, ...]
    submodels: Annotated[tuple[SubModel, ...], Field(min_length=1)]
    shards: Annotated[tuple[ShardDesc, ...], Field(min_length=1)]
    weights: tuple[WeightDesc, ...]
    states: StateLayout
    csrs: tuple[Csr, ...]
    quantization: tuple[QuantEntry, ...]
    golden: Golden | None
    arrays: tuple[Array, ...]
    files: tuple[File, ...]
    dram: tuple[MemoryRegion, ...]
    provenance: Provenance
    compatibility: Compatibility
