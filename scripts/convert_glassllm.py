"""Convert the English model of the ``glassllm`` package (MIT) to a Hugging Face directory.

The model is a Llama with 852,608 parameters, trained on public-domain English prose: small enough to keep in the
repository, real enough to show a wrong result, and its feed-forward width, 341, divides by no tile size.

    python scripts/convert_glassllm.py [OUT_DIR]        # default: examples/glassllm-en
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import _assets
import numpy as np

_assets.stay_offline()

import torch
from _hf import half_split_rope, write_generation_config, write_llama, write_tokenizer
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

GLASSLLM = _assets.Package(
    "glassllm",
    "0.1.0",
    {
        "glassllm/weights/en.npz": "261ae219ab98caa1f3641e23deb3d9d91b7b7a276f991cbd494f67cfa5abce4d",
        "glassllm/weights/en.tokenizer.json": "4cf0830157c45cf7f8c70a8fdcb8378c33330b9ba0c9a312e772d7d6485ca4df",
        "glassllm-0.1.0.dist-info/licenses/LICENSE": "9e33376790743d975866a3606a3d8be224344b3ad60d56e9dd84e8a7fb842581",
    },
)
PAD, UNK, BOS, EOS = "<pad>", "<unk>", "<bos>", "<eos>"
SPACE = "▁"
PARAMETERS = 852_608
TOLERANCE = 1e-6  # of the largest logit: both sides sum in fp32, in different orders
PROBE = (
    "Alice was beginning to get very tired of sitting by her sister on the bank,\n"
    "and of having nothing to do: once or twice she had peeped into the book"
)
README = """\
# glassllm-en

The English model of [glassllm](https://github.com/Oseiasdfarias/glassllm) 0.1.0 (MIT, Oséias Dias de Farias; see
`LICENSE`) as a Hugging Face directory. A Llama: 852,608 parameters, 4 layers, hidden 128, 4 query and 2 key/value
heads, feed-forward 341, vocabulary 1024, context 128, tied embeddings, fp16 as published.

Made by `scripts/convert_glassllm.py`, which also compares its logits with those of the package's own forward pass.
"""


def configuration(source: dict[str, float], intermediate: int) -> LlamaConfig:
    """The package's hyperparameters in transformers' terms."""
    heads, hidden = int(source["n_heads"]), int(source["d_model"])
    return LlamaConfig(
        vocab_size=int(source["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=int(source["n_layers"]),
        num_attention_heads=heads,
        num_key_value_heads=int(source["n_kv_heads"]),
        head_dim=hidden // heads,
        max_position_embeddings=int(source["max_len"]),
        rms_norm_eps=source["eps"],
        rope_parameters={"rope_type": "default", "rope_theta": source["rope_base"]},
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
    )


def weights(arrays: dict[str, np.ndarray], config: LlamaConfig) -> dict[str, torch.Tensor]:
    """The package's arrays under transformers' names.

    The package multiplies ``x @ W`` with W ``[in, out]``, so every matrix is transposed; it rotates interleaved
    pairs, so the rows of q and k are reordered.
    """

    def matrix(name: str) -> torch.Tensor:
        return torch.from_numpy(arrays[name].T.copy())

    tensors = {
        "model.embed_tokens.weight": torch.from_numpy(arrays["E"]),
        "model.norm.weight": torch.from_numpy(arrays["norm_f.gamma"]),
    }
    for layer in range(config.num_hidden_layers):
        old, new = f"blocks.{layer}.", f"model.layers.{layer}."
        q, k = matrix(old + "attn.W_Q"), matrix(old + "attn.W_K")
        tensors |= {
            new + "input_layernorm.weight": torch.from_numpy(arrays[old + "norm1.gamma"]),
            new + "self_attn.q_proj.weight": half_split_rope(q, config.num_attention_heads),
            new + "self_attn.k_proj.weight": half_split_rope(k, config.num_key_value_heads),
            new + "self_attn.v_proj.weight": matrix(old + "attn.W_V"),
            new + "self_attn.o_proj.weight": matrix(old + "attn.W_O"),
            new + "post_attention_layernorm.weight": torch.from_numpy(arrays[old + "norm2.gamma"]),
            new + "mlp.gate_proj.weight": matrix(old + "ffn.W1"),
            new + "mlp.up_proj.weight": matrix(old + "ffn.W3"),
            new + "mlp.down_proj.weight": matrix(old + "ffn.W2"),
        }
    return tensors


def tokenizer(path: Path) -> Tokenizer:
    """The package's character BPE: NFC, spaces as a visible mark, words keep their leading marks, newlines apart."""
    source = json.loads(path.read_text(encoding="utf-8"))
    merges = [(left, right) for left, right in source["merges"]]
    entries = [PAD, UNK, BOS, EOS, *source["alphabet"], *(left + right for left, right in merges)]
    vocab = {token: index for index, token in enumerate(entries)}
    result = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=UNK, fuse_unk=False))
    result.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", SPACE)])
    result.pre_tokenizer = pre_tokenizers.Split(Regex(rf"\n|{SPACE}*[^{SPACE}\n]+|{SPACE}+"), "isolated")
    result.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(SPACE, " ")])
    result.add_special_tokens([PAD, UNK, BOS, EOS])
    return result


def verify(folder: Path, wheel: Path) -> float:
    """Compare token ids and fp32 logits of `folder` with the package's own; return the largest difference.

    The package is pure Python, so it is imported straight from its wheel.
    """
    sys.path.insert(0, str(wheel))
    import glassllm  # importable only from here on

    sys.path.remove(str(wheel))
    theirs, their_tokenizer = glassllm.load_pretrained("en")
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    our_tokenizer = AutoTokenizer.from_pretrained(folder)

    ids = their_tokenizer.encode(PROBE)
    if our_tokenizer(PROBE)["input_ids"] != ids or our_tokenizer.decode(ids) != PROBE:
        raise _assets.AssetError("the converted tokenizer disagrees with the package's")
    count = sum(parameter.numel() for parameter in ours.parameters())
    if count != PARAMETERS:
        raise _assets.AssetError(f"the converted model has {count:,} parameters, expected {PARAMETERS:,}")
    expected = theirs.forward(ids).data[0]
    with torch.no_grad():
        got = ours(torch.tensor([ids])).logits[0].numpy()
    difference, largest = float(np.abs(got - expected).max()), float(np.abs(expected).max())
    print(
        f"{count:,} parameters; {len(ids)} tokens; largest logit {largest:.3f}; "
        f"largest difference from glassllm {difference:.2e} ({difference / largest:.1e} of it)"
    )
    if not difference <= TOLERANCE * largest:
        raise _assets.AssetError(f"logits differ from glassllm's by {difference:.2e}")
    return difference


def convert(out: Path, cache: Path) -> None:
    """Write the Hugging Face directory `out`; it appears only after its logits were compared."""
    root = GLASSLLM.extract(cache)
    with np.load(root / "glassllm/weights/en.npz") as archive:
        arrays = {name: archive[name] for name in archive.files}
    settings = json.loads(str(arrays.pop("__config__")))
    config = configuration(settings, arrays["blocks.0.ffn.W1"].shape[1])
    with _assets.published(out) as scratch:
        write_llama(scratch, config, weights(arrays, config), torch.float16)
        write_generation_config(scratch, bos=2, eos=[3], pad=0)
        special = {"pad_token": PAD, "unk_token": UNK, "bos_token": BOS, "eos_token": EOS}
        write_tokenizer(
            scratch,
            tokenizer(root / "glassllm/weights/en.tokenizer.json"),
            special,
            max_length=config.max_position_embeddings,
        )
        shutil.copyfile(root / "glassllm-0.1.0.dist-info/licenses/LICENSE", scratch / "LICENSE")
        (scratch / "README.md").write_text(README, encoding="utf-8")
        verify(scratch, GLASSLLM.wheel(cache))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=_assets.REPOSITORY / "examples" / "glassllm-en")
    parser.add_argument("--cache", type=Path, default=_assets.CACHE)
    options = parser.parse_args()
    try:
        convert(options.out, options.cache)
    except _assets.AssetError as error:
        sys.exit(f"convert_glassllm: {error}")
    size = sum(path.stat().st_size for path in options.out.iterdir())
    _assets.console.print(f"{options.out}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
