"""Wall time, CPU time and peak memory of a compile as the model gets deeper.

    python benchmarks/compile_cost.py MODEL [--layers 8 16 30] [--quant bf16]

Copies of MODEL with its first N layers are compiled in processes of their own, golden vectors included.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file


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


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("model", type=Path)
    p.add_argument("--layers", type=int, nargs="+", default=[8, 16, 30])
    p.add_argument("--quant", default="bf16")
    a = p.parse_args()
    print(f"{'layers':>6} {'checkpoint MB':>13} {'calbin MB':>10} {'wall s':>8} {'CPU s':>8} {'peak RSS MiB':>13}")
    with tempfile.TemporaryDirectory() as tmp:
        for n in a.layers:
            model, out = Path(tmp) / f"l{n}", Path(tmp) / f"l{n}.calbin"
            truncated(a.model, n, model)
            code = (
                "import calc, sys; calc.compile(sys.argv[1], sys.argv[2], "
                "calc.CompileOptions(prefill=(128,), max_seq_len=1024, quant=sys.argv[3], check_passes=False))"
            )
            start = time.perf_counter()
            child = subprocess.Popen([sys.executable, "-c", code, str(model), str(out), a.quant])
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            if child.returncode:
                sys.exit(f"the compile of {n} layers failed")
            size = sum(f.stat().st_size for f in model.glob("*.safetensors"))
            print(
                f"{n:6} {size / 1e6:13.1f} {out.stat().st_size / 1e6:10.1f} {time.perf_counter() - start:8.1f} "
                f"{usage.ru_utime + usage.ru_stime:8.1f} {usage.ru_maxrss / 1024:13.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
