"""Fixtures of the field tests: T0 with a tokenizer, exported once, compiled once for each set of options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.onnx._internal.exporter import _registration

import calc
from calc.core.options import CompileOptions
from tests.field.field_models import save, t0

Compiled = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> Iterator[None]:
    """One thread, no progress bars, and the exporter's translations parsed once."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    with pytest.MonkeyPatch.context() as patch:
        api = _registration.onnxscript_apis
        patch.setattr(api, "get_torchlib_ops", functools.cache(api.get_torchlib_ops))
        yield


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T0 with a word-level tokenizer; read-only (copy it to damage it)."""
    path = save(transformers.LlamaConfig(**t0()), tmp_path_factory.mktemp("field") / "llama")
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="session")
def compiled(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """``compiled(batch=(2,))``: T0 compiled with options, once for each set of them."""
    done: dict[str, Path] = {}

    def compile_once(**options: Any) -> Path:
        chosen = CompileOptions(**{"prefill": (8,), "max_seq_len": 32, "golden": False, **options})
        key = chosen.model_dump_json()
        if key not in done:
            out = tmp_path_factory.mktemp("calbin") / "t0.calbin"
            calc.compile(llama, out, chosen)
            done[key] = out
        return done[key]

    return compile_once


@pytest.fixture(scope="session")
def exported(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T0's graphs for a bucket of 8 and batch 1, as ``calc export`` writes them; read-only."""
    out = tmp_path_factory.mktemp("exported") / "llama"
    calc.export(llama, out, CompileOptions(prefill=(8,), max_seq_len=32))
    return out
