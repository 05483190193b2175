"""Tiny models, targets and runs that the field tests share."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

import calc
from calc.calbin.reader import Calbin, open_calbin
from calc.core.options import CompileOptions, CompileReport
from calc.core.target import TARGET_DIR
from calc.frontend.reference import reference
from calc.sim.machine import Mode
from calc.sim.runtime import Device
from tests.frontend.frontend_models import save_model, t0

__all__ = ["save", "t0"]

Array = NDArray[np.float32]
save = save_model

BF16_GATE = 0.02
"""Relative RMS between the simulator and transformers fp32: BF16 costs about 0.003 on these models, a wrong row 1."""

ORDER_GATE = 2e-3
"""Relative RMS between two runs that sum in another order: at most single BF16 steps here and there."""


def target(path: Path, *, base: str = "calculet-2chip", **changes: float) -> str:
    """A target's TOML with changed values: ``chips=4``, ``sram=65536``; the path, for `CompileOptions.target`."""
    text = (TARGET_DIR / f"{base}.toml").read_text()
    for key, value in changes.items():
        if key == "chips":
            text, n = re.subn(r"(?m)^chips = \d+$", f"chips = {value}", text)
        else:
            section = rf"memory\.{key}" if key in ("sram", "dram") else rf"\w+\.{key}"
            text, n = re.subn(rf"(?m)(^\[{section}\]\nvalue = ).*$", rf"\g<1>{float(value)!r}", text)
        assert n == 1, key
    path.write_text(text)
    return str(path)


def compile_model(model: Path, out: Path, **options: Any) -> CompileReport:
    """Compile with a bucket of 8 and room for 32 tokens; no golden vectors unless asked for."""
    return calc.compile(model, out, CompileOptions(**{"prefill": (8,), "max_seq_len": 32, "golden": False, **options}))


def compile_graphs(exported: Path, out: Path | None, **options: Any) -> CompileReport:
    """Compile what the `exported` fixture holds: the same as `compile_model`, without torch."""
    prefill, decode = sorted(exported.glob("prefill*.onnx")), sorted(exported.glob("decode*.onnx"))
    assert prefill and decode
    return calc.compile_graphs(
        prefill,
        decode,
        exported / "model_spec.json",
        out,
        CompileOptions(**{"max_seq_len": 32, "golden": False, **options}),
    )


def tokens(count: int, *, vocab: int = 64, seed: int = 7) -> list[int]:
    """Seeded token ids."""
    return [int(t) for t in np.random.default_rng(seed).integers(3, vocab, count)]


def rel_rms(got: Sequence[Array], want: Sequence[Array]) -> float:
    """Root mean square of the difference over that of `want`."""
    num = sum(float(np.square(np.float64(g) - w).sum()) for g, w in zip(got, want, strict=True))
    den = sum(float(np.square(np.float64(w)).sum()) for w in want)
    return float(np.sqrt(num / den))


def kv(device: Device, count: int, slot: int = 0) -> list[Array]:
    """Keys and values of all layers, in order; of a window its last rows."""
    return [x for i in range(len(device.manifest.model.layers)) for x in device.kv(i, slot, count)]


def open_device(path: Path, mode: Mode = "fast") -> Device:
    """A calbin on the simulator."""
    return Device(open_calbin(path), mode)


def with_submodels(path: Path, keep: Callable[[Any], bool]) -> Calbin:
    """An open calbin that shows some of its sub-models only."""
    calbin = open_calbin(path)
    kept = tuple(s for s in calbin.manifest.submodels if keep(s))
    calbin.manifest = calbin.manifest.model_copy(update={"submodels": kept})
    return calbin


def against_transformers(model: Path, device: Device, sequence: Sequence[int], prompt: int) -> list[float]:
    """Prefill `prompt` tokens, decode the rest: relative RMS of the logits after every call, then of the KV."""
    n = len(sequence)
    want = reference(model, sequence, list(range(prompt - 1, n)))
    got = [device.prefill(sequence[:prompt])]
    got += [device.decode([sequence[t]], [t], [0])[0] for t in range(prompt, n)]
    found = [rel_rms([g], [w]) for g, w in zip(got, want.logits, strict=True)]
    state = [x for pair in zip(want.keys, want.values, strict=True) for x in pair]
    held = kv(device, n)
    return [*found, rel_rms(held, [w[-len(h) :] for h, w in zip(held, state, strict=True)])]


def edit_weights(model: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite a model's only safetensors file."""
    path = model / "model.safetensors"
    data = load_file(path)
    change(data)
    save_file(data, path, metadata={"format": "pt"})
