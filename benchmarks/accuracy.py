"""How far artefacts are from transformers in fp32, beside transformers' own bf16 run, on the same text.

    python benchmarks/accuracy.py MODEL TEXT.txt A.calbin [B.calbin ...] [--tokens 512]

Every token of the text after the first is predicted: KL(fp32 || x) in nats, share of rows with the same top token, and
perplexity. The artefact runs token by token on the simulator, so its KV cache takes part in every row.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from rich.progress import Progress
from tokenizers import Tokenizer

import calc
from calc.core.metrics import kl_top1
from calc.frontend.reference import bf16_logits, reference
from calc.sim.runtime import Device


def perplexity(logits: np.ndarray, tokens: list[int]) -> float:
    """exp of the mean negative log likelihood of each next token."""
    z = logits[:-1].astype(np.float64)
    z -= z.max(-1, keepdims=True)
    logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
    return float(np.exp(-logp[np.arange(len(tokens) - 1), tokens[1:]].mean()))


def simulated(path: Path, tokens: list[int]) -> np.ndarray:
    """Logits of every row, one decode step at a time."""
    with calc.open(path) as c:
        device = Device(c)
        if c.manifest.states.capacity < len(tokens):
            sys.exit(f"{path}: capacity {c.manifest.states.capacity} is less than {len(tokens)} tokens")
        rows = [device.prefill(tokens[:1])]
        with Progress(transient=True) as bar:
            for t in bar.track(range(1, len(tokens)), description=path.name):
                rows += [device.decode([tokens[t]], [t], [0])[0]]
    return np.stack(rows)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("model", type=Path)
    p.add_argument("text", type=Path)
    p.add_argument("calbin", type=Path, nargs="+")
    p.add_argument("--tokens", type=int, default=512)
    a = p.parse_args()
    text = a.text.read_text(encoding="utf-8")
    tokens = Tokenizer.from_file(str(a.model / "tokenizer.json")).encode(text).ids[: a.tokens]
    every = list(range(len(tokens)))
    want = reference(a.model, tokens, every).logits
    print(f"{len(tokens)} tokens of {a.text.name}; perplexity in fp32 {perplexity(want, tokens):.3f}")
    print(f"{'run':32} {'KL':>10} {'same top':>9} {'perplexity':>11} {'seconds':>8}")
    for name, run in (
        ("transformers bf16", lambda: bf16_logits(a.model, tokens, every)),
        *((path.name, lambda path=path: simulated(path, tokens)) for path in a.calbin),
    ):
        start = time.perf_counter()
        got = run()
        kl, top = kl_top1(got, want)
        print(f"{name:32} {kl:10.2e} {top:9.2%} {perplexity(got, tokens):11.3f} {time.perf_counter() - start:8.1f}")


if __name__ == "__main__":
    main()
