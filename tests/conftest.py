"""Settings of the whole suite."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

# `make fuzz` looks at many more examples than a test run has time for.
settings.register_profile("fuzz", max_examples=2000, deadline=None)
settings.register_profile("default", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

GLASS = Path(__file__).resolve().parent.parent / "examples" / "glassllm-en"
"""The tiny trained model: 852,608 parameters, Llama, intermediate 341."""


def shared(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A file that is made once for all workers of a test run."""
    root = factory.getbasetemp()
    root = root.parent if os.environ.get("PYTEST_XDIST_WORKER") else root
    path = root / name
    with FileLock(str(path) + ".lock"):
        if not path.exists():
            make(path)
    return path


def compiled(factory: pytest.TempPathFactory, name: str, model: Path = GLASS, **options: object) -> Path:
    """A calbin that is compiled once for all workers of a test run."""
    import calc

    return shared(factory, name, lambda path: calc.compile(model, path, calc.CompileOptions(**options)))


@pytest.fixture(scope="session")
def tiny_calbin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model on one chip: buckets 16 and 32, batch 1 and 4, 64 tokens."""
    return compiled(tmp_path_factory, "tiny-1chip.calbin", prefill=(16, 32), batch=(1, 4), max_seq_len=64)


@pytest.fixture(scope="session")
def tiny_two_chips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same on two chips."""
    return compiled(
        tmp_path_factory, "tiny-2chip.calbin", prefill=(16, 32), batch=(1, 4), max_seq_len=64, target="calculet-2chip"
    )
