"""Writer and reader: what is written is what is read, whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import resource

import ml_dtypes
import numpy as np
import pytest
from calbin_tiny import CAPACITY, LOGITS_ROWS, TOKENIZER, VOCAB, Parts, assemble, program

from calc.calbin import layout as lay
from calc.calbin import writer as writer_module
from calc.calbin.manifest import Manifest
from calc.calbin.reader import open_calbin
from calc.calbin.validate import validate
from calc.calbin.writer import CalbinWriter
from calc.core.errors import DiskError, FormatError, InternalError, RuntimeFault


def manifest_of(parts: Parts, sections) -> Manifest:
    def tuples(v):
        if isinstance(v, dict):
            return {k: tuples(x) for k, x in v.items()}
        return tuple(tuples(x) for x in v) if isinstance(v, (list, tuple)) else v

    return Manifest.model_validate({**tuples(parts.manifest), "sections": sections})


def write(parts: Parts, path, step: int = 1000) -> Manifest:
    with CalbinWriter(path) as w:
        for name, kind, content in parts.sections:
            with w.section(name, kind) as s:
                for i in range(0, len(content), step):
                    assert s.write(content[i : i + step]) == i
                assert s.tell() == len(content)
        return w.finish(lambda sections: manifest_of(parts, sections))


def test_hand_made_is_valid(parts):
    data = assemble(parts)
    assert validate(memoryview(data), len(data), deep=True).model.vocab == VOCAB


def test_writer_makes_the_documented_bytes(parts, tmp_path):
    path = tmp_path / "tiny.calbin"
    write(parts, path)
    assert path.read_bytes() == assemble(parts)
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.calbin"]


@pytest.mark.parametrize("step", [1, 7, 4096, 1 << 20])
def test_bytes_do_not_depend_on_how_they_are_written(one, tmp_path, step):
    path = tmp_path / "x"
    write(one, path, step)
    assert path.read_bytes() == assemble(one)


def test_read_then_write_is_byte_identical(parts, tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    write(parts, first)
    with open_calbin(first) as c, CalbinWriter(second) as w:
        for section in c.manifest.sections:
            with w.section(section.name, section.kind) as s:
                s.write(c.section(section.name))
        w.finish(lambda sections: c.manifest.model_copy(update={"sections": sections}))
    assert first.read_bytes() == second.read_bytes()


def test_reader_answers_views(parts, tmp_path):
    path = tmp_path / "tiny.calbin"
    write(parts, path)
    chips = parts.manifest["target"]["chips"]
    with open_calbin(path, deep=True) as c:
        assert c.nbytes == path.stat().st_size
        for chip in range(chips):
            assert np.array_equal(c.program("decode_b1_s1", chip), program(chip, chips))
            shard = c.shard(chip)
            assert shard.tobytes() == parts.content(f"weights.{chip}")[: parts.manifest["shards"][chip]["nbytes"]]
            assert not shard.flags.writeable and not shard.flags.owndata
        logits = c.array("hf/logits")
        assert logits.shape == (len(LOGITS_ROWS), VOCAB) and logits.dtype == np.float32 and logits[1, 3] == VOCAB + 3
        assert c.array("hf/key.1").dtype == ml_dtypes.bfloat16
        assert c.file("tokenizer.json") == TOKENIZER
        assert bytes(c.section("graphs")) == b"onnx"
        assert c.manifest.states.capacity == CAPACITY


def test_unknown_names_are_refused(one, tmp_path):
    path = tmp_path / "x"
    write(one, path)
    with open_calbin(path) as c:
        for ask in (
            lambda: c.section("nope"),
            lambda: c.program("nope", 0),
            lambda: c.program("decode_b1_s1", 7),
            lambda: c.shard(3),
            lambda: c.array("nope"),
            lambda: c.file("nope"),
        ):
            with pytest.raises(RuntimeFault) as e:
                ask()
            assert e.value.code == "CALBIN_NO_SUCH"


def test_views_outlive_close_and_a_closed_calbin_says_so(one, tmp_path):
    path = tmp_path / "x"
    write(one, path)
    c = open_calbin(path)
    shard = c.shard(0)
    c.close()
    path.unlink()
    assert shard.tobytes() == one.content("weights.0")[: shard.size]
    with pytest.raises(RuntimeFault) as e:
        c.shard(0)
    assert e.value.code == "CALBIN_CLOSED"


# -- writer ----------------------------------------------------------------------------------------------------------


def test_arrays_of_any_dtype_are_written_little_endian(one, tmp_path):
    big = np.arange(8, dtype=">f4")
    strided = np.arange(16, dtype=ml_dtypes.bfloat16)[::2]
    content = big.astype("<f4").tobytes() + strided.tobytes() + program(0, 1).tobytes() + b"zz"
    one.sections.append(("extra", "graph", content))
    one.manifest["files"].append({"name": "extra", "section": "extra", "offset": 0, "nbytes": len(content)})
    path = tmp_path / "x"
    with CalbinWriter(path) as w:
        for name, kind, data in one.sections[:-1]:
            with w.section(name, kind) as s:
                s.write(data)
        with w.section("extra", "graph") as s:
            for item in (big, strided, program(0, 1), np.zeros((0, 3)), bytearray(b"zz"), b""):
                s.write(item)
        w.finish(lambda sections: manifest_of(one, sections))
    assert path.read_bytes() == assemble(one)


def test_weights_are_padded_to_whole_pages(one, tmp_path):
    short = one.copy()
    short.replace("weights.0", one.content("weights.0")[: one.manifest["shards"][0]["nbytes"]])
    assert len(short.content("weights.0")) % lay.ALIGN
    path = tmp_path / "x"
    write(short, path)
    assert path.read_bytes() == assemble(one)


def test_nothing_is_left_when_the_block_raises(one, tmp_path):
    with pytest.raises(KeyError), CalbinWriter(tmp_path / "x") as w, w.section("a", "graph") as s:
        s.write(b"1")
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_an_existing_file_survives_a_failed_write(one, tmp_path):
    path = tmp_path / "x"
    write(one, path)
    before = path.read_bytes()
    with pytest.raises(KeyError), CalbinWriter(path):
        raise KeyError
    assert path.read_bytes() == before
    write(one, path)
    assert path.read_bytes() == before


def test_misuse_is_our_bug(one, tmp_path):
    path = tmp_path / "x"
    with pytest.raises(InternalError, match="without finish"), CalbinWriter(path):
        pass
    with pytest.raises(InternalError, match="two sections"), CalbinWriter(path) as w:
        for _ in range(2):
            with w.section("a", "graph"):
                pass
    with (
        pytest.raises(InternalError, match="inside another"),
        CalbinWriter(path) as w,
        w.section("a", "graph"),
        w.section("b", "graph"),
    ):
        pass
    with pytest.raises(InternalError, match="finish"), CalbinWriter(path) as w, w.section("a", "graph"):
        w.finish(lambda sections: manifest_of(one, sections))
    with pytest.raises(InternalError, match="outside its with"), CalbinWriter(path).section("a", "graph"):
        pass
    assert not list(tmp_path.iterdir())


def test_an_invalid_manifest_never_becomes_a_file(one, tmp_path):
    one.manifest["submodels"][0]["model_type"] = "llm_decode"
    with pytest.raises(InternalError, match="CALBIN_ROLE"):
        write(one, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_manifest_over_the_cap_never_becomes_a_file(one, tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "MANIFEST_MAX_BYTES", 100)
    with pytest.raises(InternalError, match="exceeds"):
        write(one, tmp_path / "x")
    assert not list(tmp_path.iterdir())


# -- the disk --------------------------------------------------------------------------------------------------------


def test_a_file_size_limit_is_a_disk_error(one, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(DiskError) as e:
            write(one, tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    problem = e.value.problems[0]
    assert problem.code == "DISK_FULL" and "bytes" in problem.expected and "free" in problem.got and problem.hint
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["fsync", "pwrite"])
@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, "DISK_FULL"), (errno.EDQUOT, "DISK_FULL"), (errno.EIO, "DISK_WRITE")]
)
def test_a_refusal_at_the_end_is_a_disk_error(one, tmp_path, monkeypatch, call, number, code):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(writer_module.os, call, refuse)
    with pytest.raises(DiskError) as e:
        write(one, tmp_path / "x")
    assert e.value.code == code
    assert not list(tmp_path.iterdir())


def test_too_little_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    with pytest.raises(DiskError) as e, CalbinWriter(tmp_path / "x", reserve=1 << 60):
        raise AssertionError
    assert e.value.code == "DISK_FULL" and str(1 << 60) in e.value.problems[0].expected

    def refuse(*_):
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(writer_module.shutil, "disk_usage", refuse)
    with pytest.raises(DiskError) as e, CalbinWriter(tmp_path / "x", reserve=1):
        raise AssertionError
    assert e.value.code == "DISK_WRITE"


def test_free_space_that_cannot_be_read_does_not_hide_the_error(one, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer_module.os, "fsync", refuse)
    monkeypatch.setattr(writer_module.shutil, "disk_usage", refuse)
    with pytest.raises(DiskError) as e:
        write(one, tmp_path / "x")
    assert "cannot be read" in e.value.problems[0].got


@pytest.mark.parametrize("where", ["missing/x", ".", "file/x"])
def test_places_that_cannot_be_written(tmp_path, where):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DiskError) as e, CalbinWriter(tmp_path / where):
        raise AssertionError
    assert e.value.code == "DISK_WRITE" and e.value.exit_code == 5


# -- digests ---------------------------------------------------------------------------------------------------------


def test_verify_names_section_chunk_and_offset(one, tmp_path, monkeypatch):
    """MALFORMED 39: one flipped bit of a shard."""
    for module in ("layout", "writer", "checks.digests"):
        monkeypatch.setattr(f"calc.calbin.{module}.CHUNK", 4096)
    monkeypatch.setattr("calbin_tiny.CHUNK", 4096)
    data = bytearray(assemble(one))
    path = tmp_path / "x"
    path.write_bytes(data)
    seen: list[tuple[str, int, int]] = []
    with open_calbin(path) as c:
        c.verify_digests(lambda *a: seen.append(a))
        shard = next(s for s in c.manifest.sections if s.kind == "weights")
    assert len(shard.chunks) > 2 and seen[-1][1] == seen[-1][2] == sum(len(x) for _, _, x in one.sections)
    at = shard.offset + 4096 + 77
    data[at] ^= 16
    path.write_bytes(data)
    with open_calbin(path) as c, pytest.raises(FormatError) as e:
        c.verify_digests()
    (problem,) = e.value.problems
    assert (
        problem.code == "CALBIN_DIGEST"
        and "weights.0, chunk 1" in problem.where
        and problem.offset == shard.offset + 4096
    )
    with pytest.raises(FormatError) as e:
        open_calbin(path, deep=True)
    assert e.value.code == "CALBIN_DIGEST"


def test_a_whole_digest_that_contradicts_its_chunks(one):
    def edit(m):
        for s in m["sections"]:
            s["sha256"] = hashlib.sha256(b"other").hexdigest()

    data = assemble(one, edit=edit)
    with pytest.raises(FormatError) as e:
        validate(memoryview(data), len(data), deep=False)
    assert set(e.value.codes) == {"CALBIN_DIGEST"}


def test_an_empty_section_has_a_digest_too(one):
    one.sections.append(("empty", "graph", b""))
    one.manifest["files"].append({"name": "empty", "section": "empty", "offset": 0, "nbytes": 0})
    data = assemble(one)
    assert validate(memoryview(data), len(data), deep=True).sections[-1].chunks == ()

    def edit(m):
        m["sections"][-1]["sha256"] = "0" * 64

    data = assemble(one, edit=edit)
    with pytest.raises(FormatError) as e:
        validate(memoryview(data), len(data), deep=False)
    assert e.value.code == "CALBIN_DIGEST"
