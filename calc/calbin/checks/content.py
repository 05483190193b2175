"""Golden vectors, tokenizer and provenance."""

from __future__ import annotations

import hashlib
import re
from math import prod

from calc.calbin.codec import Path
from calc.calbin.layout import HINT
from calc.calbin.manifest import Array
from calc.calbin.report import Context

TOKENIZER_FILE = "tokenizer.json"
"""Name of the tokenizer's file when `model.tokenizer.kind` is ``tokenizers``."""

REFERENCE = "hf"
"""Prefix of the reference's arrays: its logits have a row for each of `logits_rows`, all others' for each call of the
replay."""

_KV = re.compile(r"(key|value)\.(\d{1,9})")


def check_golden(ctx: Context) -> None:
    """CALBIN_GOLDEN: tokens and rows exist, arrays have the shapes their names promise."""
    m = ctx.manifest
    golden = m.golden
    if golden is None:
        return
    path: Path = ("golden",)
    for i, token in enumerate(golden.tokens):
        if token >= m.model.vocab:
            what = "a golden token is not in the vocabulary"
            ctx.report.add("CALBIN_GOLDEN", (*path, "tokens", i), what, expected=f"below {m.model.vocab}", got=token)
    count = len(golden.tokens)
    if golden.prompt + golden.steps > count:
        what = "the prompt and the decode steps are more than the tokens"
        got = golden.prompt + golden.steps
        ctx.report.add("CALBIN_GOLDEN", (*path, "prompt"), what, expected=f"at most {count}", got=got)
    elif not set(range(golden.prompt - 1, golden.prompt + golden.steps)) <= set(golden.logits_rows):
        what = "rows of the replay are missing"
        expected = f"{golden.prompt - 1} to {golden.prompt + golden.steps - 1}"
        ctx.report.add("CALBIN_GOLDEN", (*path, "logits_rows"), what, expected=expected, got=golden.logits_rows)
    tables = (("logits_rows", golden.logits_rows, count), ("kv_layers", golden.kv_layers, len(m.model.layers)))
    for name, values, limit in tables:
        if list(values) != sorted(set(values)) or (values and values[-1] >= limit):
            what = "rows or layers are out of range, or not in ascending order"
            ctx.report.add("CALBIN_GOLDEN", (*path, name), what, expected=f"ascending, below {limit}", got=values)
    for i, array in enumerate(m.arrays):
        rows = len(golden.logits_rows) if array.name.startswith(f"{REFERENCE}/") else golden.steps + 1
        _check_array(ctx, array, ("arrays", i), rows, count)


def _check_array(ctx: Context, array: Array, path: Path, rows: int, tokens: int) -> None:
    model = ctx.manifest.model
    content = array.name.rpartition("/")[2]
    if content == "logits" and (array.shape != (rows, model.vocab) or array.dtype == "i32"):
        what = "golden logits have another shape or dtype"
        expected = f"f32 or bf16 {(rows, model.vocab)}"
        ctx.report.add("CALBIN_GOLDEN", path, what, expected=expected, got=f"{array.dtype} {array.shape}")
    kv = _KV.fullmatch(content)
    if kv is None:
        return
    layer = int(kv[2])
    if layer >= len(model.layers):
        what = "golden KV of a layer the model lacks"
        ctx.report.add("CALBIN_GOLDEN", (*path, "name"), what, expected=f"below {len(model.layers)}", got=layer)
        return
    spec = model.layers[layer]
    width = spec.kv_heads * (spec.key_dim if kv[1] == "key" else spec.value_dim)
    size = prod(array.shape)
    if size % width or size > width * tokens or array.dtype == "i32":
        what = "golden KV has another shape or dtype"
        expected = f"f32 or bf16, rows of {width} for at most {tokens} tokens"
        ctx.report.add("CALBIN_GOLDEN", path, what, expected=expected, got=f"{array.dtype} {array.shape}")


def check_tokenizer(ctx: Context, data: memoryview) -> None:
    """CALBIN_TOKENIZER: the file is there and is the one the model names; special tokens are in the vocabulary."""
    m = ctx.manifest
    files = [f for f in m.files if f.name == TOKENIZER_FILE]
    if m.model.tokenizer.kind == "tokenizers":
        if not files:
            what = "the model has a tokenizer, but the file is missing"
            ctx.report.add("CALBIN_TOKENIZER", ("files",), what, expected=TOKENIZER_FILE, hint=HINT)
            return
        section = ctx.sections[files[0].section]
        start = section.offset + files[0].offset
        digest = hashlib.sha256(data[start : start + files[0].nbytes]).hexdigest()
        if digest != m.model.tokenizer.sha256:
            what = "the tokenizer's file is not the one the model was compiled with"
            at: Path = ("model", "tokenizer", "sha256")
            ctx.report.add("CALBIN_TOKENIZER", at, what, expected=m.model.tokenizer.sha256, got=digest, hint=HINT)
    tokens = m.model.tokens
    ids = [*tokens.eos, *(t for t in (tokens.bos, tokens.pad, tokens.unk) if t is not None)]
    if any(t < 0 for t in ids) or list(tokens.eos) != sorted(set(tokens.eos)):
        what = "special tokens are negative, or the end tokens not in ascending order"
        ctx.report.add("CALBIN_TOKENIZER", ("model", "tokens"), what, got=tokens)
