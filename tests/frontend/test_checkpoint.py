"""The checkpoint's index: every kind of damage is named, and all of it at once."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from frontend_models import edit_tensors
from safetensors.torch import load_file

from calc.core.errors import ModelError
from calc.frontend.checkpoint import INDEX, SINGLE, Checkpoint, has_weights
from calc.frontend.spec import load_spec


def codes(model_dir: Path) -> tuple[str, ...]:
    with pytest.raises(ModelError) as caught:
        Checkpoint.open(model_dir)
    return caught.value.codes


def raw_file(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def put(model_dir: Path, content: bytes) -> None:
    (model_dir / SINGLE).write_bytes(content)


def test_reads_what_safetensors_reads(shards: Path) -> None:
    checkpoint = Checkpoint.open(shards)
    assert len(checkpoint.shards) > 1
    want = {k: v for file in checkpoint.shards for k, v in load_file(file).items()}
    assert list(checkpoint.tensors) == sorted(want)
    for name, tensor in checkpoint.tensors.items():
        assert np.array_equal(tensor.read(), want[name].numpy())


def test_missing_directory_and_config(tmp_path: Path, llama: Path) -> None:
    assert codes(tmp_path / "nowhere") == ("MODEL_DIR_MISSING",)
    (llama / "config.json").unlink()
    assert codes(llama) == ("MODEL_CONFIG_MISSING",)


def test_field_13_missing_shards_are_listed(shards: Path) -> None:
    gone = sorted(p.name for p in shards.glob("*.safetensors"))[:2]
    for name in gone:
        (shards / name).unlink()
    with pytest.raises(ModelError) as caught:
        Checkpoint.open(shards)
    assert caught.value.codes == ("MODEL_SHARD_MISSING",)
    assert all(name in caught.value.problems[0].got for name in gone)


def test_field_14_index_and_shards_are_compared_both_ways(shards: Path) -> None:
    index = json.loads((shards / INDEX).read_text())
    place = index["weight_map"]
    moved = "model.norm.weight"
    other = next(file for file in sorted(set(place.values())) if file != place[moved])
    place["model.ghost.weight"] = other
    place[moved] = other
    (shards / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError) as caught:
        Checkpoint.open(shards)
    assert set(caught.value.codes) == {"MODEL_INDEX_STALE"}
    text = str(caught.value)
    assert "places 'model.ghost.weight' in this shard, which lacks it" in text
    assert "holds 'model.norm.weight', which the index does not place here" in text


def test_field_15_stale_index_has_a_remedy(shards: Path) -> None:
    for shard in shards.glob("*.safetensors"):
        edit_tensors(shard, lambda tensors: [tensors.update({f"new.{k}": tensors.pop(k)}) for k in list(tensors)])
    with pytest.raises(ModelError) as caught:
        Checkpoint.open(shards)
    assert all("the index is stale" in p.hint for p in caught.value.problems)


def test_damaged_index(shards: Path) -> None:
    (shards / INDEX).write_text('{"weight_map": 3}')
    assert codes(shards) == ("MODEL_INDEX_DAMAGED",)
    (shards / INDEX).write_text("{")
    assert codes(shards) == ("MODEL_JSON_DAMAGED",)
    (shards / INDEX).write_text("[]")
    assert codes(shards) == ("MODEL_JSON_DAMAGED",)
    (shards / INDEX).unlink()
    assert codes(shards) == ("MODEL_INDEX_MISSING",)


def test_no_weights_and_pickles(llama: Path) -> None:
    (llama / SINGLE).unlink()
    assert codes(llama) == ("MODEL_WEIGHTS_MISSING",)
    assert not has_weights(llama)
    torch.save({}, llama / "pytorch_model.bin")
    assert has_weights(llama)
    with pytest.raises(ModelError) as caught:
        load_spec(llama)
    assert caught.value.code == "MODEL_PICKLE"
    assert "save_pretrained" in caught.value.problems[0].hint


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "MODEL_HEADER_DAMAGED"),
        (b"version https://git-lfs.github.com/spec/v1", "MODEL_HEADER_DAMAGED"),
        (struct.pack("<Q", 1 << 60) + b"{}", "MODEL_HEADER_DAMAGED"),
        (raw_file(b"{not json"), "MODEL_HEADER_DAMAGED"),
        (raw_file(b"\xff\xfe{}"), "MODEL_HEADER_DAMAGED"),
        (raw_file([1]), "MODEL_HEADER_DAMAGED"),
        (raw_file({"a": 3}), "MODEL_HEADER_DAMAGED"),
        (raw_file({"a": {**ENTRY, "shape": [-2]}}, b"\0" * 8), "MODEL_HEADER_DAMAGED"),
        (raw_file({"a": {**ENTRY, "data_offsets": [0]}}, b"\0" * 8), "MODEL_HEADER_DAMAGED"),
        (raw_file({"a": {**ENTRY, "dtype": "F6"}}, b"\0" * 8), "MODEL_DTYPE_UNSUPPORTED"),
        (raw_file({"a": ENTRY}, b"\0" * 4), "MODEL_DATA_BOUNDS"),
        (raw_file({"a": {**ENTRY, "shape": [3]}}, b"\0" * 12), "MODEL_DATA_BOUNDS"),
        (raw_file({"a": ENTRY, "b": {**ENTRY, "data_offsets": [4, 12]}}, b"\0" * 12), "MODEL_DATA_OVERLAP"),
    ],
)
def test_damaged_file(llama: Path, content: bytes, code: str) -> None:
    put(llama, content)
    assert codes(llama) == (code,)


def test_every_damage_is_reported_at_once(llama: Path) -> None:
    put(llama, raw_file({"a": {**ENTRY, "dtype": "F6"}, "b": ENTRY, "c": {**ENTRY, "shape": [9]}}, b"\0" * 4))
    (llama / "config.json").unlink()
    assert codes(llama) == (
        "MODEL_CONFIG_MISSING",
        "MODEL_DTYPE_UNSUPPORTED",
        "MODEL_DATA_BOUNDS",
        "MODEL_DATA_BOUNDS",
    )


def hub_cache(source: Path, root: Path) -> Path:
    """The layout of the hub's cache: blobs named by digest, a snapshot of relative links."""
    blobs, snapshot = root / "blobs", root / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, path in enumerate(sorted(source.iterdir())):
        shutil.copy(path, blobs / f"{i:040x}")
        (snapshot / path.name).symlink_to(Path("..") / ".." / "blobs" / f"{i:040x}")
    return snapshot


def test_field_48_hub_cache_links_are_accepted(llama: Path, tmp_path: Path) -> None:
    snapshot = hub_cache(llama, tmp_path / "models--a--b")
    assert Checkpoint.open(snapshot).tensors.keys() == Checkpoint.open(llama).tensors.keys()
    assert load_spec(snapshot).hidden == 32


def test_field_48_links_out_of_the_model_are_refused(llama: Path, tmp_path: Path) -> None:
    outside = tmp_path / "secret.safetensors"
    (llama / SINGLE).rename(outside)
    (llama / SINGLE).symlink_to(outside)
    assert codes(llama) == ("MODEL_LINK_ESCAPES",)
    snapshot = hub_cache(outside.parent / "llama", tmp_path / "models--a--c")
    (snapshot / SINGLE).unlink()
    (snapshot / SINGLE).symlink_to(outside)
    assert codes(snapshot) == ("MODEL_LINK_ESCAPES",)


def test_index_cannot_name_files_outside(shards: Path) -> None:
    index = json.loads((shards / INDEX).read_text())
    first = sorted(index["weight_map"])[0]
    shutil.copy(shards / index["weight_map"][first], shards.parent / "x.safetensors")
    index["weight_map"][first] = "../x.safetensors"
    (shards / INDEX).write_text(json.dumps(index))
    assert "MODEL_LINK_ESCAPES" in codes(shards)
