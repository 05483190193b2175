"""Run tests as on other machines: lower instruction sets and other numbers of threads.

    python scripts/portability.py                        the whole suite in every environment
    python scripts/portability.py --quick                the tests that compare numbers, in the two that differ most

A line per environment; pytest's output only where it fails. The exit code is 1 if any did.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

LEVELS = {
    "sse": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "OPENBLAS_CORETYPE": "Nehalem"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OPENBLAS_CORETYPE": "Haswell"},
    "mixed": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX2", "OPENBLAS_CORETYPE": "Sandybridge"},
    "native": {},
}
"""What each library may use. numpy's own loops follow in `environment`."""

NUMPY_KEEPS = {"sse": (), "avx2": ("X86_V3", "AVX2", "FMA3"), "mixed": (), "native": None}
"""Of the instruction sets that numpy chooses among at run time; None is all."""

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

FULL = (("sse", 1), ("avx2", 2), ("mixed", 4), ("native", 4))
QUICK = (("sse", 1), ("avx2", 4))
QUICK_TESTS = (
    "tests/frontend/test_reference.py",
    "tests/passes/test_execute.py",
    "tests/kernels",
    "tests/field/test_numbers.py",
    "tests/e2e/test_portability.py",
)


def environment(level: str, threads: int, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of a process that is held to a level, whatever `base` holds its own to."""
    every = {*THREADS, "NPY_DISABLE_CPU_FEATURES", *(name for values in LEVELS.values() for name in values)}
    env = {k: v for k, v in base.items() if k not in every}
    keeps = NUMPY_KEEPS[level]
    if keeps is not None:
        # numpy warns of names it does not know, and their list is another in each release: ask the one that is here
        found = _numpy_levels()
        if off := [name for name in found if name not in keeps]:
            env["NPY_DISABLE_CPU_FEATURES"] = " ".join(off)
    return env | LEVELS[level] | dict.fromkeys(THREADS, str(threads))


def _numpy_levels() -> list[str]:
    """The instruction sets above its baseline that numpy was built for and this machine has."""
    code = "import numpy as np; print(*np.show_config(mode='dicts')['SIMD Extensions'].get('found', []))"
    env = {k: v for k, v in os.environ.items() if k != "NPY_DISABLE_CPU_FEATURES"}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout.split()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--quick", action="store_true", help="the fixed part that runs in CI")
    p.add_argument("pytest", nargs="*", help="arguments for pytest; without, the suite or its fixed part")
    a = p.parse_args()
    what = a.pytest or (["-n", "2", *QUICK_TESTS] if a.quick else ["-n", "2"])
    failed = False
    for level, threads in QUICK if a.quick else FULL:
        start = time.perf_counter()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *what]
        done = subprocess.run(
            command, cwd=ROOT, env=environment(level, threads), capture_output=True, text=True, check=False
        )
        ok = done.returncode == 0
        failed |= not ok
        if not ok:
            print(done.stdout + done.stderr)
        count = f"{threads} thread{'s' if threads > 1 else ''}"
        seconds = time.perf_counter() - start
        print(f"portability: {level:6} {count:9} {'ok' if ok else 'FAILED'}, {seconds:.0f} s", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
