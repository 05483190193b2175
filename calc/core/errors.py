"""Errors for the person who must act.

Every problem has a stable code, says where it is, what is wrong, what was expected, what was found and what to do.
A stage gathers all of its problems and raises once (`Problems.raise_if_any`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Problem:
    """One finding.

    Attributes:
        code: stable identifier, e.g. ``MODEL_SHAPE_MISMATCH``.
        where: the file, tensor, node, field or instruction concerned.
        what: one sentence that says what is wrong.
        expected: what would have been right ("" where it does not apply).
        got: what was found instead.
        hint: what the reader can do.
        offset: byte offset in the file, for damaged artefacts.
    """

    code: str
    where: str
    what: str
    expected: str = ""
    got: str = ""
    hint: str = ""
    offset: int | None = None

    def __str__(self) -> str:
        lines = [f"[{self.code}] {self.where}: {self.what}"]
        for label, value in (("expected", self.expected), ("got", self.got), ("hint", self.hint)):
            if value:
                lines.append(f"    {label}: {value}")
        if self.offset is not None:
            lines.append(f"    offset: {self.offset}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """The problem as plain data, for ``--format json``."""
        return asdict(self)


class CalcError(Exception):
    """The user can act on it. Carries one or more problems; `exit_code` is the process's exit status."""

    exit_code = 3

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        if not self.problems:
            raise InternalError("a CalcError was made without a problem")
        super().__init__("\n".join(str(p) for p in self.problems))

    @property
    def code(self) -> str:
        """The first problem's code."""
        return self.problems[0].code

    @property
    def codes(self) -> tuple[str, ...]:
        """All problems' codes, in order."""
        return tuple(p.code for p in self.problems)


class UsageError(CalcError):
    """A request that contradicts itself or asks for what does not exist (exit 2)."""

    exit_code = 2


class ModelError(CalcError):
    """The model's directory, config, tokenizer or checkpoint is missing, contradictory or damaged (exit 3)."""


class UnsupportedError(CalcError):
    """The model is sound, but uses what the NPU cannot do (exit 1: a finding)."""

    exit_code = 1


class VerificationError(CalcError):
    """A check found a difference beyond its gate (exit 1)."""

    exit_code = 1


class FormatError(CalcError):
    """A calbin is damaged or breaks the format's rules (exit 3)."""


class VersionError(CalcError):
    """A calbin needs a newer reader, an unknown feature or another ISA (exit 4)."""

    exit_code = 4


class DiskError(CalcError):
    """The disk is full or cannot be written (exit 5)."""

    exit_code = 5


class CapacityError(CalcError):
    """SRAM, DRAM, context or batch does not suffice (exit 6)."""

    exit_code = 6


class RuntimeFault(CalcError):
    """A request to a loaded artefact cannot be served, or a program misbehaved while it ran (exit 3)."""


class InternalError(Exception):
    """Our bug: an invariant of calc itself does not hold (exit 70)."""

    exit_code = 70


@dataclass
class Problems:
    """Gathers the problems of a stage, then raises them all at once."""

    items: list[Problem] = field(default_factory=list)

    def add(
        self,
        code: str,
        where: str,
        what: str,
        *,
        expected: object = "",
        got: object = "",
        hint: str = "",
        offset: int | None = None,
    ) -> None:
        """Record one problem."""
        self.items.append(Problem(code, where, what, str(expected), str(got), hint, offset))

    def raise_if_any(self, kind: type[CalcError]) -> None:
        """Raise `kind` with every recorded problem, if there is one."""
        if self.items:
            raise kind(self.items)
