"""An artefact made under one instruction set verifies under another, and is the same but for what was measured."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import calc
from calc.calbin.reader import Calbin, open_calbin
from tests.conftest import GLASS, compiled
from tests.e2e.models import ROOT

COMPILE = """
import calc, sys
calc.compile(sys.argv[1], sys.argv[2], calc.CompileOptions(prefill=(16,), max_seq_len=48, quant="w8a8"))
"""
VERIFY = "import calc, sys; print(calc.verify(sys.argv[1], strict=True).model_dump_json())"


def portability() -> ModuleType:
    where = importlib.util.spec_from_file_location("portability", ROOT / "scripts" / "portability.py")
    module = importlib.util.module_from_spec(where)
    where.loader.exec_module(module)
    return module


def under(level: str, threads: int, code: str, *args: str) -> str:
    env = portability().environment(level, threads) | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, "portable.calbin", prefill=(16,), max_seq_len=48, quant="w8a8")


@pytest.fixture(scope="module")
def lower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lower") / "portable.calbin"
    under("sse", 1, COMPILE, str(GLASS), str(out))
    return out


def test_the_levels_take_effect() -> None:
    """A level that a library does not know would leave every test below comparing a machine with itself."""
    code = (
        "import json, numpy as np, torch, threadpoolctl; np.ones((2, 2)) @ np.ones((2, 2)); "
        "blas = [x['architecture'] for x in threadpoolctl.threadpool_info() if x.get('internal_api') == 'openblas']; "
        "print(json.dumps([torch.backends.cpu.get_cpu_capability(), blas[0], torch.get_num_threads()]))"
    )
    assert json.loads(under("sse", 1, code)) == ["DEFAULT", "Nehalem", 1]
    assert json.loads(under("avx2", 2, code))[1:] == ["Haswell", 2]


@pytest.mark.parametrize(("level", "threads"), [("sse", 1), ("native", 4)])
def test_verifies_under_another_instruction_set(here: Path, level: str, threads: int) -> None:
    report = json.loads(under(level, threads, VERIFY, str(here)))
    assert report["ok"], [c for c in report["checks"] if not c["ok"]]


def test_made_elsewhere_verifies_here(lower: Path) -> None:
    assert calc.verify(lower, strict=True).ok


def fixed(calbin: Calbin) -> dict[str, object]:
    """What must be the same: the manifest without measured values and digests over them, and every weight's bytes."""
    data = calbin.manifest.model_dump(mode="json")
    data["golden"]["rungs"] = [{k: r[k] for k in ("name", "reference", "metric")} for r in data["golden"]["rungs"]]
    for section in data["sections"]:
        if section["kind"] in ("golden", "weights"):
            section["sha256"], section["chunks"] = None, None
    for w in data["weights"]:
        w["digest"] = None
        if not w["name"].startswith("rope."):
            data[w["name"]] = calbin.shard(w["chip"])[w["offset"] : w["offset"] + w["nbytes"]].tobytes()
    return data


def tables(calbin: Calbin) -> dict[str, np.ndarray]:
    """The rotary tables by name."""
    return {
        w.name: calbin.shard(w.chip)[w.offset : w.offset + w.nbytes].view("<f4").reshape(w.shape)
        for w in calbin.manifest.weights
        if w.name.startswith("rope.")
    }


def test_only_what_was_measured_depends_on_the_machine(here: Path, lower: Path) -> None:
    with open_calbin(here) as a, open_calbin(lower) as b:
        one, two = fixed(a), fixed(b)
        assert one.keys() == two.keys()
        assert [k for k in one if one[k] != two[k]] == []
        assert {s.kind for s in a.manifest.sections} >= {"program", "weights", "golden", "tokenizer", "graph"}
        ours, theirs = tables(a), tables(b)
        assert ours.keys() == theirs.keys() and ours
        for name, table in ours.items():
            # frequencies an ulp apart turn the last position's angle by that ulp, cos and sin add one of their own
            assert np.abs(table - theirs[name]).max() <= 2.0**-23 * (len(table) + 1), name
