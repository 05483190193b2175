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

    # 1. Which ops the model needs, and whether the NPU has them, before any weight is read.
    print(calc.inventory(options.model))

    # 2. Compile. Options are one frozen value; what is left out has the defaults of `calc compile`.
    calc.compile(options.model, options.out, calc.CompileOptions(scheme="w8a8", target="calculet-1chip"))

    # 3. Look inside: the manifest says all that a runtime needs.
    artefact = calc.open(options.out)
    print(artefact.manifest.model.architecture, artefact.manifest.target.name)

    # 4. Verify: the format, then the golden vectors on the simulator. A finding is a value, not an exception.
    report = calc.verify(options.out)
    print(report)
    if not report.passed:
        return 1

    # 5. Generate on the simulated NPU.
    session = calc.Session(options.out)
    for piece in session.generate(options.prompt, max_new_tokens=32):
        print(piece, end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except calc.CalcError as error:
        # Every problem has a code, a place and a hint; the exit code tells CI what kind it is.
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
