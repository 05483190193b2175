"""Tiny seeded models, and runs of exported graphs against transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from calc.core.variant import Variant
from calc.frontend.export import Exported, export
from calc.frontend.save import INLINE_LIMIT, save

Array = NDArray[Any]

T0: dict[str, Any] = dict(  # noqa: C408
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def t0(**changes: Any) -> dict[str, Any]:
    """T0's fields with changes; a change to None removes the field."""
    return {k: v for k, v in {**T0, "rope_parameters": dict(ROPE), **changes}.items() if v is not ...}


def make(config: transformers.PreTrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A seeded model whose logits are not flat and whose norms and biases are not trivial."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(6.0)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save_model(config: transformers.PreTrainedConfig, path: Path, **kwargs: Any) -> Path:
    """Make, save, and return the directory."""
    shard = kwargs.pop("max_shard_size", "5GB")
    make(config, **kwargs).save_pretrained(path, max_shard_size=shard)
    return path


def golden(model_dir: Path, tokens: Sequence[int]) -> tuple[Array, list[Array], list[Array]]:
    """transformers in float32 on one sequence, all in memory: logits [T,V], keys and values [T,H,D] per layer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        out = model(torch.tensor([list(tokens)]), cache=transformers.DynamicCache(), use_cache=True)
    kv = [
        (layer.keys[0].transpose(0, 1).numpy(), layer.values[0].transpose(0, 1).numpy()) for layer in out.cache.layers
    ]
    return out.logits[0].numpy(), [k for k, _ in kv], [v for _, v in kv]


@dataclass
class Runner:
    """Exported graphs in ONNX Runtime, with one KV state that prefill and decode share.

    Buffers of both graphs differ in length (C = max_seq_len + S), so the state is kept as the valid rows.
    """

    exported: Exported
    directory: Path
    inline_limit: int = INLINE_LIMIT
    sessions: dict[Variant, onnxruntime.InferenceSession] = field(default_factory=dict)
    state: list[list[Array]] = field(default_factory=list)

    def __post_init__(self) -> None:
        files = save(self.exported, self.directory, inline_limit=self.inline_limit)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        for variant, path in zip(self.exported.graphs, files, strict=False):
            self.sessions[variant] = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        self.reset()

    @property
    def batch(self) -> int:
        return next(iter(self.sessions)).batch

    def reset(self) -> None:
        """Forget every token."""
        self.state = [
            [
                np.zeros((layer.kv_heads, 0, width), np.float32)
                for layer in self.exported.spec.layers
                for width in (layer.key_dim, layer.value_dim)
            ]
            for _ in range(self.batch)
        ]

    def step(self, variant: Variant, chunks: Sequence[Sequence[int]]) -> Array:
        """Run one call: `chunks[b]` are sequence b's next tokens, padded to the bucket; returns logits [B,V]."""
        session = self.sessions[variant]
        names = [i.name for i in session.get_inputs()]
        shapes = {i.name: i.shape for i in session.get_inputs()}
        past = np.array([s[0].shape[1] for s in self.state], np.int64)
        cur = np.array([len(c) for c in chunks], np.int64)
        ids = np.full((variant.batch, variant.seq), 3, np.int64)
        feed: dict[str, Array] = {"past_kv_cur_seq_len": past, "cur_seq_len": cur, "input_ids": ids}
        for b, chunk in enumerate(chunks):
            ids[b, : len(chunk)] = chunk
        for j, name in enumerate(names[3:]):
            buffer = np.full(shapes[name], 1e4, np.float32)  # garbage beyond the valid rows must not matter
            for b in range(variant.batch):
                buffer[b, :, : past[b]] = self.state[b][j]
            feed[name] = buffer
        assert names[:3] == ["input_ids", "past_kv_cur_seq_len", "cur_seq_len"]
        logits, *kv = session.run(None, feed)
        for b in range(variant.batch):
            self.state[b] = [t[b, :, : past[b] + cur[b]] for t in kv]
        return np.asarray(logits)

    def check(self, golds: Sequence[tuple[Array, list[Array], list[Array]]], logits: Array) -> float:
        """Largest difference of logits and KV to the golden runs of each sequence."""
        worst = 0.0
        for b, (want, keys, values) in enumerate(golds):
            n = self.state[b][0].shape[1]
            worst = max(worst, float(np.abs(logits[b] - want[n - 1]).max()))
            for i, (k, v) in enumerate(zip(keys, values, strict=True)):
                for got, full in ((self.state[b][2 * i], k), (self.state[b][2 * i + 1], v)):
                    worst = max(worst, float(np.abs(got.transpose(1, 0, 2) - full[:n]).max()))
        return worst


def runner(model_dir: Path, *, batch: int = 1, bucket: int = 16, max_seq_len: int = 48) -> Runner:
    """Export one prefill and one decode graph and open them."""
    variants = [Variant("prefill", batch, bucket), Variant("decode", batch, 1)]
    return Runner(export(model_dir, variants, max_seq_len), model_dir.parent / f"{model_dir.name}-out-b{batch}")


def parity(model_dir: Path, *, prompts: Sequence[int] = (12, 7), chunk: int = 9, steps: int = 3) -> float:
    """Padded prefill, a second chunk on top of a past, then decode: the largest difference over all of it.

    Sequence b has a prompt of ``prompts[b]`` tokens, so pasts differ within a call.
    """
    run = runner(model_dir, batch=len(prompts))
    prefill, decode = run.sessions
    generator = np.random.default_rng(1)
    vocab = run.exported.spec.vocab
    sequences = [generator.integers(3, vocab, p + chunk + steps).tolist() for p in prompts]
    golds = [golden(model_dir, s) for s in sequences]
    worst = run.check(golds, run.step(prefill, [s[:p] for s, p in zip(sequences, prompts, strict=True)]))
    worst = max(
        worst, run.check(golds, run.step(prefill, [s[p : p + chunk] for s, p in zip(sequences, prompts, strict=True)]))
    )
    for i in range(steps):
        at = [p + chunk + i for p in prompts]
        logits = run.step(decode, [[s[a]] for s, a in zip(sequences, at, strict=True)])
        worst = max(worst, run.check(golds, logits))
    return worst


def prefill_parity(model_dir: Path, exported: Exported) -> float:
    """One padded prefill of one sequence through the only graph: the largest difference."""
    run = Runner(exported, model_dir.parent / f"{model_dir.name}-prefill")
    (variant,) = run.sessions
    tokens = np.random.default_rng(2).integers(3, exported.spec.vocab, variant.seq - 4).tolist()
    return run.check([golden(model_dir, tokens)], run.step(variant, [tokens]))


def stepwise(run: Runner, tokens: Sequence[int], prompt: int) -> list[float]:
    """Prefill `prompt` tokens, then decode the rest one by one: the difference after every call."""
    prefill, decode = run.sessions
    gold = golden(Path(run.directory.parent / run.directory.name.split("-out-")[0]), tokens)
    found = [run.check([gold], run.step(prefill, [tokens[:prompt]]))]
    found += [run.check([gold], run.step(decode, [[token]])) for token in tokens[prompt:]]
    return found


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite a safetensors file after `change` has altered its tensors."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
