"""The ladder's ground: golden tokens, transformers' answer to them, and the first rung."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import numpy as np

from calc.core.options import CompileOptions, Progress
from calc.core.spec import ModelSpec
from calc.core.variant import Variant
from calc.passes.base import Graph
from calc.passes.execute import Replayed
from calc.passes.ladder import DECODE_STEPS, Ladder, golden_plan
from calc.passes.ladder_run import LadderRun
from calc.stages.source import Source

MIN_DISTINCT = 8
"""Different tokens that a golden text has at least."""

STEPWISE = 16
"""Where there is no prefill, the golden prompt is as long as for a bucket of this many tokens, decoded one by one."""

CHECK_LIMIT = 50_000_000
"""Models with fewer parameters are checked after every pass unless told otherwise."""


def start_ladder(
    source: Source, graphs: Mapping[Variant, Graph], options: CompileOptions, progress: Progress
) -> LadderRun | None:
    """Golden tokens, transformers' answer, and the first rung: the exported graphs.

    None where transformers' answer is not to be had (graphs from files, a model without weights), or where it was not
    asked for. A model of one role is replayed through that role alone: prefill in chunks, or decode token by token.
    """
    opened = source.opened
    if not options.golden or opened is None or source.shape_only:
        return None
    from calc.frontend.reference import reference

    buckets = [v.seq for v in source.variants if v.role == "prefill"] or [min(STEPWISE, source.context - DECODE_STEPS)]
    spec = source.exported.spec
    tokens = golden_tokens(opened.loaded.model_dir, spec, max(buckets) + DECODE_STEPS + 1)
    plan = golden_plan(tokens, buckets, source.context)
    progress("reference: transformers fp32", 0, 1)
    every = sorted({*plan.rows})
    ref = reference(opened, plan.tokens, every)
    picked = [every.index(r) for r in plan.replay_rows]
    end = plan.prompt + DECODE_STEPS
    # copies: a view would keep every token's KV of the longest bucket
    ground = Replayed(ref.logits[picked], [k[:end].copy() for k in ref.keys], [v[:end].copy() for v in ref.values])
    params = sum(int(np.prod(r.shape)) for r in source.exported.weights.values())
    run = LadderRun(
        plan,
        Ladder(),
        ref.logits,
        min((v for v in graphs if v.role == "prefill"), default=None),
        next((v for v in graphs if v.role == "decode" and v.batch == 1), None),
        params < CHECK_LIMIT if options.check_passes is None else options.check_passes,
        graphs,
    )
    run.ladder.start("hf", ground)
    run.ladder.climb("exported", "hf", run.replay("raw", {}, "exported graph", progress))
    return run


def golden_tokens(source: Path, spec: ModelSpec, count: int) -> list[int]:
    """Tokens of the bundled text under the model's tokenizer, repeated to `count`.

    Seeded ids where there is no tokenizer, or one that knows so little of the text that nearly all of it is one token:
    attention over equal values gives the same whatever the queries are, so that no rung would see a fault in them.
    """
    path = source / "tokenizer.json"
    if path.is_file():
        from tokenizers import Tokenizer

        text = resources.files("calc").joinpath("data/golden_text.txt").read_text(encoding="utf-8")
        ids = Tokenizer.from_file(str(path)).encode(text, add_special_tokens=True).ids
        if len(set(ids[:count])) >= min(count, MIN_DISTINCT):
            return (ids * (count // len(ids) + 1))[:count]
    return [int(t) for t in np.random.default_rng(0).integers(0, spec.vocab, count)]
