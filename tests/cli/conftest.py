"""A runner for the command line, and calbins whose manifest was changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result

from calc.calbin.codec import encode
from calc.calbin.layout import HEADER_BYTES, Header, parse_header
from calc.calbin.reader import open_calbin

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch) -> Run:
    """Run ``calc`` in this process; the result has exit_code, stdout and stderr."""
    from calc.cli.app import cli

    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return lambda *args, **kwargs: CliRunner().invoke(cli, [str(a) for a in args], prog_name="calc", **kwargs)


def fits_schema(text: str, name: str) -> dict:
    """The document, after it was checked against ``schemas/<name>.schema.json``."""
    schema = json.loads((ROOT / f"schemas/{name}.schema.json").read_text(encoding="utf-8"))
    document = json.loads(text)
    jsonschema.validate(document, schema, jsonschema.Draft202012Validator)
    return document


def change_manifest(source: Path, out: Path, change: Callable[[dict], None]) -> Path:
    """A copy of a calbin with another manifest, digest and header right."""
    data = source.read_bytes()
    manifest = open_calbin(source).manifest.model_dump()
    change(manifest)
    raw = encode(manifest)
    at = parse_header(data[:HEADER_BYTES], len(data)).manifest_offset
    header = Header((1, 0), at, len(raw), hashlib.sha256(raw).digest())
    out.write_bytes(header.pack() + data[HEADER_BYTES:at] + raw)
    return out


def damage(source: Path, out: Path, offset: int, content: bytes) -> Path:
    """A copy of a file with some bytes replaced."""
    data = bytearray(source.read_bytes())
    data[offset : offset + len(content)] = content
    out.write_bytes(data)
    return out
