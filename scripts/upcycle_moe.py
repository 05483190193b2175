"""Make a mixture-of-experts model with distinct experts and real weights from a dense Llama directory.

Each expert is the dense feed-forward block plus noise of its own, so that a wrong expert, a wrong weight or a wrong
routing order changes the result, while the model still speaks. The router is random; it is scaled so that its logits
have a standard deviation near `ROUTER_SPREAD`, which spreads the tokens over the experts without being flat.

    python scripts/upcycle_moe.py SRC OUT --family mixtral|qwen3_moe --experts 4 --top-k 2 --noise 0.08 --seed 0

Mixtral has Llama's attention, which is kept exactly. Qwen3-MoE normalizes every query and key head: its norm weights
are set to the RMS the dense model shows on `CALIBRATION`, which is an approximation.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import _assets

_assets.stay_offline()

import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

ROUTER_SPREAD = 2.0
CALIBRATION = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once "
    "or twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it."
)
# Where an expert's three matrices are in a saved checkpoint, below "model.layers.N.".
EXPERT_KEYS = {
    "mixtral": ("block_sparse_moe.experts", ("w1", "w2", "w3")),
    "qwen3_moe": ("mlp.experts", ("gate_proj", "down_proj", "up_proj")),
}


def empty_model(dense: LlamaForCausalLM, family: str, experts: int, top_k: int) -> PreTrainedModel:
    """A model of `family` with the dense model's dimensions; its weights are yet to be set."""
    config = dense.config
    common = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": dict(config.rope_parameters),
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "num_experts_per_tok": top_k,
        "sliding_window": None,
    }
    if family == "mixtral":
        return MixtralForCausalLM(
            MixtralConfig(intermediate_size=config.intermediate_size, num_local_experts=experts, **common)
        )
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            intermediate_size=config.intermediate_size,
            moe_intermediate_size=config.intermediate_size,
            num_experts=experts,
            norm_topk_prob=True,
            **common,
        )
    )


def head_rms(dense: LlamaForCausalLM, source: Path) -> dict[str, torch.Tensor]:
    """The RMS of every layer's query and key heads on `CALIBRATION`, keyed ``LAYER.q_norm`` and ``LAYER.k_norm``."""
    found: dict[str, torch.Tensor] = {}

    def recorder(key: str) -> Callable[[object, object, torch.Tensor], None]:
        def record(_module: object, _inputs: object, output: torch.Tensor) -> None:
            found[key] = output.square().mean().sqrt()

        return record

    hooks = []
    for index, layer in enumerate(dense.model.layers):
        attention = layer.self_attn
        hooks.append(attention.q_proj.register_forward_hook(recorder(f"{index}.q_norm")))
        hooks.append(attention.k_proj.register_forward_hook(recorder(f"{index}.k_norm")))
    with torch.no_grad():
        dense(AutoTokenizer.from_pretrained(source)(CALIBRATION, return_tensors="pt")["input_ids"])
    for hook in hooks:
        hook.remove()
    return found


def upcycle(
    dense: LlamaForCausalLM, source: Path, family: str, experts: int, top_k: int, noise: float, seed: int
) -> PreTrainedModel:
    """The mixture. `noise` is each expert's deviation, as a fraction of the matrix's standard deviation."""
    random = torch.Generator().manual_seed(seed)
    mixture = empty_model(dense, family, experts, top_k)
    old, new = dense.state_dict(), mixture.state_dict()

    def expert(weight: torch.Tensor) -> torch.Tensor:
        return weight + noise * weight.std() * torch.randn(weight.shape, generator=random)

    for name in new:
        if name in old:
            new[name] = old[name].clone()
    for index in range(dense.config.num_hidden_layers):
        layer = f"model.layers.{index}."
        gate, up, down = (old[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        fused = [torch.cat([expert(gate), expert(up)]) for _ in range(experts)]
        new[f"{layer}mlp.experts.gate_up_proj"] = torch.stack(fused)
        new[f"{layer}mlp.experts.down_proj"] = torch.stack([expert(down) for _ in range(experts)])
        # The router reads the normalized hidden state, whose norm is the norm weight's.
        norm = old[f"{layer}post_attention_layernorm.weight"].norm()
        router = new[f"{layer}mlp.gate.weight"]
        new[f"{layer}mlp.gate.weight"] = torch.randn(router.shape, generator=random) * ROUTER_SPREAD / norm
    if family == "qwen3_moe":
        for key, rms in head_rms(dense, source).items():
            name = f"model.layers.{key.replace('.', '.self_attn.')}.weight"
            new[name] = torch.full_like(new[name], rms.item())
    mixture.load_state_dict(new)
    mixture.tie_weights()
    return mixture.eval()


def check_keys(folder: Path, family: str, layers: int, experts: int) -> int:
    """Make sure that every expert has tensors of its own in the checkpoint; return the number of tensors."""
    keys: set[str] = set()
    for shard in folder.glob("*.safetensors"):
        with safe_open(shard, "pt") as stream:
            keys.update(stream.keys())
    block, parts = EXPERT_KEYS[family]
    expected = {
        f"model.layers.{layer}.{block}.{index}.{part}.weight"
        for layer in range(layers)
        for index in range(experts)
        for part in parts
    }
    if missing := sorted(expected - keys):
        raise _assets.AssetError(f"{len(missing)} expert tensors are missing, the first is {missing[0]}")
    return len(keys)


def build(options: argparse.Namespace) -> None:
    """Write the directory and print what was measured on it, reloaded from the disk."""
    dense = AutoModelForCausalLM.from_pretrained(options.src, dtype=torch.float32).eval()
    if dense.config.model_type != "llama":
        raise _assets.AssetError(f"{options.src} is a {dense.config.model_type}, expected a llama")
    saved_dtype = AutoConfig.from_pretrained(options.src).dtype or torch.float32
    mixture = upcycle(dense, options.src, options.family, options.experts, options.top_k, options.noise, options.seed)
    with _assets.published(options.out) as scratch:
        mixture.to(saved_dtype).save_pretrained(scratch)
        for pattern in ("tokenizer*", "generation_config.json", "chat_template.jinja", "LICENSE"):
            for path in options.src.glob(pattern):
                shutil.copyfile(path, scratch / path.name)
        tensors = check_keys(scratch, options.family, dense.config.num_hidden_layers, options.experts)
        # The default implementation, grouped_mm, needs rows of a multiple of 16 bytes: a width of 341 has not.
        again = AutoModelForCausalLM.from_pretrained(
            scratch, dtype=torch.float32, experts_implementation="eager"
        ).eval()
        ids = AutoTokenizer.from_pretrained(scratch)(CALIBRATION, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            reference = dense(ids, labels=ids)
            got = again(ids, labels=ids, output_router_logits=True)
        loads = [
            torch.bincount(r.topk(options.top_k).indices.flatten(), minlength=options.experts).tolist()
            for r in got.router_logits
        ]
        count = sum(parameter.numel() for parameter in again.parameters())
    print(
        f"{options.out}: {options.family}, {count:,} parameters in {tensors} tensors, one set per expert\n"
        f"loss {got.loss:.3f} (dense {reference.loss:.3f}), "
        f"largest logit difference {(got.logits - reference.logits).abs().max():.3f}\n"
        f"tokens per expert and layer: {loads}"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("src", type=Path, help="a dense Llama directory")
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", choices=sorted(EXPERT_KEYS), default="mixtral")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--noise", type=float, default=0.08)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not 1 <= options.top_k <= options.experts:
        parser.error(f"--top-k must lie between 1 and --experts ({options.experts})")
    try:
        build(options)
    except _assets.AssetError as error:
        sys.exit(f"upcycle_moe: {error}")


if __name__ == "__main__":
    main()
