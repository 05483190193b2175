"""The disassembler on programs of the compiler, and on records made by hand."""

from __future__ import annotations

import re

import numpy as np
import pytest

import calc
from calc.core.errors import RuntimeFault
from calc.core.isa import NO_REG, OPERAND_NAMES, RECORD, Alu, DType, Engine, Flag, Fn, Op, Red, Space, Tile
from calc.sim.disasm import disassemble


def record(op, engine, sub=0, dims=(), imm=(), flags=0, tile=0, fimm=(), *, regs=0, **operands) -> np.ndarray:
    """One record; operands are (space, base, dtype, steps, terms)."""
    r = np.zeros(1, RECORD)
    r["op"], r["engine"], r["sub"], r["flags"], r["tile"], r["dim_regs"] = op, engine, sub, flags, tile, regs
    r["dims"][0, : len(dims)] = dims
    r["imm"][0, : len(imm)] = imm
    if op >= Op.LOAD and op != Op.GEMM:
        r["imm"][0, 4] = len(dims)
    r["fimm"][0, : len(fimm)] = fimm
    for name in OPERAND_NAMES:
        r[name]["reg"] = NO_REG
    for name, (space, base, dtype, steps, *terms) in operands.items():
        o = r[name]
        o["space"], o["base"], o["dtype"] = space, base, dtype
        o["step"][0, : len(steps)] = steps
        for i, (reg, stride) in enumerate(terms):
            o["reg"][0, i], o["stride"][0, i] = reg, stride
    return r


def lines(*records: np.ndarray) -> list[str]:
    return [re.sub(r"^ +\d+  ", "", x) for x in list(disassemble(np.concatenate(records)))[1:]]


S, D, F32, BF16, I32, I8 = Space.SRAM, Space.DRAM, DType.F32, DType.BF16, DType.I32, DType.I8


def test_loops_indent_and_scalars_read_as_assignments():
    got = lines(
        record(Op.CSRR, Engine.CTL, imm=(1, 64 + 2, -1)),
        record(Op.CSRR, Engine.CTL, imm=(2, 128, 5)),
        record(Op.CSRR, Engine.CTL, imm=(2, 640, -1)),
        record(Op.SALU, Engine.CTL, Alu.ADD, imm=(3, 1, 7), flags=Flag.IMM),
        record(Op.SALU, Engine.CTL, Alu.CDIV, imm=(4, 3, 2)),
        record(Op.LOOP, Engine.CTL, dims=(9,), imm=(5,), regs=1),
        record(Op.SLOAD, Engine.CTL, imm=(6, 2, 3, -1, 0, 8), a=(S, 64, I32, (), (5, 4))),
        record(Op.WAIT, Engine.VEC, imm=(18, 2)),
        record(Op.END, Engine.CTL),
        record(Op.HALT, Engine.CTL),
    )
    assert got == [
        "ctl   csrr           r1 = cur_seq_len[2]",
        "ctl   csrr           r2 = kv_slot[0 + r5]",
        "ctl   csrr           r2 = csr10[0]",
        "ctl   add            r3 = r1 + 7",
        "ctl   cdiv           r4 = cdiv(r3, r2)",
        "ctl   loop           r5 in 0..r9",
        "ctl     sload          r6 = sram[0x40 + r5*4]:i32[]/  (timing takes 2*r3//8)",
        "vec     wait           s18 × 2",
        "ctl   end",
        "ctl   halt",
    ]


def test_data_records_show_each_operand_with_its_own_dimensions():
    a, b = (S, 0, BF16, (256, 2)), (S, 512, I32, (4,))
    vec = Engine.VEC
    got = lines(
        record(
            Op.LOAD, Engine.WDMA, dims=(100,), flags=Flag.TILE, dst=(S, 0, DType.U8, (1,)), a=(D, 64, DType.U8, (1,))
        ),
        record(Op.LOADG, Engine.ADMA, dims=(3, 8), imm=(1024,), dst=a, a=(D, 0, BF16, (16, 2)), b=b),
        record(Op.VMAP, vec, Fn.FILL, dims=(4,), fimm=(0, -1e30), dst=(S, 0, F32, (4,))),
        record(Op.VMAP, vec, Fn.RSQRT, dims=(4,), fimm=(0.5, 1e-6), dst=(S, 0, F32, (4,)), a=(S, 0, F32, (4,))),
        record(Op.VREDUCE, vec, Red.SUM, dims=(3, 8), dst=(S, 0, F32, (4,)), a=a),
        record(Op.VQUANT, vec, dims=(3, 8), dst=(S, 0, I8, (8, 1)), a=a, d=(S, 64, F32, (4,))),
        record(Op.VTOPK, vec, dims=(3, 8), imm=(2,), dst=(S, 0, F32, (8, 4)), a=a, d=(S, 64, I32, (8, 4))),
        record(Op.VBUCKET, vec, dims=(6,), imm=(8,), dst=b, a=b, d=b),
        record(Op.VGATHER, vec, dims=(3, 8), imm=(2, 16), dst=a, a=a, b=b),
        record(Op.VSCATTER, vec, dims=(3, 8), imm=(2, 16), dst=(S, 0, F32, (32, 4)), a=a, b=b, d=(S, 9, F32, (4,))),
        record(Op.VCMUL, vec, dims=(3, 8), imm=(16, 16), dst=a, a=a, b=a, d=a),
        record(Op.VCMUL, vec, dims=(3, 8), imm=(2, 4), dst=(S, 0, F32, (64, 8)), a=(S, 0, BF16, (64, 4)), b=a, d=a),
        record(Op.VBAND, vec, dims=(3, 8), imm=(0, 7, 99), fimm=(-1.0,), dst=a, a=a),
        record(Op.SEND, Engine.LINK, dims=(3, 8), imm=(1,), a=a),
        record(Op.RECV, Engine.LINK, dims=(3, 8), imm=(0,), dst=a),
    )
    assert [x.split(maxsplit=2)[1:] for x in got] == [
        ["load.tile", "sram[0x0]:u8[100]/1 <- dram[0x40]:u8[100]/1"],
        ["loadg", "sram[0x0]:bf16[3,8]/256,2 <- dram[0x0]:bf16[1024,8]/16,2, sram[0x200]:i32[3]/4"],
        ["vmap.fill", "sram[0x0]:f32[4]/4  f1=-1e+30"],
        ["vmap.rsqrt", "sram[0x0]:f32[4]/4 <- sram[0x0]:f32[4]/4  f0=0.5 f1=1e-06"],
        ["vreduce.sum", "sram[0x0]:f32[3]/4 <- sram[0x0]:bf16[3,8]/256,2"],
        ["vquant", "sram[0x0]:i8[3,8]/8,1, sram[0x40]:f32[3]/4 <- sram[0x0]:bf16[3,8]/256,2"],
        ["vtopk", "sram[0x0]:f32[3,2]/8,4, sram[0x40]:i32[3,2]/8,4 <- sram[0x0]:bf16[3,8]/256,2"],
        ["vbucket", "sram[0x200]:i32[6]/4, sram[0x200]:i32[9]/4 <- sram[0x200]:i32[6]/4"],
        ["vgather", "sram[0x0]:bf16[3,8]/256,2 <- sram[0x0]:bf16[16,8]/256,2, sram[0x200]:i32[3]/4  rows=b//2"],
        [
            "vscatter",
            "sram[0x0]:f32[16,8]/32,4 += sram[0x0]:bf16[3,8]/256,2, sram[0x200]:i32[3]/4, "
            "sram[0x9]:f32[*]/4  rows=b//2",
        ],
        [
            "vcmul",
            "sram[0x0]:bf16[3,8]/256,2 <- sram[0x0]:bf16[3,8]/256,2, sram[0x0]:bf16[3,8]/256,2, "
            "sram[0x0]:bf16[3,8]/256,2  imaginary at a+16, dst+16 (halves)",
        ],
        [
            "vcmul",
            "sram[0x0]:f32[3,8]/64,8 <- sram[0x0]:bf16[3,8]/64,4, sram[0x0]:bf16[3,8]/256,2, "
            "sram[0x0]:bf16[3,8]/256,2  imaginary at a+2, dst+4 (interleaved)",
        ],
        ["vband", "sram[0x0]:bf16[3,8]/256,2 <- sram[0x0]:bf16[3,8]/256,2  axis=0 offset=r7 width=99 else -1"],
        ["send", "sram[0x0]:bf16[3,8]/256,2  to chip 1"],
        ["recv", "sram[0x0]:bf16[3,8]/256,2  from chip 0"],
    ]


def test_gemm_with_all_that_it_can_have():
    common = {"dims": (1, 3, 1, 64, 32), "regs": 2}
    dst, a = (S, 0, BF16, (0, 128, 0, 2)), (S, 4096, I8, (0, 32, 0, 1))
    b, e = (S, 64, I8, (0, 32, 1), (0, 1 << 20)), (S, 9, F32, (0, 4))
    packed = record(
        Op.GEMM, Engine.MAT, flags=Flag.PACKED | Flag.BIAS | Flag.ADDEND, tile=Tile.W4, imm=(1, 2, 64, 999),
        fimm=(1.0,), dst=dst, a=a, b=b, d=dst, e=e, **common,
    )  # fmt: skip
    plain = record(Op.GEMM, Engine.MAT, flags=Flag.ACC, fimm=(0.5,), dst=dst, a=a, b=b, **common)
    first, second = lines(packed, plain)
    assert first == (
        "mat   gemm.w4        sram[0x0]:bf16[1,r3,1,64]/0,128,0,2 <- sram[0x1000]:i8[1,r3,1,32]/0,32,0,1, "
        "sram[0x40 + r0*1048576]:i8[1,64,32]/0,32,1, sram[0x0]:bf16[1,r3,1,64]/0,128,0,2, sram[0x9]:f32[1,r3]/0,4"
        "  tile=999B group=64 bias addend"
    )
    assert second.startswith("mat   gemm           sram[0x0]:bf16[1,r3,1,64]/0,128,0,2 += ")
    assert second.endswith("  alpha=0.5")


def test_values_outside_the_instruction_set_are_shown_by_number():
    got = lines(
        record(77, 9, dims=(1,), imm=(0, 0, 0, 0, 1)), record(Op.VMAP, Engine.VEC, 99, dims=(1,), dst=(S, 0, 9, (1,)))
    )
    assert got[0].split() == ["engine9", "op77"]
    assert "vmap.fn99" in got[1]
    assert ":dtype9[1]" in got[1]


@pytest.mark.parametrize("op", [Op.LOOP, Op.END])
def test_loops_that_do_not_match_are_refused(op):
    with pytest.raises(RuntimeFault, match="SIM_BAD_PROGRAM"):
        list(disassemble(record(op, Engine.CTL, dims=(1,))))


def test_every_instruction_of_a_real_program_has_a_line(tiny_two_chips):
    artefact = calc.open(tiny_two_chips)
    for sub in artefact.manifest.submodels:
        for part in sub.chip_map:
            text = list(disassemble(artefact.program(sub.name, part.chip), part.nodes))
            pcs = [int(x.split()[0]) for x in text if not x.startswith(";")]
            assert pcs == list(range(part.instructions))
            assert {x[2:] for x in text if x.startswith(";")} <= set(part.nodes)
            assert text[-1].split()[1:] == ["ctl", "halt"]
            assert not re.search(r"\b(op|fn|space|dtype|engine|tile|red)\d", "\n".join(x for x in text if x[0] != ";"))
