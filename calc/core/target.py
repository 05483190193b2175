"""Targets: chips and boards as data. Every number in ``calc/targets/*.toml`` has a unit, a status and a source."""

from __future__ import annotations

import hashlib
import tomllib
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from calc.core.errors import Problem, UsageError
from calc.core.spec import Frozen

PLACED = 64
"""Bytes on multiples of which buffers, tiles and DRAM ranges are placed."""

TARGET_DIR = Path(__file__).resolve().parent.parent / "targets"


class Quantity(Frozen):
    """A number about hardware: `status` says whether it was measured, derived from a measurement or assumed."""

    value: float = Field(ge=0, allow_inf_nan=False)
    unit: str
    status: Literal["measured", "published", "derived", "assumed"]
    source: str


class Positive(Quantity):
    """A rate: never zero."""

    value: float = Field(gt=0, allow_inf_nan=False)


class Whole(Quantity):
    """A count of bytes, slots or rows."""

    value: float = Field(ge=1, multiple_of=1, allow_inf_nan=False)


class Alignment(Whole):
    """What every range must start on: the compiler places on 64 bytes, so a divisor of that."""

    @field_validator("value")
    @classmethod
    def _divides(cls, value: float) -> float:
        if PLACED % int(value):
            raise ValueError(f"must divide {PLACED}, on multiples of which the compiler places")
        return value


class Memory(Frozen):
    """Capacities per chip."""

    sram: Whole
    dram: Whole
    alignment: Alignment


class Rates(Frozen):
    """Throughput of one chip's engines."""

    clock: Positive
    mac_int8: Positive
    mac_bf16: Positive
    mac_f32: Positive
    vector: Positive
    vector_special: Positive
    dram: Positive
    link: Positive


class Costs(Frozen):
    """Start costs of one instruction per engine, and of one call."""

    dma_start: Quantity
    matrix_start: Quantity
    vector_start: Quantity
    link_start: Quantity
    dispatch: Quantity
    call: Quantity


class Tiling(Frozen):
    """The compiler's choices for this chip.

    Attributes:
        weight_tile: bytes of a packed weight tile at most.
        weight_ring: slots of the weight ring.
        row_multiple: rows of a weight tile are a multiple of this.
        score_tile: bytes of the f32 scores of one attention tile at most.
        key_tile: keys of one attention tile at most.
        key_block: keys that a block of queries is sized for.
        activation_row: elements that an activation's rows are padded to.
        block_rows: rows of a block are a multiple of this.
        state_rows: rows of a growing state, and keys of an attention tile, are a multiple of this.
    """

    weight_tile: Whole
    weight_ring: Whole
    row_multiple: Whole
    score_tile: Whole
    key_tile: Whole
    key_block: Whole
    activation_row: Whole
    block_rows: Whole
    state_rows: Whole

    @model_validator(mode="after")
    def _tiles_of_whole_rows(self) -> Tiling:
        if self.key_tile.value % self.state_rows.value:
            raise ValueError("key_tile must be a multiple of state_rows, in which keys are stored")
        return self


class Target(Frozen):
    """A board: `chips` equal chips and how a model is split over them."""

    name: str
    description: str
    chips: int = Field(gt=0, le=16)
    split: str
    memory: Memory
    rates: Rates
    costs: Costs
    tiling: Tiling
    toml: str = Field(default="", repr=False)

    @property
    def sram_bytes(self) -> int:
        """SRAM per chip, bytes."""
        return int(self.memory.sram.value)

    @property
    def dram_bytes(self) -> int:
        """DRAM per chip, bytes."""
        return int(self.memory.dram.value)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the target's TOML text."""
        return hashlib.sha256(self.toml.encode()).hexdigest()


def target_names() -> tuple[str, ...]:
    """Names of the bundled targets, sorted."""
    return tuple(sorted(p.stem for p in TARGET_DIR.glob("*.toml")))


def parse_target(text: str, where: str) -> Target:
    """A target from TOML text.

    Raises:
        UsageError: TARGET_INVALID, one problem for each field.
    """
    try:
        return Target.model_validate({**tomllib.loads(text), "toml": text})
    except tomllib.TOMLDecodeError as e:
        raise UsageError(Problem("TARGET_INVALID", where, "not valid TOML", got=str(e))) from e
    except ValidationError as e:
        raise UsageError(
            [
                Problem(
                    "TARGET_INVALID",
                    f"{where}: {'.'.join(map(str, err['loc']))}",
                    err["msg"],
                    got=str(err["input"])[:80],
                )
                for err in e.errors()
            ]
        ) from e


def load_target(name: str) -> Target:
    """A bundled target by name, or any target by the path of its TOML file.

    Raises:
        UsageError: TARGET_UNKNOWN, TARGET_INVALID.
    """
    is_file = name.endswith(".toml")
    path = Path(name) if is_file else TARGET_DIR / f"{name}.toml"
    if not (path.is_file() if is_file else name in target_names()):
        raise UsageError(
            Problem(
                "TARGET_UNKNOWN",
                name,
                "no such target",
                expected=" or ".join(target_names()),
                hint="or the path of a .toml",
            )
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(Problem("TARGET_INVALID", name, "cannot be read as text", got=str(e))) from e
    return parse_target(text, name)
