"""`LadderRun`: the rungs that are climbed while the graphs change under them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from calc.core.errors import Problem, Problems, VerificationError
from calc.core.metrics import max_abs
from calc.core.options import Progress
from calc.core.roles import ROLES
from calc.core.schemes import Scheme
from calc.core.variant import Variant
from calc.passes.base import Graph, Watcher
from calc.passes.calls import bind_functions
from calc.passes.execute import Provider, Replayed, replay
from calc.passes.finite import Finite
from calc.passes.ladder import DECODE_STEPS, GoldenPlan, Ladder, Weights

Values = Literal["raw", "fp32", "bf16", "quantized"]
Schemes = Mapping[str, Scheme]

_BLOCK = 1 << 22
"""Elements of a weight that are checked at a time."""


@dataclass
class LadderRun(Watcher):
    """The rungs that run while the graphs change under them."""

    plan: GoldenPlan
    ladder: Ladder
    hf_logits: NDArray[np.float32]
    prefill: Variant | None
    decode: Variant | None
    check_passes: bool
    graphs: Mapping[Variant, Graph]
    before: dict[Variant, Replayed] = field(default_factory=dict)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variants that the replay runs through."""
        return tuple(v for v in (self.prefill, self.decode) if v is not None)

    def replay(self, values: Values, schemes: Schemes, stage: str, progress: Progress) -> Replayed:
        """Run the golden tokens through the graphs as they are now.

        Raises:
            ModelError: MODEL_NOT_FINITE for each checkpoint tensor with such a value, when the weights are read as they
                are stored.
        """
        todo = self.plan.calls(self.prefill, self.decode)
        graphs = {v.name: self.graphs[v] for v in self.variants}
        count = iter(range(1 << 30))
        finite, problems = Finite(), Problems()
        provider = self._provider(values, schemes, problems)
        result = replay(
            graphs,
            _checked(provider, finite) if values == "raw" else provider,
            todo,
            lambda s: progress(f"ladder: {stage}", next(count), 0),
        )
        finite.raise_if_any()
        problems.raise_if_any(VerificationError)
        return replace(result, logits=result.logits[-DECODE_STEPS - 1 :])

    @staticmethod
    def _provider(values: Values, schemes: Schemes, problems: Problems) -> Provider:
        def get(graph: Graph, name: str, floats: bool) -> NDArray[np.generic]:
            weights = Weights(graph.weights, schemes, problems)
            read = {"raw": weights.raw, "fp32": weights.fp32, "bf16": weights.bf16, "quantized": weights.quantized}
            return read["fp32" if values == "raw" and floats else values](name)

        return get

    def before_passes(self, g: Graph) -> None:
        """With `check_passes`: keep what the exported graph computes."""
        if self.check_passes:
            v = self._variant(g)
            self.before[v] = self._once(v, "raw")

    def after_pass(self, g: Graph, name: str) -> None:
        """With `check_passes`: the graph computes the same as before the pass (one call).

        Raises:
            VerificationError: PASS_CHANGED_RESULT.
        """
        if not self.check_passes:
            return
        v = self._variant(g)
        bind_functions(g, "fp32")
        got, before = self._once(v, "fp32"), self.before[v]
        diff = max_abs([got.logits, *got.keys, *got.values], [before.logits, *before.keys, *before.values])
        gate = self.ladder.fp32_gate(before)
        if not diff <= gate:
            raise VerificationError(
                Problem(
                    "PASS_CHANGED_RESULT",
                    f"pass {name} on {v.name}",
                    "the graph computes something else than before the pass",
                    f"<= {gate:.3g}",
                    f"{diff:.3g}",
                )
            )
        self.before[v] = got

    def _variant(self, g: Graph) -> Variant:
        return next(k for k, x in self.graphs.items() if x is g)

    def _once(self, v: Variant, values: Values) -> Replayed:
        """The replay's first prefill or decode call, without a past."""
        several = ROLES[v.role].several
        call = self.plan.calls(v if several else None, None if several else v)[0]
        return replay({v.name: self.graphs[v]}, self._provider(values, {}, Problems()), [replace(call, past=0)])

    def check_fused(self, progress: Progress) -> None:
        """Rung fused: the fusions computed in FP32."""
        for v in self.variants:
            bind_functions(self.graphs[v], "fp32")
        self.ladder.climb("fused", "exported", self.replay("fp32", {}, "fused graph", progress))

    def check_bf16(self, progress: Progress) -> None:
        """Rung bf16: the partitioned graph with the NPU's roundings."""
        for v in self.variants:
            bind_functions(self.graphs[v], "npu")
        g = self.graphs[self.variants[0]]
        self.ladder.climb("bf16", "fused", self.replay("bf16", g.schemes, "bf16", progress))

    def check_quantized(self, progress: Progress) -> None:
        """Rung quantized, where anything is; then the program's rung, which `calc verify` climbs."""
        last = "bf16"
        g = self.graphs[self.variants[0]]
        schemes = g.schemes
        if {s.name for s in schemes.values()} != {"bf16"}:
            for v in self.variants:
                bind_functions(self.graphs[v], "npu")
            self.ladder.schemes = frozenset(schemes.values())
            self.ladder.climb("quantized", "bf16", self.replay("quantized", schemes, "quantized", progress))
            last = "quantized"
        self.ladder.finish(last)


def _checked(provider: Provider, finite: Finite) -> Provider:
    """The same weights, each checked when it is read first."""
    seen = set[str]()

    def get(graph: Graph, name: str, floats: bool) -> NDArray[np.generic]:
        data = provider(graph, name, floats)
        if name not in seen:
            seen.add(name)
            flat = data.reshape(-1)
            for start in range(0, flat.size, _BLOCK):  # the check needs memory in proportion
                finite.check(", ".join(graph.weights[name].sources) or name, flat[start : start + _BLOCK])
        return data

    return get
