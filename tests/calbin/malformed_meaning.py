"""Malformed meaning (42-56): a well-formed file that contradicts itself."""

from __future__ import annotations

import numpy as np
from calbin_tiny import CAPACITY, IO_BASE, KV_BASE, VOCAB, Parts, assemble, program
from malformed import CASES, Case, damaged, edited, field

from calc.core.errors import VersionError
from calc.core.isa import RECORD, DType, Engine, Flag, Fn, Op, Space, Tile
from calc.core.packing import TileLayout

P = "submodels[0]"

field("42 duplicate chip", "CALBIN_CHIP", f"{P}.chip_map[1].chip", 0, chips=2)
field("42 a gap", "CALBIN_CHIP", f"{P}.chip_map[0].chip", 1)
field("42 a chip the target lacks", "CALBIN_CHIP", "target.chips", 1, chips=2)
field("42 target chips and chip map differ", "CALBIN_CHIP", f"{P}.target_chips", (0,), (0, 0, 1), (1, 2), chips=2)
field("42 a layer is missing", "CALBIN_LAYERS", f"{P}.chip_map[0].layers", (0,), (0, 1, 1), (0, 2))


@damaged("42 a sub-model that leaves a shard out", "CALBIN_CHIP", chips=2)
def _(parts: Parts) -> bytes:
    decode = parts.manifest["submodels"][1]
    decode["chip_map"][0]["layers"] = (0, 1)
    del decode["chip_map"][1]
    parts.sections = [s for s in parts.sections if s[0] != "program.decode_b1_s1.1"]
    return assemble(parts)


@edited("43 roles disagree on where a layer's states are", "CALBIN_STATE", chips=2)
def _(m: dict) -> None:
    a, b = m["submodels"][1]["chip_map"]
    a["layers"], b["layers"] = b["layers"], a["layers"]


@edited("43 roles disagree on a state's tensor", "CALBIN_STATE")
def _(m: dict) -> None:
    for sub, heads in zip(m["submodels"], (1, 2), strict=True):
        tensor = {
            **sub["outputs"][0],
            "name": "kv.0.key",
            "dtype": "bf16",
            "shape": (1, 16 * heads),
            "padded_shape": (1, 16 * heads),
        }
        tensor["at"] = {"space": "dram", "chip": 0, "offset": KV_BASE, "nbytes": 32 * heads}
        sub["outputs"].append(tensor)


STATE = "states.states[0]"
field("43 heads", "CALBIN_STATE", f"{STATE}.heads", 2)
field("43 head dim", "CALBIN_STATE", "states.states[3].dim", 8)
field("43 a window without a ring", "CALBIN_STATE", f"{STATE}.window", 4)
field("43 a ring without a window", "CALBIN_STATE", f"{STATE}.growth", "ring")
field("43 several rows of what has one", "CALBIN_STATE", f"{STATE}.growth", "fixed")
field("43 unknown growth", "CALBIN_ENUM", f"{STATE}.growth", "heap")
field("43 dtype", "CALBIN_ENUM", f"{STATE}.dtype", "f16")
field("43 a layer that the model lacks", "CALBIN_STATE", f"{STATE}.layer", 2)
field("43 a name twice", "CALBIN_STATE", f"{STATE}.name", "kv.0.value")
field("43 memory under the capacity", "CALBIN_STATE", f"{STATE}.rows", 16)
field("43 memory that is not whole tiles", "CALBIN_STATE", "states.tile", 15)
field("43 a bucket past the capacity", "CALBIN_STATE", "states.capacity", 7)
field("43 a part past the heads", "CALBIN_STATE", f"{STATE}.parts[0].heads", 2, 2**62)
field("43 a head that nobody holds", "CALBIN_STATE", f"{STATE}.parts[0].first_head", 1)
field("43 no part", "CALBIN_RANGE", f"{STATE}.parts", ())


@edited("43 a chip with two parts", "CALBIN_STATE")
def _(m: dict) -> None:
    parts = m["states"]["states"][0]["parts"]
    m["states"]["states"][0]["parts"] = [*parts, {**parts[0], "offset": KV_BASE + (1 << 18)}]


@edited("43 a language model that keeps nothing", "CALBIN_STATE")
def _(m: dict) -> None:
    m["states"]["states"] = []


field("43 a part of an output", "CALBIN_PART", f"{P}.outputs[0].part", {"axis": 1, "start": 0, "size": 120})
field("43 a part past the whole", "CALBIN_PART", f"{P}.outputs[0].part", {"axis": 1, "start": 4, "size": 60})
field("43 a part along no axis", "CALBIN_PART", f"{P}.outputs[0].part", {"axis": 2, "start": 0, "size": 60})
field("43 a part of an input", "CALBIN_PART", f"{P}.inputs[0].part", {"axis": 1, "start": 0, "size": 8})


@edited("44 a role twice", "CALBIN_ROLE")
def _(m: dict) -> None:
    m["submodels"][1].update(role="prefill", model_type="llm_prefill", seq=8)


field("44 a name twice", "CALBIN_DUPLICATE_NAME", "submodels[1].name", "prefill_b1_s8", "PREFILL_b1_s8")
field("44 decode of several tokens", "CALBIN_ROLE", "submodels[1].seq", 2)
field("45 batch", "CALBIN_BATCH", f"{P}.batch", 0, -1)
field("45 a batch of more than the slots", "CALBIN_BATCH", f"{P}.batch", 3)
T = f"{P}.outputs[0]"
field("46 tile", "CALBIN_TILE", f"{T}.tile", (1, 0), (0, 16))
field("46 negative tile", "CALBIN_TILE", f"{T}.tile", (1, -16))
field("46 tile of the states", "CALBIN_RANGE", "states.tile", 0)
field("46 padded below logical", "CALBIN_PADDED", f"{T}.padded_shape", (1, 48))
field("46 padded to no whole tile", "CALBIN_PADDED", f"{T}.padded_shape", (1, 63))
field("46 padded below logical, weight", "CALBIN_WEIGHT_SHAPE", "weights[1].padded_shape", (63, 32))
R = f"{P}.chip_map[0].regions"
field("47 live buffers overlap", "CALBIN_SRAM", f"{R}[1].offset", 2047)
field("47 live buffers meet for one step", "CALBIN_SRAM", f"{R}[2].first", 4)
field("47 a buffer inside another", "CALBIN_SRAM", f"{R}[0].nbytes", 65536)
field("47 a buffer past the SRAM", "CALBIN_SRAM", f"{R}[2].nbytes", 65537)
field("47 a buffer on another chip", "CALBIN_SRAM", f"{R}[2].chip", 1)
field("47 a buffer that ends before it begins", "CALBIN_SRAM", f"{R}[2].last", 1)
field("47 the peak past the SRAM", "CALBIN_SRAM", f"{P}.chip_map[0].sram_peak", 65537)
field("47 DRAM regions overlap", "CALBIN_DRAM", "dram[1].offset", KV_BASE - 1)
field("47 a region past the DRAM", "CALBIN_DRAM", "target.dram_bytes", 3 * (1 << 20) - 1)
field("47 a region elsewhere", "CALBIN_DRAM", "dram[0].space", "sram")
field("47 a shard over a state", "CALBIN_DRAM", "shards[0].dram_offset", KV_BASE)
field("47 states overlap", "CALBIN_DRAM", "states.states[2].parts[0].offset", KV_BASE + 1)
field("47 a state outside its region", "CALBIN_DRAM", "states.states[2].parts[0].offset", KV_BASE - 2)
field("47 a tensor over a state", "CALBIN_DRAM", f"{T}.at.offset", KV_BASE)
field("47 a tensor over another", "CALBIN_DRAM", f"{T}.at.offset", IO_BASE)
field("47 a tensor before every region", "CALBIN_DRAM", f"{T}.at.offset", 3 << 20)


@edited("47 nothing is in a region", "CALBIN_DRAM")
def _(m: dict) -> None:
    m["dram"] = []


field("47 a tensor in DRAM without a chip", "CALBIN_LOCATION", f"{T}.at.chip", None)
field("47 a tensor on the host with an offset", "CALBIN_LOCATION", f"{T}.at.space", "host")

# -- 48 programs -----------------------------------------------------------------------------------------------------

CSRR, SALU, LOOP, LOAD, SIGNAL, WAIT, VMAP, LOOP2, END2, END1, STORE, HALT = range(12)


def record(name: str, code: str, index: int, path: str, *values: object, chips: int = 1) -> None:
    """A field of one record of the first program; its digests are made right again."""
    for i, value in enumerate(values):

        def damage(parts: Parts, value: object = value) -> bytes:
            records = program(0, chips)
            node, *keys = records[index], *path.split(".")
            for key in keys[:-1]:
                node = node[key]
            last = keys[-1]
            if last.isdigit():
                node[int(last)] = value
            else:
                node[last] = value
            parts.replace("program.prefill_b1_s8.0", records.tobytes())
            return assemble(parts)

        suffix = f" #{i + 1}" if len(values) > 1 else ""
        CASES.append(Case(f"48 {name}{suffix}", code, damage, chips=chips))


def records(name: str, code: str, *, chips: int = 1):
    """A function of the first program's records; size and digests are made right again."""

    def register(function):
        def damage(parts: Parts) -> bytes:
            out = function(program(0, chips))
            parts.replace("program.prefill_b1_s8.0", out.tobytes())
            parts.manifest["submodels"][0]["chip_map"][0]["instructions"] = len(out)
            return assemble(parts)

        CASES.append(Case(f"48 {name}", code, damage, chips=chips))
        return function

    return register


record("unknown opcode", "CALBIN_OPCODE", VMAP, "op", 7, 255)
record("unknown function", "CALBIN_OPCODE", VMAP, "sub", 200)
record("unknown scalar operation", "CALBIN_OPCODE", SALU, "sub", 8)
record("unknown engine", "CALBIN_ENGINE", VMAP, "engine", 6, 255)
record("an engine that cannot", "CALBIN_ENGINE", VMAP, "engine", Engine.MAT)
record("unknown tile format", "CALBIN_RECORD", VMAP, "tile", len(Tile))
record("unknown flag", "CALBIN_RECORD", VMAP, "flags", 1 << 15)
record("dimension register bits", "CALBIN_RECORD", VMAP, "dim_regs", 32)
record("negative dimension", "CALBIN_RECORD", VMAP, "dims.0", -1)
record("dimension in no register", "CALBIN_REGISTER", LOOP2, "dims.0", 64)
record("source node", "CALBIN_RECORD", LOAD, "node", 2)
record("NaN immediate", "CALBIN_RECORD", VMAP, "fimm.0", float("nan"))
record("operand past its memory", "CALBIN_OPERAND", VMAP, "a.base", 65536, 65533, -1, 2**63 - 1)
record("operand past the DRAM", "CALBIN_OPERAND", STORE, "dst.base", 4 << 20)
record("operand in no memory", "CALBIN_OPERAND", VMAP, "a.space", 3)
record("operand in the wrong memory", "CALBIN_OPERAND", LOAD, "dst.space", Space.DRAM)
record("vector operand in DRAM", "CALBIN_OPERAND", VMAP, "a.space", Space.DRAM)
record("operand of no dtype", "CALBIN_OPERAND", VMAP, "a.dtype", 0, 6)
record("operand that is missing", "CALBIN_OPERAND", LOAD, "a.space", 0)
record("operand the opcode lacks", "CALBIN_OPERAND", VMAP, "e.space", 1)
record("register of an operand", "CALBIN_REGISTER", LOAD, "a.reg.0", 64, 254)
record("padding of an operand", "CALBIN_RECORD", VMAP, "e.pad.2", 1)
record("register of a loop", "CALBIN_REGISTER", LOOP, "imm.0", 64, -1)
record("register of a scalar operation", "CALBIN_REGISTER", SALU, "imm.1", 64)
record("register of a CSR read", "CALBIN_REGISTER", CSRR, "imm.2", 64, -2)
record("CSR", "CALBIN_CSR", CSRR, "imm.1", 65, 3 * 64, -1)
record("semaphore", "CALBIN_SEMAPHORE", SIGNAL, "imm.0", 64, -1)
record("semaphore that nothing signals", "CALBIN_SEMAPHORE", WAIT, "imm.0", 6)
record("count of a semaphore", "CALBIN_SEMAPHORE", WAIT, "imm.1", 0)
record("peer", "CALBIN_CHIP", 11, "imm.0", 0, 2, chips=2)
record("a loop that writes its counter", "CALBIN_LOOP", LOOP2, "imm.0", 3)
record("negative loop count", "CALBIN_RECORD", LOOP, "dims.0", -2)
record("end of the program", "CALBIN_HALT", HALT, "op", Op.END)
record("two ends of the program", "CALBIN_HALT", END2, "op", Op.HALT)


@records("a division by zero", "CALBIN_RECORD")
def _(r: np.ndarray) -> np.ndarray:
    r[SALU]["sub"], r[SALU]["imm"][2] = 3, 0
    return r


@records("a gather that divides by zero", "CALBIN_RECORD")
def _(r: np.ndarray) -> np.ndarray:
    r[VMAP]["op"], r[VMAP]["sub"] = Op.VGATHER, 0
    return r


@records("a band over no dimension", "CALBIN_RECORD")
def _(r: np.ndarray) -> np.ndarray:
    r[VMAP]["op"], r[VMAP]["sub"], r[VMAP]["imm"][0] = Op.VBAND, 0, 5
    return r


@records("a packed operand of no format", "CALBIN_RECORD")
def _(r: np.ndarray) -> np.ndarray:
    r[VMAP]["op"], r[VMAP]["engine"], r[VMAP]["sub"], r[VMAP]["flags"] = Op.GEMM, Engine.MAT, 0, 2
    return r


@records("a function without its second operand", "CALBIN_OPERAND")
def _(r: np.ndarray) -> np.ndarray:
    r[VMAP]["sub"] = Fn.ADD
    return r


@records("an operand that the function does not take", "CALBIN_OPERAND")
def _(r: np.ndarray) -> np.ndarray:
    r[VMAP]["b"] = r[VMAP]["a"]
    return r


@records("a flag of another opcode", "CALBIN_RECORD")
def _(r: np.ndarray) -> np.ndarray:
    r[VMAP]["flags"] = Flag.ACC
    return r


@records("a gather from a table of negative size", "CALBIN_RECORD")
def _(r: np.ndarray) -> np.ndarray:
    r[LOAD]["op"], r[LOAD]["dims"][1], r[LOAD]["imm"][0], r[LOAD]["imm"][4] = Op.LOADG, 1, -1, 2
    r[LOAD]["b"] = r[LOAD]["dst"]
    return r


@records("more dimensions than an operand has", "CALBIN_RECORD")
def _(r: np.ndarray) -> np.ndarray:
    r[VMAP]["imm"][4] = 5
    return r


@records("a tile off the target's alignment", "CALBIN_MISALIGNED")
def _(r: np.ndarray) -> np.ndarray:
    r[LOAD]["flags"], r[LOAD]["a"]["stride"][0] = Flag.TILE, 32
    return r


def packed_gemm(r: np.ndarray, tile: Tile, dtype: DType, group: int) -> np.ndarray:
    """The vector record as a packed GEMM without operand e."""
    r[VMAP]["op"], r[VMAP]["engine"], r[VMAP]["sub"], r[VMAP]["flags"] = Op.GEMM, Engine.MAT, 0, 2
    r[VMAP]["tile"], r[VMAP]["a"]["dtype"], r[VMAP]["imm"][2] = tile, dtype, group
    return r


@records("int8 rows without scales", "CALBIN_OPERAND")
def _(r: np.ndarray) -> np.ndarray:
    return packed_gemm(r, Tile.W8, DType.I8, 0)


@records("scales of rows that are no int8", "CALBIN_OPERAND")
def _(r: np.ndarray) -> np.ndarray:
    r = packed_gemm(r, Tile.W4, DType.BF16, 32)
    r[VMAP]["e"] = r[VMAP]["a"]
    return r


@records("a packed tile without its group size", "CALBIN_RECORD")
def _(r: np.ndarray) -> np.ndarray:
    return packed_gemm(r, Tile.W4Z, DType.BF16, 0)


@records("a packed tile with a group size it has not", "CALBIN_RECORD")
def _(r: np.ndarray) -> np.ndarray:
    return packed_gemm(r, Tile.BF16, DType.BF16, 64)


@records("a loop without END", "CALBIN_LOOP")
def _(r: np.ndarray) -> np.ndarray:
    return np.delete(r, END1)


@records("an END without loop", "CALBIN_LOOP")
def _(r: np.ndarray) -> np.ndarray:
    return np.delete(r, LOOP)


@records("loops too deep", "CALBIN_LOOP")
def _(r: np.ndarray) -> np.ndarray:
    loops = np.repeat(r[LOOP : LOOP + 1], 9)
    loops["imm"][:, 0] = np.arange(9)
    return np.concatenate([loops, np.repeat(r[END1 : END1 + 1], 9), r[HALT:]])


@records("a program past the step cap", "CALBIN_STEPS")
def _(r: np.ndarray) -> np.ndarray:
    loops = np.repeat(r[LOOP : LOOP + 1], 8)
    loops["imm"][:, 0] = np.arange(8)
    loops["dims"][:, 0] = 2**31 - 1
    return np.concatenate([loops, np.repeat(r[END1 : END1 + 1], 8), r[HALT:]])


@damaged("48 a program of no whole records", "CALBIN_PROGRAM_SIZE")
def _(parts: Parts) -> bytes:
    parts.replace("program.prefill_b1_s8.0", program(0, 1).tobytes()[:-1])
    return assemble(parts)


field("48 number of instructions", "CALBIN_PROGRAM_SIZE", f"{P}.chip_map[0].instructions", 13)

# -- 49 scales -------------------------------------------------------------------------------------------------------


def scale(name: str, code: str, weight: int, layout: TileLayout, tile: int, where: str, value: bytes) -> None:
    """A scale or bias of one packed weight."""

    def damage(parts: Parts) -> bytes:
        at = parts.manifest["weights"][weight]["offset"] + layout.tile_offset(tile)
        n = layout.rows_of(tile)
        at += (
            (layout.scales_offset(n) + layout.scales_bytes(n) - len(value))
            if where == "scale"
            else layout.bias_offset(n)
        )
        content = bytearray(parts.content("weights.0"))
        content[at : at + len(value)] = value
        parts.replace("weights.0", bytes(content))
        return assemble(parts)

    CASES.append(Case(f"49 {name}", code, damage, deep=True))


W8 = TileLayout("w8", 40, 48, 16, bias=True)
W4 = TileLayout("w4", 40, 72, 16, group=32)
for _tile in (0, 2):
    for _name, _value in (("NaN", np.nan), ("Inf", np.inf), ("0", 0.0), ("-1", -1.0), ("subnormal", 1e-40)):
        scale(f"w8 tile {_tile} scale {_name}", "CALBIN_SCALE", 2, W8, _tile, "scale", np.float32(_value).tobytes())
    scale(f"w4 tile {_tile} scale NaN", "CALBIN_SCALE", 3, W4, _tile, "scale", b"\xc0\x7f")
    scale(f"w4 tile {_tile} scale -0", "CALBIN_SCALE", 3, W4, _tile, "scale", b"\x00\x80")
    scale(f"w8 tile {_tile} bias NaN", "CALBIN_BIAS", 2, W8, _tile, "bias", np.float32(np.nan).tobytes())
field("49 number of scales", "CALBIN_WEIGHT_BYTES", "weights[3].group", 64)
field("49 no such group", "CALBIN_WEIGHT_FORMAT", "weights[3].group", 33, 0)
field("49 the scheme says another group", "CALBIN_QUANT", "quantization[1].group", 64)
field("49 the scheme says another format", "CALBIN_QUANT", "quantization[0].scheme", "w4a16", "w4z", "bf16")
field("49 a scheme for a plain array", "CALBIN_QUANT", "weights[2].format", "f32")
field("49 no such scheme", "CALBIN_ENUM", "quantization[0].scheme", "w2a2", "")
field("49 no such format", "CALBIN_ENUM", "weights[3].format", "w2", "W4", "rows_bf16")
field("49 tiles of another format", "CALBIN_QUANT", "weights[3].format", "w4z")


# -- 50-56 -----------------------------------------------------------------------------------------------------------


@edited("50 logits of the wrong shape", "CALBIN_GOLDEN")
def _(m: dict) -> None:
    m["arrays"][0]["shape"] = (VOCAB, 2)


field("50 logits of the wrong dtype", "CALBIN_GOLDEN", "arrays[0].dtype", "i32")


@edited("50 fewer rows of logits than the reference has", "CALBIN_GOLDEN")
def _(m: dict) -> None:
    m["arrays"][0].update(shape=(1, VOCAB))


@edited("50 more rows of logits than there are", "CALBIN_GOLDEN")
def _(m: dict) -> None:
    m["arrays"][0].update(name="program/logits")


@edited("50 KV of the wrong shape", "CALBIN_GOLDEN")
def _(m: dict) -> None:
    m["arrays"][1].update(shape=(6, 16))


@edited("50 KV of no layer", "CALBIN_GOLDEN")
def _(m: dict) -> None:
    m["arrays"][1]["name"] = "hf/value.2"


field("50 a token past the vocabulary", "CALBIN_GOLDEN", "golden.tokens[4]", VOCAB)
field("50 rows", "CALBIN_GOLDEN", "golden.logits_rows", (2, 3, 4, 5), (4, 3, 2, 1), (2, 2, 3, 4), (1, 2, 3))
field("50 decode steps", "CALBIN_GOLDEN", "golden.steps", 3)
field("50 layers", "CALBIN_GOLDEN", "golden.kv_layers", (2,))
field("50 prompt", "CALBIN_GOLDEN", "golden.prompt", 6)
field("51 another ISA", "CALBIN_ISA", "compatibility.isa", "other", kind=VersionError)
field("51 version of the ISA", "CALBIN_ISA", "compatibility.isa_version", (2, 0), (1, 1), (0, 9), kind=VersionError)
field("51 newer runtime", "CALBIN_RUNTIME", "compatibility.runtime_min", (1, 1), kind=VersionError)
field("51 newer driver", "CALBIN_DRIVER", "compatibility.driver_min", (2, 0), kind=VersionError)
field("52 tokenizer digest", "CALBIN_TOKENIZER", "model.tokenizer.sha256", "0" * 64, "")
field("52 tokenizer missing", "CALBIN_TOKENIZER", "files[0].name", "other.json")
field("52 end tokens", "CALBIN_TOKENIZER", "model.tokens.eos", (3, 2), (2, 2), (-1,))
field("54 model type", "CALBIN_ROLE", f"{P}.model_type", "llm_decode", "encoder")
for _name in ("macs", "vector_ops", "dram_bytes", "host_bytes", "cycles"):
    field("55 workload", "CALBIN_WORKLOAD", f"{P}.workload.{_name}", 0, -1)
field("56 no target chip", "CALBIN_TARGET_CHIPS", f"{P}.target_chips", ())
field("56 no chip map", "CALBIN_RANGE", f"{P}.chip_map", ())
field("56 no sub-model", "CALBIN_RANGE", "submodels", ())
field("format of the header and the manifest differ", "CALBIN_FORMAT_FIELD", "format", (1, 1), (2, 0))
field("format of the compatibility record", "CALBIN_FORMAT_FIELD", "compatibility.calbin", (1, 1))
field("digest of the target", "CALBIN_TARGET_DIGEST", "target.toml", "other")
field("too many chips", "CALBIN_CHIP", "target.chips", 65)
field("units of the target", "CALBIN_UNITS", "target.sram_bytes", 18)
field("no input", "CALBIN_NO_TENSOR", f"{P}.inputs", ())
field("pattern of a digest", "CALBIN_PATTERN", "target.digest", "A" * 64, "0" * 63)

assert RECORD.itemsize == 376 and CAPACITY < 64
