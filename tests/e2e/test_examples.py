"""The examples run as they stand."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.e2e.models import ROOT


def test_graphs_made_by_hand(tmp_path):
    """Graphs no exporter of ours made, against ONNX Runtime: within BF16 of the largest logit."""
    where = importlib.util.spec_from_file_location("from_onnx", ROOT / "examples" / "from_onnx.py")
    module = importlib.util.module_from_spec(where)
    where.loader.exec_module(module)
    assert module.main(tmp_path) < 0.02


@pytest.mark.slow
def test_export_and_compile(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "examples" / "export_and_compile.py"),
            str(ROOT / "examples" / "glassllm-en"),
            str(tmp_path / "x.calbin"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "LlamaForCausalLM" in done.stdout
    assert "FAILED" not in done.stdout
    assert "TTFT" in done.stdout
