"""Fixtures of the frontend's tests."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from frontend_models import save_model, t0
from torch.onnx._internal.exporter import _registration


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> Iterator[None]:
    """One thread, unless the environment says how many, and no progress bars.

    The exporter parses the source of all its 500 translations for every graph: once is enough for a tiny one.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    with pytest.MonkeyPatch.context() as patch:
        api = _registration.onnxscript_apis
        patch.setattr(api, "get_torchlib_ops", functools.cache(api.get_torchlib_ops))
        yield


@pytest.fixture(scope="session")
def _llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(transformers.LlamaConfig(**t0()), tmp_path_factory.mktemp("t0") / "llama")


@pytest.fixture(scope="session")
def _llama_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("t0") / "shards"
    return save_model(transformers.LlamaConfig(**t0()), path, max_shard_size="40KB")


@pytest.fixture
def llama(_llama: Path, tmp_path: Path) -> Path:
    """A copy of T0 with one safetensors file, to be damaged."""
    return Path(shutil.copytree(_llama, tmp_path / "llama"))


@pytest.fixture
def shards(_llama_shards: Path, tmp_path: Path) -> Path:
    """A copy of T0 with several shards, to be damaged."""
    return Path(shutil.copytree(_llama_shards, tmp_path / "shards"))


Edit = Callable[..., None]


@pytest.fixture
def edit() -> Edit:
    """``edit(dir, "config.json", key=value)``: change fields of a JSON file; ``...`` removes a field."""

    def change(model_dir: Path, name: str = "config.json", /, **changes: Any) -> None:
        path = model_dir / name
        data = json.loads(path.read_text()) if path.exists() else {}
        data.update(changes)
        path.write_text(json.dumps({k: v for k, v in data.items() if v is not ...}))

    return change
