"""Names of files: unicode, spaces, and what is left on disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import calc
from tests.field.field_models import compile_graphs, compile_model


def test_field_49_unicode_and_spaces(llama: Path, tmp_path: Path) -> None:
    home = tmp_path / "模型 é"
    home.mkdir()
    model = Path(shutil.copytree(llama, home / "a model ü"))
    out = home / "läuft auf dem 芯片 .calbin"
    report = compile_model(model, out)
    assert report.path == str(out)
    calc.open(out).verify_digests()
    assert {p.name for p in home.iterdir()} == {model.name, out.name}
    made = calc.export(model, home / "graphs é", calc.CompileOptions(prefill=(8,), max_seq_len=32))
    assert all(p.is_file() for p in made)
    assert calc.inventory(made[0]).ok
    compile_graphs(home / "graphs é", home / "two .calbin")
    session = calc.Session(calc.open(home / "two .calbin"))
    assert session.generate([3, 4], max_new_tokens=1).prompt_tokens == 2


def test_the_bytes_do_not_depend_on_the_path_or_the_workers(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for home in ("one", "two é"):
        shutil.copytree(llama, tmp_path / home / "m")
    monkeypatch.chdir(tmp_path / "one")
    calc.compile("./m", "m.calbin", calc.CompileOptions(prefill=(8,), max_seq_len=32, golden=False))
    compile_model(tmp_path / "two é" / "m", tmp_path / "other.calbin", jobs=5)
    assert Path("m.calbin").read_bytes() == (tmp_path / "other.calbin").read_bytes()
