"""CPU time, wall time and peak memory of a compile, each in a process of its own.

    python benchmarks/compile_cost.py MODEL [--layers 8 16 30] [--quant bf16]
    python benchmarks/compile_cost.py --shape [--layers 28] [--builder]

The first compiles copies of MODEL with its first N layers, golden vectors included. The second makes a checkpoint of
random weights in the shape of Qwen3-0.6B and compiles it in w4a16 with two prefill buckets and two batches, without
golden vectors and with the whole ladder. ``--builder`` runs onnxruntime-genai's int4 model builder on the same
checkpoint, before and after, from a throwaway environment that pip fills. All runs have one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import site
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[1]
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
COMPILE = """
import calc, sys
calc.compile(sys.argv[1], sys.argv[2], calc.CompileOptions.model_validate_json(sys.argv[3]))
"""
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}


class Cost(NamedTuple):
    """Of one process: seconds of CPU and of the clock, peak MiB."""

    cpu: float
    wall: float
    rss: float


def truncated(model: Path, layers: int, out: Path) -> None:
    """A copy of a model directory with its first layers only."""
    out.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (model / name).is_file():
            shutil.copy(model / name, out / name)
    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] = layers
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:layers]
    (out / "config.json").write_text(json.dumps(config))
    kept = {}
    for shard in sorted(model.glob("*.safetensors")):
        with safe_open(shard, "pt") as f:
            for name in list(f.keys()):
                parts = name.split(".")
                if "layers" not in parts or int(parts[parts.index("layers") + 1]) < layers:
                    kept[name] = f.get_tensor(name)
    save_file(kept, out / "model.safetensors")


def random_qwen3(layers: int, out: Path) -> None:
    """A checkpoint of random BF16 weights in the shape of Qwen3-0.6B."""
    import ml_dtypes

    out.mkdir(parents=True)
    c = {**QWEN3_06B, "num_hidden_layers": layers}
    (out / "config.json").write_text(json.dumps(c))
    h, i, d = int(c["hidden_size"]), int(c["intermediate_size"]), int(c["head_dim"])
    q, kv = d * int(c["num_attention_heads"]), d * int(c["num_key_value_heads"])
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (int(c["vocab_size"]), h), "model.norm": (h,)}
    for n in range(layers):
        p = f"model.layers.{n}"
        shapes |= {
            f"{p}.self_attn.{k}_proj": s for k, s in zip("qkvo", ((q, h), (kv, h), (kv, h), (h, q)), strict=True)
        }
        shapes |= {f"{p}.mlp.gate_proj": (i, h), f"{p}.mlp.up_proj": (i, h), f"{p}.mlp.down_proj": (h, i)}
        shapes |= {f"{p}.self_attn.{k}_norm": (d,) for k in "qk"}
        shapes |= {f"{p}.input_layernorm": (h,), f"{p}.post_attention_layernorm": (h,)}
    rng = np.random.default_rng(0)
    arrays = {}
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape, dtype=np.float32)
        values = noise * 0.03 if len(shape) > 1 else 1 + 0.1 * noise
        arrays[f"{name}.weight"] = values.astype(ml_dtypes.bfloat16)
    save_arrays(arrays, out / "model.safetensors")


def measure(command: Sequence[str], log: Path) -> Cost:
    """Run a command to its end; its output goes to a file, shown if it fails."""
    start = time.perf_counter()
    with log.open("w") as out:
        env = {**os.environ, **THREADS, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
        _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        sys.exit(f"{log.read_text()}\n{command[0]} failed")
    return Cost(usage.ru_utime + usage.ru_stime, time.perf_counter() - start, usage.ru_maxrss / 1024)


def compiled(model: Path, out: Path, **options: object) -> Cost:
    return measure([sys.executable, "-c", COMPILE, str(model), str(out), json.dumps(options)], out.with_suffix(".log"))


def builder_environment(home: Path) -> Path:
    """A Python that has onnxruntime-genai, and for the rest sees what is installed here."""
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "onnxruntime-genai"], check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "here.pth").write_text("\n".join(site.getsitepackages()))
    return python


def by_layers(model: Path, counts: Sequence[int], quant: str, tmp: Path) -> None:
    print(f"{'layers':>6} {'checkpoint MB':>13} {'calbin MB':>10} {'wall s':>8} {'CPU s':>8} {'peak RSS MiB':>13}")
    for n in counts:
        copy, out = tmp / f"l{n}", tmp / f"l{n}.calbin"
        truncated(model, n, copy)
        c = compiled(copy, out, prefill=[128], max_seq_len=1024, quant=quant, check_passes=False)
        size = sum(f.stat().st_size for f in copy.glob("*.safetensors"))
        print(
            f"{n:6} {size / 1e6:13.1f} {out.stat().st_size / 1e6:10.1f} {c.wall:8.1f} {c.cpu:8.1f} {c.rss:13.0f}",
            flush=True,
        )


def shape(layers: int, builder: bool, tmp: Path) -> None:
    model = tmp / "qwen3"
    # in a process of its own: a child's peak counts what its parent held when it was made
    code = f"from benchmarks.compile_cost import random_qwen3, Path; random_qwen3({layers}, Path({str(model)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    python = builder_environment(tmp / "genai") if builder else None
    print(f"Qwen3-0.6B's shape, {layers} layers, w4a16, prefill 128 and 512, batch 1 and 4, one thread")
    print(f"{'run':32} {'CPU s':>7} {'wall s':>7} {'peak RSS MiB':>13} {'builders CPU':>13}")
    rows: list[tuple[str, Cost]] = []
    common = {"quant": "w4a16", "prefill": [128, 512], "batch": [1, 4], "max_seq_len": 1024, "check_passes": False}
    for label, golden in (("without golden vectors", False), ("with the whole ladder", True)):
        if python is not None:
            rows.append(("onnxruntime-genai int4 builder", build(python, model, tmp / f"built-{golden}")))
        rows.append((label, compiled(model, tmp / f"{golden}.calbin", golden=golden, **common)))
    reference = [c.cpu for name, c in rows if name.startswith("onnxruntime-genai")]
    for label, c in rows:
        ratio = f"{c.cpu * len(reference) / sum(reference):.2f} x" if reference else ""
        print(f"{label:32} {c.cpu:7.1f} {c.wall:7.1f} {c.rss:13.0f} {ratio:>13}")


def build(python: Path, model: Path, out: Path) -> Cost:
    what = ["-i", str(model), "-o", str(out), "-p", "int4", "-e", "cpu", "-c", str(out) + "-cache"]
    command = [str(python), "-W", "ignore", "-m", "onnxruntime_genai.models.builder", *what]
    return measure(command, out.with_suffix(".log"))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path, nargs="?")
    p.add_argument("--layers", type=int, nargs="+")
    p.add_argument("--quant", default="bf16")
    p.add_argument("--shape", action="store_true")
    p.add_argument("--builder", action="store_true")
    a = p.parse_args()
    if a.shape == (a.model is not None):
        p.error("give either MODEL or --shape")
    with tempfile.TemporaryDirectory() as tmp:
        if a.shape:
            shape((a.layers or [28])[0], a.builder, Path(tmp))
        else:
            by_layers(a.model, a.layers or [8, 16, 30], a.quant, Path(tmp))


if __name__ == "__main__":
    main()
