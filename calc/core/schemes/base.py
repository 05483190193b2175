"""What a scheme is: how a weight is rounded and stored, and what it is multiplied with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from calc.core.errors import InternalError
from calc.core.numerics import F32, dequant_groups
from calc.core.packing import Codes, TileFormat, TileLayout, pack_codes

Activations = Literal["bf16", "int8"]


class UnknownSchemeError(InternalError):
    """A text that is no scheme's. Recipes and manifests are checked before; a graph made elsewhere may have one."""


@dataclass(frozen=True)
class Scheme(ABC):
    """One way to round a weight and to multiply with it.

    Attributes:
        group: values along K that share a scale; 0 where the format has no groups.
        name: unique among schemes.
        format: the packed tile's fields.
        activations: what the other operand is: BF16 as it lies in memory, or int8 with a scale per row made at run
            time.
        gate: what the ladder's quantized rung may lose, as relative RMS against bf16.
        why: where the gate comes from.

    Raises:
        InternalError: a group size the format does not have.
    """

    group: int = 0

    name: ClassVar[str]
    format: ClassVar[TileFormat]
    activations: ClassVar[Activations]
    gate: ClassVar[float]
    why: ClassVar[str]

    def __post_init__(self) -> None:
        if self.group not in self.format.groups:
            raise InternalError(f"scheme {self.name} has no group size {self.group}")

    def __str__(self) -> str:
        return f"{self.name}/{self.group}" if self.group else self.name

    @property
    def zero_point(self) -> bool:
        """Whether a group has a zero point besides its scale."""
        return self.format.zero_point

    @property
    def row_scaled(self) -> bool:
        """Whether the scale is one per row, so that it can multiply the finished sum: graphs then hold the codes."""
        return self.format.per == "row"

    @abstractmethod
    def quantize(self, w: F32) -> Codes:
        """Codes, scales and zero points of a weight [N, K]."""

    @abstractmethod
    def bound(self, w: F32) -> F32:
        """Half a step, in closed form: how far a value of a weight [N, K] may be from what stands for it.

        It is written without `quantize`, whose faults it must show. Its shape broadcasts to [N, K].
        """

    def pack(self, layout: TileLayout, w: F32, bias: F32 | None) -> bytes:
        """The bytes of one tile: rows [n, K] of the weight, and their bias [n] where the layout has one."""
        return pack_codes(layout, self.quantize(w), bias)

    def ort_values(self, w: F32) -> tuple[NDArray[np.generic], F32 | None]:
        """What ONNX Runtime computes with for a weight [N, K].

        Returns:
            int8 codes [N, K] and f32 scales [N] of a scheme with a scale per row; else values f32 [N, K], exactly what
            the tile stands for, and None.
        """
        c = self.quantize(w)
        if c.scales is None:
            return c.values.astype(np.float32), None
        if self.row_scaled:
            return c.values, c.scales.astype(np.float32)
        return dequant_groups(c.values, c.scales, c.zeros, self.group), None


def over_groups(f: np.ufunc, w: F32, group: int) -> F32:
    """A reduction (np.maximum, np.minimum) over each group along K, repeated to [N, K]."""
    reduced = f.reduceat(w, np.arange(0, w.shape[1], group), axis=1)
    return np.repeat(reduced, group, axis=1)[:, : w.shape[1]]
