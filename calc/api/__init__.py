"""The library: what export scripts and CI jobs call. `import calc` gives the same names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calc.api.bench import BenchReport, bench
from calc.api.session import Generation, Sampling, Session
from calc.calbin.reader import Calbin, open_calbin
from calc.core.errors import CalcError
from calc.core.options import CompileOptions, CompileReport, Progress, no_progress
from calc.sim.verify import VerifyReport
from calc.sim.verify import verify as _verify

if TYPE_CHECKING:
    from calc.passes.inventory import InventoryReport

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


def compile(  # noqa: A001 - the library's verb
    model: str | Path,
    out: str | Path | None,
    options: CompileOptions | None = None,
    progress: Progress = no_progress,
    keep_graphs: str | Path | None = None,
) -> CompileReport:
    """Compile a Hugging Face model to a calbin.

    Args:
        model: a directory or a hub id.
        out: the file to write; None plans only.
        options: defaults if None.
        progress: told (stage, done, total).
        keep_graphs: a directory for the intermediate graphs.

    Raises:
        CalcError: all problems of the stage that failed; nothing is written then.
    """
    from calc.frontend.hub import resolve
    from calc.pipeline import compile_model

    return compile_model(
        resolve(str(model)),
        None if out is None else Path(out),
        options or CompileOptions(),
        progress,
        None if keep_graphs is None else Path(keep_graphs),
    )


def export(
    model: str | Path, out_dir: str | Path, options: CompileOptions | None = None, progress: Progress = no_progress
) -> tuple[Path, ...]:
    """Export prefill and decode graphs and ``model_spec.json``; weights stay in the checkpoint.

    Args:
        model: a directory or a hub id.
        out_dir: made if missing.
        options: `prefill`, `batch` and `max_seq_len` count.
        progress: told each step.

    Returns:
        The files written.
    """
    from calc.frontend.hub import resolve
    from calc.pipeline import export_model

    return export_model(resolve(str(model)), Path(out_dir), options or CompileOptions(), progress)


def inventory(
    model: str | Path, options: CompileOptions | None = None, progress: Progress = no_progress
) -> InventoryReport:
    """Take stock of a model's ops: a directory, a hub id, or an ONNX file (that needs no torch)."""
    from calc.pipeline import inventory_model, inventory_onnx

    options = options or CompileOptions()
    if str(model).endswith(".onnx"):
        return inventory_onnx(Path(model))
    from calc.frontend.hub import resolve

    return inventory_model(resolve(str(model)), options, progress)


def compile_graphs(
    prefill: Sequence[str | Path],
    decode: Sequence[str | Path],
    spec: str | Path,
    out: str | Path | None,
    options: CompileOptions | None = None,
) -> CompileReport:
    """Compile graphs that were exported before (`export`, or by other means in the same form).

    Args:
        prefill: ONNX files of prefill graphs, one per bucket.
        decode: ONNX files of decode graphs, one per batch.
        spec: ``model_spec.json``.
        out: the file to write; None plans only.
        options: defaults if None.
    """
    from calc.pipeline import compile_onnx

    return compile_onnx(
        [Path(p) for p in (*prefill, *decode)],
        Path(spec),
        None if out is None else Path(out),
        options or CompileOptions(),
    )


def open(path: str | Path, *, deep: bool = False) -> Calbin:  # noqa: A001 - the library's verb
    """Open a calbin lazily, validated; `deep` checks scales too.

    Raises:
        FormatError: what is damaged, where, and at which offset.
        VersionError: it needs a newer reader.
    """
    return open_calbin(path, deep=deep)


def verify(path: str | Path | Calbin, *, strict: bool = False, progress: Progress = no_progress) -> VerifyReport:
    """Verify an artefact on the simulator against its golden vectors."""
    return _verify(path if isinstance(path, Calbin) else open_calbin(path), strict=strict, progress=progress)
