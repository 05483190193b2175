"""Write ``schemas/*.schema.json`` from the pydantic models, or with ``--check`` fail if a file differs.

The bytes depend on the models alone. A test runs the check, so a schema cannot drift from the code that reads.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from calc.api.bench import BenchReport
from calc.api.session import Generation
from calc.calbin.layout import FORMAT, version_text
from calc.calbin.manifest import Manifest
from calc.cli.reports import ErrorReport, ExportReport
from calc.core.options import CompileReport
from calc.passes.inventory import InventoryReport
from calc.sim.verify import VerifyReport

SCHEMAS = ROOT / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
REPORTS = {
    "bench": BenchReport,
    "compile": CompileReport,
    "error": ErrorReport,
    "export": ExportReport,
    "inventory": InventoryReport,
    "run": Generation,
    "verify": VerifyReport,
}
"""What each verb writes under ``--format json``; `calc inspect` writes the manifest."""


class _Reports(GenerateJsonSchema):
    """JSON has no infinity: a measured value that is not finite is written as null."""

    def float_schema(self, schema: dict) -> JsonSchemaValue:
        return {**super().float_schema(schema), "type": ["number", "null"]}


def manifest_schema() -> dict:
    """JSON Schema 2020-12 of the calbin manifest, msgpack maps and arrays taken as objects and arrays."""
    schema = Manifest.model_json_schema(mode="validation")
    return {
        "$schema": DIALECT,
        "$id": f"calbin-manifest-{version_text(FORMAT)}",
        **schema,
        "title": f"calbin manifest {version_text(FORMAT)}",
    }


def report_schema(name: str) -> dict:
    """JSON Schema 2020-12 of a verb's report."""
    schema = REPORTS[name].model_json_schema(mode="serialization", schema_generator=_Reports)
    return {"$schema": DIALECT, "$id": f"calc-{name}-report", **schema, "title": f"calc {name} report"}


def schemas() -> dict[Path, str]:
    """Each schema's path and text."""
    made = {"calbin-manifest": manifest_schema(), **{name: report_schema(name) for name in REPORTS}}
    return {
        SCHEMAS / f"{name}.schema.json": json.dumps(schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        for name, schema in made.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file differs")
    check = parser.parse_args().check
    differ = []
    for path, text in schemas().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            differ.append(path.relative_to(ROOT))
            if not check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8")
    for path in differ:
        print(f"{path}: {'differs from the models, run scripts/gen_schemas.py' if check else 'written'}")
    return int(check and bool(differ))


if __name__ == "__main__":
    raise SystemExit(main())
