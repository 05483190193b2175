"""Reports that only the command line makes."""

from __future__ import annotations

from calc.core.spec import Frozen


class ExportedFile(Frozen):
    """A file that an export wrote. Size in bytes."""

    path: str
    nbytes: int


class ExportReport(Frozen):
    """What `calc export` wrote."""

    model: str
    directory: str
    files: tuple[ExportedFile, ...]


class ProblemReport(Frozen):
    """One problem (`calc.core.errors.Problem`); "" where a field does not apply."""

    code: str
    where: str
    what: str
    expected: str
    got: str
    hint: str
    offset: int | None


class ErrorBody(Frozen):
    """Why a verb failed. `trace` is set for bugs of calc only."""

    kind: str
    exit_code: int
    problems: tuple[ProblemReport, ...]
    trace: str


class ErrorReport(Frozen):
    """What stderr holds when a verb fails under ``--format json``."""

    error: ErrorBody
