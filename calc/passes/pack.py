"""Pack: weights to the bytes of a shard, a tile at a time, as independent jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from calc.core.numerics import F32
from calc.core.packing import TileLayout
from calc.core.schemes import Scheme
from calc.core.tensors import SelectTensor, StackTensor, TensorRef
from calc.kernels.program import Packed, Plain


def pack_rows(scheme: Scheme, layout: TileLayout, values: F32, bias: F32 | None = None) -> bytes:
    """A whole weight that is already in memory: its tiles one after another."""
    cuts = [t * layout.tile_rows for t in range(layout.tiles)] + [layout.rows]
    return b"".join(scheme.pack(layout, values[a:b], None if bias is None else bias[a:b]) for a, b in pairwise(cuts))


def pack_plain(values: NDArray[np.generic]) -> bytes:
    """A plain f32 array."""
    return np.ascontiguousarray(values, dtype="<f4").tobytes()


@dataclass(frozen=True)
class Placed:
    """A weight in a shard and where its bytes come from."""

    handle: Packed | Plain
    ref: TensorRef
    bias: TensorRef | None

    def experts(self) -> Sequence[TensorRef]:
        """The 2-D weights to pack, one after another."""
        if isinstance(self.handle, Plain) or not self.handle.experts:
            return (self.ref,)
        if isinstance(self.ref, StackTensor):
            return self.ref.parts
        return tuple(SelectTensor(self.ref, e) for e in range(self.handle.experts))


class Check(Protocol):
    """Told each piece of a weight before it is packed; `matrix` is false for what stays f32 (norms, tables, biases)."""

    def __call__(self, source: str, rows: F32, *, matrix: bool) -> None:
        """`source` names the checkpoint tensors the rows come from."""


def shard_pieces(item: Placed, check: Check) -> list[Callable[[], bytes]]:
    """The weight's bytes as independent jobs, in order; each reads its rows, checks them and packs them.

    Args:
        item: the weight.
        check: called with the rows about to be packed.
    """
    if isinstance(item.handle, Plain):
        handle = item.handle

        def plain() -> bytes:
            data = _f32(item.ref.read())
            check(_source(item.ref, handle.name), data, matrix=False)
            return pack_plain(data)

        return [plain]
    packed = item.handle
    return [_tile_job(item, packed, ref, t, check) for ref in item.experts() for t in range(packed.layout.tiles)]


def _source(ref: TensorRef, name: str) -> str:
    return ", ".join(ref.sources) or name


def _f32(values: NDArray[np.generic]) -> F32:
    with np.errstate(over="ignore"):  # beyond the range of FP32: the check finds the infinity
        return values.astype(np.float32)


def _tile_job(item: Placed, handle: Packed, ref: TensorRef, t: int, check: Check) -> Callable[[], bytes]:
    lay = handle.layout

    def run() -> bytes:
        a = t * lay.tile_rows
        b = a + lay.rows_of(t)
        rows = _f32(ref.rows(a, b))
        check(_source(ref, handle.name), rows, matrix=True)
        bias = None
        if item.bias is not None:
            bias = _f32(item.bias.rows(a, b))
            check(_source(item.bias, f"{handle.name}/bias"), bias, matrix=False)
        with np.errstate(invalid="ignore", over="ignore"):  # nobody will see the tile of a weight that is not finite
            return handle.scheme.pack(lay, rows, bias)

    return run
