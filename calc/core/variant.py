"""A sub-model's static shape: role, batch and sequence bucket."""

from __future__ import annotations

from dataclasses import dataclass

from calc.core.roles import RoleName


@dataclass(frozen=True, order=True)
class Variant:
    """One static shape of the model.

    Attributes:
        role: what it is for; see `roles.ROLES`.
        batch: sequences in a call.
        seq: the bucket: tokens per sequence the graph has room for (1 for decode).
    """

    role: RoleName
    batch: int
    seq: int

    @property
    def name(self) -> str:
        """Unique name, e.g. ``prefill_b1_s128``."""
        return f"{self.role}_b{self.batch}_s{self.seq}"
