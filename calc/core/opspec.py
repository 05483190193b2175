"""What there is to say about an opcode or a function: the types of the rows in `calc.core.optable`.

A row is complete or it is refused: `faults` lists what it lacks. Everything that needs to know an opcode reads its
row, so that a fact is written once and cannot be forgotten by one reader.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum
from functools import cached_property

from calc.core.errors import InternalError
from calc.core.isa import MAX_RANK, OPERAND_NAMES, RANK_IMM, Engine, Flag, Space

FIRST_QUEUED = 8
"""Opcodes below are run by the control engine itself; from here on they are dispatched to an engine's queue."""

FIRST_DATA = 16
"""Opcodes from here on move or change data; queued ones below order the engines."""


class Access(Enum):
    """What an instruction does with an operand."""

    READ = "read"
    WRITE = "write"
    UPDATE = "update"


class Cost(StrEnum):
    """At which rate of the target an instruction runs."""

    NONE = "none"
    DMA = "dma"
    SEND = "send"
    RECEIVE = "receive"
    MATRIX = "matrix"
    VECTOR = "vector"
    SPECIAL = "special"
    BY_FUNCTION = "by function"


class ImmKind(StrEnum):
    """What the value of an immediate may be."""

    RESULT = "written register"
    REGISTER = "register"
    OPTIONAL_REGISTER = "register or -1"
    REGISTER_OR_CONSTANT = "register, or a constant with flag IMM"
    COUNT = "at least 1"
    SEMAPHORE = "semaphore"
    SIGNALS = "at least 1 signal"
    CHIP = "peer chip"
    CSR = "CSR"
    LIMIT = "at least 0"
    AXIS = "dimension"
    RANK = "number of dimensions"
    PLAIN = "any"


@dataclass(frozen=True)
class Func:
    """One function of an opcode's `sub`: how many of a, b, d it takes, its rate, and what it computes.

    Attributes:
        note: what the disassembler says of the float immediates.
        symbol: the infix the disassembler writes it with.
        divides: whether the second operand must not be 0.
    """

    arity: int
    cost: Cost
    meaning: str
    note: str = ""
    symbol: str = ""
    divides: bool = False


@dataclass(frozen=True)
class OperandSpec:
    """One operand of an opcode.

    Attributes:
        dims: its dimensions in terms of the record's: names of the row's `dims`, ``...`` for those without a name,
            ``immN`` or ``immN+1`` for an immediate, ``*`` for a size that data decides.
        flag: present only with this flag; 0 for always.
        argument: present only if the function takes at least so many; 0 for always.
        codes: present only if operand a holds int8 codes.
        update_flag: with this flag, a written operand is also read.
    """

    name: str
    access: Access
    dims: str
    space: Space = Space.SRAM
    flag: int = 0
    argument: int = 0
    codes: bool = False
    update_flag: int = 0

    def access_with(self, flags: int) -> Access:
        """What happens to it in a record with these flags."""
        return Access.UPDATE if flags & self.update_flag else self.access

    @property
    def always(self) -> bool:
        """Whether every record of the opcode has it."""
        return not (self.flag or self.argument or self.codes)


@dataclass(frozen=True)
class Imm:
    """One integer immediate, and what its value may be."""

    index: int
    name: str
    kind: ImmKind
    meaning: str = ""


@dataclass(frozen=True)
class Note:
    """What the disassembler adds to a line: shown with `flag`, and unless the value named first is the second."""

    text: str
    flag: int = 0
    unless: tuple[str, float] | None = None


@dataclass(frozen=True)
class OpSpec:
    """All facts of one opcode.

    Attributes:
        code: the number; its range says who runs it (`FIRST_QUEUED`, `FIRST_DATA`).
        engines: which may run it.
        cost: the rate it runs at.
        meaning: what it does, a paragraph of ``docs/isa.md``.
        dims: names of its dimensions; a leading ``...`` for any number of further ones.
        operands: which it has, in the order of the record.
        imms: its integer immediates.
        floats: what f0 and f1 are.
        functions: the enumeration in `sub`, or None.
        flags: those it takes.
        forms: suffix of its name in the disassembly with a flag set; ``{tile}`` is the tile format's name.
        notes: what the disassembler adds.
    """

    code: int
    name: str
    engines: tuple[Engine, ...]
    cost: Cost
    meaning: str
    dims: str = ""
    operands: tuple[OperandSpec, ...] = ()
    imms: tuple[Imm, ...] = ()
    floats: tuple[str, ...] = ()
    functions: type[IntEnum] | None = None
    flags: int = 0
    forms: tuple[tuple[Flag, str], ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def is_scalar(self) -> bool:
        """Whether the control engine runs it itself."""
        return self.code < FIRST_QUEUED

    @property
    def is_data(self) -> bool:
        """Whether it moves or changes data."""
        return self.code >= FIRST_DATA

    @property
    def has_rank(self) -> bool:
        """Whether the record says how many dimensions it has; else their names do."""
        return any(i.kind is ImmKind.RANK for i in self.imms)

    @property
    def ranks(self) -> tuple[int, int]:
        """The least and the largest number of dimensions."""
        names = self.dims.split()
        return (max(1, len(names) - 1), MAX_RANK) if "..." in names else (len(names), len(names))

    def rank(self, imm: tuple[int, ...] | list[int]) -> int:
        """Number of dimensions of a record with these immediates."""
        return imm[RANK_IMM] if self.has_rank else self.ranks[0]

    @cached_property
    def _by_name(self) -> dict[str, OperandSpec]:
        return {o.name: o for o in self.operands}

    def operand(self, name: str) -> OperandSpec | None:
        """The operand of this name, if the opcode has it."""
        return self._by_name.get(name)

    def accesses(self, names: Iterable[str], flags: int) -> list[tuple[str, Access]]:
        """What a record with these flags does with its operands, in the order of `names`.

        Raises:
            InternalError: the opcode has no such operand.
        """
        try:
            return [(n, self._by_name[n].access_with(flags)) for n in names]
        except KeyError as e:
            raise InternalError(f"{self.name} has no operand {e.args[0]}") from e

    def uses(self, names: Iterable[str], flags: int) -> list[str]:
        """The operands whose contents a record uses; those that it changes too come last.

        Raises:
            InternalError: the opcode has no such operand.
        """
        found = self.accesses(names, flags)
        return [n for n, a in found if a is Access.READ] + [n for n, a in found if a is Access.UPDATE]

    def changes(self, names: Iterable[str], flags: int) -> list[str]:
        """The operands that a record changes.

        Raises:
            InternalError: the opcode has no such operand.
        """
        return [n for n, a in self.accesses(names, flags) if a is not Access.READ]

    def imm(self, kind: ImmKind) -> Iterator[Imm]:
        """The immediates of a kind."""
        return (i for i in self.imms if i.kind is kind)

    def operand_dims(self, name: str, dims: tuple[str, ...], imm: tuple[int, ...]) -> tuple[str, ...]:
        """An operand's dimensions as text.

        Args:
            name: an operand the opcode has.
            dims: the record's dimensions as text, ``r3`` for a register.
            imm: the record's immediates.
        """
        names = self.dims.split()
        free = names[:1] == ["..."]
        named = names[1:] if free else names
        rest = len(dims) - len(named) if free else 0
        bound = dict(zip(named, dims[max(0, rest) :], strict=False))
        out: list[str] = []
        for token in o.dims.split() if (o := self.operand(name)) else ():
            if token == "...":
                out += dims[: max(0, rest)]
            elif found := _IMM.fullmatch(token):
                out.append(str(imm[int(found[1])] + int(found[2] or 0)))
            else:
                out.append(bound.get(token, "*"))
        return tuple(out)


_IMM = re.compile(r"imm([0-5])(?:\+(\d+))?")


def faults(spec: OpSpec) -> list[str]:
    """What a row lacks or contradicts; empty for a sound one."""
    out = [f"no {what}" for what, value in (("name", spec.name), ("meaning", spec.meaning)) if not value]
    if not 0 <= spec.code <= 255:
        out.append(f"a code outside 0..255: {spec.code}")
    return out + _engine_faults(spec) + _dim_faults(spec) + _operand_faults(spec) + _imm_faults(spec)


def _engine_faults(spec: OpSpec) -> list[str]:
    out = [] if spec.engines else ["no engine"]
    if spec.is_scalar and spec.engines != (Engine.CTL,):
        out.append(f"a scalar opcode runs on CTL alone (codes below {FIRST_QUEUED})")
    if spec.is_data and Engine.CTL in spec.engines:
        out.append(f"CTL does not run opcodes from {FIRST_DATA} on")
    if spec.is_data == (spec.cost is Cost.NONE):
        out.append("a data opcode has a cost class" if spec.is_data else "only a data opcode has a cost class")
    if (spec.cost is Cost.BY_FUNCTION or any(o.argument for o in spec.operands)) and spec.functions is None:
        out.append("its functions are to say cost or operands, and it has none")
    out += [f"form {text!r} needs a flag it does not take" for flag, text in spec.forms if not flag & spec.flags]
    out += [f"note {n.text!r} needs a flag it does not take" for n in spec.notes if n.flag & ~spec.flags]
    return out


def _dim_faults(spec: OpSpec) -> list[str]:
    names = spec.dims.split()
    out = []
    if len(set(names)) < len(names) or "..." in names[1:]:
        out.append(f"dimensions {spec.dims!r}: names once each, ... in front")
    if spec.is_data and not names:
        out.append("a data opcode has dimensions")
    if "..." in names and not spec.has_rank:
        out.append("any number of dimensions, and no immediate that says how many")
    return out


def _operand_faults(spec: OpSpec) -> list[str]:
    out = []
    order = [o.name for o in spec.operands]
    if order != [n for n in OPERAND_NAMES if n in order]:
        out.append(f"operands {order}: each once, in the order {OPERAND_NAMES}")
    if spec.is_data and not order:
        out.append("a data opcode has operands")
    known = {*spec.dims.split(), "*"}
    for o in spec.operands:
        where = f"operand {o.name}"
        out += [
            f"{where}: no dimension {token!r}"
            for token in o.dims.split()
            if token not in known
            and not ((m := _IMM.fullmatch(token)) and any(i.index == int(m[1]) for i in spec.imms))
        ]
        if (o.flag | o.update_flag) & ~spec.flags:
            out.append(f"{where} depends on a flag the opcode does not take")
        if o.name == "dst" and o.access is Access.READ:
            out.append(f"{where} is a result")
        if o.update_flag and o.access is not Access.WRITE:
            out.append(f"{where} is read in any case")
        if o.space is Space.NONE:
            out.append(f"{where} lies in no memory")
    return out


def _imm_faults(spec: OpSpec) -> list[str]:
    out = []
    indices = [i.index for i in spec.imms]
    if len(set(indices)) < len(indices) or not set(indices) <= set(range(6)):
        out.append(f"immediates {indices}: each once, within 0..5")
    for i in spec.imms:
        if (i.kind is ImmKind.RANK) != (i.index == RANK_IMM and spec.is_data and spec.has_rank):
            out.append(f"imm{RANK_IMM} of a data opcode is its number of dimensions")
        if not i.name:
            out.append(f"imm{i.index} has no name")
    if len(spec.floats) > 2:
        out.append("two float immediates exist")
    return out
