"""Partition and place: which layers each chip runs, and where weights, KV and inputs/outputs lie in its DRAM.

A chip's DRAM, from address 0: weight shard, KV cache (per layer, keys then values, slot after slot), inputs and
outputs (shared by all sub-models). Every range starts on a multiple of 64 bytes, which the target's alignment divides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from calc.core.errors import CapacityError, Problem
from calc.core.isa import Space
from calc.core.packing import TileLayout, align
from calc.core.spec import ModelSpec
from calc.core.target import Target
from calc.core.tensors import RowsTensor, TensorRef
from calc.core.variant import Variant
from calc.kernels import registry
from calc.kernels.base import Call
from calc.kernels.emit import Buffer, Packed, Plain
from calc.kernels.lowering import KvBuffers
from calc.passes.lower import ChipMemory, io_buffers
from calc.passes.pack import Placed

KV_ROW_MULTIPLE = 16


@dataclass(frozen=True)
class Placement:
    """The whole board's memory.

    Attributes:
        layer_chip: chip of each decoder layer.
        chips: each chip's memory as the lowering sees it.
        weights: each chip's weights in shard order.
        kv_bytes, io_bytes: bytes per chip.
        dynamic: bytes per chip after the shard.
        rows: KV rows per slot.
        slots: KV slots.
    """

    layer_chip: tuple[int, ...]
    chips: Mapping[int, ChipMemory]
    weights: Mapping[int, tuple[Placed, ...]]
    kv_bytes: Mapping[int, int]
    io_bytes: int
    dynamic: Mapping[int, int]
    rows: int
    slots: int

    def chip_of(self, call: Call) -> int:
        """The chip a call runs on: its layer's, the first for the embedding, the last for the head."""
        if call.layer is not None:
            return self.layer_chip[call.layer]
        return max(self.chips) if call.op in ("LmHead", "RmsNorm") else 0


def weight_handle(call: Call, formal: str, target: Target, offset: int) -> Packed:
    """How a matrix weight is packed: as few tiles as the ring's slot allows, rows a multiple of the target's lanes."""
    shape, scheme = call.shape(formal), call.schemes[formal]
    fmt, group = scheme.format.name, scheme.group
    rows, cols = shape[-2:]
    bias = call.op == "Linear" and bool(call.attrs["bias"])
    multiple, limit = int(target.tiling.row_multiple.value), int(target.tiling.weight_tile.value)
    full = TileLayout(fmt, rows, cols, rows, group, bias)
    count = -(-full.nbytes // limit)
    while True:
        tile_rows = align(-(-rows // count), multiple)
        lay = TileLayout(fmt, rows, cols, tile_rows, group, bias)
        if lay.tile_bytes(min(tile_rows, rows)) <= limit:
            break
        if tile_rows == multiple:
            raise CapacityError(
                Problem(
                    "TILE_TOO_LARGE",
                    call.inputs[formal],
                    f"{multiple} rows of the weight do not fit a slot of the weight ring",
                    f"at most {limit} bytes",
                    str(lay.tile_stride),
                    "raise tiling.weight_tile in the target",
                )
            )
        count += 1
    return Packed(call.inputs[formal], offset, lay, scheme, shape[0] if len(shape) == 3 else 0)


def place(
    spec: ModelSpec,
    calls: Sequence[Call],
    weights: Mapping[str, TensorRef],
    target: Target,
    variants: Sequence[Variant],
    max_seq_len: int,
    slots: int,
) -> Placement:
    """Place everything.

    Args:
        spec: the model.
        calls: one variant's calls, schemes bound (all variants use the same weights).
        weights: lazy references by name.
        target: chips and capacities.
        variants: all static shapes, for the inputs and outputs.
        max_seq_len: KV capacity in tokens.
        slots: KV slots.

    Raises:
        CapacityError: DRAM_TOO_SMALL per chip, with what is missing and what would fit; TILE_TOO_LARGE.
    """
    size = _layer_bytes(calls, target, spec)
    layer_chip = split_layers(size, target.chips)
    last = target.chips - 1
    placed: dict[int, dict[str, Placed]] = {c: {} for c in range(target.chips)}
    end = dict.fromkeys(placed, 0)
    for call in calls:
        chip = layer_chip[call.layer] if call.layer is not None else last if call.op in ("LmHead", "RmsNorm") else 0
        for item in _weights_of(call, weights, target, end[chip], max_seq_len, placed[chip]):
            placed[chip][item.handle.name] = item
            end[chip] = align(item.handle.offset + item.handle.nbytes, 64)
    rows = align(max_seq_len, KV_ROW_MULTIPLE)
    io_bytes = max(io_buffers(v, spec.vocab, 0)[1] for v in variants)
    chips, kv_bytes, dynamic = {}, {}, {}
    problems: list[tuple[int, Problem]] = []
    for chip, items in placed.items():
        shard = align(end[chip], 4096)  # a chip without work has none
        kv, at = _kv(spec, layer_chip, chip, shard, rows, slots)
        kv_bytes[chip] = at - shard
        dynamic[chip] = align(kv_bytes[chip] + io_bytes, 4096)
        need = shard + dynamic[chip]
        if need > target.dram_bytes:
            what = (
                f"{need}: weights {shard}, KV {kv_bytes[chip]} ({slots} slots of {max_seq_len} tokens), io {io_bytes}"
            )
            fits = _tokens_that_fit(target.dram_bytes - shard, kv_bytes[chip] // rows, io_bytes)
            problems.append((fits, _too_small(chip, need, what, target)))
        handles = {n: p.handle for n, p in items.items()}
        # inputs and outputs are laid out per sub-model at lowering time, from the same base
        chips[chip] = ChipMemory(handles, shard, kv, {"io": Buffer("io", Space.DRAM, io_bytes, base=at)})
    if problems:
        hint = _what_fits(min(fits for fits, _ in problems), max(v.seq for v in variants))
        raise CapacityError([replace(p, hint=hint) for _, p in problems])
    return Placement(
        layer_chip, chips, {c: tuple(p.values()) for c, p in placed.items()}, kv_bytes, io_bytes, dynamic, rows, slots
    )


def _too_small(chip: int, need: int, what: str, target: Target) -> Problem:
    return Problem(
        "DRAM_TOO_SMALL",
        f"chip {chip}",
        f"{need - target.dram_bytes} bytes more DRAM are needed than the target has",
        f"at most {target.dram_bytes}",
        what,
    )


def _tokens_that_fit(room: int, per_token: int, io: int) -> int:
    """The KV capacity that the memory beside the shard has room for."""
    return max(0, (room // 4096 * 4096 - io) // max(1, per_token) // KV_ROW_MULTIPLE * KV_ROW_MULTIPLE)


def _what_fits(tokens: int, bucket: int) -> str:
    if not tokens:
        return "the weights alone do not fit: use a smaller scheme (--quant) or more chips"
    smaller = f" with --prefill {tokens}" if tokens < bucket else ""
    return f"--max-seq-len {tokens}{smaller} would fit"


def _kv(
    spec: ModelSpec, layer_chip: Sequence[int], chip: int, base: int, rows: int, slots: int
) -> tuple[dict[int, KvBuffers], int]:
    out: dict[int, KvBuffers] = {}
    at = base
    for i, layer in enumerate(spec.layers):
        if layer_chip[i] != chip:
            continue
        bufs, widths = [], []
        for which, dim in (("key", layer.key_dim), ("value", layer.value_dim)):
            row = layer.kv_heads * dim * 2
            n = slots * rows * row
            bufs.append(Buffer(f"kv.{i}.{which}", Space.DRAM, n, base=at))
            widths.append(row)
            at = align(at + n, 64)
        out[i] = KvBuffers(bufs[0], bufs[1], widths[0], widths[1], rows)
    return out, at


def split_layers(size: Sequence[int], chips: int) -> tuple[int, ...]:
    """Contiguous layers per chip so that the largest share is as small as can be.

    Args:
        size: bytes before the layers, of each layer, after the layers.
        chips: number of chips; the first also has what is before the layers, the last what is after.

    Returns:
        The chip of each layer. With fewer layers than chips the last chips share none.
    """
    head, *layers, tail = size
    n = len(layers)

    def fill(limit: int) -> list[int] | None:
        out, chip, used = [], 0, head
        for s in layers:
            if used + s > limit and chip < chips - 1:
                chip, used = chip + 1, 0
            used += s
            out.append(chip)
        loads = [0] * chips
        loads[0] += head
        loads[chips - 1] += tail
        for c, s in zip(out, layers, strict=True):
            loads[c] += s
        return out if max(loads) <= limit else None

    low, high = 0, sum(size)
    best = fill(high) or [0] * n
    while low < high:
        mid = (low + high) // 2
        found = fill(mid)
        if found is None:
            low = mid + 1
        else:
            best, high = found, mid
    return tuple(best)


def _layer_bytes(calls: Sequence[Call], target: Target, spec: ModelSpec) -> list[int]:
    n = len(spec.layers)
    out = [0] * (n + 2)
    problems: dict[str, Problem] = {}
    for call in calls:
        at = call.layer + 1 if call.layer is not None else n + 1 if call.op in ("LmHead", "RmsNorm") else 0
        for formal in registry()[call.op].weights(call.attrs):
            name = call.inputs[formal]
            try:
                out[at] += weight_handle(call, formal, target, 0).nbytes
            except CapacityError as e:
                problems[name] = e.problems[0]
    if problems:
        raise CapacityError(problems.values())
    return out


PLAIN_FORMALS = ("gamma", "q_gamma", "k_gamma", "cos", "sin")


def _weights_of(
    call: Call,
    weights: Mapping[str, TensorRef],
    target: Target,
    at: int,
    max_seq_len: int,
    have: Mapping[str, Placed],
) -> list[Placed]:
    out: list[Placed] = []
    matrices = registry()[call.op].weights(call.attrs)
    for formal, name in call.inputs.items():
        if name in have or any(p.handle.name == name for p in out):
            continue
        if formal in matrices:
            handle = weight_handle(call, formal, target, at)
            bias = weights[call.inputs[f"b{formal[1:]}"]] if handle.layout.bias else None
            out.append(Placed(handle, weights[name], bias))
        elif formal in PLAIN_FORMALS:
            ref = weights[name]
            if formal in ("cos", "sin"):
                # tables are exported long enough for a padded bucket; the NPU reads valid positions only
                ref = RowsTensor(ref, 0, min(max_seq_len, ref.shape[0]))
            out.append(Placed(Plain(name, at, ref.shape), ref, None))
        else:
            continue
        at = align(out[-1].handle.offset + out[-1].handle.nbytes, 64)
    return out
