"""Writing Hugging Face model directories from plain arrays."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast


def half_split_rope(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder a q or k projection from interleaved RoPE pairs to the two halves that transformers rotates.

    Args:
        weight: ``[heads * head_dim, hidden]``; within a head, rows 2i and 2i + 1 form a pair.
        heads: number of heads in `weight`.

    Returns:
        The same rows; within a head, rows i and i + head_dim / 2 form a pair.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, hidden)
    return pairs.transpose(1, 2).reshape(rows, hidden).contiguous()


def write_llama(folder: Path, config: LlamaConfig, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Write ``config.json`` and ``model.safetensors``. A tied ``lm_head.weight`` is left out, as transformers does."""
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = dtype
    config.save_pretrained(folder)
    ready = {name: tensor.to(dtype).contiguous() for name, tensor in sorted(tensors.items())}
    save_file(ready, folder / "model.safetensors", metadata={"format": "pt"})


def write_generation_config(folder: Path, *, bos: int, eos: list[int], pad: int) -> None:
    """Write ``generation_config.json`` for greedy decoding."""
    GenerationConfig(bos_token_id=bos, eos_token_id=eos, pad_token_id=pad, do_sample=False).save_pretrained(folder)


def write_tokenizer(
    folder: Path,
    tokenizer: Tokenizer,
    special: dict[str, str],
    *,
    max_length: int,
    chat_template: str | None = None,
) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, the chat template inside the latter.

    The class is recorded as ``PreTrainedTokenizerFast``: transformers 5 would write a name that version 4 does not
    know, and a family's own class (GPT-2's, Llama's) would rebuild the pre-tokenizer and lose this one.
    """
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, model_max_length=max_length, **special
    )
    fast.chat_template = chat_template
    fast.save_pretrained(folder, save_jinja_files=False)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    for internal in ("backend", "is_local", "local_files_only"):
        settings.pop(internal, None)
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
