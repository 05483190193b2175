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
MAX_RANK = 4
"""Dimensions of an operand; a GEMM's record has one more than each of its operands."""
MAX_TERMS = 3
REGISTERS = 64
SEMAPHORES = 64
MAX_LOOP_DEPTH = 8
NO_REG = 255
RANK_IMM = 4
"""The `imm` slot that holds the number of dimensions where the opcode leaves it open."""


class Engine(IntEnum):
    """Engines of one chip. WDMA streams weights, ADMA moves activations, KV and input/output."""

    CTL = 0
    WDMA = 1
    ADMA = 2
    MAT = 3
    VEC = 4
    LINK = 5


class Op(IntEnum):
    """Opcodes; all that is known of each stands in its row of `calc.core.optable`."""

    HALT = 0
    LOOP = 1
    END = 2
    SALU = 3
    CSRR = 4
    SLOAD = 5
    WAIT = 8
    SIGNAL = 9
    LOAD = 16
    STORE = 17
    LOADG = 18
    SEND = 24
    RECV = 25
    GEMM = 32
    VMAP = 48
    VREDUCE = 49
    VCMUL = 50
    VBAND = 51
    VQUANT = 52
    VTOPK = 53
    VBUCKET = 54
    VGATHER = 55
    VSCATTER = 56


class Alu(IntEnum):
    """Scalar operations of SALU (64-bit integers)."""

    ADD = 0
    SUB = 1
    MUL = 2
    DIV = 3
    CDIV = 4
    MIN = 5
    MAX = 6
    MOD = 7


class Fn(IntEnum):
    """Element functions of VMAP, in f32; `calc.core.optable.FUNCTIONS` says what each computes."""

    COPY = 0
    ADD = 1
    SUB = 2
    MUL = 3
    DIV = 4
    MAX = 5
    AFFINE = 6
    EXP = 7
    EXPSUB = 8
    RSQRT = 9
    TANH = 10
    SIGMOID = 11
    SILU = 12
    GELU = 13
    GELU_TANH = 14
    MUL3 = 15
    MADD = 16
    FILL = 17


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
    TILE = 64  # LOAD: the source is a packed weight tile


ITEMSIZE: dict[int, int] = {DType.NONE: 0, DType.F32: 4, DType.BF16: 2, DType.I8: 1, DType.I32: 4, DType.U8: 1}

OPERAND = np.dtype(
    [
        ("base", "<i8"),
        ("stride", "<i8", (MAX_TERMS,)),
        ("step", "<i4", (MAX_RANK,)),
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

CSRS = ("past_kv_cur_seq_len", "cur_seq_len", "kv_slot")
"""CSR arrays, one element per sequence of the batch; CSR index = array index * CSR_STRIDE + sequence."""

CSR_STRIDE = 64

RING_FREE = 0
"""Semaphore the matrix engine signals when a slot of the weight ring may be overwritten; not zero at HALT."""

RING_FULL = 1
"""Semaphore the weight DMA signals when a slot of the ring holds its tile."""

FIRST_SYNC_SEMAPHORE = 2
"""Semaphores from here on order all other memory, one for each ordered pair of engines."""
