"""Models for whole-compiler tests, made from the tiny trained one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def upcycled(source: Path, out: Path, family: str = "mixtral") -> None:
    """A mixture of experts with distinct experts, from a dense model (`scripts/upcycle_moe.py`)."""
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "upcycle_moe.py"), str(source), str(out), "--family", family],
        check=True,
        capture_output=True,
    )
