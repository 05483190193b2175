"""What a model keeps between calls: one `StateSpec` per state, read off the graph by the kernels that use it.

A state belongs to a KV slot. It grows by a row per token, keeps the rows of the last tokens as a ring, or has a fixed
size (recurrent state). Layers may have none, or read another layer's (`Attention` nodes that name the same state).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from calc.core.packing import align
from calc.core.spec import Frozen

Growth = Literal["token", "ring", "fixed"]
"""token: a row per token, row t at position t. ring: position t at row ``t mod rows``. fixed: one row."""

StateDType = Literal["bf16", "f32", "i8"]

ITEMSIZE: dict[str, int] = {"bf16": 2, "f32": 4, "i8": 1}


class StateSpec(Frozen):
    """One state.

    Attributes:
        name: semantic name, ``kv.<layer>.key``.
        layer: the decoder layer that writes it, None outside of the layers.
        heads: heads of one row; a state may be split over chips by head.
        dim: elements of one head.
        dtype: element type in memory.
        growth: see `Growth`.
        window: for a ring, the keys that a query sees, its own among them.
    """

    name: str
    layer: int | None
    heads: int = Field(gt=0)
    dim: int = Field(gt=0)
    dtype: StateDType = "bf16"
    growth: Growth = "token"
    window: int | None = Field(default=None, gt=0)

    def rows(self, capacity: int, tile: int, multiple: int) -> int:
        """Rows of one slot in memory.

        A ring that would be as long as the capacity is no ring: its rows lie at their positions.

        Args:
            capacity: tokens.
            tile: rows that are read at once at most, a multiple of `multiple`.
            multiple: what rows are padded to, the target's `state_rows`.
        """
        if self.growth == "fixed":
            return 1
        whole = align(capacity, multiple)
        if self.growth == "ring" and self.window is not None:
            return min(whole, align(self.window, min(tile, align(self.window, multiple))))
        return whole

    def row_bytes(self, heads: int | None = None) -> int:
        """Bytes of one row, of all heads or of a part of them."""
        return (self.heads if heads is None else heads) * self.dim * ITEMSIZE[self.dtype]
