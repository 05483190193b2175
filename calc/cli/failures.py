"""Every way a verb can fail: its problems, its exit code, and how both are said."""

from __future__ import annotations

import errno
import json
import platform
import traceback
from dataclasses import dataclass

from calc.cli.text import clean
from calc.core.errors import CalcError, InternalError, Problem

DISK, MEMORY, USAGE, INTERNAL, INTERRUPTED = 5, 6, 2, 70, 130
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
HF_MODULES = ("accelerate", "huggingface_hub", "torch", "transformers")


@dataclass(frozen=True)
class Failed:
    """What is said of an exception. `trace` is for our bugs only."""

    kind: str
    exit_code: int
    problems: tuple[Problem, ...]
    trace: str = ""

    def text(self) -> str:
        """For people: every problem, then the trace."""
        lines = "\n".join(str(p) for p in self.problems).splitlines() + self.trace.splitlines()
        return "\n".join(clean(line) for line in lines)

    def json(self) -> str:
        """For programs: one object, ``schemas/error.schema.json``."""
        problems = [p.as_dict() for p in self.problems]
        error = {"kind": self.kind, "exit_code": self.exit_code, "problems": problems, "trace": self.trace}
        return json.dumps({"error": error}, indent=2, ensure_ascii=False)


def failed(e: BaseException) -> Failed:
    """What to say of an exception that ended a verb, and the exit code."""
    kind = type(e).__name__
    if isinstance(e, CalcError):
        return Failed(kind, e.exit_code, e.problems)
    if isinstance(e, KeyboardInterrupt):
        return Failed(kind, INTERRUPTED, (Problem("INTERRUPTED", "calc", "interrupted; no output was completed"),))
    if isinstance(e, MemoryError):
        hint = "use fewer --jobs, a smaller model, or a machine with more memory"
        return Failed(kind, MEMORY, (Problem("OUT_OF_MEMORY", "calc", "this machine's memory ran out", hint=hint),))
    if isinstance(e, ModuleNotFoundError) and (e.name or "").partition(".")[0] in HF_MODULES:
        hint = "pip install 'calc[hf]'"
        what = "this verb needs the [hf] extra, which is not installed"
        return Failed(kind, USAGE, (Problem("HF_MISSING", e.name or "", what, hint=hint),))
    if isinstance(e, OSError):
        return Failed(kind, DISK, (_disk(e),))
    code = e.exit_code if isinstance(e, InternalError) else INTERNAL
    hint = f"please report it with the command and all of this message ({platform.platform()}, {_versions()})"
    problem = Problem("INTERNAL", kind, "this is a bug in calc, not in your input", got=str(e), hint=hint)
    return Failed(kind, code, (problem,), "".join(traceback.format_exception(e)))


def _disk(e: OSError) -> Problem:
    where, got = str(e.filename or "calc"), e.strerror or str(e)
    if e.errno in FULL:
        hint = "free some space, lift the quota, or write to another disk"
        return Problem("DISK_FULL", where, "there is no room for the output", got=got, hint=hint)
    return Problem("DISK_IO", where, "a file cannot be read or written", got=got, hint="check the path and permissions")


def _versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        own = version("calc")
    except PackageNotFoundError:
        own = "not installed"
    return f"Python {platform.python_version()}, calc {own}"
