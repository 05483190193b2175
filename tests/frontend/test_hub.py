"""Names of models → directories. There is no network in the tests."""

from __future__ import annotations

import sys
from pathlib import Path

import huggingface_hub
import pytest

from calc.core.errors import ModelError
from calc.frontend.hub import resolve


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/no/such/model", "./no-such-model", "~/no-such-model-dir"])
def test_a_path_is_never_sent_to_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(ModelError) as caught:
        resolve(name)
    assert caught.value.code == "MODEL_DIR_MISSING"


def test_neither_path_nor_id() -> None:
    with pytest.raises(ModelError) as caught:
        resolve("a/b/c d")
    assert caught.value.code == "MODEL_DIR_MISSING"


def test_offline() -> None:
    with pytest.raises(ModelError) as caught:
        resolve("calc-tests/no-such-model")
    assert caught.value.code == "MODEL_HUB_UNREACHABLE"
    assert "HF_HUB_OFFLINE" in caught.value.problems[0].hint


def test_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: str(tmp_path / name))
    assert resolve("calc-tests/model") == tmp_path / "calc-tests" / "model"


def test_import_is_cheap() -> None:
    import subprocess

    code = "import sys, calc.frontend; sys.exit(bool({'torch', 'transformers', 'onnx'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
