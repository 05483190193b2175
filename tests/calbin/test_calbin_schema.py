"""The published schema is the models', and a manifest that the reader takes fits it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from calbin_tiny import plain, section_entries

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "schemas/calbin-manifest.schema.json").read_text(encoding="utf-8"))


def test_the_schema_is_generated():
    done = subprocess.run(
        [sys.executable, "scripts/gen_schemas.py", "--check"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def manifest(parts) -> dict:
    return json.loads(json.dumps(plain({**parts.manifest, "sections": section_entries(parts)})))


def test_a_manifest_fits_the_schema(manifest):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(manifest, SCHEMA, jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("field", "value"), [("submodels", []), ("colour", 1), ("csrs", None), ("weights", [{"name": ""}])]
)
def test_the_schema_refuses(manifest, field, value):
    manifest[field] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, SCHEMA, jsonschema.Draft202012Validator)
