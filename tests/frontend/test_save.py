"""Saved graphs: names, external data that ONNX Runtime accepts, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import onnx
import pytest
from frontend_models import Runner, golden, stepwise
from test_checkpoint import hub_cache

from calc.core.errors import DiskError, InternalError, UsageError
from calc.core.spec import ModelSpec
from calc.core.variant import Variant
from calc.frontend import save as save_module
from calc.frontend.checkpoint import SINGLE
from calc.frontend.export import Exported, export
from calc.frontend.save import save

PREFILL, DECODE = Variant("prefill", 1, 8), Variant("decode", 1, 1)
TOKENS = list(range(5, 14))


@pytest.fixture
def exported(llama: Path) -> Exported:
    return export(llama, [DECODE], 16)


def locations(path: Path) -> set[str]:
    model = onnx.load(path, load_external_data=False)
    return {e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"}


def test_shards_of_a_hub_cache_load_in_place(shards: Path, tmp_path: Path) -> None:
    snapshot = hub_cache(shards, tmp_path / "models--a--b")
    out = tmp_path / "模型 out"
    run = Runner(export(snapshot, [PREFILL, DECODE], 16), out)
    assert sorted(p.name for p in out.glob("*.onnx")) == ["decode.onnx", "prefill.onnx"]
    names = locations(out / "prefill.onnx")
    assert len(names) > 1
    for name in names:
        assert (out / name).stat().st_nlink > 1
        assert not (out / name).is_symlink()
    gold = golden(shards, TOKENS)
    assert run.check([gold], run.step(PREFILL, [TOKENS[:8]])) <= 2e-4
    assert run.check([gold], run.step(DECODE, [TOKENS[8:]])) <= 2e-4


def test_into_the_models_own_directory(llama: Path) -> None:
    exported = export(llama, [PREFILL], 16)
    files = save(exported, llama)
    assert [p.name for p in files] == ["prefill.onnx", "model_spec.json"]
    assert locations(llama / "prefill.onnx") == {SINGLE}
    assert (llama / SINGLE).stat().st_nlink == 1
    assert ModelSpec.model_validate_json((llama / "model_spec.json").read_text()) == exported.spec


def test_several_variants_of_a_role(llama: Path, tmp_path: Path) -> None:
    longer = Variant("prefill", 1, 16)
    files = save(export(llama, [PREFILL, longer], 16), tmp_path / "out")
    assert [p.name for p in files] == ["prefill_b1_s8.onnx", "prefill_b1_s16.onnx", "model_spec.json"]


def test_field_47_large_constants_leave_the_protobuf(llama: Path, tmp_path: Path) -> None:
    exported = export(llama, [PREFILL, DECODE], 32)
    save(exported, tmp_path / "a")
    save(exported, tmp_path / "b", inline_limit=16)
    assert not (tmp_path / "a" / "decode.bin").exists()
    assert locations(tmp_path / "b" / "decode.onnx") == {SINGLE, "decode.bin"}
    assert (tmp_path / "b" / "decode.onnx").stat().st_size < (tmp_path / "a" / "decode.onnx").stat().st_size

    run = Runner(exported, tmp_path / "llama-out-b1", inline_limit=16)
    assert max(stepwise(run, TOKENS, 8)) <= 2e-4


def test_a_protobuf_over_the_limit_is_our_bug(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_module, "_MAX_PROTO", 100)
    with pytest.raises(InternalError, match="cannot be read back"):
        save(exported, tmp_path / "out")


def test_copies_where_links_do_not_work(exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*_: object) -> None:
        raise OSError("no hard links here")

    monkeypatch.setattr(os, "link", no_link)
    save(exported, tmp_path / "out")
    assert (tmp_path / "out" / SINGLE).stat().st_nlink == 1
    save(exported, tmp_path / "out")


def test_copies_satisfy_the_onnx_checker(exported: Exported, tmp_path: Path) -> None:
    save(exported, tmp_path / "out")
    save(exported, tmp_path / "out", copy=True)
    onnx.checker.check_model(tmp_path / "out" / "decode.onnx")


def test_two_shards_of_one_name_and_a_blob(tmp_path: Path) -> None:
    shards = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        shards.append(tmp_path / folder / "x.safetensors")
        shards[-1].write_text(folder)
    blob = tmp_path / "0123abcd"
    blob.write_text("blob")
    out = tmp_path / "out"
    out.mkdir()
    names = save_module._place_shards([*shards, blob], out, copy=False)
    assert list(names.values()) == ["x.safetensors", "00001-x.safetensors", "weights-00002.safetensors"]
    assert [(out / n).read_text() for n in names.values()] == ["a", "b", "blob"]


def test_no_weights_to_refer_to(llama: Path, tmp_path: Path) -> None:
    (llama / SINGLE).unlink()
    with pytest.raises(UsageError) as caught:
        save(export(llama, [DECODE], 16), tmp_path / "out")
    assert caught.value.code == "USAGE_NO_WEIGHTS"


def test_a_directory_that_cannot_be_written(exported: Exported, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(DiskError) as caught:
        save(exported, tmp_path / "out")
    assert caught.value.code == "DISK_WRITE"


def test_saved_twice_gives_the_same_bytes(exported: Exported, tmp_path: Path) -> None:
    one, two = (save(exported, tmp_path / name)[0].read_bytes() for name in ("a", "b"))
    assert one == two
    assert json.loads((tmp_path / "a" / "model_spec.json").read_text())["name"] == "llama"
