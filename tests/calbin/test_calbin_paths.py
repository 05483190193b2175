"""What `open_calbin` is pointed at (MALFORMED 41, 53), what it touches, and what hostile bytes can do."""

from __future__ import annotations

import mmap
import os
import random
import resource
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from calbin_tiny import assemble, pack, section_entries, tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calc.calbin import reader
from calc.calbin.codec import check_canonical, decode, encode
from calc.calbin.reader import open_calbin
from calc.calbin.validate import validate
from calc.core.errors import CalcError, DiskError, FormatError, InternalError

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "fuzz"
GOOD = assemble(tiny())
MANIFEST_AT, MANIFEST_BYTES = struct.unpack_from("<QQ", GOOD, 24)


def refused(data: bytes, *, deep: bool = False) -> str:
    with pytest.raises(CalcError) as e:
        validate(memoryview(data), len(data), deep=deep)
    return e.value.code


# -- paths -----------------------------------------------------------------------------------------------------------


def no_such(path: Path) -> str:
    with pytest.raises(FormatError) as e:
        open_calbin(path)
    return e.value.code


def test_41_absent_loop_directory_fifo_device(tmp_path):
    assert no_such(tmp_path / "absent") == "CALBIN_NOT_FOUND"
    assert no_such(tmp_path / "absent" / "x") == "CALBIN_NOT_FOUND"
    assert no_such(tmp_path / ("x" * 300)) == "CALBIN_NOT_FOUND"
    assert no_such(Path("a\0b")) == "CALBIN_NOT_FOUND"
    (tmp_path / "loop").symlink_to("loop")
    assert no_such(tmp_path / "loop") == "CALBIN_NOT_FOUND"
    assert no_such(tmp_path) == "CALBIN_NOT_A_FILE"
    os.mkfifo(tmp_path / "fifo")
    assert no_such(tmp_path / "fifo") == "CALBIN_NOT_A_FILE"
    assert no_such(Path("/dev/zero")) == "CALBIN_NOT_A_FILE"


def test_41_a_socket(tmp_path, monkeypatch):
    import socket

    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as s:
        s.bind("socket")
        assert no_such(Path("socket")) == "CALBIN_NOT_A_FILE"


def test_a_symlink_to_a_calbin_is_followed(tmp_path):
    (tmp_path / "x").write_bytes(GOOD)
    (tmp_path / "link").symlink_to("x")
    with open_calbin(str(tmp_path / "link")) as c:
        assert c.manifest.model.name == "tiny"


def test_a_file_that_cannot_be_read_is_a_disk_error(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(GOOD)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(reader.os, "open", refuse)
    with pytest.raises(DiskError) as e:
        open_calbin(tmp_path / "x")
    assert e.value.code == "DISK_READ"


def test_a_map_that_fails_is_a_disk_error(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(GOOD)

    def refuse(*_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(reader.mmap, "mmap", refuse)
    with pytest.raises(DiskError):
        open_calbin(tmp_path / "x")


def test_53_replaced_after_open(tmp_path, monkeypatch):
    """Another file takes the name between check and use: what was checked is what is read."""
    path = tmp_path / "x"
    path.write_bytes(GOOD)
    other = tiny()
    other.manifest["model"]["name"] = "other"
    (tmp_path / "y").write_bytes(assemble(other))
    checked = reader.validate

    def replace_first(*args, **kwargs):
        (tmp_path / "y").replace(path)
        return checked(*args, **kwargs)

    monkeypatch.setattr(reader, "validate", replace_first)
    with open_calbin(path) as c:
        assert c.manifest.model.name == "tiny"
        assert c.program("decode_b1_s1", 0).tobytes() == tiny().content("program.decode_b1_s1.0")
    monkeypatch.undo()
    with open_calbin(path) as c:
        assert c.manifest.model.name == "other"


def test_53_written_to_while_open(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(GOOD)
    checked = reader.validate

    def append(*args, **kwargs):
        with path.open("ab") as f:
            f.write(b"\0")
        return checked(*args, **kwargs)

    monkeypatch.setattr(reader, "validate", append)
    assert no_such(path) == "CALBIN_CHANGED"


def test_53_cut_between_check_and_map(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(GOOD)
    real = mmap.mmap

    def cut(descriptor, size, **kwargs):
        os.truncate(path, 4096)
        return real(descriptor, size, **kwargs)

    monkeypatch.setattr(reader.mmap, "mmap", cut)
    assert no_such(path) == "CALBIN_CHANGED"


@pytest.mark.parametrize(("deep", "code"), [(False, 0), (True, -11)], ids=["shallow", "deep"])
def test_inspecting_touches_no_shard_page(deep, code):
    """The shard's pages may not be touched: a process that reads one is ended. `deep` shows that the guard works."""
    entry = next(e for e in section_entries(tiny()) if e["kind"] == "weights")
    script = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[2])!r}]
from test_calbin_paths import GOOD, Guard, validate
validate(memoryview(Guard(GOOD, {entry["offset"]}, {entry["nbytes"]}).map), len(GOOD), deep={deep})
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, preexec_fn=no_core)
    assert done.returncode == code, done.stderr.decode()


def no_core() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class Guard:
    """Bytes in anonymous memory of which one range of whole pages may not be touched."""

    def __init__(self, data: bytes, start: int, nbytes: int) -> None:
        import ctypes

        self.map = mmap.mmap(-1, len(data))
        self.map.write(data)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(address + start), ctypes.c_size_t(nbytes), 0) == 0


# -- hostile bytes ---------------------------------------------------------------------------------------------------


def test_fuzz_every_truncation_is_refused():
    step = 1 if THOROUGH else 97
    for size in sorted({*range(0, len(GOOD), step), *range(len(GOOD) - 200, len(GOOD)), 4095, 4096, 4097}):
        assert refused(GOOD[:size]) in ("CALBIN_SHORT", "CALBIN_TRUNCATED")


def test_fuzz_every_flipped_bit_of_header_and_manifest_is_refused():
    bits = [*range(72 * 8), *range(MANIFEST_AT * 8, len(GOOD) * 8)]
    reserved = list(range(72 * 8, 4096 * 8))
    if not THOROUGH:
        sample = random.Random(1)
        bits = [*bits[: 72 * 8], *sample.sample(bits[72 * 8 :], 1000)]
        reserved = sample.sample(reserved, 300)
    data = bytearray(GOOD)
    for bit in (*bits, *reserved):
        data[bit // 8] ^= 1 << bit % 8
        refused(bytes(data))
        data[bit // 8] ^= 1 << bit % 8


def survives(data: bytes) -> None:
    """Anything but `CalcError` is a failure; acceptance is fine."""
    try:
        validate(memoryview(data), len(data), deep=True)
    except CalcError as e:
        assert e.problems[0].code.startswith("CALBIN_")


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, MANIFEST_BYTES - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_fuzz_a_manifest_with_a_right_digest_and_wrong_bytes(changes):
    raw = bytearray(GOOD[MANIFEST_AT:])
    for at, value in changes:
        raw[at] = value
    survives(assemble(tiny(), raw=bytes(raw)))


def leaves(node: object, path: tuple = ()) -> list[tuple]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, (list, tuple)) else ()
    return [path] + [p for key, value in items for p in leaves(value, (*path, key))]


MANIFEST = decode(GOOD[MANIFEST_AT:])
LEAVES = leaves(MANIFEST)[1:]
VALUES = st.one_of(
    st.sampled_from(
        [0, 1, -1, 2, 2**31, 2**32, 2**61, 2**62, 4096, None, True, "", "..", 1.5, (), (0,), {}, "io", "dram"]
    ),
    st.integers(-(2**62), 2**62),
    st.text(max_size=5),
    st.floats(allow_nan=False, allow_infinity=False),
)


def with_value(node: object, path: tuple, value: object) -> object:
    if not path:
        return value
    if isinstance(node, dict):
        return {**node, path[0]: with_value(node[path[0]], path[1:], value)}
    if not isinstance(node, (list, tuple)):
        return value
    return (*node[: path[0]], with_value(node[path[0]], path[1:], value), *node[path[0] + 1 :])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(LEAVES), VALUES), min_size=1, max_size=3))
def test_fuzz_a_manifest_with_other_values(changes):
    manifest: object = MANIFEST
    for path, value in changes:
        try:
            manifest = with_value(manifest, path, value)
        except (KeyError, IndexError, TypeError):
            continue
    survives(assemble(tiny(), raw=pack(manifest)))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12 * 376 - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_fuzz_a_program_of_other_bytes(changes):
    parts = tiny()
    content = bytearray(parts.content("program.decode_b1_s1.0"))
    for at, value in changes:
        content[at] = value
    parts.replace("program.decode_b1_s1.0", bytes(content))
    survives(assemble(parts))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_fuzz_decode_never_raises_anything_else(data):
    try:
        value = decode(data)
        check_canonical(value, data)
    except FormatError:
        return
    assert encode(value) == data


PLAIN = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**62), 2**62),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(tuple), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(PLAIN)
def test_fuzz_what_is_encoded_is_decoded(value):
    assert decode(encode(value)) == value
    assert encode(decode(encode(value))) == encode(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**62 + 1, b"x", {1: 2}, {"a": {1, 2}}])
def test_what_has_no_canonical_form_is_our_bug(value):
    with pytest.raises(InternalError):
        encode(value)
