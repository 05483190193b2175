"""Fixtures of the field tests: T0 with a tokenizer, exported once, compiled once for each set of options."""

from __future__ import annotations

import functools
import os
import shutil
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
from tests.field.field_models import compile_graphs, save, t0

Compiled = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> Iterator[None]:
    """One thread unless the environment says otherwise, no progress bars, translations parsed once."""
    if "OMP_NUM_THREADS" not in os.environ:
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
def graphs_of(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``graphs_of((8,), (1, 2), 32)``: T0's graphs and tokenizer, as ``calc export`` writes them, once; read-only."""
    done: dict[object, Path] = {}

    def export_once(prefill: tuple[int, ...], batch: tuple[int, ...], max_seq_len: int) -> Path:
        key = (prefill, batch, max_seq_len)
        if key not in done:
            out = tmp_path_factory.mktemp("exported") / "llama"
            calc.export(llama, out, CompileOptions(prefill=prefill, batch=batch, max_seq_len=max_seq_len))
            shutil.copy(llama / "tokenizer.json", out)
            done[key] = out
        return done[key]

    return export_once


@pytest.fixture(scope="session")
def exported(graphs_of: Callable[..., Path]) -> Path:
    """T0's graphs for a bucket of 8, batch 1 and 32 tokens."""
    return graphs_of((8,), (1,), 32)


@pytest.fixture(scope="session")
def compiled(graphs_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """``compiled(batch=(2,))``: T0 compiled with options, once for each set of them; no golden vectors."""
    done: dict[str, Path] = {}

    def compile_once(
        prefill: tuple[int, ...] = (8,), batch: tuple[int, ...] = (1,), max_seq_len: int = 32, **options: Any
    ) -> Path:
        key = repr((prefill, batch, max_seq_len, sorted(options.items())))
        if key not in done:
            done[key] = tmp_path_factory.mktemp("calbin") / "t0.calbin"
            compile_graphs(graphs_of(prefill, batch, max_seq_len), done[key], max_seq_len=max_seq_len, **options)
        return done[key]

    return compile_once
