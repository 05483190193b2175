"""The NPU's instruction set: fixed-width records, one program per chip and sub-model (``docs/isa.md``).

A chip's control engine walks its program in order. It runs the scalar records itself (loops, register arithmetic, CSR
reads) and dispatches every other record to its engine's queue, with operand addresses and dimensions resolved from
the scalar registers at that moment. Each engine works through its queue in order and in parallel to the others; WAIT
and SIGNAL on counting semaphores are the only order between engines. The n-th WAIT on a semaphore is released by the
n-th SIGNAL on it.

An operand's address is affine in scalar registers (loop counters, CSR values, values the program computed)::

    address = base + sum(stride[i] * R[reg[i]] for i in 0..2)       (bytes)

and its elements are ``step[j]`` bytes apart along dimension j. A dimension is a constant, or a register when its bit
in `dim_regs` is set.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

ISA_NAME = "calculet-sim"
ISA_VERSION = (1, 0)
MAX_DIMS = 5
MAX_TERMS = 3
REGISTERS = 64
SEMAPHORES = 64
MAX_LOOP_DEPTH = 8
NO_REG = 255
RANK_IMM = 4
"""The `imm` slot that holds the number of dimensions of moves, links and vector records."""


class Engine(IntEnum):
    """Engines of one chip. WDMA streams weights, ADMA moves activations, KV and input/output."""

    CTL = 0
    WDMA = 1
    ADMA = 2
    MAT = 3
    VEC = 4
    LINK = 5


class Op(IntEnum):
    """Opcodes. Operands are named in `OPERANDS`; `docs/isa.md` gives each one's meaning."""

    HALT = 0
    LOOP = 1  # rd = imm0; count = dims[0]; body up to the matching END
    END = 2
    SALU = 3  # rd = imm0, sub = Alu, ra = imm1, rb = imm2 (flag IMM: imm2 is the second operand itself)
    CSRR = 4  # rd = imm0; csr index = imm1 + R[imm2]
    SLOAD = 5  # rd = imm0; reads one i32 from SRAM operand a
    WAIT = 8  # imm0 = semaphore, imm1 = count
    SIGNAL = 9  # imm0 = semaphore, imm1 = count
    LOAD = 16  # dst SRAM <- a DRAM, dims[0:4]
    STORE = 17  # dst DRAM <- a SRAM
    LOADG = 18  # dst[i, :] <- a[b[i], :]   rows of DRAM by i32 index in SRAM
    SEND = 24  # a -> link to chip imm0
    RECV = 25  # dst <- link from chip imm0
    GEMM = 32  # dst[h,i,g,n] (+)= alpha * sum_k a[h,i,g,k] * b[h,n,k] (+ bias[n]) (+ d[h,i,g,n])
    VMAP = 48  # dst = f(a, b, d); sub = Fn
    VREDUCE = 49  # dst = reduce(a) over the last dimension; sub = Red
    VCMUL = 50  # complex product of pairs: rotary embedding
    VBAND = 51  # dst = a where 0 <= (index of dim `imm0`) + R[imm1] - (last index) < imm2, else fimm0
    VQUANT = 52  # dst i8 codes, d f32 scale per row, of a
    VTOPK = 53  # dst f32 values, d i32 indices of the k largest of a's last dimension, k = imm0
    VBUCKET = 54  # dst i32 order (stable by key), d i32 offsets[imm0 + 1], of i32 keys a
    VGATHER = 55  # dst[i, :] = a[b[i] // imm0, :]
    VSCATTER = 56  # dst[b[i] // imm0, :] += a[i, :] * d[b[i]]


class Alu(IntEnum):
    """Scalar operations of SALU (64-bit integers)."""

    ADD = 0
    SUB = 1
    MUL = 2
    DIV = 3  # floor
    CDIV = 4  # ceiling
    MIN = 5
    MAX = 6
    MOD = 7


class Fn(IntEnum):
    """Element functions of VMAP, in f32. Unary ones use a; f0 and f1 are the record's float immediates."""

    COPY = 0
    ADD = 1
    SUB = 2
    MUL = 3
    DIV = 4
    MAX = 5
    AFFINE = 6  # a * f0 + f1
    EXP = 7
    EXPSUB = 8  # exp(a - b)
    RSQRT = 9  # 1 / sqrt(a * f0 + f1)
    TANH = 10
    SIGMOID = 11
    SILU = 12
    GELU = 13
    GELU_TANH = 14
    MUL3 = 15  # a * b * d
    MADD = 16  # a * b + d
    FILL = 17  # f1; reads nothing


class Red(IntEnum):
    """Reductions of VREDUCE."""

    MAX = 0
    SUM = 1
    SUMSQ = 2


class Space(IntEnum):
    """Where an operand lives."""

    NONE = 0
    SRAM = 1
    DRAM = 2


class DType(IntEnum):
    """Element types an engine can read or write."""

    NONE = 0
    F32 = 1
    BF16 = 2
    I8 = 3
    I32 = 4
    U8 = 5


class Tile(IntEnum):
    """Formats of a packed weight tile (GEMM operand b with flag PACKED)."""

    NONE = 0
    BF16 = 1
    W8 = 2
    W4 = 3
    W4Z = 4


class Flag(IntEnum):
    """Bits of `flags`."""

    ACC = 1  # GEMM: add to what dst holds
    PACKED = 2  # GEMM: operand b is a packed weight tile
    BIAS = 4  # GEMM: the tile carries a bias
    ADDEND = 8  # GEMM: operand d is added
    IMM = 16  # SALU: the second operand is imm2
    INTERLEAVED = 32  # VCMUL: pairs are neighbours
    TILE = 64  # LOAD: the source is a packed weight tile


ITEMSIZE: dict[int, int] = {DType.NONE: 0, DType.F32: 4, DType.BF16: 2, DType.I8: 1, DType.I32: 4, DType.U8: 1}

OPERAND = np.dtype(
    [
        ("base", "<i8"),
        ("stride", "<i8", (MAX_TERMS,)),
        ("step", "<i4", (4,)),
        ("reg", "u1", (MAX_TERMS,)),
        ("space", "u1"),
        ("dtype", "u1"),
        ("pad", "u1", (3,)),
    ]
)
"""One operand, 56 bytes."""

RECORD = np.dtype(
    [
        ("op", "u1"),
        ("engine", "u1"),
        ("sub", "u1"),
        ("tile", "u1"),
        ("flags", "<u2"),
        ("dim_regs", "<u2"),
        ("node", "<u4"),
        ("dims", "<i4", (MAX_DIMS,)),
        ("imm", "<i8", (6,)),
        ("fimm", "<f8", (2,)),
        ("dst", OPERAND),
        ("a", OPERAND),
        ("b", OPERAND),
        ("d", OPERAND),
        ("e", OPERAND),
    ]
)
"""One instruction record, 376 bytes: little endian, no hidden padding."""

OPERAND_NAMES = ("dst", "a", "b", "d", "e")

OPERANDS: dict[int, tuple[str, ...]] = {
    Op.SLOAD: ("a",),
    Op.LOAD: ("dst", "a"),
    Op.STORE: ("dst", "a"),
    Op.LOADG: ("dst", "a", "b"),
    Op.SEND: ("a",),
    Op.RECV: ("dst",),
    Op.GEMM: ("dst", "a", "b", "d", "e"),
    Op.VMAP: ("dst", "a", "b", "d"),
    Op.VREDUCE: ("dst", "a"),
    Op.VCMUL: ("dst", "a", "b", "d"),
    Op.VBAND: ("dst", "a"),
    Op.VQUANT: ("dst", "a", "d"),
    Op.VTOPK: ("dst", "a", "d"),
    Op.VBUCKET: ("dst", "a", "d"),
    Op.VGATHER: ("dst", "a", "b"),
    Op.VSCATTER: ("dst", "a", "b", "d"),
}
"""Which operands each opcode uses (d, e and b may be absent where a flag or function does not need them)."""

ENGINE_OF: dict[int, tuple[Engine, ...]] = {
    Op.HALT: (Engine.CTL,),
    Op.LOOP: (Engine.CTL,),
    Op.END: (Engine.CTL,),
    Op.SALU: (Engine.CTL,),
    Op.CSRR: (Engine.CTL,),
    Op.SLOAD: (Engine.CTL,),
    Op.WAIT: tuple(Engine),
    Op.SIGNAL: tuple(Engine),
    Op.LOAD: (Engine.WDMA, Engine.ADMA),
    Op.STORE: (Engine.ADMA,),
    Op.LOADG: (Engine.ADMA,),
    Op.SEND: (Engine.LINK,),
    Op.RECV: (Engine.LINK,),
    Op.GEMM: (Engine.MAT,),
    **{op: (Engine.VEC,) for op in Op if op >= Op.VMAP},
}
"""Engines that may run each opcode."""

CSRS = ("past_kv_cur_seq_len", "cur_seq_len", "kv_slot")
"""CSR arrays, one element per sequence of the batch; CSR index = array index * CSR_STRIDE + sequence."""

CSR_STRIDE = 64

RING_FREE = 0
"""Semaphore the matrix engine signals when a slot of the weight ring may be overwritten; not zero at HALT."""

RING_FULL = 1
"""Semaphore the weight DMA signals when a slot of the ring holds its tile."""

FIRST_SYNC_SEMAPHORE = 2
"""Semaphores from here on order all other memory, one for each ordered pair of engines."""
