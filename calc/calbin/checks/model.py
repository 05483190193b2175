"""What a host relies on: versions, roles, chips, tensors, KV and golden vectors agree with each other."""

from __future__ import annotations

import hashlib
from math import prod

from calc.calbin.codec import Path
from calc.calbin.layout import DRIVER_VERSION, INT_MAX, MAX_CHIPS, MAX_RANK, RUNTIME_VERSION, version_text
from calc.calbin.manifest import StateDesc, SubModel, TensorDesc
from calc.calbin.report import Context
from calc.core.errors import UsageError
from calc.core.isa import CSR_STRIDE, CSRS, ISA_NAME, ISA_VERSION
from calc.core.roles import ROLES, WHICH, kv_name
from calc.core.state import Growth
from calc.core.target import parse_target
from calc.core.tensors import DTYPES

_NEWER = "install a newer calc, or compile the model again with this one"
_MIN_SRAM = 4096
_MIN_DRAM = 1024 * 1024


def check_compatibility(ctx: Context) -> None:
    """Which versions fit together (R10, R11). Raised as VersionError: CALBIN_ISA, CALBIN_RUNTIME, CALBIN_DRIVER."""
    c = ctx.manifest.compatibility
    path: Path = ("compatibility",)
    isa = f"{c.isa} {version_text(c.isa_version)}"
    if c.isa != ISA_NAME or c.isa_version[0] != ISA_VERSION[0] or c.isa_version[1] > ISA_VERSION[1]:
        what = "the programs are for another instruction set"
        expected = f"{ISA_NAME} {version_text(ISA_VERSION)}"
        ctx.report.add("CALBIN_ISA", (*path, "isa"), what, expected=expected, got=isa, hint=_NEWER)
    if c.runtime_min > RUNTIME_VERSION:
        what = "the artefact needs a newer runtime"
        got = f"{version_text(RUNTIME_VERSION)} is installed"
        ctx.report.add(
            "CALBIN_RUNTIME", (*path, "runtime_min"), what, expected=version_text(c.runtime_min), got=got, hint=_NEWER
        )
    if c.driver_min > DRIVER_VERSION:
        what = "the artefact needs a newer driver"
        got = f"{version_text(DRIVER_VERSION)} is installed"
        ctx.report.add(
            "CALBIN_DRIVER", (*path, "driver_min"), what, expected=version_text(c.driver_min), got=got, hint=_NEWER
        )
    ctx.report.raise_version()


def check_target(ctx: Context) -> None:
    """CALBIN_UNITS (R9), CALBIN_CHIP, CALBIN_TARGET_DIGEST, CALBIN_FORMAT_FIELD, CALBIN_CSR."""
    m = ctx.manifest
    for name, value, least in (
        ("sram_bytes", m.target.sram_bytes, _MIN_SRAM),
        ("dram_bytes", m.target.dram_bytes, _MIN_DRAM),
    ):
        if value < least:
            what = "a capacity this small is not in bytes (R9)"
            ctx.report.add("CALBIN_UNITS", ("target", name), what, expected=f"at least {least} bytes", got=value)
    if m.target.chips > MAX_CHIPS:
        ctx.report.add(
            "CALBIN_CHIP", ("target", "chips"), "too many chips", expected=f"at most {MAX_CHIPS}", got=m.target.chips
        )
    digest = hashlib.sha256(m.target.toml.encode()).hexdigest()
    if digest != m.target.digest:
        what = "the target's text does not have its digest"
        ctx.report.add("CALBIN_TARGET_DIGEST", ("target", "digest"), what, expected=digest, got=m.target.digest)
    try:
        parse_target(m.target.toml, m.target.name)
    except UsageError as e:
        what = "the target's text is not a target this version reads"
        ctx.report.add("CALBIN_TARGET_DIGEST", ("target", "toml"), what, got=str(e)[:200], hint="compile again")
    if m.compatibility.calbin != m.format:
        what = "the compatibility record names another format version"
        got = m.compatibility.calbin
        ctx.report.add("CALBIN_FORMAT_FIELD", ("compatibility", "calbin"), what, expected=m.format, got=got)
    indices: set[int] = set()
    for i, csr in enumerate(m.csrs):
        if csr.name not in CSRS or csr.index != CSRS.index(csr.name) or csr.count > CSR_STRIDE or csr.index in indices:
            what = "not a CSR array of this instruction set"
            expected = f"one of {', '.join(f'{n} = {k}' for k, n in enumerate(CSRS))}, at most {CSR_STRIDE} elements"
            ctx.report.add(
                "CALBIN_CSR",
                ("csrs", i),
                what,
                expected=expected,
                got=f"{csr.name} = {csr.index}, {csr.count} elements",
            )
        indices.add(csr.index)


def check_submodels(ctx: Context) -> None:
    """CALBIN_ROLE (R1, R4), CALBIN_BATCH and what the checks of one sub-model find."""
    m = ctx.manifest
    variants: set[tuple[str, int, int]] = set()
    for i, sub in enumerate(m.submodels):
        path: Path = ("submodels", i)
        role = ROLES[sub.role]
        if sub.model_type != role.model_type:
            what = "the model type contradicts the role (R1)"
            ctx.report.add("CALBIN_ROLE", (*path, "model_type"), what, expected=role.model_type, got=sub.model_type)
        if (sub.role, sub.batch, sub.seq) in variants:
            what = "two sub-models have the same role, batch and bucket: a host could not choose (R4)"
            ctx.report.add("CALBIN_ROLE", path, what, got=f"{sub.role}, batch {sub.batch}, seq {sub.seq}")
        variants.add((sub.role, sub.batch, sub.seq))
        if not role.several and sub.seq != 1:
            what = f"a {sub.role} sub-model takes one token"
            ctx.report.add("CALBIN_ROLE", (*path, "seq"), what, expected=1, got=sub.seq)
        if m.states.states and role.stateful and sub.batch > m.states.slots:
            what = "more sequences than the states have slots"
            ctx.report.add("CALBIN_BATCH", (*path, "batch"), what, expected=f"at most {m.states.slots}", got=sub.batch)
        if sub.seq > m.states.capacity:
            what = "the bucket is longer than a slot's capacity"
            ctx.report.add("CALBIN_STATE", (*path, "seq"), what, expected=f"at most {m.states.capacity}", got=sub.seq)
        _check_chips(ctx, sub, path)
        _check_tensors(ctx, sub, path)


def _check_chips(ctx: Context, sub: SubModel, path: Path) -> None:
    """CALBIN_CHIP, CALBIN_LAYERS (R3)."""
    m = ctx.manifest
    chips = sorted(part.chip for part in sub.chip_map)
    shards = sorted(s.chip for s in m.shards)
    if chips != list(range(len(chips))) or chips[-1] >= m.target.chips:
        what = "the chip map has a duplicate, a gap or a chip the target lacks"
        ctx.report.add(
            "CALBIN_CHIP", (*path, "chip_map"), what, expected=f"0, 1, ... up to {m.target.chips - 1}", got=chips
        )
    if sorted(sub.target_chips) != chips:
        what = "target chips and chip map differ (R3)"
        ctx.report.add("CALBIN_CHIP", (*path, "target_chips"), what, expected=chips, got=sub.target_chips)
    if shards != chips:
        what = "each chip of a sub-model needs a shard, and each shard a chip"
        ctx.report.add("CALBIN_CHIP", (*path, "chip_map"), what, expected=shards, got=chips)
    layers = {layer for part in sub.chip_map for layer in part.layers}
    twice = any(len(set(part.layers)) < len(part.layers) for part in sub.chip_map)
    if twice or layers != set(range(len(m.model.layers))):
        what = "the chips together do not have each layer of the model"
        expected = f"0 to {len(m.model.layers) - 1}, on each chip at most once"
        got = [part.layers for part in sub.chip_map]
        ctx.report.add("CALBIN_LAYERS", (*path, "chip_map"), what, expected=expected, got=got)
    for j, part in enumerate(sub.chip_map):
        for layer in part.layers:
            homes = ctx.state_chips.get(layer, {part.chip})
            if ROLES[sub.role].stateful and part.chip not in homes:
                what = "the layer runs on another chip than its states"
                at = (*path, "chip_map", j, "layers")
                expected = f"layer {layer} on one of chips {sorted(homes)}"
                ctx.report.add("CALBIN_STATE", at, what, expected=expected, got=f"chip {part.chip}")


def _check_tensors(ctx: Context, sub: SubModel, path: Path) -> None:
    """CALBIN_NO_TENSOR, CALBIN_UNBOUNDED (R5) and what `check_tensor` finds."""
    for side, tensors in (("inputs", sub.inputs), ("outputs", sub.outputs)):
        if not tensors:
            ctx.report.add("CALBIN_NO_TENSOR", (*path, side), f"a sub-model has no {side}", expected="at least one")
        for j, tensor in enumerate(tensors):
            at: Path = (*path, side, j)
            check_tensor(ctx, tensor, at)
            rows = (
                side == "inputs" and sub.seq > 1 and tensor.dtype == "i32" and tensor.shape[:2] == (sub.batch, sub.seq)
            )
            if rows and not any(v.axis == 1 for v in tensor.valid):
                what = "an input of one element per token does not say how many are valid (R5)"
                ctx.report.add(
                    "CALBIN_UNBOUNDED", (*at, "valid"), what, expected="axis 1 bounded by cur_seq_len", got=tensor.valid
                )
    _check_whole(ctx, sub, path)
    bounded = any(v.csr == "cur_seq_len" for t in sub.inputs for v in t.valid)
    if sub.seq > 1 and sub.inputs and not bounded:
        what = "no input is bounded by cur_seq_len, yet the bucket has room for several tokens (R5)"
        ctx.report.add("CALBIN_UNBOUNDED", (*path, "inputs"), what, expected="valid: cur_seq_len")


def _check_whole(ctx: Context, sub: SubModel, path: Path) -> None:
    """CALBIN_PART: an input is whole wherever it lies; an output is one tensor, or parts that make up the whole."""
    for j, tensor in enumerate(sub.inputs):
        if tensor.part is not None:
            what = "an input is a part: the host writes all of it on each chip"
            ctx.report.add("CALBIN_PART", (*path, "inputs", j, "part"), what, expected="none", got=tensor.part)
    by_name: dict[str, list[int]] = {}
    for j, tensor in enumerate(sub.outputs):
        by_name.setdefault(tensor.name, []).append(j)
    for found in by_name.values():
        at: Path = (*path, "outputs", found[0], "part")
        parts = [(sub.outputs[j].part, sub.outputs[j].shape) for j in found]
        if len(parts) == 1 and parts[0][0] is None:
            continue
        spans = sorted((p.start, p.start + s[p.axis]) for p, s in parts if p is not None and p.axis < len(s))
        wholes = {(p.axis, p.size) for p, _ in parts if p is not None}
        ends = [0, *(end for _, end in spans)]
        fit = len(spans) == len(parts) and len(wholes) == 1 and [a for a, _ in spans] == ends[:-1]
        if not fit or ends[-1] != next(iter(wholes))[1]:
            what = "the parts of an output do not make up the whole, side by side along one axis"
            ctx.report.add("CALBIN_PART", at, what, got=[p for p, _ in parts])


def check_tensor(ctx: Context, tensor: TensorDesc, path: Path) -> None:
    """CALBIN_TENSOR_RANK, _DIM and _BYTES, CALBIN_TILE, CALBIN_PADDED, CALBIN_VALID, CALBIN_LOCATION (R5)."""
    shape, tile, padded = tensor.shape, tensor.tile, tensor.padded_shape
    if not 1 <= len(shape) <= MAX_RANK or not len(shape) == len(tile) == len(padded):
        what = "shape, tile and padded shape have different or unusable ranks"
        got = (shape, tile, padded)
        ctx.report.add("CALBIN_TENSOR_RANK", (*path, "shape"), what, expected=f"one rank, 1 to {MAX_RANK}", got=got)
        return
    if min(shape) < 1 or prod(padded) > INT_MAX:
        what = "a dimension is zero or the number of elements overflows"
        ctx.report.add("CALBIN_TENSOR_DIM", (*path, "shape"), what, expected="1 to 2**62 elements", got=(shape, padded))
        return
    if min(tile) < 1:
        ctx.report.add("CALBIN_TILE", (*path, "tile"), "a tile has no extent (R5)", expected="at least 1", got=tile)
        return
    if any(p < s or p % t for p, s, t in zip(padded, shape, tile, strict=True)):
        what = "the padded shape is smaller than the logical one, or not whole tiles (R5)"
        ctx.report.add(
            "CALBIN_PADDED",
            (*path, "padded_shape"),
            what,
            expected=f"multiples of {tile}, at least {shape}",
            got=padded,
        )
    nbytes = prod(padded) * DTYPES[tensor.dtype].itemsize
    if tensor.at.nbytes != nbytes:
        what = "the tensor's size is not that of its padded shape and dtype"
        ctx.report.add("CALBIN_TENSOR_BYTES", (*path, "at", "nbytes"), what, expected=nbytes, got=tensor.at.nbytes)
    axes: set[int] = set()
    for k, valid in enumerate(tensor.valid):
        if valid.axis >= len(shape) or valid.axis in axes or valid.csr not in ctx.csrs:
            what = "a valid range names an axis the tensor lacks or bounds twice, or an unknown CSR"
            expected = f"axis below {len(shape)}, one of {sorted(ctx.csrs)}"
            ctx.report.add("CALBIN_VALID", (*path, "valid", k), what, expected=expected, got=valid)
        axes.add(valid.axis)
    at = tensor.at
    if (at.space == "dram") != (at.chip is not None) or (at.chip is None) != (at.offset is None):
        what = "a tensor in DRAM has a chip and an offset, one on the host has neither"
        ctx.report.add("CALBIN_LOCATION", (*path, "at"), what, got=at)


def check_states(ctx: Context) -> None:
    """CALBIN_STATE: names, layers, heads and rows fit each other, the model and the way the state grows."""
    m = ctx.manifest
    seen: set[str] = set()
    for i, state in enumerate(m.states.states):
        path: Path = ("states", "states", i)
        if state.name in seen:
            ctx.report.add("CALBIN_STATE", (*path, "name"), "two states have one name", got=state.name)
        seen.add(state.name)
        if state.layer is not None and state.layer >= len(m.model.layers):
            what = "a state of a layer that the model lacks"
            expected = f"below {len(m.model.layers)}"
            ctx.report.add("CALBIN_STATE", (*path, "layer"), what, expected=expected, got=state.layer)
            continue
        _check_rows(ctx, state, path)
        _check_parts(ctx, state, path)
        _check_layer(ctx, state, path)
    if not m.states.states and any(ROLES[sub.role].stateful for sub in m.submodels):
        ctx.report.add("CALBIN_STATE", ("states", "states"), "a language model keeps nothing between calls")
    _check_agreement(ctx)


def _least_rows(state: StateDesc, capacity: int) -> int:
    least: dict[Growth, int] = {"token": capacity, "ring": min(state.window or 1, capacity), "fixed": 1}
    return least[state.growth]


def _check_rows(ctx: Context, state: StateDesc, path: Path) -> None:
    layout = ctx.manifest.states
    least, tile = _least_rows(state, layout.capacity), 1 if state.growth == "fixed" else layout.tile
    if state.rows < least or state.rows % tile or (state.growth == "fixed" and state.rows != 1):
        what = f"a state that grows by {state.growth} does not hold what it must in whole tiles"
        expected = f"a multiple of {tile}, at least {least}"
        ctx.report.add("CALBIN_STATE", (*path, "rows"), what, expected=expected, got=state.rows)
    if (state.growth == "ring") != (state.window is not None):
        what = "a ring has a window, and nothing else has"
        got = f"{state.growth}, window {state.window}"
        ctx.report.add("CALBIN_STATE", (*path, "window"), what, got=got)


def _check_parts(ctx: Context, state: StateDesc, path: Path) -> None:
    """Every head on a chip; a head may lie on several, each chip has one part."""
    held, gap = 0, False
    for p in sorted(state.parts, key=lambda p: p.first_head):
        gap |= p.first_head > held
        held = max(held, p.first_head + p.heads)
    chips = [p.chip for p in state.parts]
    if gap or held != state.heads or len(set(chips)) < len(chips):
        what = "the parts do not hold every head, or hold what is none, or one chip has two"
        got = [(p.chip, p.first_head, p.heads) for p in state.parts]
        ctx.report.add("CALBIN_STATE", (*path, "parts"), what, expected=f"heads 0 to {state.heads - 1}", got=got)


def _check_layer(ctx: Context, state: StateDesc, path: Path) -> None:
    """Keys and values have the model's heads and widths."""
    which = state.name.rpartition(".")[2]
    if state.layer is None or which not in WHICH or state.name != kv_name(state.layer, which):
        return
    spec = ctx.manifest.model.layers[state.layer]
    needs = (spec.kv_heads, spec.key_dim if which == "key" else spec.value_dim)
    if (state.heads, state.dim) != needs:
        what = "heads or width differ from the model's layer"
        ctx.report.add("CALBIN_STATE", path, what, expected=needs, got=(state.heads, state.dim))


def _check_agreement(ctx: Context) -> None:
    """Sub-models that hand out a state as a tensor agree on it."""
    seen: dict[str, TensorDesc] = {}
    states = {s.name for s in ctx.manifest.states.states}
    for i, sub in enumerate(ctx.manifest.submodels):
        for side, tensors in (("inputs", sub.inputs), ("outputs", sub.outputs)):
            for j, tensor in enumerate(tensors):
                first = seen.setdefault(tensor.name, tensor)
                if tensor.name in states and tensor != first:
                    what = "sub-models disagree on a state's dtype, shape, layout or place"
                    at = ("submodels", i, side, j)
                    ctx.report.add("CALBIN_STATE", at, what, expected=f"as {first.shape}", got=tensor)
