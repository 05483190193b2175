"""Requests that cannot be compiled: the error says what would do, and nothing is left on disk."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import calc
from calc.calbin import writer
from calc.calbin.reader import open_calbin
from calc.core.errors import CalcError, CapacityError, DiskError, ModelError, UsageError
from calc.core.target import load_target
from tests.field.field_models import compile_graphs, compile_model, target


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Failures leave no calbin and no temporary file behind; what a test makes on purpose it names ``made``."""
    yield
    left = [p for p in tmp_path.rglob("*") if "calbin" in p.name or "partial" in p.name]
    assert [p.name for p in left if not p.name.startswith("made")] == []


def refused(kind: type[CalcError], exported: Path, tmp_path: Path, **options: Any) -> CalcError:
    with pytest.raises(kind) as caught:
        compile_graphs(exported, tmp_path / "m.calbin", **options)
    with pytest.raises(kind) as planned:
        compile_graphs(exported, None, **options)
    assert planned.value.codes == caught.value.codes
    return caught.value


def test_sram_too_small(exported: Path, tmp_path: Path) -> None:
    """Bytes that are missing are exact: with that many more it compiles."""
    have = 3 * 65536 + 4096
    small = {"base": "calculet-1chip", "weight_tile": 65536}
    error = refused(CapacityError, exported, tmp_path, target=target(tmp_path / "t.toml", sram=have, **small))
    (problem,) = error.problems[:1]
    assert (problem.code, problem.where) == ("SRAM_TOO_SMALL", "prefill_b1_s8 chip 0")
    assert "smaller tiles" in problem.hint
    missing = int(re.search(r"need (\d+) bytes", problem.what).group(1))
    assert problem.expected == f"at most {have}"
    assert f"{have + missing};" in problem.got
    for more, fits in ((missing, True), (missing - 1, False)):
        chosen = target(tmp_path / "t.toml", sram=have + more, **small)
        if fits:
            report = compile_graphs(exported, tmp_path / "made.calbin", target=chosen)
            assert max(v.sram_peak[0] for v in report.variants) == have + missing
        else:
            refused(CapacityError, exported, tmp_path, target=chosen)


def test_sram_too_small_for_a_batch(llama: Path, tmp_path: Path) -> None:
    chosen = target(tmp_path / "t.toml", base="calculet-1chip", weight_tile=16384, sram=3 * 16384 + 36864)
    with pytest.raises(CapacityError) as caught:
        compile_model(llama, tmp_path / "m.calbin", target=chosen, batch=(64,))
    assert {p.code for p in caught.value.problems} == {"SRAM_TOO_SMALL"}
    assert any(p.where == "decode_b64_s1 chip 0" and "--batch" in p.hint for p in caught.value.problems)


def test_dram_too_small_and_the_hint_compiles(graphs_of: Any, tmp_path: Path) -> None:
    graphs = graphs_of((8,), (1,), 96)
    need = compile_graphs(graphs, None, max_seq_len=96).dram_bytes[0]
    chosen = target(tmp_path / "t.toml", base="calculet-1chip", dram=need - 4096)
    with pytest.raises(CapacityError) as caught:
        compile_graphs(graphs, tmp_path / "m.calbin", target=chosen, max_seq_len=96)
    (problem,) = caught.value.problems
    assert (problem.code, caught.value.exit_code) == ("DRAM_TOO_SMALL", 6)
    assert problem.what.startswith("4096 bytes more DRAM")
    fits = int(re.search(r"--max-seq-len (\d+) would fit", problem.hint).group(1))
    assert 8 <= fits < 96
    report = compile_graphs(graphs, None, target=chosen, max_seq_len=fits)
    assert report.dram_bytes[0] <= need - 4096
    with pytest.raises(CapacityError):
        compile_graphs(graphs, None, target=chosen, max_seq_len=fits + 32)


def test_dram_too_small_for_the_weights(exported: Path, tmp_path: Path) -> None:
    chosen = target(tmp_path / "t.toml", dram=8192)
    error = refused(CapacityError, exported, tmp_path, target=chosen)
    assert error.codes == ("DRAM_TOO_SMALL", "DRAM_TOO_SMALL")
    assert [p.where for p in error.problems] == ["chip 0", "chip 1"]
    assert all("the weights alone do not fit" in p.hint for p in error.problems)


def test_weight_tile_too_large_for_the_ring(exported: Path, tmp_path: Path) -> None:
    error = refused(CapacityError, exported, tmp_path, target=target(tmp_path / "t.toml", weight_tile=1024))
    (problem,) = error.problems[:1]
    assert problem.code == "TILE_TOO_LARGE"
    assert problem.expected == "at most 1024 bytes"
    assert int(problem.got) > 1024
    least = max(int(p.got) for p in error.problems)
    assert compile_graphs(exported, None, target=target(tmp_path / "t.toml", weight_tile=least)).variants


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("nowhere", "TARGET_UNKNOWN"),
        ("nowhere.toml", "TARGET_UNKNOWN"),
        ("calculet-1chip.toml", "TARGET_UNKNOWN"),
        ("", "TARGET_UNKNOWN"),
        ("../targets/calculet-1chip", "TARGET_UNKNOWN"),
    ],
)
def test_unknown_targets(exported: Path, tmp_path: Path, text: str, code: str) -> None:
    error = refused(UsageError, exported, tmp_path, target=text)
    assert error.codes == (code,)
    assert "calculet-1chip or calculet-2chip" in error.problems[0].expected


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        (lambda s: s + "x = [", ("TARGET_INVALID",)),
        (lambda s: s.replace("chips = 1", "chips = 0"), ("TARGET_INVALID",)),
        (lambda s: s.replace('split = "layers"', 'split = "heads"'), ("TARGET_SPLIT",)),
        (lambda s: s.replace("chips = 1", "chips = 1\nspeed = 3").replace("chips = 1", "chips = 99"), None),
        (lambda s: s.replace("[memory.sram]\nvalue = 18874368.0", "[memory.sram]\nvalue = nan"), None),
        (lambda s: s.replace("[memory.sram]\nvalue = 18874368.0", "[memory.sram]\nvalue = -1.0"), None),
        (lambda s: s.replace("[rates.dram]\nvalue = 153.6", "[rates.dram]\nvalue = 0.0"), None),
        (lambda s: s.replace("[rates.clock]\nvalue = 1.0e9", "[rates.clock]\nvalue = inf"), None),
        (lambda s: s.replace("[tiling.row_multiple]\nvalue = 16.0", "[tiling.row_multiple]\nvalue = 0.0"), None),
        (lambda s: s.replace("[tiling.weight_ring]\nvalue = 3.0", "[tiling.weight_ring]\nvalue = 0.0"), None),
        (lambda s: s.replace("[tiling.row_multiple]\nvalue = 16.0", "[tiling.row_multiple]\nvalue = 1.5"), None),
    ],
)
def test_bad_targets(exported: Path, tmp_path: Path, change: Any, codes: tuple[str, ...] | None) -> None:
    before = load_target("calculet-1chip").toml
    assert change(before) != before
    path = tmp_path / "t.toml"
    path.write_text(change(before))
    error = refused(UsageError, exported, tmp_path, target=str(path))
    assert set(error.codes) <= {"TARGET_INVALID", "TARGET_SPLIT"}
    assert all("t.toml" in p.where or p.code == "TARGET_SPLIT" for p in error.problems)


def test_a_target_that_is_not_text(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_bytes(b"\xff\xfe\x00")
    assert refused(UsageError, exported, tmp_path, target=str(tmp_path / "t.toml")).code == "TARGET_INVALID"


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("default = ", ["RECIPE_INVALID"]),
        ("group = 64", ["RECIPE_INVALID"]),
        ('default = "int3"', ["RECIPE_INVALID"]),
        ('default = "w4a16"\ngroup = 48\ngroups = 1', ["RECIPE_INVALID", "RECIPE_INVALID"]),
        ('default = "w4a16"\n[[override]]\nmatch = 3\nscheme = "w8a8"', ["RECIPE_INVALID"]),
        ('default = "bf16"\n[[override]]\nmatch = "*.nothing"\nscheme = "w8a8"', ["RECIPE_NO_MATCH"]),
        ('default = "bf16"\n[[override]]\nmatch = "*embed*"\nscheme = "w8a8"', ["RECIPE_TABLE"]),
        (
            'default = "bf16"\n[[override]]\nmatch = "*embed*"\nscheme = "w8a8"\n'
            '[[override]]\nmatch = "x"\nscheme = "bf16"',
            ["RECIPE_TABLE", "RECIPE_NO_MATCH"],
        ),
        ('default = "bf16"\n[[override]]\nmatch = "*.0.mlp.gate_proj*"\nscheme = "w8a8"', ["RECIPE_PAIR"]),
    ],
)
def test_bad_recipes(exported: Path, tmp_path: Path, text: str, codes: list[str]) -> None:
    (tmp_path / "r.toml").write_text(text)
    error = refused(UsageError, exported, tmp_path, quant=str(tmp_path / "r.toml"))
    assert list(error.codes) == codes
    assert error.exit_code == 2


def test_recipes_that_are_no_files(exported: Path, tmp_path: Path) -> None:
    for text in ("int8", "W8A8", "", str(tmp_path), "r.toml"):
        assert refused(UsageError, exported, tmp_path, quant=text).codes == ("RECIPE_UNKNOWN",)
    (tmp_path / "r.toml").write_bytes(b"\xff\xfe\x00")
    assert refused(UsageError, exported, tmp_path, quant=str(tmp_path / "r.toml")).code == "RECIPE_INVALID"


@pytest.mark.parametrize(
    ("options", "kind", "codes"),
    [
        ({"prefill": (0, -3, 8)}, UsageError, ("USAGE_BUCKET", "USAGE_BUCKET")),
        ({"batch": (0, 65, 2)}, UsageError, ("USAGE_BATCH", "USAGE_BATCH")),
        ({"prefill": (0,), "batch": (-1,)}, UsageError, ("USAGE_BUCKET", "USAGE_BATCH")),
        ({"prefill": (8, 33, 64)}, CapacityError, ("BUCKET_TOO_LONG", "BUCKET_TOO_LONG")),
        ({"max_seq_len": 129}, CapacityError, ("CONTEXT_TOO_LONG",)),
    ],
)
def test_shapes_that_cannot_be(llama: Path, tmp_path: Path, options: Any, kind: Any, codes: Any) -> None:
    with pytest.raises(kind) as caught:
        compile_model(llama, tmp_path / "m.calbin", **options)
    assert caught.value.codes == codes


def test_a_bucket_of_one_and_a_context_of_one(llama: Path, tmp_path: Path) -> None:
    """The smallest there is: a prefill sub-model of one token beside decode, and a cache of one row."""
    compile_model(llama, tmp_path / "made.calbin", prefill=(1,), max_seq_len=1)
    session = calc.Session(open_calbin(tmp_path / "made.calbin"), "strict")
    generation = session.generate([5], max_new_tokens=4)
    assert generation.finish in ("capacity", "eos")


def test_golden_vectors_need_room(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(CalcError) as caught:
        compile_model(llama, tmp_path / "m.calbin", golden=True, max_seq_len=16)
    assert caught.value.codes == ("GOLDEN_TOO_SHORT",)


Usage = namedtuple("Usage", "total used free")


def test_a_disk_without_room(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _: Usage(1 << 30, 1 << 30, 1000))
    with pytest.raises(DiskError) as caught:
        compile_graphs(exported, tmp_path / "m.calbin")
    assert (caught.value.code, caught.value.exit_code) == ("DISK_FULL", 5)
    assert "1000 bytes are free" in caught.value.problems[0].got


def test_a_disk_that_fills_up_midway(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def full(descriptor: int) -> None:
        if os.fstat(descriptor).st_size > 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(writer.os, "fsync", full)
    with pytest.raises(DiskError) as caught:
        compile_graphs(exported, tmp_path / "m.calbin")
    assert caught.value.codes == ("DISK_FULL",)


def test_a_directory_that_is_not_there_or_not_writable(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(DiskError) as caught:
        compile_graphs(exported, tmp_path / "no" / "m.calbin")
    assert caught.value.codes == ("DISK_WRITE",)
    (tmp_path / "made").mkdir()
    with pytest.raises(DiskError):
        compile_graphs(exported, tmp_path / "made")


def test_a_failed_compile_keeps_the_old_artefact(exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "made.calbin"
    compile_graphs(exported, out)
    before = out.read_bytes()
    with pytest.raises(CapacityError):
        compile_graphs(exported, out, target=target(tmp_path / "t.toml", sram=65536))
    assert out.read_bytes() == before


def test_a_checkpoint_that_shrinks_while_it_is_compiled(llama: Path, tmp_path: Path) -> None:
    """The weights are read last: what is gone by then must not become garbage."""
    model = Path(shutil.copytree(llama, tmp_path / "m"))

    def progress(stage: str, done: int, total: int) -> None:
        if stage.startswith("lower"):
            os.truncate(model / "model.safetensors", 3000)

    with pytest.raises((ModelError, DiskError)):
        calc.compile(
            model, tmp_path / "m.calbin", calc.CompileOptions(prefill=(8,), max_seq_len=32, golden=False), progress
        )


def test_graphs_that_are_no_graphs(exported: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(exported, tmp_path / "graphs"))
    (prefill,) = out.glob("prefill*.onnx")
    spec = out / "model_spec.json"
    (decode,) = out.glob("decode*.onnx")
    options = calc.CompileOptions(max_seq_len=32)
    cases: list[tuple[list[Path], list[Path], Path, type[CalcError], str]] = [
        ([], [], spec, UsageError, "ONNX_VARIANTS"),
        ([prefill, prefill], [decode], spec, ModelError, "ONNX_INPUTS"),
        ([out / "no.onnx"], [decode], spec, ModelError, "ONNX_UNREADABLE"),
        ([spec], [decode], spec, ModelError, "ONNX_UNREADABLE"),
        ([prefill], [decode], prefill, ModelError, "SPEC_INVALID"),
        ([prefill], [decode], out / "no.json", ModelError, "SPEC_INVALID"),
    ]
    for p, d, s, kind, code in cases:
        with pytest.raises(kind) as caught:
            calc.compile_graphs(p, d, s, tmp_path / "m.calbin", options)
        assert caught.value.code == code, (p, d, s)
    with pytest.raises(CapacityError) as full:
        calc.compile_graphs([prefill], [decode], spec, tmp_path / "m.calbin", calc.CompileOptions(max_seq_len=33))
    assert full.value.codes == ("CONTEXT_TOO_LONG",)
