"""Big models from their configurations alone: export and inventory cost, and the plan for the board.

    python benchmarks/big_shapes.py

Each graph is exported and inventoried in a process of its own (CPU seconds, peak memory). Then Qwen3-30B-A3B is
planned on two chips with the board's mix of schemes, beside the board's measured rates.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}
LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
LLAMA3_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
INVENTORY = """
import sys
from pathlib import Path
from calc.core.variant import Variant
from calc.frontend.export import export
from calc.passes.inventory import take_stock
from calc.stages.source import _graph
role, seq = sys.argv[2], int(sys.argv[3])
v = Variant(role, 1, seq)
e = export(Path(sys.argv[1]), [v], 4096)
stock = take_stock(v.name, _graph(e, v))
bad = [x.op for x in stock.ops if x.klass == "unsupported"]
print(f"{stock.nodes} nodes, {stock.fused} after fusion, unsupported: {bad or 'none'}")
"""
PLAN = """
import json, sys, calc
options = calc.CompileOptions(
    target="calculet-2chip", quant=sys.argv[2], prefill=(27, 128), batch=(1, 4), max_seq_len=int(sys.argv[3])
)
r = calc.compile(sys.argv[1], None, options)
print(r.model_dump_json())
"""


BLOCKS = """
import sys, calc
options = calc.CompileOptions(target=sys.argv[2], quant=sys.argv[3], prefill=(2048,), max_seq_len=4096)
print(calc.compile(sys.argv[1], None, options).model_dump_json())
"""


def run(code: str, *args: str) -> tuple[str, float, float]:
    """Output, CPU seconds and peak MiB of a process."""
    child = subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout is not None
    out = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        sys.exit("failed")
    return out.strip(), usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def blocks(tmp: Path) -> None:
    """A bucket of 2048 tokens: SRAM, how often weights are read, and every plan that fits."""
    recipe = str(ROOT / "examples" / "recipes" / "qwen3-30b-a3b.toml")
    print("Bucket of 2048 tokens, planned from a config alone")
    for name, config, target, quant in (
        ("Llama-3-8B", LLAMA3_8B, "calculet-1chip", "bf16"),
        ("Qwen3-30B-A3B", QWEN3_30B_A3B, "calculet-2chip", recipe),
    ):
        d = tmp / f"{name}-blocks"
        d.mkdir()
        (d / "config.json").write_text(json.dumps(config))
        out, cpu, rss = run(BLOCKS, str(d), target, quant)
        v = next(v for v in json.loads(out)["variants"] if v["role"] == "prefill")
        peaks = " + ".join(f"{s / 2**20:.1f}" for s in v["sram_peak"])
        print(f"  {name} on {target} ({cpu:.1f} CPU-s, {rss:.0f} MiB): SRAM {peaks} MiB, ", end="")
        print(f"{v['dram_bytes'] / 1e9:.1f} GB, {v['seconds'] * 1e3:.0f} ms, bound: {v['bound']}")
        for b in v["row_blocks"]:
            sizes = ", ".join(map(str, b["rows"]))
            print(f"    cut {b['kind']:7} blocks of {sizes:14} weights read {b['weight_reads']} x", end="")
            print(f" = {b['weight_bytes'] / 1e9:.1f} GB, spilled {b['spill_bytes'] / 1e9:.2f} GB", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as tmp:
        dirs = {}
        for name, config in (("Qwen3-30B-A3B", QWEN3_30B_A3B), ("Llama-3-70B", LLAMA3_70B)):
            dirs[name] = Path(tmp) / name
            dirs[name].mkdir()
            (dirs[name] / "config.json").write_text(json.dumps(config))
        blocks(Path(tmp))
        print("\nExport and inventory from a config alone, one graph per process")
        for name, d in dirs.items():
            for role, seq in (("prefill", "128"), ("decode", "1")):
                out, cpu, rss = run(INVENTORY, str(d), role, seq)
                print(f"  {name:14} {role:8} {cpu:6.1f} CPU-s {rss:6.0f} MiB   {out}", flush=True)
        recipe = str(ROOT / "examples" / "recipes" / "qwen3-30b-a3b.toml")
        for context in ("512", "40960"):
            out, cpu, rss = run(PLAN, str(dirs["Qwen3-30B-A3B"]), recipe, context)
            plan = json.loads(out)
            shards = " + ".join(f"{b / 1e9:.2f}" for b in plan["shard_bytes"])
            print(f"\nPlan of Qwen3-30B-A3B on two chips, context {context} ({cpu:.1f} CPU-s, {rss:.0f} MiB)")
            print(f"  layers per chip {plan['layers_per_chip']}, shards {shards} GB (board 9.40 + 8.78 GB)")
            for v in plan["variants"]:
                peaks = " ".join(f"{s / 2**20:.1f}" for s in v["sram_peak"])
                print(
                    f"  {v['name']:16} past {v['past']:5}  SRAM {peaks} MiB  {v['dram_bytes'] / 1e9:.2f} GB", end="  "
                )
                print(f"{v['seconds'] * 1e3:.1f} ms  {v['tokens_per_second']:.1f} token/s  bound: {v['bound']}")
        print("  board, measured: prefill of 27 tokens 184.27 token/s, decode of 246 tokens 58.25 token/s (batch 1)")


if __name__ == "__main__":
    main()
