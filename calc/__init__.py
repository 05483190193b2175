"""calc compiles language models for the Calculet NPU and proves that the artefact computes what the model computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from calc.api import (
        BenchReport,
        Calbin,
        CalcError,
        CompileOptions,
        CompileReport,
        Generation,
        Sampling,
        Session,
        VerifyReport,
        bench,
        compile,  # noqa: A004
        compile_graphs,
        export,
        inventory,
        open,  # noqa: A004
        verify,
    )

__all__ = [
    "BenchReport",
    "Calbin",
    "CalcError",
    "CompileOptions",
    "CompileReport",
    "Generation",
    "Sampling",
    "Session",
    "VerifyReport",
    "bench",
    "compile",
    "compile_graphs",
    "export",
    "inventory",
    "open",
    "verify",
]


def __getattr__(name: str) -> object:
    """Load the library at its first use, so that ``calc --help`` does not."""
    if name in __all__:
        import calc.api

        return getattr(calc.api, name)
    raise AttributeError(f"module 'calc' has no attribute {name!r}")
