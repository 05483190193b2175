"""A chip's memories, seen two ways.

`FastMemory` hands out views; weight tiles are not copied, a ring slot remembers which tile of the shard it stands for
and the decoded tile is kept. `StrictMemory` copies every byte, and checks every access: bounds, use before load, and
order between engines.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from calc.core.errors import Problem, RuntimeFault
from calc.core.isa import DType, Space, Tile
from calc.core.packing import unpack_int4
from calc.sim.program import Ins, Operand, Regs

NP: dict[int, np.dtype[np.generic]] = {
    DType.F32: np.dtype(np.float32),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.I8: np.dtype(np.int8),
    DType.I32: np.dtype(np.int32),
    DType.U8: np.dtype(np.uint8),
}
Bytes = NDArray[np.uint8]
Run = Callable[[Regs], None]
Access = Callable[[Regs, tuple[int, ...]], NDArray[Any]]

INT8_EXACT_K = 1024
"""int8 products summed in FP32 are exact up to this many: 1024 * 127 * 127 < 2^24."""


@dataclass(frozen=True)
class TileSpec:
    """What a GEMM record says of its packed tile: n rows of k codes, `row_bytes` apart, and where the rest lies."""

    fmt: int
    n: int
    k: int
    row_bytes: int
    scales: int
    bias: int
    has_bias: bool
    group: int
    nbytes: int


@dataclass(frozen=True)
class DecodedTile:
    """A packed tile as the matrix engine sees it: values f32 [n, k], or codes, where rows have scales; bias."""

    values: NDArray[np.float32]
    row_scale: NDArray[np.float32] | None
    bias: NDArray[np.float32] | None


def decode_tile(raw: Bytes, spec: TileSpec) -> DecodedTile:
    """Decode a packed tile's bytes (``docs/calbin.md``, packed tiles)."""
    n, k = spec.n, spec.k
    rows = raw[: n * spec.row_bytes].reshape(n, spec.row_bytes)
    scale = None
    if spec.fmt == Tile.BF16:
        values = rows.view(NP[DType.BF16])[:, :k].astype(np.float32)
    elif spec.fmt == Tile.W8:
        values = rows.view(np.int8)[:, :k].astype(np.float32)
        scale = raw[spec.scales : spec.scales + 4 * n].view(np.float32).copy()
    else:
        groups = -(-k // spec.group)
        zeros = spec.scales + 2 * n * groups
        s = raw[spec.scales : zeros].view(NP[DType.BF16]).reshape(n, groups).astype(np.float32)
        if spec.fmt == Tile.W4:
            codes = unpack_int4(rows)[:, :k].astype(np.float32)
        else:
            width = (groups + 1) // 2
            zero = _nibbles(raw[zeros : zeros + n * width].reshape(n, width))[:, :groups]
            codes = _nibbles(rows)[:, :k] - np.repeat(zero, spec.group, axis=1)[:, :k]
        values = codes * np.repeat(s, spec.group, axis=1)[:, :k]
    bias = raw[spec.bias : spec.bias + 4 * n].view(np.float32).copy() if spec.has_bias else None
    return DecodedTile(np.ascontiguousarray(values), scale, bias)


def _nibbles(packed: Bytes) -> NDArray[np.float32]:
    """Unsigned 4-bit values, the low nibble first: [n, bytes] to f32 [n, 2 bytes]."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1).astype(np.float32)


class TileCache:
    """Decoded weight tiles, least recently used out first once `budget` bytes are held."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.held = 0
        self._tiles: OrderedDict[tuple[int, int], DecodedTile] = OrderedDict()

    def get(self, chip: int, address: int, raw: Callable[[], Bytes], spec: TileSpec) -> DecodedTile:
        """The decoded tile at a shard address."""
        key = (chip, address)
        tile = self._tiles.get(key)
        if tile is None:
            tile = decode_tile(raw(), spec)
            self._tiles[key] = tile
            self.held += tile.values.nbytes
            while self.held > self.budget and len(self._tiles) > 1:
                _, old = self._tiles.popitem(last=False)
                self.held -= old.values.nbytes
        elif self.held > self.budget // 2:
            self._tiles.move_to_end(key)
        return tile


def out_of_bounds(chip: int, op: Operand, address: int, shape: tuple[int, ...], limit: int) -> RuntimeFault:
    """The fault of an access outside a memory."""
    return RuntimeFault(
        Problem(
            "SIM_OUT_OF_BOUNDS",
            f"chip {chip} {Space(op.space).name}",
            "an access lies outside the memory",
            expected=f"0..{limit}",
            got=f"{shape} of {DType(op.dtype).name} at {address}, steps {op.steps}",
        )
    )


def extent(shape: tuple[int, ...], steps: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Lowest and one past the highest byte touched, relative to the address."""
    low = sum(min(0, (n - 1) * s) for n, s in zip(shape, steps, strict=False) if n > 0)
    high = sum(max(0, (n - 1) * s) for n, s in zip(shape, steps, strict=False) if n > 0)
    return low, high + itemsize


SHAPES_KEPT = 8
"""Views of one operand that are kept: decode needs one, prompts as many as there are lengths."""


def _remembered(view: Access) -> Access:
    """An operand whose address never changes: one view per shape, made once."""
    made: dict[tuple[int, ...], NDArray[Any]] = {}

    def get(regs: Regs, shape: tuple[int, ...]) -> NDArray[Any]:
        found = made.get(shape)
        if found is None:
            if len(made) >= SHAPES_KEPT:
                made.clear()  # prompts of many lengths: views are cheap to make again
            found = made[shape] = view(regs, shape)
        return found

    return get


class FastMemory:
    """Memories of one chip without checks beyond numpy's own bounds.

    Args:
        chip: its number.
        sram: bytes of SRAM.
        shard: the read-only weights, at DRAM address 0.
        dynamic: bytes of DRAM after the shard (KV, inputs, outputs).
        cache: where decoded weight tiles are kept.
    """

    def __init__(self, chip: int, sram: int, shard: Bytes, dynamic: int, cache: TileCache) -> None:
        self.chip = chip
        self.sram: Bytes = np.zeros(sram, np.uint8)
        self.shard = shard
        self.dynamic: Bytes = np.zeros(dynamic, np.uint8)
        self.split = len(shard)
        self.cache = cache
        self.slots: dict[int, int] = {}
        self.links: dict[tuple[int, int], deque[Any]] = defaultdict(deque)

    def host_write(self, address: int, data: NDArray[np.generic]) -> None:
        """The host writes DRAM (inputs)."""
        raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        self._dram(address, raw.nbytes)[: raw.nbytes] = raw

    def host_read(self, address: int, dtype: int, shape: tuple[int, ...]) -> NDArray[np.generic]:
        """The host reads DRAM (outputs, KV): a copy."""
        n = int(np.prod(shape)) * NP[dtype].itemsize
        return self._dram(address, n)[:n].view(NP[dtype]).reshape(shape).copy()

    def _dram(self, address: int, nbytes: int) -> Bytes:
        a = address - self.split
        if a < 0 or a + nbytes > len(self.dynamic):
            op = Operand(Space.DRAM, DType.U8, address, (), ())
            raise out_of_bounds(self.chip, op, address, (nbytes,), self.split + len(self.dynamic))
        return self.dynamic[a : a + nbytes]

    # -- what a mode does around records -----------------------------------------------------------------------------

    def start(self) -> None:
        """A call starts."""

    def finish(self) -> None:
        """The program has halted."""

    def order(self, ins: Ins, node: str) -> Run | None:
        """What executes a WAIT or SIGNAL that came from graph node `node`; None if the mode needs no order."""
        return None

    def data(self, ins: Ins, node: str, run: Run) -> Run:
        """What executes a data record that came from graph node `node`, given its bare closure."""
        return run

    def sload(self, ins: Ins, regs: Regs) -> int:
        """One i32 of SRAM, for the control engine."""
        return int(self.read(ins.operands["a"])(regs, ())[()])

    # -- access ------------------------------------------------------------------------------------------------------

    def read(self, op: Operand) -> Access:
        """A function that gives the operand's elements for register values and a shape."""
        return self._view(op)

    def write(self, op: Operand) -> Access:
        """A function that gives the operand's elements to be overwritten."""
        return self._view(op)

    def update(self, op: Operand) -> Access:
        """A function that gives the operand's elements to be read and changed."""
        return self._view(op)

    def link_out(self, peer: int) -> deque[Any]:
        """Messages on their way to another chip."""
        return self.links[(self.chip, peer)]

    def link_in(self, peer: int) -> deque[Any]:
        """Messages that have come from another chip."""
        return self.links[(peer, self.chip)]

    def moved(self, op: Operand, offset: int) -> Operand:
        """The operand `offset` bytes further on."""
        return replace(op, base=op.base + offset)

    def check_index(self, ids: NDArray[np.generic], limit: int) -> None:
        """Every index the program computed lies in 0..limit-1.

        Raises:
            RuntimeFault: SIM_BAD_INDEX.
        """
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= limit):
            raise RuntimeFault(
                Problem(
                    "SIM_BAD_INDEX",
                    f"chip {self.chip}",
                    "an index lies outside its table",
                    f"0..{limit - 1}",
                    f"{ids.min()}..{ids.max()}",
                )
            )

    def _view(self, op: Operand) -> Access:
        dt, steps, base, terms = NP[op.dtype], op.steps, op.base, op.terms
        sram, shard, dynamic, split, chip = self.sram, self.shard, self.dynamic, self.split, self.chip

        def sram_view(regs: Regs, shape: tuple[int, ...]) -> NDArray[np.generic]:
            a = base
            for r, s in terms:
                a += regs[r] * s
            try:
                return np.ndarray(shape, dt, sram, a, steps[: len(shape)])
            except (ValueError, TypeError) as e:
                # numpy refuses a view that leaves its buffer
                raise out_of_bounds(chip, op, a, shape, len(sram)) from e

        def dram_view(regs: Regs, shape: tuple[int, ...]) -> NDArray[np.generic]:
            a = base
            for r, s in terms:
                a += regs[r] * s
            try:
                if a < split:
                    return np.ndarray(shape, dt, shard, a, steps[: len(shape)])
                return np.ndarray(shape, dt, dynamic, a - split, steps[: len(shape)])
            except (ValueError, TypeError) as e:
                raise out_of_bounds(chip, op, a, shape, split + len(dynamic)) from e

        view = sram_view if op.space == Space.SRAM else dram_view
        return view if terms else _remembered(view)

    def load_tile(self, dst: Operand, src: Operand, nbytes: int) -> Callable[[Regs], None]:
        """A weight tile goes to a ring slot: only remembered."""
        slots = self.slots

        def run(regs: Regs) -> None:
            slots[dst.address(regs)] = src.address(regs)

        return run

    def tile(self, op: Operand, spec: TileSpec) -> Callable[[Regs], DecodedTile]:
        """The decoded tile in a ring slot."""
        slots, cache, chip, shard = self.slots, self.cache, self.chip, self.shard

        def run(regs: Regs) -> DecodedTile:
            a = slots[op.address(regs)]
            return cache.get(chip, a, lambda: shard[a : a + spec.nbytes], spec)

        return run
