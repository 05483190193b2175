"""Decode speed on this machine, one thread: the simulator in fast mode beside ONNX Runtime on the fused fp32 graph.

    python benchmarks/decode_speed.py MODEL OUT.calbin [--steps 32] [--rounds 3]

Both run in one process, in turns, on the same tokens; the figure to keep is the ratio. ONNX Runtime keeps its KV
buffers in place through bound inputs and outputs, so that it does not pay for copies the simulator does not make.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import onnxruntime as rt
from threadpoolctl import threadpool_limits

import calc
from calc.core.variant import Variant
from calc.frontend.export import export
from calc.passes.base import Graph
from calc.passes.calls import bind_functions
from calc.passes.execute import Held, Segment, session
from calc.passes.order import fusion_passes
from calc.sim.runtime import Device
from calc.stages.source import _graph


def fused_session(model: Path, capacity: int) -> tuple[rt.InferenceSession, Graph]:
    """The whole fused fp32 decode graph in one session."""
    v = Variant("decode", 1, 1)
    g = _graph(export(model, [v], capacity), v)
    for p in fusion_passes():
        p.run(g)
    bind_functions(g, "fp32")
    graph = g.model.graph
    names = tuple(i.name for i in graph.inputs)
    seg = Segment(tuple(graph), names, tuple(graph.initializers), tuple(o.name for o in graph.outputs))
    held = Held(lambda graph, name, _: graph.weights[name].read().astype(np.float32))
    return session(g, seg, held, packed=True).runtime, g


class Ort:
    """Decode steps in ONNX Runtime with KV buffers that stay where they are."""

    def __init__(self, model: Path, capacity: int) -> None:
        self.session, g = fused_session(model, capacity)
        shapes = {i.name: [int(d) for d in i.shape] for i in g.model.graph.inputs if i.name.startswith("past_kv.")}
        self.kv = [
            {n: rt.OrtValue.ortvalue_from_numpy(np.zeros(s, np.float32)) for n, s in shapes.items()} for _ in range(2)
        ]

    def step(self, token: int, past: int) -> np.ndarray:
        b = self.session.io_binding()
        now, then = self.kv
        for name, value in now.items():
            b.bind_ortvalue_input(name, value)
            b.bind_ortvalue_output(name.removeprefix("past_"), then[name])
        b.bind_cpu_input("input_ids", np.array([[token]], np.int64))
        b.bind_cpu_input("past_kv_cur_seq_len", np.array([past], np.int64))
        b.bind_cpu_input("cur_seq_len", np.array([1], np.int64))
        b.bind_output("logits")
        self.session.run_with_iobinding(b)
        self.kv.reverse()
        return b.get_outputs()[-1].numpy()  # bound last


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("model", type=Path)
    p.add_argument("calbin", type=Path)
    p.add_argument("--steps", type=int, default=32)
    p.add_argument("--rounds", type=int, default=3)
    a = p.parse_args()
    with calc.open(a.calbin) as c, threadpool_limits(1):
        tokens = [int(t) for t in np.random.default_rng(0).integers(0, c.manifest.model.vocab, a.steps)]
        ort, device = Ort(a.model, a.steps + 1), Device(c)
        print(f"{'round':>5} {'simulator tok/s':>16} {'ORT fp32 tok/s':>15} {'ratio':>6}")
        for r in range(a.rounds + 1):
            speeds = []
            for step in (lambda t, i: device.decode([t], [i], [0]), ort.step):
                start = time.process_time()
                for i, t in enumerate(tokens):
                    step(t, i)
                speeds.append(a.steps / (time.process_time() - start))
            label = "warm" if r == 0 else str(r)
            print(f"{label:>5} {speeds[0]:16.2f} {speeds[1]:15.2f} {speeds[0] / speeds[1]:6.2f}", flush=True)


if __name__ == "__main__":
    main()
