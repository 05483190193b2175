"""A tiny valid calbin, put together by hand: the tests damage it in one place at a time."""

from __future__ import annotations

import copy
import hashlib
import struct
from dataclasses import dataclass, field

import ml_dtypes
import msgpack
import numpy as np

from calc.calbin.layout import ALIGN, CHUNK
from calc.core.isa import NO_REG, RANK_IMM, RECORD, Alu, DType, Engine, Flag, Fn, Op, Space
from calc.core.optable import spec_of
from calc.core.packing import TileLayout, align, pack_int4
from calc.core.target import load_target

VOCAB, HIDDEN, HEAD = 64, 32, 16
LAYERS = 2
SLOTS, CAPACITY, ROWS = 2, 24, 32
SHARD_BASE, KV_BASE, IO_BASE = 0, 1 << 20, 2 << 20
TOML = load_target("calculet-1chip").toml
TOKENIZER = b'{"version": "1.0"}'
TOKENS = (1, 2, 3, 63, 5)
LOGITS_ROWS = (1, 2, 3, 4)


@dataclass
class Parts:
    """What a calbin is made of. `sections` are (name, kind, content) in file order."""

    manifest: dict
    sections: list[tuple[str, str, bytes]] = field(default_factory=list)

    def copy(self) -> Parts:
        return copy.deepcopy(self)

    def content(self, name: str) -> bytes:
        return next(c for n, _, c in self.sections if n == name)

    def replace(self, name: str, content: bytes) -> None:
        self.sections = [(n, k, content if n == name else c) for n, k, c in self.sections]


def plain(value: object) -> object:
    """Keys sorted, tuples as lists: what the canonical encoding holds."""
    if isinstance(value, dict):
        return {k: plain(value[k]) for k in sorted(value, key=lambda k: str(k).encode("utf-8", "surrogatepass"))}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def pack(value: object) -> bytes:
    return msgpack.packb(plain(value), use_bin_type=True, unicode_errors="surrogatepass")


def section_entries(parts: Parts) -> list[dict]:
    at, out = ALIGN, []
    for name, kind, content in parts.sections:
        at = align(at, ALIGN)
        chunks = [hashlib.sha256(content[i : i + CHUNK]).hexdigest() for i in range(0, len(content), CHUNK)]
        digest = hashlib.sha256(content).hexdigest()
        out.append(
            {"name": name, "kind": kind, "offset": at, "nbytes": len(content), "sha256": digest, "chunks": chunks}
        )
        at += len(content)
    return out


def header(offset: int, raw: bytes, version: tuple[int, int] = (1, 0)) -> bytes:
    fields = (b"\x89CALBIN\n", *version, 4096, 0, offset, len(raw), hashlib.sha256(raw).digest())
    return struct.pack("<8sHHIQQQ32s", *fields).ljust(4096, b"\0")


def assemble(parts: Parts, *, edit=None, raw: bytes | None = None, version: tuple[int, int] = (1, 0)) -> bytes:
    """The file's bytes, without the writer.

    Args:
        parts: sections and manifest.
        edit: changes the complete manifest before it is encoded.
        raw: the manifest's bytes, instead of the encoded manifest.
        version: the header's version.
    """
    manifest = copy.deepcopy(parts.manifest)
    manifest["sections"] = section_entries(parts)
    if edit is not None:
        edit(manifest)
    body = bytearray(ALIGN)
    for _, _, content in parts.sections:
        body += bytes(align(len(body), ALIGN) - len(body)) + content
    body += bytes(align(len(body), ALIGN) - len(body))
    raw = pack(manifest) if raw is None else raw
    body[:4096] = header(len(body), raw, version)
    return bytes(body) + raw


# -- programs --------------------------------------------------------------------------------------------------------


def operand(space: Space, dtype: DType, base: int, step: int, reg: int = NO_REG, stride: int = 0) -> np.ndarray:
    out = np.zeros((), dtype=RECORD["dst"])
    out["base"], out["space"], out["dtype"] = base, space, dtype
    out["step"] = (step, 0, 0, 0)
    out["reg"], out["stride"] = (reg, NO_REG, NO_REG), (stride, 0, 0)
    return out


def record(op: Op, engine: Engine, *, dims=(), imm=(), fimm=(), **fields) -> np.ndarray:
    out = np.zeros((), dtype=RECORD)
    out["op"], out["engine"] = op, engine
    for name in ("dst", "a", "b", "d", "e"):
        out[name]["reg"] = NO_REG
    out["dims"] = (*dims, *[0] * (5 - len(dims)))
    out["imm"] = (*imm, *[0] * (6 - len(imm)))
    if spec_of(op).has_rank:
        out["imm"][RANK_IMM] = len(dims)
    out["fimm"] = (*fimm, *[0.0] * (2 - len(fimm)))
    for name, value in fields.items():
        out[name] = value
    return out


def program(chip: int, chips: int) -> np.ndarray:
    """A loop that moves rows of KV through SRAM, and what it takes to hand them to the next chip."""
    sram = operand(Space.SRAM, DType.F32, 0, 4)
    dram = operand(Space.DRAM, DType.F32, KV_BASE, 4, reg=3, stride=64)
    records = [
        record(Op.CSRR, Engine.CTL, imm=(1, 64, -1)),
        record(Op.SALU, Engine.CTL, sub=Alu.MUL, imm=(2, 1, 4), flags=Flag.IMM),
        record(Op.LOOP, Engine.CTL, imm=(3,), dims=(2,)),
        record(Op.LOAD, Engine.ADMA, dims=(16,), dst=sram, a=dram, node=1),
        record(Op.SIGNAL, Engine.ADMA, imm=(5, 1)),
        record(Op.WAIT, Engine.VEC, imm=(5, 1)),
        record(Op.VMAP, Engine.VEC, sub=Fn.AFFINE, dims=(16,), fimm=(2.0, 0.5), dst=sram, a=sram),
        record(Op.LOOP, Engine.CTL, imm=(4,), dims=(1,), dim_regs=1),
        record(Op.END, Engine.CTL),
        record(Op.END, Engine.CTL),
        record(Op.STORE, Engine.ADMA, dims=(16,), dst=operand(Space.DRAM, DType.F32, IO_BASE, 4), a=sram),
    ]
    if chip + 1 < chips:
        records.append(record(Op.SEND, Engine.LINK, imm=(chip + 1,), dims=(16,), a=sram))
    if chip:
        records.insert(0, record(Op.RECV, Engine.LINK, imm=(chip - 1,), dims=(16,), dst=sram))
    return np.array([*records, record(Op.HALT, Engine.CTL)], dtype=RECORD)


# -- weights ---------------------------------------------------------------------------------------------------------


def packed(layout: TileLayout, seed: int) -> bytes:
    """One packed weight with random codes and proper scales."""
    rng = np.random.default_rng(seed)
    out = bytearray(layout.nbytes)
    for tile in range(layout.tiles):
        n, at = layout.rows_of(tile), layout.tile_offset(tile)
        if layout.fmt == "w4":
            codes = np.zeros((n, layout.cols_padded), dtype=np.int8)
            codes[:, : layout.cols] = rng.integers(-8, 8, (n, layout.cols))
            data = pack_int4(codes).tobytes()
            scales = rng.uniform(0.5, 1, (n, layout.groups)).astype(ml_dtypes.bfloat16).tobytes()
        else:
            dtype = np.int8 if layout.fmt == "w8" else ml_dtypes.bfloat16
            grid = np.zeros((n, layout.cols_padded), dtype=dtype)
            grid[:, : layout.cols] = rng.integers(-100, 100, (n, layout.cols)).astype(dtype)
            data = grid.tobytes()
            scales = rng.uniform(0.5, 1, n).astype(np.float32).tobytes() if layout.fmt == "w8" else b""
        out[at : at + len(data)] = data
        out[at + layout.scales_offset(n) : at + layout.scales_offset(n) + len(scales)] = scales
        if layout.bias:
            bias = rng.uniform(-1, 1, n).astype(np.float32).tobytes()
            out[at + layout.bias_offset(n) : at + layout.bias_offset(n) + len(bias)] = bias
    return bytes(out)


def shard(chip: int) -> tuple[list[dict], bytes]:
    weights: list[dict] = []
    data = bytearray()

    def add(name: str, content: bytes, fmt: str, shape: tuple, padded: tuple, **more) -> None:
        data.extend(bytes(align(len(data), 64) - len(data)))
        weights.append(
            {
                "name": name,
                "chip": chip,
                "offset": len(data),
                "nbytes": len(content),
                "format": fmt,
                "shape": shape,
                "padded_shape": padded,
                "tile_rows": 0,
                "group": 0,
                "bias": False,
                "experts": 0,
                "sources": (f"model.{name}.weight",),
            }
            | more
        )
        data.extend(content)

    add("norm", np.ones(HIDDEN, np.float32).tobytes(), "f32", (HIDDEN,), (HIDDEN,))
    embed = TileLayout("bf16", VOCAB, HIDDEN, VOCAB)
    add("embed", packed(embed, 5), "bf16", (VOCAB, HIDDEN), (VOCAB, HIDDEN), tile_rows=VOCAB)
    w8 = TileLayout("w8", 40, 48, 16, bias=True)
    add("qkv", packed(w8, 1), "w8", (40, 48), (40, 64), tile_rows=16, bias=True)
    w4 = TileLayout("w4", 40, 72, 16, group=32)
    add("up", packed(w4, 2), "w4", (40, 72), (40, 96), tile_rows=16, group=32)
    bf16 = TileLayout("bf16", 24, 32, 16)
    experts = packed(bf16, 3) + packed(bf16, 4)
    add("experts", experts, "bf16", (2, 24, 32), (2, 24, 32), tile_rows=16, experts=2)
    for w in weights:
        w["name"] = f"chip{chip}.{w['name']}"
    return weights, bytes(data)


# -- manifest --------------------------------------------------------------------------------------------------------


def tensor(name: str, dtype: str, shape: tuple, tile: tuple, padded: tuple, at: int, valid=()) -> dict:
    item = {"i32": 4, "f32": 4, "bf16": 2}[dtype]
    return {
        "name": name,
        "dtype": dtype,
        "shape": shape,
        "layout": "row_major",
        "tile": tile,
        "padded_shape": padded,
        "valid": [{"axis": a, "csr": c} for a, c in valid],
        "part": None,
        "at": {"space": "dram", "chip": 0, "offset": at, "nbytes": int(np.prod(padded)) * item},
    }


def submodel(role: str, batch: int, seq: int, chips: int) -> dict:
    name = f"{role}_b{batch}_s{seq}"
    split = {1: [(0, 1)], 2: [(0,), (1,)]}[chips]
    parts = [
        {
            "chip": c,
            "layers": split[c],
            "program": f"program.{name}.{c}",
            "instructions": len(program(c, chips)),
            "nodes": ("embed", "layers.0"),
            "sram_peak": 4096,
            "regions": [
                {"name": "a", "space": "sram", "chip": c, "offset": 0, "nbytes": 2048, "first": 0, "last": 4},
                {"name": "b", "space": "sram", "chip": c, "offset": 2048, "nbytes": 2048, "first": 2, "last": 9},
                {"name": "c", "space": "sram", "chip": c, "offset": 0, "nbytes": 2048, "first": 5, "last": 9},
            ],
        }
        for c in range(chips)
    ]
    work = {"macs": 10, "vector_ops": 10, "dram_bytes": 10, "host_bytes": 10, "link_bytes": chips - 1, "cycles": 10}
    ids = tensor(
        "input_ids", "i32", (batch, seq), (1, 1), (batch, seq), IO_BASE, [(1, "cur_seq_len")] if seq > 1 else []
    )
    return {
        "name": name,
        "role": role,
        "model_type": f"llm_{role}",
        "batch": batch,
        "seq": seq,
        "workload": work,
        "target_chips": tuple(range(chips)),
        "chip_map": parts,
        "inputs": [ids],
        "outputs": [tensor("logits", "f32", (batch, 60), (1, 16), (batch, 64), IO_BASE + 4096)],
    }


def states(chips: int) -> list[dict]:
    size = SLOTS * ROWS * HEAD * 2
    return [
        {
            "name": f"kv.{i}.{which}",
            "layer": i,
            "dtype": "bf16",
            "heads": 1,
            "dim": HEAD,
            "growth": "token",
            "window": None,
            "rows": ROWS,
            "parts": [
                {
                    "chip": i if chips == 2 else 0,
                    "offset": KV_BASE + (2 * i + k) * size,
                    "first_head": 0,
                    "heads": 1,
                }
            ],
        }
        for i in range(LAYERS)
        for k, which in enumerate(("key", "value"))
    ]


def model() -> dict:
    layer = {"kv_heads": 1, "key_dim": HEAD, "value_dim": HEAD, "window": None, "experts": 0}
    tokenizer = {
        "kind": "tokenizers",
        "sha256": hashlib.sha256(TOKENIZER).hexdigest(),
        "vocab_size": VOCAB,
        "add_bos": False,
        "chat_template": "{{ messages }}\n",
    }
    return {
        "name": "tiny",
        "family": "llama",
        "architecture": "LlamaForCausalLM",
        "layers": [layer] * LAYERS,
        "hidden": HIDDEN,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": HEAD,
        "intermediate": 40,
        "vocab": VOCAB,
        "activation": "silu",
        "rms_eps": 1e-6,
        "rope_parameters": "{}",
        "tied_embeddings": False,
        "experts": 0,
        "experts_per_token": 0,
        "norm_topk_prob": False,
        "moe_intermediate": 0,
        "attn_softcap": None,
        "logit_softcap": None,
        "max_position_embeddings": 64,
        "torch_dtype": "bfloat16",
        "tokens": {"bos": 1, "eos": (2,), "pad": None, "unk": None},
        "tokenizer": tokenizer,
        "dynamic_dims": {"batch": "sequences", "cur_seq_len": "tokens"},
        "source_sha256": "",
    }


def golden_arrays() -> tuple[list[dict], bytes]:
    logits = np.arange(len(LOGITS_ROWS) * VOCAB, dtype=np.float32).tobytes()
    key = np.ones((len(TOKENS), HEAD), ml_dtypes.bfloat16).tobytes()
    data = logits + key
    return [
        {
            "name": "hf/logits",
            "dtype": "f32",
            "shape": (len(LOGITS_ROWS), VOCAB),
            "offset": 0,
            "nbytes": len(logits),
        },
        {
            "name": "hf/key.1",
            "dtype": "bf16",
            "shape": (len(TOKENS), HEAD),
            "offset": len(logits),
            "nbytes": len(key),
        },
    ], data


def tiny(chips: int = 1) -> Parts:
    """A valid calbin for one or two chips: prefill of 8 tokens and decode."""
    submodels = [submodel("prefill", 1, 8, chips), submodel("decode", 1, 1, chips)]
    shards = [shard(c) for c in range(chips)]
    arrays, golden = golden_arrays()
    sections: list[tuple[str, str, bytes]] = [
        (p["program"], "program", program(p["chip"], chips).tobytes()) for s in submodels for p in s["chip_map"]
    ]
    sections += [
        (f"weights.{c}", "weights", d + bytes(align(len(d), ALIGN) - len(d))) for c, (_, d) in enumerate(shards)
    ]
    sections += [("golden", "golden", golden), ("tokenizer", "tokenizer", TOKENIZER), ("graphs", "graph", b"onnx")]
    manifest = {
        "format": (1, 0),
        "model": model(),
        "target": {
            "name": "tiny",
            "chips": chips,
            "sram_bytes": 65536,
            "dram_bytes": 4 << 20,
            "digest": hashlib.sha256(TOML.encode()).hexdigest(),
            "toml": TOML,
        },
        "submodels": submodels,
        "shards": [
            {"chip": c, "section": f"weights.{c}", "dram_offset": SHARD_BASE, "nbytes": len(d)}
            for c, (_, d) in enumerate(shards)
        ],
        "weights": [w for ws, _ in shards for w in ws],
        "states": {"slots": SLOTS, "capacity": CAPACITY, "tile": 16, "states": states(chips)},
        "csrs": [
            {"name": n, "index": i, "count": 1} for i, n in enumerate(("past_kv_cur_seq_len", "cur_seq_len", "kv_slot"))
        ],
        "quantization": [
            {"weight": "chip0.qkv", "scheme": "w8a8", "group": 0, "flushed": 0, "saturated": 0},
            {"weight": "chip0.up", "scheme": "w4a16", "group": 32, "flushed": 0, "saturated": 0},
        ],
        "golden": {
            "section": "golden",
            "tokens": TOKENS,
            "prompt": 3,
            "steps": 2,
            "logits_rows": LOGITS_ROWS,
            "kv_layers": (1,),
            "rungs": [
                {
                    "name": "exported",
                    "reference": "hf",
                    "candidate": "ort",
                    "metric": "max_abs",
                    "logits": 1e-6,
                    "kv": None,
                    "gate_logits": 1e-4,
                    "gate_kv": 1e-4,
                    "why": "same arithmetic",
                }
            ],
        },
        "arrays": arrays,
        "files": [
            {"name": "tokenizer.json", "section": "tokenizer", "offset": 0, "nbytes": len(TOKENIZER)},
            {"name": "graphs/prefill.onnx", "section": "graphs", "offset": 0, "nbytes": 4},
        ],
        "dram": [
            {"name": n, "space": "dram", "chip": c, "offset": o, "nbytes": 1 << 20, "first": 0, "last": 0}
            for c in range(chips)
            for n, o in (("weights", SHARD_BASE), ("kv", KV_BASE), ("io", IO_BASE))
        ],
        "provenance": {
            "source_sha256": "",
            "calc": "0.1.0",
            "versions": {"numpy": "2"},
            "passes": ("fuse",),
            "options": {},
        },
        "compatibility": {
            "isa": "calculet-sim",
            "isa_version": (1, 0),
            "calbin": (1, 0),
            "runtime_min": (1, 0),
            "driver_min": (1, 0),
        },
    }
    return Parts(manifest, sections)
