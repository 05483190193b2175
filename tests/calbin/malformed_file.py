"""Malformed header, encoding and placement (1-41)."""

from __future__ import annotations

import io
import struct
import zipfile

import msgpack
from calbin_tiny import Parts, assemble, pack, plain, section_entries
from malformed import CASES, Case, damaged, edited, field, header_bytes, u16, u32, u64

from calc.core.errors import VersionError

# -- header ----------------------------------------------------------------------------------------------------------

for _size in (0, 1, 71, 4095):
    CASES.append(Case(f"01 short file of {_size}", "CALBIN_SHORT", lambda p, n=_size: assemble(p)[:n]))
header_bytes("02 bad magic", "CALBIN_MAGIC", 0, b"PK\3\4", b"\x89CALBIN\r", b"\x09CALBIN\n", bytes(8))
header_bytes("03 version 0", "CALBIN_VERSION_ZERO", 8, u16(0)[0])
header_bytes("04 future major", "CALBIN_VERSION", 8, *u16(2, 65535), kind=VersionError)
header_bytes("05 unknown required feature", "CALBIN_FEATURE", 16, *u64(1, 1 << 63), kind=VersionError)
header_bytes("06 manifest length", "CALBIN_MANIFEST_RANGE", 32, *u64(0, 2**64 - 1, 2**63, 64 * 1024 * 1024 + 1))
header_bytes("06 manifest length over the file", "CALBIN_TRUNCATED", 32, *u64(60_000_000))
header_bytes("06 manifest offset", "CALBIN_MANIFEST_RANGE", 24, *u64(0, 1, 4097, 2**64 - 1))
header_bytes("06 manifest offset over the file", "CALBIN_TRUNCATED", 24, *u64(2**64 - 4096, 1 << 40))


@damaged("07 byte-swapped header", "CALBIN_BYTE_ORDER")
def _(parts: Parts) -> bytes:
    data = bytearray(assemble(parts))
    fields = struct.unpack_from("<HHIQQQ", data, 8)
    struct.pack_into(">HHIQQQ", data, 8, *fields)
    return bytes(data)


header_bytes("08 reserved byte", "CALBIN_RESERVED", 72, b"\1")
header_bytes("08 last reserved byte", "CALBIN_RESERVED", 4095, b"\x80")
header_bytes("09 manifest digest", "CALBIN_MANIFEST_DIGEST", 40, bytes(32))


@damaged("10 padding before the manifest", "CALBIN_PADDING")
def _(parts: Parts) -> bytes:
    data = bytearray(assemble(parts))
    data[struct.unpack_from("<Q", data, 24)[0] - 1] = 1
    return bytes(data)


@damaged("10 padding between sections", "CALBIN_PADDING")
def _(parts: Parts) -> bytes:
    data = bytearray(assemble(parts))
    data[section_entries(parts)[1]["offset"] - 1] = 1
    return bytes(data)


@damaged("11 a zip appended", "CALBIN_TRAILING")
def _(parts: Parts) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        z.writestr("a", "b")
    return assemble(parts) + out.getvalue()


CASES.append(Case("11 one byte appended", "CALBIN_TRAILING", lambda p: assemble(p) + b"\0"))

# -- encoding --------------------------------------------------------------------------------------------------------

MARK = "@@"


def raw_value(name: str, code: str, path: str, encoded: bytes) -> None:
    """A field whose msgpack bytes are replaced."""

    def damage(parts: Parts) -> bytes:
        manifest = {**parts.manifest, "sections": section_entries(parts)}
        node, *keys = manifest, *path.split(".")
        for key in keys[:-1]:
            node[key] = dict(node[key])
            node = node[key]
        node[keys[-1]] = MARK
        raw = pack(manifest)
        assert raw.count(b"\xa2@@") == 1
        return assemble(parts, raw=raw.replace(b"\xa2@@", encoded))

    CASES.append(Case(name, code, damage))


raw_value("12 invalid UTF-8", "CALBIN_MSGPACK_UTF8", "model.name", b"\xa2\xc3\x28")
raw_value("12 overlong UTF-8", "CALBIN_MSGPACK_UTF8", "model.name", b"\xa2\xc0\x80")
raw_value("12 lone surrogate", "CALBIN_MSGPACK_UTF8", "model.name", b"\xa3\xed\xa0\x80")
field("12 byte order mark in a name", "CALBIN_NAME", "submodels[0].name", "\ufeffprefill")


@damaged("12 manifest starts with a BOM", "CALBIN_MSGPACK_TRAILING")
def _(parts: Parts) -> bytes:
    return assemble(parts, raw=b"\xef\xbb\xbf" + pack(parts.manifest))


@damaged("13 duplicate key", "CALBIN_MSGPACK_DUPLICATE")
def _(parts: Parts) -> bytes:
    items = plain({**parts.manifest, "sections": section_entries(parts)})
    body = b"".join(msgpack.packb(k) + msgpack.packb(v) for k, v in items.items())
    return assemble(parts, raw=b"\xde" + struct.pack(">H", len(items) + 1) + body + msgpack.packb("weights") + b"\x90")


for _name, _bits in (("NaN", "7ff8000000000000"), ("Infinity", "7ff0000000000000"), ("-Infinity", "fff0000000000000")):
    raw_value(f"14 {_name}", "CALBIN_MSGPACK_FLOAT", "model.rms_eps", b"\xcb" + bytes.fromhex(_bits))
raw_value("15 nesting 100000 deep", "CALBIN_MSGPACK_DEPTH", "model.name", b"\x91" * 100_000 + b"\xc0")
raw_value("15 maps 100000 deep", "CALBIN_MSGPACK_DEPTH", "model.name", b"\x81\xa1a" * 100_000 + b"\xc0")
raw_value("16 a 5000-digit integer as text", "CALBIN_TYPE", "model.vocab", msgpack.packb("9" * 5000))
raw_value("16 the largest integer of msgpack", "CALBIN_MSGPACK_INTEGER", "model.vocab", b"\xcf" + b"\xff" * 8)
raw_value("16 the smallest integer of msgpack", "CALBIN_MSGPACK_INTEGER", "model.vocab", b"\xd3\x80" + bytes(7))
raw_value("16 an extension integer", "CALBIN_MSGPACK_TYPE", "model.vocab", b"\xd8\x01" + bytes(16))
field("17 no integer", "CALBIN_TYPE", "submodels[0].batch", 8.0, True, "1", None, [1])
field("17 no boolean", "CALBIN_TYPE", "weights[0].bias", 0, "false")
field("17 an integer where a float belongs", "CALBIN_CANONICAL", "model.rms_eps", 1)
raw_value("17 a float of 32 bits", "CALBIN_MSGPACK_TYPE", "model.rms_eps", b"\xca" + bytes(4))
raw_value("17 binary where text belongs", "CALBIN_MSGPACK_TYPE", "model.name", b"\xc4\x01a")
raw_value("17 a byte msgpack never uses", "CALBIN_MSGPACK_TYPE", "model.name", b"\xc1")
field("18 unknown field", "CALBIN_UNKNOWN_FIELD", "submodels[0].colour", 1)
field("18 unknown field at the root", "CALBIN_UNKNOWN_FIELD", "extra", {})


@edited("18 a field is missing", "CALBIN_MISSING_FIELD")
def _(m: dict) -> None:
    del m["submodels"][0]["outputs"]


@edited("18 a field with a default is missing", "CALBIN_CANONICAL")
def _(m: dict) -> None:
    del m["weights"][0]["experts"]


raw_value("19 a list claims 2**32 - 1", "CALBIN_MSGPACK_LENGTH", "weights", b"\xdd\xff\xff\xff\xff")
raw_value("20 a text claims 2**32 - 1", "CALBIN_MSGPACK_LENGTH", "model.name", b"\xdb\xff\xff\xff\xff")
raw_value("20 a map claims 2**32 - 1", "CALBIN_MSGPACK_LENGTH", "model", b"\xdf\xff\xff\xff\xff")
raw_value(
    "20 two million values",
    "CALBIN_MSGPACK_VALUES",
    "weights",
    b"\xdd" + struct.pack(">I", 2_000_000) + bytes(2_000_000),
)
raw_value("20 a million wrong values", "CALBIN_TYPE", "weights", b"\xdd" + struct.pack(">I", 990_000) + bytes(990_000))
raw_value(
    "20 a million wrong indices",
    "CALBIN_TYPE",
    "golden.tokens",
    b"\xdd" + struct.pack(">I", 990_000) + b"\xc2" * 990_000,
)
raw_value("20 not the shortest integer", "CALBIN_MSGPACK_CANONICAL", "model.vocab", b"\xcd\x00\x40")
raw_value("20 not the shortest text", "CALBIN_MSGPACK_CANONICAL", "model.name", b"\xd9\x04tiny")
CASES.append(Case("20 the manifest is cut", "CALBIN_MSGPACK_LENGTH", lambda p: assemble(p, raw=pack(p.manifest)[:-1])))
CASES.append(Case("20 two values", "CALBIN_MSGPACK_TRAILING", lambda p: assemble(p, raw=pack(p.manifest) + b"\0")))
CASES.append(Case("20 a key that is no text", "CALBIN_MSGPACK_KEY", lambda p: assemble(p, raw=b"\x81\x01\x01")))
CASES.append(Case("20 no map at all", "CALBIN_TYPE", lambda p: assemble(p, raw=b"\x01")))
raw_value("20 a length cut off", "CALBIN_MSGPACK_LENGTH", "weights", b"\xdd")


@damaged("20 keys out of order", "CALBIN_MSGPACK_CANONICAL")
def _(parts: Parts) -> bytes:
    items = reversed(list(plain({**parts.manifest, "sections": section_entries(parts)}).items()))
    return assemble(parts, raw=msgpack.packb(dict(items)))


# -- tensors ---------------------------------------------------------------------------------------------------------

T = "submodels[0].outputs[0]"


@edited("21 product of dims overflows 64 bits", "CALBIN_TENSOR_DIM")
def _(m: dict) -> None:
    m["submodels"][0]["outputs"][0].update(shape=(1 << 40, 1 << 40), padded_shape=(1 << 40, 1 << 40), tile=(1, 1))


@edited("21 product of a weight's dims overflows 64 bits", "CALBIN_WEIGHT_SHAPE")
def _(m: dict) -> None:
    m["weights"][1].update(shape=(1 << 40, 1 << 40), padded_shape=(1 << 40, 1 << 40))


field("22 dims 0 and 2**62", "CALBIN_TENSOR_DIM", f"{T}.shape", (0, 2**62 - 1))
field("22 dims 0 and 2**62 of a weight", "CALBIN_WEIGHT_SHAPE", "weights[0].shape", (0,))
field("22 dims past 2**62", "CALBIN_RANGE", f"{T}.shape", (1, 2**62 + 1 - 1, -1))
field("23 negative dim", "CALBIN_RANGE", f"{T}.shape", (1, -60))
field("23 rank over 8", "CALBIN_RANGE", f"{T}.shape", (1,) * 9)
field("23 rank 0", "CALBIN_TENSOR_RANK", f"{T}.shape", ())
field("23 ranks differ", "CALBIN_TENSOR_RANK", f"{T}.tile", (1, 1, 1))
field("23 a weight's ranks differ", "CALBIN_WEIGHT_SHAPE", "weights[0].padded_shape", (32, 1))
field("24 size of a tensor", "CALBIN_TENSOR_BYTES", f"{T}.at.nbytes", 255, 257)
field("24 size of a weight", "CALBIN_WEIGHT_BYTES", "weights[2].nbytes", 4095, 4097)
field("24 size of an array", "CALBIN_ARRAY_BYTES", "arrays[0].nbytes", 511)
field("24 int4 rows of an odd width", "CALBIN_WEIGHT_SHAPE", "weights[3].padded_shape", (40, 95), (40, 97))
field("24 rows of a packed weight are not padded", "CALBIN_WEIGHT_SHAPE", "weights[2].padded_shape", (40, 48))
field("24 tile rows", "CALBIN_WEIGHT_BYTES", "weights[2].tile_rows", 7)
field("24 no tile rows", "CALBIN_WEIGHT_FORMAT", "weights[2].tile_rows", 0)
field("24 number of experts", "CALBIN_WEIGHT_FORMAT", "weights[4].experts", 3, 0)


@edited("24 experts of a plain weight", "CALBIN_WEIGHT_SHAPE")
def _(m: dict) -> None:
    m["weights"][0]["experts"] = 3


field("25 a section's end wraps", "CALBIN_OUTSIDE", "sections[0].nbytes", 2**62)
field("25 a section's offset is huge", "CALBIN_HOLE", "sections[0].offset", 2**62)
field("25 a weight's end wraps", "CALBIN_OUTSIDE", "weights[4].offset", 2**62)
field("25 a tensor's end wraps", "CALBIN_DRAM", f"{T}.at.offset", 2**62)
field("25 a state's end wraps", "CALBIN_DRAM", "states.states[2].parts[0].offset", 2**62)
field("25 an array's end wraps", "CALBIN_OUTSIDE", "arrays[1].offset", 2**62)
field("25 a file's end wraps", "CALBIN_OUTSIDE", "files[0].offset", 2**62)
field("25 a shard's place wraps", "CALBIN_DRAM", "shards[0].dram_offset", 2**62)
field("25 a region's end wraps", "CALBIN_DRAM", "dram[2].nbytes", 2**62)


@edited("26 ends one byte past what holds it", "CALBIN_OUTSIDE")
def _(m: dict) -> None:
    m["sections"][-1]["nbytes"] = 4097


field("26 a file ends one byte past its section", "CALBIN_OUTSIDE", "files[1].nbytes", 5)


@edited("27 sections overlap", "CALBIN_OVERLAP")
def _(m: dict) -> None:
    m["sections"][1]["offset"] = m["sections"][0]["offset"]


@edited("27 weights overlap", "CALBIN_OVERLAP")
def _(m: dict) -> None:
    m["weights"][1]["offset"] = m["weights"][0]["offset"]


field("27 arrays overlap", "CALBIN_OVERLAP", "arrays[1].offset", 0)
field("27 the order of sections", "CALBIN_OVERLAP", "sections[1].offset", 4096)


@edited("28 a hole before a section", "CALBIN_HOLE")
def _(m: dict) -> None:
    del m["sections"][0]


@edited("28 a hole before the manifest", "CALBIN_HOLE")
def _(m: dict) -> None:
    del m["sections"][-1]


@edited("28 a hole in a shard", "CALBIN_HOLE")
def _(m: dict) -> None:
    del m["weights"][1]


@edited("28 a hole in the golden section", "CALBIN_HOLE")
def _(m: dict) -> None:
    del m["arrays"][0]


@edited("28 a hole at the end of the golden section", "CALBIN_HOLE")
def _(m: dict) -> None:
    del m["arrays"][1]


@edited("28 a small hole that is not zero", "CALBIN_PADDING")
def _(m: dict) -> None:
    m["files"][1].update(offset=1, nbytes=3)


@damaged("28 bytes between weights are not zero", "CALBIN_PADDING", deep=True)
def _(parts: Parts) -> bytes:
    content = bytearray(parts.content("weights.0"))
    content[-1] = 1
    parts.replace("weights.0", bytes(content))
    return assemble(parts)


field("29 a section", "CALBIN_MISALIGNED", "sections[1].offset", 4097, 8191)
field("29 a weight", "CALBIN_MISALIGNED", "weights[1].offset", 129)
field("29 an array", "CALBIN_MISALIGNED", "arrays[1].offset", 513)
field("29 a shard that is not whole pages", "CALBIN_MISALIGNED", "sections[2].nbytes", 4096 * 5 - 1)
header_bytes("30 page size", "CALBIN_HEADER_BYTES", 12, *u32(0, 13, 4095, 2**31))
field("31 two weights", "CALBIN_DUPLICATE_NAME", "weights[1].name", "chip0.norm")
field("31 input and output", "CALBIN_DUPLICATE_NAME", f"{T}.name", "input_ids")
field("31 two sections", "CALBIN_DUPLICATE_NAME", "sections[1].name", "program.prefill_b1_s8.0")
field("31 two quantization entries", "CALBIN_DUPLICATE_NAME", "quantization[1].weight", "chip0.qkv")
field("32 empty or too long", "CALBIN_NAME", "weights[0].name", "", "x" * 257)
field(
    "32 name", "CALBIN_NAME", "files[1].name", "a\0b", "..", "a/../b", "/etc/passwd", "C:x", "a\\b", "a//b", " a", "a\n"
)
field("32 name in Unicode", "CALBIN_NAME", "weights[0].name", "e\u0301", "a\u202eb", "\u2028", "a\u200db")
field("32 equal after case folding", "CALBIN_DUPLICATE_NAME", "files[1].name", "TOKENIZER.json", "to\u212aenizer.json")
field("33 dtype", "CALBIN_ENUM", f"{T}.dtype", "f16", "F32", "")
field("33 layout", "CALBIN_ENUM", f"{T}.layout", "tiled")
field("33 kind of section", "CALBIN_ENUM", "sections[0].kind", "code")
field("34 -1", "CALBIN_RANGE", "weights[0].chip", -1)
field("34 -1", "CALBIN_RANGE", "states.states[0].layer", -1)
field("34 -1", "CALBIN_RANGE", "golden.tokens[0]", -1)
field("35 chip of a weight", "CALBIN_INDEX", "weights[0].chip", 1, 2**40)
field("35 chip of a region", "CALBIN_INDEX", "dram[0].chip", 1)
field("35 chip of a state", "CALBIN_INDEX", "states.states[0].parts[0].chip", 1)
field("35 chip of a tensor", "CALBIN_INDEX", f"{T}.at.chip", 1)
field("35 axis", "CALBIN_VALID", "submodels[0].inputs[0].valid[0].axis", 2)
field("35 name of a CSR", "CALBIN_VALID", "submodels[0].inputs[0].valid[0].csr", "nope")
field("35 a CSR the ISA lacks", "CALBIN_CSR", "csrs[2].name", "nope")
field("35 index of a CSR", "CALBIN_CSR", "csrs[2].index", 1)
field("35 a program that is not there", "CALBIN_REFERENCE", "submodels[0].chip_map[0].program", "nope")
field("35 another's program", "CALBIN_REFERENCE", "submodels[0].chip_map[0].program", "program.decode_b1_s1.0")
field("35 golden section", "CALBIN_REFERENCE", "golden.section", "nope")
field("35 no golden section for the arrays", "CALBIN_REFERENCE", "golden", None)
field("35 quantized weight", "CALBIN_REFERENCE", "quantization[0].weight", "nope")
field("35 kind of what a file is in", "CALBIN_SECTION_KIND", "files[1].section", "golden")

# -- shards: in calbin 1.0 they are sections of the one file -----------------------------------------------------------

field("36 shard missing", "CALBIN_SHARD_MISSING", "shards[0].section", "nope")


@damaged("37 an undeclared shard", "CALBIN_SECTION_UNUSED")
def _(parts: Parts) -> bytes:
    parts.sections.insert(3, ("weights.9", "weights", bytes(4096)))
    return assemble(parts)


@edited("37 a shard for a chip that has one", "CALBIN_CHIP", chips=2)
def _(m: dict) -> None:
    m["shards"][1]["chip"] = 0


field("38 shard of the wrong size", "CALBIN_SHARD_SIZE", "shards[0].nbytes", 4096, 4096 * 9)
field("38 chunk digests of the wrong number", "CALBIN_CHUNKS", "sections[2].chunks", ["0" * 64] * 2, [])


@damaged("39 one flipped bit in a shard", "CALBIN_DIGEST", deep=True)
def _(parts: Parts) -> bytes:
    data = bytearray(assemble(parts))
    data[section_entries(parts)[2]["offset"] + 5000] ^= 1
    return bytes(data)


@damaged("39 one flipped bit in a program", "CALBIN_DIGEST")
def _(parts: Parts) -> bytes:
    data = bytearray(assemble(parts))
    data[4096 + 400] ^= 1
    return bytes(data)


@damaged("40 a shard from another build", "CALBIN_DIGEST", deep=True)
def _(parts: Parts) -> bytes:
    data = bytearray(assemble(parts))
    entry = section_entries(parts)[2]
    data[entry["offset"] : entry["offset"] + entry["nbytes"]] = bytes(entry["nbytes"])
    return bytes(data)
