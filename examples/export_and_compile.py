"""Compile a model from Python and use the artefact: what the command line does, with the values at hand.

python examples/export_and_compile.py [MODEL_DIR] [OUT]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import calc

HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=HERE / "glassllm-en")
    parser.add_argument("out", nargs="?", type=Path, default=Path("out/glassllm-en.calbin"))
    parser.add_argument("--prompt", default="Alice was beginning to")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)

    choice = calc.CompileOptions(target="calculet-1chip", quant="w8a8", prefill=(16, 32), batch=(1, 4), max_seq_len=96)

    # 1. Which ops the model needs, and whether the NPU has them, before any weight is read.
    stock = calc.inventory(options.model, choice)
    for graph in stock.graphs:
        print(graph.name, {f"{x.domain}.{x.op}": x.count for x in graph.ops if x.klass == "native"})
    if not stock.ok:
        return 1

    # 2. Export the graphs, if you want to look at them; compile does not need the files.
    print(*calc.export(options.model, options.out.with_suffix(""), choice), sep="\n")

    # 3. Compile. Options are one frozen value; what is left out has the defaults of `calc compile`.
    plan = calc.compile(options.model, options.out, choice)
    print(f"{plan.nbytes} bytes, decode {plan.variants[-1].tokens_per_second:.0f} token/s at batch 4")

    # 4. Verify: the format, then the golden vectors on the simulator. A finding is a value, not an exception.
    verdict = calc.verify(options.out, strict=True)
    print(*(f"{'ok' if c.ok else 'FAILED':6} {c.name}: {c.metric} {c.value:.2e}" for c in verdict.checks), sep="\n")
    if not verdict.ok:
        return 1

    # 5. Look inside lazily, and generate on the simulated NPU.
    with calc.open(options.out) as artefact:
        print(artefact.manifest.model.architecture, [s.name for s in artefact.manifest.submodels])
        session = calc.Session(artefact)
        done = session.generate(
            options.prompt, max_new_tokens=24, on_text=lambda piece: print(piece, end="", flush=True)
        )
        print(f"\nTTFT {done.ttft * 1e3:.2f} ms, TPOT {done.tpot * 1e3:.2f} ms on the target")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except calc.CalcError as error:
        # Every problem has a code, a place and a hint; the exit code tells CI what kind it is.
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
