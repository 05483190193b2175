"""Kernels that cross chips: every chip's own program on one machine, against the ONNX body of what they do together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np
import pytest

from calc.core.errors import InternalError, RuntimeFault
from calc.core.isa import ITEMSIZE, Alu, DType, Engine, Flag, Op, Space
from calc.core.target import load_target
from calc.core.variant import Variant
from calc.kernels import registry
from calc.kernels.base import Attr, Attrs, Call, Numerics, parse_attrs
from calc.kernels.emit import Emitter
from calc.kernels.lowering import ChipMemory, Lowering, Rows, weight_region
from calc.kernels.program import Buffer, View
from calc.passes.lower import ChipProgram, allocate_sram, finish
from calc.sim.machine import Machine, csr_file
from tests.kernels.harness import bf16, run_ort, small_tiles

Array = np.ndarray
NUMPY = {DType.F32: np.float32, DType.BF16: ml_dtypes.bfloat16}
SHARD = 4096


@dataclass
class Chip:
    """One chip's calls, what they read, and where their outputs go.

    Attributes:
        inputs: value name to data, [S, width] or [B, width].
        dtypes: of those that are not BF16.
        calls: in order.
        outputs: values to read back.
    """

    inputs: Mapping[str, Array]
    calls: list[Call]
    outputs: tuple[str, ...]
    dtypes: Mapping[str, DType] = field(default_factory=dict)
    program: ChipProgram | None = None
    at: dict[str, tuple[int, DType, tuple[int, int]]] = field(default_factory=dict)
    end: int = SHARD

    def place(self, name: str, dtype: DType, shape: tuple[int, int]) -> View:
        """DRAM for a value, rows close together."""
        row = shape[1] * ITEMSIZE[dtype]
        self.at[name] = (self.end, dtype, shape)
        buf = Buffer(f"io:{name}", Space.DRAM, shape[0] * row, base=self.end)
        self.end += -(-buf.nbytes // 64) * 64
        return View(buf, dtype, (row, ITEMSIZE[dtype]))


class Board:
    """Several chips, each with its own program; the call has `cur` of `seq` rows, worked on `block` at a time."""

    def __init__(self, chips: list[Chip], seq: int, *, cur: int | None = None, block: int | None = None) -> None:
        self.chips, self.seq, self.cur = chips, seq, cur or seq
        self.target = load_target("calculet-1chip")
        batch = 1 if seq > 1 else len(next(iter(chips[0].inputs.values())))
        self.variant = Variant("prefill" if seq > 1 else "decode", batch, seq)
        for chip in chips:
            self._lower(chip, block)

    def _lower(self, chip: Chip, block: int | None) -> None:
        em = Emitter(weight_region("weights", SHARD, 0), 3, 4096)
        low = Lowering(em, self.variant, ChipMemory({}, SHARD, {}, {}, 1 << 20), small_tiles(self.target))
        if self.seq == 1:
            low.begin(low.sequences, None)
            self._body(low, chip)
        elif block is None:
            low.begin(Rows(em.csr("cur_seq_len"), self.seq), None)
            self._body(low, chip)
        else:
            cur = em.csr("cur_seq_len")
            with em.loop(em.alu(Alu.CDIV, cur, block)) as b:
                first = em.alu(Alu.MUL, b, block)
                low.begin(Rows(em.alu(Alu.MIN, em.alu(Alu.SUB, cur, first), block), block), first)
                self._body(low, chip)
        low.end()
        allocate_sram(low, self.variant, 0, self.target)
        chip.program = finish(low)

    def _body(self, low: Lowering, chip: Chip) -> None:
        em = low.em
        for name, data in chip.inputs.items():
            dtype = chip.dtypes.get(name, DType.BF16)
            a = low.new(name, data.shape[-1], dtype=dtype)
            home = chip.place(name, dtype, data.shape)
            em.load(a.view, low.from_first(home, home.steps[0]), (a.rows.count, a.width))
        for call in chip.calls:
            em.source(call.name)
            with em.scope():
                registry()[call.op].lower(low, call)
        for name in chip.outputs:
            a = low.act(name)
            home = chip.place(name, a.dtype, (self.variant.batch * self.seq, a.width))
            em.store(low.from_first(home, home.steps[0]), a.view, (a.rows.count, a.width))

    def run(self, mode: str, edit: Callable[[int, Array], None] | None = None) -> list[dict[str, Array]]:
        """Each chip's outputs as f32, valid rows."""
        n = range(len(self.chips))
        dram = max(c.end for c in self.chips) + 4096
        machine = Machine(
            self.target.sram_bytes, dict.fromkeys(n, np.zeros(SHARD, np.uint8)), dict.fromkeys(n, dram), mode
        )
        for i, c in enumerate(self.chips):
            for name, data in c.inputs.items():
                at, dtype, _ = c.at[name]
                machine.memories[i].host_write(at, np.ascontiguousarray(data.astype(NUMPY[dtype])))
        records = {i: c.program.records.copy() for i, c in enumerate(self.chips)}
        for i, rec in records.items():
            if edit is not None:
                edit(i, rec)
        csr = csr_file({"past_kv_cur_seq_len": [0], "cur_seq_len": [self.cur], "kv_slot": [0]})
        machine.load(records, {i: c.program.nodes for i, c in enumerate(self.chips)}).run(csr)
        rows = self.variant.batch if self.seq == 1 else self.cur
        out = []
        for i, c in enumerate(self.chips):
            wanted = {n: c.at[n] for n in c.outputs}
            out.append(
                {
                    n: machine.memories[i].host_read(at, d, s).astype(np.float32)[:rows]
                    for n, (at, d, s) in wanted.items()
                }
            )
        return out

    def both(self) -> list[dict[str, Array]]:
        """Fast and strict give the same bits: these."""
        fast, strict = self.run("fast"), self.run("strict")
        for a, b in zip(fast, strict, strict=True):
            assert a.keys() == b.keys()
            for name in a:
                np.testing.assert_array_equal(a[name], b[name])
        return strict


def typed(op: str, values: Mapping[str, Attr]) -> Attrs:
    return parse_attrs(registry()[op].attributes, values)


def call(op: str, attrs: Mapping[str, Attr], shapes: Mapping[str, tuple[int, ...]], outs: tuple[str, ...]) -> Call:
    return Call(op, f"{op}.{attrs.get('own', '')}", typed(op, attrs), {k: k for k in shapes}, outs, dict(shapes), 0)


def ort(op: str, attrs: Mapping[str, Attr], numerics: Numerics, values: dict[str, Array]) -> dict[str, Array]:
    return run_ort(registry()[op], typed(op, attrs), numerics, values)


def drawn(shapes: Mapping[str, tuple[int, ...]], seed: int = 3) -> dict[str, Array]:
    """FP32 values that no BF16 holds, of very different sizes: the order of their sum shows in its bits."""
    rng = np.random.default_rng(seed)
    return {n: (rng.standard_normal(s) * 4.0**i).astype(np.float32) for i, (n, s) in enumerate(shapes.items())}


def reduction(chips: int, *, add: bool, rows: int = 7, width: int = 48, seq: int | None = None, **more: object):
    """A board whose chips hold a partial sum each, and the values by name."""
    shape = (1, rows, width) if seq is None else (rows, 1, width)
    names = [f"p{i}" for i in range(chips)]
    values = drawn(dict.fromkeys(names, shape))
    if add:
        values["residual"] = bf16(drawn({"r": shape}, 9)["r"])
    flat = {n: v.reshape(-1, width) for n, v in values.items()}
    board = []
    for own in range(chips):
        attrs = {"chips": chips, "own": own, "add": int(add)}
        c = call("AllReduce", attrs, {n: v.shape for n, v in values.items()}, ("y",))
        ins = {n: flat[n] for n in (names[own], *(["residual"] if add else []))}
        board.append(Chip(ins, [c], ("y",), {names[own]: DType.F32}))
    return Board(board, rows if seq is None else seq, **more), values


def gathering(widths: tuple[int, ...], rows: int = 7, **more: object):
    """A board whose chips hold some columns each, and the values by name."""
    values = {
        f"p{i}": bf16(v)
        for i, v in enumerate(drawn({str(w) + str(i): (1, rows, w) for i, w in enumerate(widths)}).values())
    }
    board = []
    for own in range(len(widths)):
        c = call("AllGather", {"chips": len(widths), "own": own}, {n: v.shape for n, v in values.items()}, ("y",))
        board.append(Chip({f"p{own}": values[f"p{own}"][0]}, [c], ("y",)))
    return Board(board, rows, **more), values


@pytest.mark.parametrize("block", [None, 3])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("chips", [2, 3, 4])
def test_a_sum_over_chips_is_the_body_bit_for_bit_on_every_chip(chips: int, add: bool, block: int | None) -> None:
    board, values = reduction(chips, add=add, block=block)
    out = board.both()
    want = ort("AllReduce", {"chips": chips, "own": 0, "add": int(add)}, "npu", values)["y"][0]
    for mine in out:
        np.testing.assert_array_equal(mine["y"], want)
    # chips counted from the other end give other bits: the order is part of the result
    names = [f"p{i}" for i in range(chips)]
    turned = {**values, **dict(zip(names, (values[n] for n in reversed(names)), strict=True))}
    other = ort("AllReduce", {"chips": chips, "own": 0, "add": int(add)}, "fp32", turned)["y"][0]
    straight = ort("AllReduce", {"chips": chips, "own": 0, "add": int(add)}, "fp32", values)["y"][0]
    assert chips == 2 or not np.array_equal(other, straight)


def test_the_sum_is_rounded_once() -> None:
    """Partial sums that BF16 would lose: 1 and 2^-8 twice give 1 + 2^-7, but 1 if each step were rounded."""
    board, _ = reduction(3, add=False, rows=2, width=32)
    parts = (1.0, 2.0**-8, 2.0**-8)
    for i, c in enumerate(board.chips):
        c.inputs = {f"p{i}": np.full((2, 32), parts[i], np.float32)}
    for mine in board.both():
        assert np.unique(mine["y"]).tolist() == [1 + 2.0**-7]


@pytest.mark.parametrize("chips", [2, 3])
def test_a_sum_in_a_decode_batch(chips: int) -> None:
    board, values = reduction(chips, add=True, rows=4, seq=1)
    want = ort("AllReduce", {"chips": chips, "own": 0, "add": 1}, "npu", values)["y"]
    for mine in board.both():
        np.testing.assert_array_equal(mine["y"], want.reshape(4, -1))


@pytest.mark.parametrize("block", [None, 3])
@pytest.mark.parametrize("widths", [(48, 32), (16, 16, 24), (21, 22, 21, 5)])
def test_columns_of_chips_side_by_side(widths: tuple[int, ...], block: int | None) -> None:
    board, values = gathering(widths, block=block)
    attrs = {"chips": len(widths), "own": 0}
    want = ort("AllGather", attrs, "npu", values)["y"][0]
    for mine in board.both():
        np.testing.assert_array_equal(mine["y"], want)


@pytest.mark.parametrize("op", ["AllReduce", "AllGather"])
def test_every_chip_of_an_exchange_has_the_same_body(op: str) -> None:
    """What `own` is makes no difference to the value: the graph may use any chip's."""
    _, values = reduction(3, add=False) if op == "AllReduce" else gathering((16, 16, 24))
    attrs: dict[str, Attr] = {"chips": 3, "add": 0} if op == "AllReduce" else {"chips": 3}
    first, *others = (ort(op, {**attrs, "own": i}, "npu", values)["y"] for i in range(3))
    assert all(np.array_equal(first, o) for o in others)


def chain(partial: bool, rows: int = 7, hops: int = 1, **more: object) -> tuple[Board, Array]:
    """Chip 0 sends to 1, 1 to 2, …: as many hops as wanted."""
    x = drawn({"x": (1, rows, 40)})["x"]
    x = x if partial else bf16(x)
    dtype = DType.F32 if partial else DType.BF16
    chips = []
    for i in range(hops + 1):
        calls: list[Call] = []
        if i > 0:
            attrs: dict[str, Attr] = {"peer": i - 1, "partial": int(partial)}
            calls.append(replace(call("Recv", attrs, {"message": x.shape}, ("x",)), name=f"recv.{i}"))
        if i < hops:
            calls.append(call("Send", {"peer": i + 1, "partial": int(partial)}, {"x": x.shape}, ("message",)))
        chips.append(Chip({"x": x[0]} if i == 0 else {}, calls, ("x",) if i else (), {"x": dtype}))
    return Board(chips, rows, **more), x[0]


@pytest.mark.parametrize("block", [None, 3])
@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("partial", [False, True])
def test_what_is_sent_arrives_bit_for_bit(partial: bool, hops: int, block: int | None) -> None:
    board, x = chain(partial, hops=hops, block=block)
    _, *others = board.both()
    body = ort("Send", {"peer": 1, "partial": int(partial)}, "npu", {"x": x[None]})["message"]
    want = ort("Recv", {"peer": 0, "partial": int(partial)}, "npu", {"message": body})["x"][0]
    for mine in others:
        np.testing.assert_array_equal(mine["x"], want)


@pytest.mark.parametrize("cur", [1, 3, 4, 6])
def test_only_valid_rows_cross(cur: int) -> None:
    """A padded call: the rows behind the last token are neither sent nor summed."""
    board, values = reduction(2, add=True, block=3)
    board.cur = cur
    want = ort("AllReduce", {"chips": 2, "own": 0, "add": 1}, "npu", values)["y"][0, :cur]
    for mine in board.both():
        np.testing.assert_array_equal(mine["y"], want)


def nop(rec: np.void) -> None:
    """A scalar record that changes nothing."""
    rec["op"], rec["engine"], rec["sub"], rec["flags"] = Op.SALU, Engine.CTL, Alu.ADD, Flag.IMM
    rec["imm"] = (63, 63, 0, 0, 0, 0)


@pytest.mark.parametrize("mode", ["fast", "strict"])
@pytest.mark.parametrize("chips", [2, 3])
def test_a_message_that_nobody_sends_is_a_deadlock(chips: int, mode: str) -> None:
    board, _ = reduction(chips, add=False)

    def edit(chip: int, records: Array) -> None:
        if chip == 1:
            nop(records[np.flatnonzero(records["op"] == Op.SEND)[0]])

    with pytest.raises(RuntimeFault) as e:
        board.run(mode, edit)
    assert e.value.code == "SIM_LINK_DEADLOCK"


@pytest.mark.parametrize("mode", ["fast", "strict"])
def test_a_message_that_nobody_takes_is_an_error(mode: str) -> None:
    """A chip that lacks a RECV: its peer's message is left over, or what it reads was never written."""
    board, _ = chain(partial=False)

    def edit(chip: int, records: Array) -> None:
        if chip == 1:
            nop(records[np.flatnonzero(records["op"] == Op.RECV)[0]])

    with pytest.raises(RuntimeFault) as e:
        board.run(mode, edit)
    assert e.value.code == ("SIM_UNINITIALISED" if mode == "strict" else "SIM_LINK_LEFT")


def test_a_message_for_the_wrong_chip_is_an_error() -> None:
    """Of three chips the first tells the third what the second waits for."""
    board, _ = reduction(3, add=False)

    def edit(chip: int, records: Array) -> None:
        if chip == 0:
            sends = np.flatnonzero(records["op"] == Op.SEND)
            records["imm"][sends[0], 0] = 2

    with pytest.raises(RuntimeFault) as e:
        board.run("strict", edit)
    assert e.value.code in ("SIM_LINK_DEADLOCK", "SIM_LINK_LEFT")


def test_messages_of_unlike_sizes_are_an_error() -> None:
    board, _ = reduction(2, add=False, rows=8)

    def edit(chip: int, records: Array) -> None:
        if chip == 0:
            i = np.flatnonzero(records["op"] == Op.SEND)[0]
            records["dims"][i, 1] -= 16

    with pytest.raises(RuntimeFault) as e:
        board.run("strict", edit)
    assert e.value.code == "SIM_LINK_MISMATCH"


def test_a_sum_over_one_chip_is_our_bug() -> None:
    with pytest.raises(InternalError, match="one chip"):
        reduction(1, add=False)
